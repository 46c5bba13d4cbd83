"""Scripts that run before they have a place in a world: what they wait for, what is kept, and what throws it away."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from dalsegno.agent.processes.lifeline import Lifeline
from dalsegno.agent.script import modules_of
from dalsegno.agent.standby.nursery_client import StandbyProcess
from dalsegno.agent.standby.standby_pool import StandbyPool
from dalsegno.agent.standby.worker_main import Assignment
from dalsegno.protos import trace
from dalsegno.protos.ready import readable

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="nothing runs ahead on Python 3.10"),
]

PLACE = {"RANK": "3", "WORLD_SIZE": "4", "DALSEGNO_EPOCH": "2", "TORCHELASTIC_RESTART_COUNT": "1"}
ENDED = 5


class Ahead:
    """One pool of one worker, and what is told of it."""

    def __init__(self, directory: Path, modules: tuple[str, ...] = ("json",), patience: float = 60.0) -> None:
        self.directory = directory
        self.out, self.errors = directory / "out", directory / "errors"
        self.script = directory / "scripts" / "script.py"
        self.script.parent.mkdir(exist_ok=True)
        self.lifeline = Lifeline()
        self.warm = threading.Event()
        log = directory / "standby.log"
        self.pool = StandbyPool(self.lifeline, 1, modules, log, self.warm.set, ahead_patience_seconds=patience)
        self.environment = {**os.environ, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    def assignment(self, **more: str) -> Assignment:
        environment = {**self.environment, **more}
        return Assignment([str(self.script), "one"], False, environment, str(self.directory))

    def run(self, text: str) -> None:
        """Until it waits for its place, or has ended."""
        self.script.write_text(text)
        self.warm.clear()
        self.pool.fill(low_priority=False, ahead=[self.assignment()])
        assert self.warm.wait(60)

    def begin(self) -> None:
        """Until the script that is there may run; how far it is does not matter."""
        self.pool.fill(low_priority=False, ahead=[self.assignment()])
        deadline = time.monotonic() + 60
        while self.pool.warm() == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)  # why: there is no event for the imports alone

    def place(self, place: Mapping[str, str] = PLACE) -> StandbyProcess:
        wanted = self.assignment(**place)
        files = {"stdout": str(self.out), "stderr": str(self.errors)}
        worker = self.pool.start_worker(Assignment(**{**vars(wanted), **files}), 0)
        assert worker is not None
        return worker

    def finish(self, place: Mapping[str, str] = PLACE) -> str:
        """Its output, once it has ended as it should."""
        worker = self.place(place)
        assert worker.wait(60) == 0, self.errors.read_text()
        assert not worker.abandoned
        return self.out.read_text()

    def clear(self) -> None:
        """Nothing is left of the case before."""
        for _, _, worker in self.pool._ahead._workers.values():
            worker.discard()
            worker.wait(60)
        for path in (self.out, self.errors, self.directory / "here"):
            path.unlink(missing_ok=True)
        effect = self.directory / "effect"
        if effect.is_dir() and not effect.is_symlink():
            shutil.rmtree(effect)
        else:
            effect.unlink(missing_ok=True)

    def close(self) -> None:
        self.pool.close()
        self.lifeline.close()


Make = Callable[..., Ahead]


@pytest.fixture
def make(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Make]:
    caplog.set_level(logging.INFO)
    made: list[Ahead] = []

    def one(**options: object) -> Ahead:
        made.append(Ahead(tmp_path, **options))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for each in made:
        each.close()


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.partition("waits: ")[2] for line in caplog.messages if "has run ahead and waits" in line]


BODY = """
import builtins, io, json, os, socket, subprocess, sys
sys.argv[1]
print("before", os.environ["LOCAL_RANK"], "DALSEGNO_EPOCH" in vars(os.environ)["_data"], flush=True)
print("careful", file=sys.stderr)
{need}
print(json.dumps(dict(rank=os.environ.get("RANK"), epoch=os.environ["DALSEGNO_EPOCH"], all=len(dict(os.environ)),
    plain=type(os.environ) is os._Environ, argv=sys.argv[1:],
    put_back=[builtins.open is io.open, os.mkdir.__module__ == "posix", "connect" not in vars(socket.socket)])))
