"""A process whose exit code is decided ends with it, whatever its script has left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import sys, threading, time
from pathlib import Path
from concurrent.futures import ThreadPoolExecutor
from dalsegno.elastic.rank import exits
exits.THREADS_SECONDS = 1.0
log = Path(sys.argv[1])
def work(seconds):
    time.sleep(seconds)
    log.write_text("done")
exits.insist(83)
"""
ENDS = {
    "a thread for ever": ("threading.Thread(target=work, args=(60,), name='beat').start()", "", "thread beat goes on"),
    "a save": ("threading.Thread(target=work, args=(2.5,), name='dalsegno-save').start()", "done", ""),
    "a thread that ends": (
        "exits.THREADS_SECONDS = 20.0; threading.Thread(target=work, args=(0.3,)).start()",
        "done",
        "",
    ),
    "a daemon": ("threading.Thread(target=work, args=(60,), daemon=True).start()", "", ""),
    "an idle pool": ("p = ThreadPoolExecutor(2); p.submit(work, 0.0).result()", "done", ""),
    "a busy pool": ("ThreadPoolExecutor(2).submit(work, 60)", "", "thread ThreadPoolExecutor"),
    "an error": ("raise RuntimeError('no')", "", "RuntimeError: no"),
    "another code": ("sys.exit(1)", "", ""),
    "a script that begins anew": (
        "import os; from dalsegno.elastic import session; os.environ['DALSEGNO_SOCKET'] = 'there'\n"
        "while True:\n try: session()\n except BaseException: pass",
        "",
        "",
    ),
    "a slow end": ("time.sleep(2.0); log.write_text('done')", "done", ""),
}


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_with_its_code(tmp_path: Path, end: str) -> None:
    code, written, said = ENDS[end]
    log = tmp_path / "log"
    log.touch()
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code, str(log)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 83, done.stderr
    assert log.read_text() == written
    assert said in done.stderr if said else not done.stderr


def test_it_ends_with_its_code_where_no_thread_can_be_started() -> None:
    """A drain that all else has come through is no failure, and damage is reported."""
    code = (
        "import threading\nfrom dalsegno.elastic.rank import exits\n"
        "def start(thread): raise RuntimeError('cannot start new thread')\n"
        "threading.Thread.start = start\nexits.insist(83)\nassert exits.is_decided()\nraise exits.Drained\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (83, "")


FAILS = """
import atexit, sys, threading, time
from pathlib import Path
from dalsegno.elastic.rank import exits
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.meetings import Meetings, watch_the_end
exits.THREADS_SECONDS = float(sys.argv[5])
log, ranks, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
class Group(Solo):
    world_size = ranks
    def has_lost_a_peer(self): return False
meetings = Meetings(Group(), None)
watch_the_end(meetings, lambda: None)
def work():
    time.sleep(seconds)
    log.write_text(log.read_text() + "thread ")
threading.Thread(target=work, name="beat").start()
atexit.register(lambda: log.write_text(log.read_text() + "handler"))
end = sys.argv[4]
error = RuntimeError("the batch is bad")
if end == "raised":
    raise error
if end.startswith("exits "):
    print(error, file=sys.stderr)
    sys.exit(int(end.split()[1]))
if end == "a thread's":
    threading.excepthook = lambda told: sys.excepthook(told.exc_type, told.exc_value, told.exc_traceback)
    helper = threading.Thread(target=lambda: int("the batch is bad"))
    helper.start()
    helper.join()
else:
    sys.excepthook(RuntimeError, error, None)
    if end == "shown, and finished":
        meetings.finished()
"""


AS_A_WORKER = """
import sys
from dalsegno.agent.standby.worker_main import run_to_end
sys.argv = sys.argv[1:]
run_to_end(sys.argv[0], False, "")
"""
GOES_ON = "the script's thread beat goes on 1 s after the script's end"


@pytest.mark.parametrize(
    ("ranks", "seconds", "end", "code", "done", "said"),
    [
        (2, 60.0, "raised", 1, "", GOES_ON),
        (2, 0.3, "raised", 1, "thread handler", ""),
        (1, 2.5, "raised", 1, "thread handler", ""),
        (2, 2.5, "a thread's", 0, "thread handler", ""),
        (2, 2.5, "shown, and finished", 0, "thread handler", ""),
        (2, 60.0, "shown", 1, "", GOES_ON),
    ],
    ids=["for ever", "to its end", "nobody waits", "a thread's error", "shown, and finished", "shown, not finished"],
)
def test_a_rank_that_fails_ends_whatever_its_threads_do(
    tmp_path: Path, ranks: int, seconds: float, end: str, code: int, done: str, said: str
) -> None:
    """The others wait for its connections to close. What the script does at its end it does as ever.

    An error that is only printed, where `sys.excepthook` is called by hand, ends nothing.
    """
    log = tmp_path / "log"
    log.touch()
    # The thread that ends has the limit for that; the others reach it soon.
    limit = 1.0 if said or seconds > 1.0 else 20.0
    ended = subprocess.run(
        [sys.executable, "-c", FAILS, str(log), str(ranks), str(seconds), end, str(limit)],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
        cwd=Path(__file__).parents[4],
    )
    assert (ended.returncode, log.read_text()) == (code, done), ended.stderr
    assert "the batch is bad" in ended.stderr
    assert said in ended.stderr if said else "goes on" not in ended.stderr


@pytest.mark.parametrize(
    ("ranks", "seconds", "code", "done", "said"),
    [
        (2, 60.0, 3, "", GOES_ON),
        (2, 0.3, 3, "thread handler", ""),
        (1, 2.5, 3, "thread handler", ""),
        (2, 2.5, 0, "thread handler", ""),
    ],
    ids=["for ever", "to its end", "nobody waits", "has ended well"],
)
def test_a_worker_that_exits_ends_whatever_its_threads_do(
    tmp_path: Path, ranks: int, seconds: float, code: int, done: str, said: str
) -> None:
    """As one that fails with an exception does, with the code that the script has said."""
    log, script = tmp_path / "log", tmp_path / "train.py"
    log.touch()
    script.write_text(FAILS)
    limit = 1.0 if said or seconds > 1.0 else 20.0
    arguments = [str(script), str(log), str(ranks), str(seconds), f"exits {code}", str(limit)]
    ended = subprocess.run(
        [sys.executable, "-c", AS_A_WORKER, *arguments],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
        cwd=Path(__file__).parents[4],
    )
    assert (ended.returncode, log.read_text()) == (code, done), ended.stderr
    assert said in ended.stderr if said else "goes on" not in ended.stderr
