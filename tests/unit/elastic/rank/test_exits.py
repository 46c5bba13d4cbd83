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
    "a thread that ends": ("threading.Thread(target=work, args=(0.3,)).start()", "done", ""),
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