"""

NEEDS = {
    "a variable": ("os.environ['RANK']", "RANK"),
    "a default": ("os.environ.get('WORLD_SIZE', '1')", "WORLD_SIZE"),
    "getenv": ("os.getenv('MASTER_ADDR')", "MASTER_ADDR"),
    "in": ("'GROUP_RANK' in os.environ", "GROUP_RANK"),
    "of ours": ("os.environ.get('DALSEGNO_RESUME_NAME')", "DALSEGNO_RESUME_NAME"),
    "of torch's": ("os.environ.get('TORCHELASTIC_RESTART_COUNT')", "TORCHELASTIC_RESTART_COUNT"),
    "one that is set": ("os.environ.setdefault('MASTER_PORT', '1')", "MASTER_PORT"),
    "all": ("os.environ.copy()", "all variables"),
    "a file": ("open('effect', 'w')", "it writes effect"),
    "a file that goes on": ("open('effect', 'a')", "it writes effect"),
    "a path": ("import pathlib; pathlib.Path('effect').write_text('x')", "it writes effect"),
    "touched": ("import pathlib; pathlib.Path('effect').touch()", "it writes effect"),
    "a descriptor": ("os.open('effect', os.O_WRONLY | os.O_CREAT)", "it writes effect"),
    "a log": ("import logging; logging.basicConfig(filename='effect')", "it writes {cwd}/effect"),
    "a directory": ("os.makedirs('effect/more')", "it writes effect"),
    "moved": ("os.replace('here', 'effect')", "it writes here"),
    "a link": ("os.symlink('here', 'effect')", "it writes here"),
    "removed": ("os.remove('here'); open('effect', 'w')", "it writes here"),
    "a process": ("subprocess.run(['touch', 'effect'], check=True)", "it starts a process"),
    "a shell": ("os.system('touch effect')", "it starts a process"),
    "a fork": ("os.waitpid(os.fork() or os._exit(open('effect', 'w').close() or 0), 0)", "it starts a process"),
    "spawned": (
        "import multiprocessing as m\nif __name__ == '__main__': m.get_context('spawn').Lock(); open('effect', 'w')",
        "it starts a process",
    ),
    "a connection": ("socket.socket().connect_ex(('127.0.0.1', 1)); open('effect', 'w')", "it opens a connection"),
    "a server": ("socket.socket().bind(('127.0.0.1', 0)); open('effect', 'w')", "it opens a connection"),
    "bytes": ("os.environb.get(b'RANK')", "RANK"),
    "bytes asked for": ("os.getenvb(b'WORLD_SIZE')", "WORLD_SIZE"),
    "shown": ("repr(os.environ)", "all variables"),
    "copied": ("import copy; copy.deepcopy(os.environ)['RANK']", "all variables"),
    "an archive": ("import tarfile; tarfile.open('effect', 'w')", "it writes effect"),
    "a database": ("import sqlite3; sqlite3.connect('effect').execute('create table t (x)')", "it opens a database"),
    "shared memory": (
        "from multiprocessing.shared_memory import SharedMemory as M; s = M(None, True, 1); s.close(); s.unlink()",
        "it uses shared memory",
    ),
    "its file": ("open('/dev/shm/dalsegno-test', 'w'); os.unlink('/dev/shm/dalsegno-test')", "it writes {shm}"),
    "a lock": (
        "open(os.path.join({tmp!r}, 'dalsegno-lock'), 'x'); os.unlink({tmp!r} + '/dalsegno-lock')",
        "it writes {lock}",
    ),
    "nothing more": ("", "RANK"),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    one = Ahead(tmp_path_factory.mktemp("shared"))
    yield one
    one.close()


@pytest.mark.parametrize("need", NEEDS)
def test_a_script_waits_where_it_needs_its_place(shared: Ahead, caplog: pytest.LogCaptureFixture, need: str) -> None:
    """Nothing is done before; all of it afterwards, with the place's variables; and Python is as it was."""
    caplog.set_level(logging.INFO)
    text, reason = (part.replace("{tmp!r}", repr(tempfile.gettempdir())) for part in NEEDS[need])
    effect, here = shared.directory / "effect", shared.directory / "here"
    shared.clear()
    here.touch()
    shared.run(BODY.format(need=text))
    places = {"shm": "/dev/shm/dalsegno-test", "lock": f"{tempfile.gettempdir()}/dalsegno-lock"}
    assert waits(caplog) == [reason.format(cwd=shared.directory, **places)]
    assert not effect.is_symlink()
    assert not effect.exists()
    assert here.exists()
    assert not shared.out.exists()
    before, after = shared.finish().splitlines()
    assert before == "before 0 False"
    assert shared.errors.read_text() == "careful\n"
    told = json.loads(after)
    assert (told["rank"], told["epoch"], told["plain"], told["argv"]) == ("3", "2", True, ["one"])
    own = {"MASTER_PORT": "1"} if need == "one that is set" else {}
    assert told["all"] == len({**shared.environment, **PLACE, **own}), "no more and no less than it was given"
    assert told["put_back"] == [True, True, True]
    if "effect" in text:
        assert effect.is_symlink() or effect.exists()


# Stands for the session of this process: what it is made with, and when.
SESSION = """
import os, threading
from dalsegno.protos import ahead
from dalsegno.elastic.training import unopened
class Kind:
    def __init__(self, rank): self.rank, self.threads = rank, threading.current_thread() is threading.main_thread()
    def __enter__(self): return self
    def __exit__(self, *_): pass
def begin(make):
    print("opens", flush=True)
    return make(os.environ["RANK"])
s = unopened.unopened(Kind, begin, ahead.running())
print(unopened.is_unopened(s), isinstance(s, Kind))
with s as same:
    print(same is s, flush=True)
{use}
print(unopened.is_unopened(s), type(s) is Kind, s.rank, s.threads, ahead.running())
"""
USES = {
    "read": ("s.rank", "its session is used"),
    "called": ("try: s.nothing()\nexcept AttributeError as error: print(error)", "its session is used"),
    "set": ("s.own = 1", "its session is used"),
    "another need": ("os.environ['WORLD_SIZE']; print('then this')", "WORLD_SIZE"),
    "a file": ("open('effect', 'w'); print('then this')", "it writes effect"),
}


@pytest.mark.parametrize(
    "use", [pytest.param(use, marks=[pytest.mark.full] if use != "called" else []) for use in USES]
)
def test_a_session_opens_when_it_is_used(make: Make, caplog: pytest.LogCaptureFixture, use: str) -> None:
    """Or first of all when the script needs its place for something else, as where nothing runs ahead."""
    ahead = make(modules=tuple(modules_of("import torch")))
    text, reason = USES[use]
    ahead.run(SESSION.format(use=text))
    assert waits(caplog) == [reason]
    lines = ahead.finish().splitlines()
    said = {"called": "'Kind' object has no attribute 'nothing'", "another need": "then this", "a file": "then this"}
    middle = [said[use]] if use in said else []
    assert lines == ["True True", "True", "opens", *middle, "False True 3 True None"]


def test_a_place_that_comes_early_waits_for_the_session(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The script is still building: what it has done so far is not done again."""
    ahead = make(modules=tuple(modules_of("import torch")))
    worker = placed_early(ahead, "import time\ntime.sleep(4)\ns.rank")
    assert not settles_soon(worker), "it is on its way"
    assert worker.wait(60) == 0, ahead.errors.read_text()
    assert ahead.out.read_text().splitlines() == ["True True", "True", "opens", "False True 3 True None"]
    assert not caplog.messages


def placed_early(ahead: Ahead, builds: str) -> StandbyProcess:
    """The worker gets its place between `session()` and the first use of that."""
    reached = ahead.directory / "cache" / "hub" / "reached"  # what may be written ahead
    reached.parent.mkdir(parents=True)
    ahead.environment["HF_HOME"] = str(reached.parents[1])
    ahead.script.write_text(SESSION.format(use=f"open({str(reached)!r}, 'w').close()\n{builds}"))
    ahead.begin()
    deadline = time.monotonic() + 60
    while not reached.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # why: another process makes it
    return ahead.place()


def settles_soon(worker: StandbyProcess) -> bool:
    """Whether it takes its place, or ends, within a second."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline and not worker.taken and worker.returncode is None:
        time.sleep(0.02)  # why: until nothing has happened
    return worker.taken or worker.returncode is not None


@pytest.mark.full
def test_a_script_that_is_too_slow_for_its_place_runs_ahead_the_next_time(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """It starts anew for this place. It was not to blame."""
    caplog.set_level(logging.INFO)
    ahead = make(modules=tuple(modules_of("import torch")))
    worker = placed_early(ahead, "import time\nif ahead.running(): time.sleep(60)")
    assert worker.wait(60) != 0
    assert worker.abandoned
    assert any("has its place too early" in line for line in caplog.messages)
    ahead.run(SESSION.format(use="s.rank"))
    assert waits(caplog) == ["its session is used"]
    assert ahead.finish().splitlines()[-1] == "False True 3 True None"


MARKS = """
import os
from dalsegno.protos import ahead, trace
from dalsegno.elastic.training import unopened
class Kind:
    def __enter__(self): return self
    def __exit__(self, *_): pass
def begin(make):
    trace.mark("session")
    return make()
s = unopened.unopened(Kind, begin, ahead.running())
trace.mark("built")
open("effect", "w")
trace.mark("first")
"""


def test_marks_need_no_place(make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """They are written once it is known whose they are. A session that opens meanwhile makes marks, too."""
    ahead = make(modules=tuple(modules_of("import torch")))
    marks = tmp_path / "marks"
    ahead.environment["DALSEGNO_TRACE"] = str(marks)
    ahead.run(MARKS)
    assert waits(caplog) == ["it writes effect"]
    assert not marks.exists()
    ahead.finish()
    found = trace.read(marks)
    assert [(one.name, one.rank, one.epoch) for one in found] == [("built", 3, 2), ("session", 3, 2), ("first", 3, 2)]


@pytest.mark.full
def test_a_session_that_cannot_open_says_so_at_each_use(make: Make) -> None:
    """Also where the script has swallowed it."""
    ahead = make(modules=tuple(modules_of("import torch")))
    use = "for _ in 'ab':\n    try: s.rank\n    except Exception as error: print(error)\nraise SystemExit"
    ahead.run(SESSION.format(use=use).replace('os.environ["RANK"]', "1 / 0"))
    assert ahead.finish().splitlines()[2:] == ["opens", "division by zero"] * 2


@pytest.mark.full
def test_a_thread_that_needs_the_place_first_ends_it(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody knows what the main thread is doing then; the script starts anew once its place is known."""
    ahead = make(modules=tuple(modules_of("import torch")))
    ahead.script.write_text(
        SESSION.replace("{use}", "t = threading.Thread(target=os.getenv, args=('RANK',)); t.start(); t.join()").replace(
            "s = unopened.unopened(Kind, begin, ahead.running())",
            "running = ahead.running()\ns = unopened.unopened(Kind, begin, running) if running else begin(Kind)",
        )
    )
    ahead.pool.fill(low_priority=False, ahead=[ahead.assignment()])
    assert ahead.warm.wait(60)
    assert "a thread of its own needs its place (RANK) before its session is used" in caplog.text
    assert ahead.finish().splitlines()[-1] == "False True 3 True None"


EARLIER_THREAD = """
import os, threading, time
from dalsegno.protos import ahead
threading.Thread(target=lambda: print(os.environ["RANK"] + "\\n", end="", flush=True)).start()
time.sleep(1)
running = ahead.running()
if running:
    is_main = lambda: threading.current_thread() is threading.main_thread()
    running.first(lambda: print(f"first {is_main()}\\n", end="", flush=True))
end = time.monotonic() + 3
while time.monotonic() < end: pass
os.environ["WORLD_SIZE"]
print("then\\n", end="", flush=True)
"""


def test_what_comes_first_is_the_main_threads(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Also where another thread waits for the place already. (Two threads' lines mix, unless each is one write.)"""
    caplog.set_level(logging.INFO)
    ahead = make()
    ahead.run(EARLIER_THREAD)
    assert waits(caplog) == ["RANK"]
    time.sleep(2)  # why: the main thread gets on, and nobody sees that
    lines = ahead.finish().splitlines()
    assert sorted(lines) == ["3", "first True", "then"]
    assert lines.index("first True") < lines.index("then")


HARMLESS = """
import os, pathlib, sys, tempfile
sys.path.insert(0, "scripts")
import of_its_own
os.makedirs("scripts", exist_ok=True)
open("/dev/null", "w").write("x")
os.environ["OF_ITS_OWN"] = "1"
cache = pathlib.Path(os.environ["HF_HOME"], "hub")
cache.joinpath("lock").write_text("x")
import importlib.metadata
sys.path.insert(0, os.getcwd())
try: importlib.metadata.version("none")
except importlib.metadata.PackageNotFoundError: pass
try: os.open(cache / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL)
except FileExistsError: os.close(os.open(cache / "lock", os.O_RDWR))
handle, name = tempfile.mkstemp()
os.unlink(name) if False else os.close(handle)
os.listdir("scripts"), os.path.exists("nowhere"), open("scripts/script.py").read()
print("so far", flush=True)
os.environ["RANK"]
print(os.environ["OF_ITS_OWN"])
os.unlink(name)
"""


def test_what_harms_nobody_is_done_ahead(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    ahead = make()
    cache = ahead.directory / "cache" / "hub"
    cache.mkdir(parents=True)
    ahead.environment["HF_HOME"] = str(cache.parent)
    (ahead.script.parent / "of_its_own.py").write_text("")
    ahead.run(HARMLESS)
    assert waits(caplog) == ["RANK"]
    assert (cache / "lock").exists()
    (ahead.directory / "results").mkdir()  # beside the script, where it has looked for a package
    assert ahead.finish() == "so far\n1\n"


def repointed(link: Path) -> None:
    link.unlink()
    link.symlink_to("scripts")


CHANGES = {
    "a file that it read": ("open('data').read()", lambda root: (root / "data").write_text("other")),
    "a file of the same size and time": (
        "open('data').read()",
        lambda root: ((root / "data").write_text("2"), os.utime(root / "data", (1, 1))),
    ),
    "a file that was not there": ("os.path.exists('new')", lambda root: (root / "new").write_text("")),
    "a file that is gone": ("os.path.exists('data')", lambda root: (root / "data").unlink()),
    "a directory's entries": ("os.listdir('.')", lambda root: (root / "new").write_text("")),
    "an installed package": (
        "import importlib.metadata as m, sys; sys.path.insert(0, os.getcwd()); m.packages_distributions()",
        lambda root: (root / "mine-1.0.dist-info").mkdir(),
    ),
    "a directory walked": ("list(os.walk('scripts'))", lambda root: (root / "scripts" / "new").write_text("")),
    "a link": ("os.readlink('link')", lambda root: repointed(root / "link")),
    "the newest of some": (
        "max(os.scandir('some'), key=lambda one: one.stat().st_mtime_ns)",
        lambda root: (root / "some" / "one").write_text("other"),
    ),
    "a module of its own": ("import helper", lambda root: (root / "scripts" / "helper.py").write_text("X = 2")),
    "the script": ("", lambda root: (root / "scripts" / "script.py").write_text("print('the new one')")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_since_is_not_built_on(make: Make, caplog: pytest.LogCaptureFixture, change: str) -> None:
    """Who waits for the worker starts another one, which sees it as it is now."""
    look, alter = CHANGES[change]
    ahead = make()
    (ahead.directory / "data").write_text("1")
    os.utime(ahead.directory / "data", (1, 1))
    (ahead.directory / "link").symlink_to("data")
    (ahead.directory / "some").mkdir()
    (ahead.directory / "some" / "one").write_text("1")
    (ahead.script.parent / "helper.py").write_text("X = 1")
    ahead.run(f"import os\n{look}\nprint(os.environ['RANK'])")
    alter(ahead.directory)
    worker = ahead.place()
    assert worker.wait(60) != 0
    assert worker.abandoned
    assert not ahead.out.exists()
    assert any("has run ahead in vain" in line for line in caplog.messages)
    expected = "the new one\n" if change == "the script" else "3\n"
    assert ahead.finish() == expected


def test_what_changes_each_time_is_not_tried_a_third_time(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    ahead = make()
    for attempt in range(2):
        (ahead.directory / "data").write_text(str(attempt))
        ahead.run("import os\nopen('data').read()\nos.environ['RANK']")
        (ahead.directory / "data").write_text(f"{attempt} after")
        assert ahead.place().wait(60) != 0
    assert any("changes between one start and the next" in line for line in caplog.messages)
    before = len(waits(caplog))
    ahead.run("print('a usual start')")
    assert len(waits(caplog)) == before
    assert ahead.finish() == "a usual start\n"


FAILURES = {
    "an error": "raise ValueError('not here')",
    "an exit": "raise SystemExit(4)",
    "at once": f"import os; os._exit({ENDED})",
    "a signal": "import os, signal; signal.raise_signal(signal.SIGKILL)",
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_script_that_ends_badly_ahead_is_started_again(
    make: Make, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """It may have failed for being ahead. Nobody hears of it but the log."""
    ahead = make()
    first = ahead.directory / "first"
    ahead.run(f"import os\nif not os.path.exists({str(first)!r}):\n    {FAILURES[how]}\nprint('well')")
    first.touch()
    assert waits(caplog) == []
    assert ahead.finish() == "well\n"
    if how in ("an error", "an exit"):
        assert any("failed ahead of its place" in line for line in caplog.messages)


def test_an_error_behind_its_place_is_its_own(make: Make) -> None:
    ahead = make()
    ahead.run("import os\nos.environ['RANK']\nraise ValueError('here')")
    worker = ahead.place()
    assert worker.wait(60) == 1
    assert not worker.abandoned
    assert ahead.errors.read_text().splitlines()[-1] == "ValueError: here"
    assert "run_ahead" not in ahead.errors.read_text()
    assert "worker_main" not in ahead.errors.read_text()


def test_who_needs_no_place_ends_with_it(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A script that does all of its work ahead is done when its world opens, not before."""
    ahead = make()
    ahead.run("import atexit\natexit.register(print, 'at its exit')\nprint('done')")
    assert waits(caplog) == ["its end"]
    assert ahead.finish() == "done\nat its exit\n"


@pytest.mark.parametrize("what", ["arguments", "variables"])
def test_another_start_than_is_wanted_is_not_used(make: Make, what: str) -> None:
    ahead = make()
    ahead.run("import os, sys\nprint(sys.argv[1:], os.environ.get('OTHER'))")
    wanted = ahead.assignment(**PLACE, **({"OTHER": "1"} if what == "variables" else {}))
    if what == "arguments":
        wanted.arguments.append("two")
    worker = ahead.pool.start_worker(Assignment(**{**vars(wanted), "stdout": str(ahead.out)}), 0)
    assert worker is not None
    assert worker.wait(60) == 0
    assert ahead.out.read_text() == ("['one'] 1\n" if what == "variables" else "['one', 'two'] None\n")


def test_a_place_may_come_while_the_script_still_runs(make: Make, tmp_path: Path) -> None:
    """At a first start the world is open before the imports are over."""
    ahead = make()
    go_on = tmp_path / "go-on"
    os.mkfifo(go_on)
    # Opened by both without waiting for the other; what is read is not looked at through Python.
    ahead.script.write_text(
        "import os, select\nfrom posix import open as plain\nprint('one')\n"
        f"fifo = plain({str(go_on)!r}, os.O_RDWR)\nselect.select([fifo], [], [])\n"
        "print('two', os.environ['RANK'])\n"
    )
    ahead.begin()
    worker = ahead.place()
    deadline = time.monotonic() + 60
    while not worker.taken:
        assert time.monotonic() < deadline
        assert worker.returncode is None
        time.sleep(0.02)  # why: nothing tells when it took its place
    with open(go_on, "wb", buffering=0) as fifo:
        fifo.write(b"x")
        assert worker.wait(60) == 0
    assert ahead.out.read_text() == "one\ntwo 3\n"
    assert ahead.pool._ahead._workers == {}, "no other one was started beside it"


def test_nothing_runs_ahead_beside_a_start_that_does_not_wait(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The world is open before the imports are over: the script is started once."""
    go_on, modules = Path(os.path.realpath(tempfile.mkdtemp())), "waits_for_a_file"
    text = f"import os, time\nwhile not os.path.exists({str(go_on / 'go')!r}):\n    time.sleep(0.01)\n"
    (go_on / f"{modules}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(go_on), prepend=os.pathsep)
    ahead = make(modules=(modules,))
    ahead.script.write_text("import os\nprint(os.environ['RANK'])")
    ahead.pool.fill(low_priority=False, ahead=[ahead.assignment()])
    worker = ahead.place()
    (go_on / "go").touch()
    assert worker.wait(60) == 0
    assert ahead.warm.wait(60)
    assert ahead.pool._ahead._workers == {}
    assert waits(caplog) == []
    shutil.rmtree(go_on)


def test_a_script_that_does_not_come_to_its_place_is_given_up(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    ahead = make(patience=0.5)
    first = ahead.directory / "first"
    ahead.run(f"import os, time\nif not os.path.exists({str(first)!r}):\n    time.sleep(600)\nprint('well')")
    first.touch()
    assert any("has not needed its place within" in line for line in caplog.messages)
    assert ahead.finish() == "well\n"


@pytest.mark.parametrize("victim", ["worker", "nursery"])
def test_one_that_is_killed_while_it_waits_costs_nothing(make: Make, victim: str) -> None:
    ahead = make()
    ahead.run("import os\nprint(os.environ['RANK'])")
    (_, _, worker) = ahead.pool._ahead._workers[0]
    os.kill(worker.pid if victim == "worker" else ahead.pool._nurseries[0].process.pid, signal.SIGKILL)
    worker.wait(60)
    ahead.run("import os\nprint(os.environ['RANK'])")
    assert ahead.finish() == "3\n"


def stop(pid: int) -> None:
    """SIGSTOP, until it has reached all threads: one that is woken first would go on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while any(
        task.read_text().rpartition(")")[2].split()[0] != "T" for task in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # why: the kernel tells nobody


def test_one_that_is_stopped_while_it_waits_can_be_ended(make: Make) -> None:
    """SIGSTOP: it takes no place. Whoever waits for it stops it as any worker."""
    ahead = make()
    ahead.run("import os\nprint(os.environ['RANK'])")
    (_, _, waiting) = ahead.pool._ahead._workers[0]
    stop(waiting.pid)
    worker = ahead.place()
    worker.signal_group(signal.SIGKILL)
    assert worker.wait(60) == -signal.SIGKILL


def test_one_that_does_not_take_its_place_is_replaced(make: Make) -> None:
    """Stopped, or stuck in the kernel: who waits for it hears in time that it never was."""
    ahead = make()
    ahead.pool._ahead._placing._patience_seconds = 0.2
    ahead.run("import os\nprint(os.environ['RANK'])")
    (_, _, waiting) = ahead.pool._ahead._workers[0]
    stop(waiting.pid)
    worker = ahead.place()
    assert worker.wait(60) == -signal.SIGKILL
    assert worker.abandoned
    assert ahead.finish() == "3\n"


def test_a_script_that_closes_all_files_harms_nobody(make: Make) -> None:
    """As daemons do. Its place does not reach it then; it is started again, and closes them with its place."""
    ahead = make()
    ahead.run(
        "import os\nos.closerange(3, 1000)\nhandle = os.open('script-own', os.O_RDWR | os.O_CREAT)\nprint('well')"
    )
    assert ahead.finish() == "well\n"
    assert (ahead.directory / "script-own").read_bytes() == b""


def test_cards_are_left_alone_and_memory_is_the_first_to_go(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """torch's first use of a card waits; the kernel's choice under shortage is as before once the place is there."""
    ahead = make(modules=("torch",))
    ahead.run(
        "import torch\nfrom pathlib import Path\nscore = lambda: Path('/proc/self/oom_score_adj').read_text().strip()\n"
        "before = score()\ntry:\n    torch.cuda.current_stream()\nexcept Exception as error:\n    pass\n"
        "print(before, score())"
    )
    assert waits(caplog) == ["it uses a card"]
    assert ahead.finish().split() == ["1000", Path("/proc/self/oom_score_adj").read_text().strip()]


def test_much_output_waits_with_its_script(make: Make) -> None:
    """More than is kept: the script goes on when it has its place, and nothing of it is lost."""
    ahead = make(patience=600.0)
    ahead.script.write_text("for number in range(300_000):\n    print(number)\n")
    ahead.begin()
    assert ahead.finish().split() == [str(number) for number in range(300_000)]


def test_who_never_stops_writing_is_read_in_order(make: Make) -> None:
    """It gets its place in the midst of it: what was kept, and what is under way, come first."""
    ahead = make(patience=600.0)
    ahead.script.write_text(
        "import os, time\nnumber = 0\n"
        "while time.process_time() < 3.5:\n    os.write(1, b'%d' % number)\n    print(flush=True)\n    number += 1\n"
    )
    ahead.begin()
    lines = ahead.finish().splitlines()
    assert lines == [str(number) for number in range(len(lines))]


STREAMS = {
    "kept under another number": "import os\nsaved = os.dup(1)\n{wait}\nos.write(saved, b'saved\\n')",
    "silenced": (
        "import os\nsaved, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)\nos.dup2(null, 1)\n{wait}\n"
        "os.write(1, b'not to be seen\\n')\nos.write(saved, b'saved\\n')"
    ),
    "one long write": "import os\nos.write(1, b'x' * 5_000_000 + b'\\n')\n{wait}\nos.write(1, b'saved\\n')",
}


@pytest.mark.parametrize("how", STREAMS)
def test_streams_are_where_the_script_has_put_them(make: Make, caplog: pytest.LogCaptureFixture, how: str) -> None:
    """A duplicate of its output goes on, what it has put in its place stays, and no write is cut off."""
    ahead = make()
    ahead.run(STREAMS[how].format(wait="os.environ['RANK']"))
    assert waits(caplog) == ["its output is read" if how == "one long write" else "RANK"]
    long = "x" * 5_000_000 + "\n" if how == "one long write" else ""
    assert ahead.finish() == f"{long}saved\n"


def test_no_variable_is_missing_to_a_script_that_still_runs(make: Make, tmp_path: Path) -> None:
    """It asks while it is given its place, one variable after the other: it waits until it has all of them."""
    ahead = make()
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    ahead.script.write_text(
        "import os, threading, time\nfrom posix import open as plain\nput, begun = os.putenv, threading.Event()\n"
        "def slow(name, value):\n    begun.set()\n    time.sleep(0.1)\n    put(name, value)\n"
        f"os.putenv = slow\nos.write(plain({str(ready)!r}, os.O_RDWR), b'x')\nbegun.wait()\n"
        "print(os.environ.get('TORCHELASTIC_RESTART_COUNT'), dict(os.environ)['RANK'])\n"
    )
    with open(os.open(ready, os.O_RDWR), "rb", buffering=0) as fifo:
        ahead.begin()
        assert readable(fifo.fileno(), 60), "it never came to its wait"
    assert ahead.finish() == "1 3\n"


# As `torch.utils.cpp_extension` and `filelock` do it, which processes of other jobs meet, too.
LOCKS = {
    "a file that must be new": ("os.open(path, os.O_CREAT | os.O_EXCL)", "it writes"),
    "a lock on a file": ("fcntl.flock(os.open(path, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)", ""),
}


@pytest.mark.parametrize("how", LOCKS)
def test_nobody_waits_for_a_lock_of_a_script_that_waits(make: Make, caplog: pytest.LogCaptureFixture, how: str) -> None:
    """In a cache that others use: it waits before it takes it, or ends, and starts when its place is known."""
    ahead = make()
    lock = ahead.directory / "cache" / "lock"
    lock.parent.mkdir()
    ahead.environment["TORCH_EXTENSIONS_DIR"] = str(lock.parent)
    text, reason = LOCKS[how]
    ahead.run(f"import fcntl, os\npath = {str(lock)!r}\n{text}\nos.system('true')\nprint(os.environ['RANK'])")
    if reason:
        assert waits(caplog) == [f"{reason} {lock}"]
        assert not lock.exists()
    else:
        assert waits(caplog) == []
        assert any("while it holds a lock" in line for line in caplog.messages)
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert ahead.finish() == "3\n"


def test_what_lies_beside_a_cache_is_no_cache(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """HF_HOME is a disk on which people have their runs, too."""
    ahead = make()
    ahead.environment["HF_HOME"] = ahead.environment["XDG_CACHE_HOME"] = str(ahead.directory)
    ahead.run("open('log', 'w')")
    assert waits(caplog) == ["it writes log"]
    assert not (ahead.directory / "log").exists()
    ahead.finish()


STORES = {
    "store of torch": (
        "torch.distributed.TCPStore('127.0.0.1', 0, 1, True, wait_for_workers=False)",
        "it opens a connection",
    ),
    "store in a file": ("torch.distributed.FileStore('effect', 1).set('x', 'y')", "it opens a store"),
    "safetensors": (
        "import safetensors.torch as s; s.save_file(dict(x=torch.ones(1)), 'effect')",
        "it writes safetensors",
    ),
}


@pytest.mark.full
def test_what_native_code_writes_waits(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    ahead = make(modules=("torch", "torch.distributed"))
    for text, reason in STORES.values():
        caplog.clear()
        ahead.clear()
        ahead.run(f"import torch, torch.distributed\n{text}\nprint('__init__' in vars(torch.distributed.TCPStore))")
        assert waits(caplog) == [reason]
        assert not (ahead.directory / "effect").exists()
        assert ahead.finish() == "True\n"


def test_no_thread_for_it_is_no_failure(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `ulimit -u`: the node is warm all the same, and the script starts when its place is known."""

    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "ahead-patience":
            raise RuntimeError("can't start new thread")
        started(thread)

    ahead = make()
    monkeypatch.setattr(threading.Thread, "start", start)
    ahead.run("import os\nprint(os.environ['RANK'])")
    assert ahead.finish() == "3\n"


def test_a_nursery_that_is_killed_while_scripts_run_ahead_keeps_nobody_waiting(make: Make, tmp_path: Path) -> None:
    """Others wait for this node to be warm. There is nothing left that it could wait for."""
    ahead = make(patience=600.0)
    started = tmp_path / "started"
    os.mkfifo(started)
    ahead.script.write_text(
        f"from posix import close, open\nclose(open({str(started)!r}, 1))\nimport signal\nsignal.pause()\n"
    )
    ahead.pool.fill(low_priority=False, ahead=[ahead.assignment()])
    assert started.read_bytes() == b"", "it is opened, and closed"
    os.kill(ahead.pool._nurseries[0].process.pid, signal.SIGKILL)
    assert ahead.warm.wait(30)
    ahead.run("import os\nprint(os.environ['RANK'])")
    assert ahead.finish() == "3\n"
