"""Workers with real processes: adopted and cold ones, their output and exits, and the socket to the agent."""

from __future__ import annotations

import errno
import io
import json
import os
import queue
import signal
import socket
import stat
import struct
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.processes.lifeline import Lifeline
from dalsegno.agent.processes.proc import kill_group, listeners, start_time
from dalsegno.agent.script import ALWAYS, Script, modules_of
from dalsegno.agent.shell.mailbox import Mailbox
from dalsegno.agent.shell.stopping import Stopping
from dalsegno.agent.standby import nursery as standby
from dalsegno.agent.standby import nursery_start
from dalsegno.agent.standby.standby_pool import StandbyPool
from dalsegno.agent.workers import workers
from dalsegno.agent.workers.worker_link import WorkerLink
from dalsegno.agent.workers.workers import WorkersContext
from dalsegno.agent.workers.working_directory import WorkingDirectory
from dalsegno.protos import worker_pb2
from tests.support.jobs.local_processes import process_state

pytestmark = pytest.mark.timeout(120)

# Reports about itself; a child process started with `spawn` finds a function of the script again.
REPORT = """
import json, multiprocessing, os, sys
from helper import WHERE
def square(x):
    return x * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        nine = pool.apply(square, (3,))
    print(json.dumps({"argv": sys.argv, "path": sys.path[0], "env": dict(os.environ), "cwd": os.getcwd(), "nine": nine,
                      "where": WHERE, "nice": os.getpriority(os.PRIO_PROCESS, 0), "pid": os.getpid(),
                      "standby": "dalsegno.agent.standby.nursery" in sys.orig_argv,
                      "file": globals().get("__file__")}))
    sys.exit(int(os.environ.get("CODE", "0")))
"""

SPEAK = """
import os, socket, struct, sys, time
from dalsegno.protos import worker_pb2
def send(link, **body):
    data = worker_pb2.ToAgent(**body).SerializeToString()
    link.sendall(struct.pack(">I", len(data)) + data)
link = socket.socket(socket.AF_UNIX)
link.connect(os.environ["DALSEGNO_SOCKET"])
send(link, hello=worker_pb2.Hello(epoch=7, rank=3, pid=os.getpid()))
for step in range(1, 51):
    send(link, progress=worker_pb2.Progress(step=step))
send(link, finished=worker_pb2.Finished(step=50))
child = os.fork()
if child == 0:
    time.sleep(300)  # Holds the connection open, as a DataLoader worker would.
print(child, flush=True)
os._exit(83)
"""


class Node:
    """One node's parts, and what they told."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.said: queue.SimpleQueue[tuple[int, int, worker_pb2.ToAgent]] = queue.SimpleQueue()
        self.exits: queue.SimpleQueue[tuple[int, int, str]] = queue.SimpleQueue()
        self.imports: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.order: list[str] = []
        # Seconds that each message takes its reader.
        self.slowness = 0.0
        self.lifeline = Lifeline()
        self.link = WorkerLink(self.hear)
        self.link.expect(epoch=7, first_rank=3, nproc=1)
        self.warm = threading.Event()
        self.pools: list[StandbyPool] = []

    def hear(self, epoch: int, rank: int, message: worker_pb2.ToAgent) -> None:
        time.sleep(self.slowness)
        self.order.append(message.WhichOneof("body") or "")
        self.said.put((epoch, rank, message))

    def exited(self, rank: int, code: int, message: str, had_stayed: bool) -> None:
        self.order.append("exit")
        self.exits.put((rank, code, message))

    def pool(
        self,
        count: int,
        modules: tuple[str, ...] = ("json",),
        low_priority: bool = False,
        fork: bool = True,
        **options: Any,
    ) -> StandbyPool:
        self.warm.clear()
        log = self.directory / "standby.log"
        pool = StandbyPool(self.lifeline, count, modules, log, self.warm.set, fork=fork, **options)
        self.pools.append(pool)
        pool.fill(low_priority=low_priority)
        return pool

    def workers(self, script: Script, count: int, pool: StandbyPool | None, **environment: str) -> WorkersContext:
        return WorkersContext(
            "trainer",
            script,
            dict.fromkeys(range(count), script.arguments),
            {
                rank: {
                    "RANK": str(rank),
                    "TORCHELASTIC_RESTART_COUNT": "0",
                    "TORCHELASTIC_RUN_ID": "x",
                    "DALSEGNO_SOCKET": str(self.link.path),
                    **self.lifeline.environment(),
                    **environment,
                }
                for rank in range(count)
            },
            DefaultLogsSpecs(log_dir=str(self.directory / "logs"), redirects=Std.ALL),
            None,
            WorkingDirectory(),
            pool,
            self.lifeline,
            self.link,
            self.exited,
            lambda: self.imports.put(True),
        )

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
        self.lifeline.close()
        self.link.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    one = Node(tmp_path)
    yield one
    one.close()


def script_in(directory: Path, text: str, *arguments: str) -> Script:
    scripts = directory / "scripts"
    scripts.mkdir(exist_ok=True)
    (scripts / "helper.py").write_text("WHERE = __file__\n")
    (scripts / "script.py").write_text(text)
    return Script(sys.executable, ("-u", str(scripts / "script.py"), *arguments))


@pytest.mark.parametrize("how", ["forked", "single", "cold", "module"])
def test_a_worker_is_what_python_would_have_made_of_the_script(
    node: Node, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Arguments, path, environment, output file and exit status are the same for adopted and cold workers."""
    monkeypatch.setenv("FROM_THE_START", "1")
    script = script_in(node.directory, REPORT, "--alpha", "1 2")
    pool = None
    if how != "cold":
        pool = node.pool(2, fork=how != "single")
        assert node.warm.wait(20)
        assert pool.warm() == 2
    # What the agent dropped since must be gone in the adopted worker as well, and what is new must be there.
    monkeypatch.delenv("FROM_THE_START")
    monkeypatch.setenv("LATER", "2")
    if how == "module":
        monkeypatch.chdir(node.directory / "scripts")
        script = Script(sys.executable, ("-u", "-m", "script", "--alpha", "1 2"))
    context = node.workers(script, 2, pool, CODE="5")
    context.start()
    assert context.adopted == (0 if how == "cold" else 2)
    assert sorted([node.exits.get(timeout=30), node.exits.get(timeout=30)]) == [(0, 5, ""), (1, 5, "")]
    context.stop(0)
    for rank in range(2):
        report = json.loads(Path(context.stdouts[rank]).read_text())
        assert Path(context.stderrs[rank]).read_text() == ""
        assert report["argv"][1:] == ["--alpha", "1 2"]
        assert report["argv"][0] == report["file"] == str(node.directory / "scripts" / "script.py")
        assert report["path"] == str(node.directory / "scripts")
        assert report["where"] == str(node.directory / "scripts" / "helper.py")
        assert report["cwd"] == os.getcwd()
        assert report["nine"] == 9
        assert report["standby"] == (how != "cold")
        assert report["env"]["RANK"] == str(rank)
        assert report["env"]["LATER"] == "2"
        assert "FROM_THE_START" not in report["env"]
        assert report["nice"] == os.getpriority(os.PRIO_PROCESS, 0)
        assert start_time(report["pid"]) is None


@pytest.mark.parametrize("how", ["forked", "single", "hooks", "cold"])
def test_a_script_with_a_relative_name_finds_what_lies_beside_it(
    node: Node, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """As under Python: `__file__` is absolute and leads there from another directory, too; `sys.argv` is as typed."""
    text = (
        "import json, linecache, os, pickle, sys\n"
        "class Thing: pass\n"
        "os.chdir('/')\n"
        "again = type(pickle.loads(pickle.dumps(Thing()))) is Thing\n"
        "print(json.dumps([__file__, sys.argv[0], sys.path[0], (lambda: 0).__code__.co_filename, __loader__.path,\n"
        "                  linecache.getline(__file__, 2), type(__builtins__).__name__, again]))\n"
        "raise ValueError('no luck')\n"
    )
    script_in(node.directory, text)
    here = node.directory / "scripts" / "runs"
    here.mkdir()
    monkeypatch.chdir(here)
    pool = None if how in ("hooks", "cold") else node.pool(1, fork=how == "forked")
    hooks: dict[str, str] = {}
    if how == "hooks":
        (here.parent / "hook_of_nobody.py").write_text("def install() -> None: ...\n")
        monkeypatch.setenv("PYTHONPATH", str(here.parent), prepend=os.pathsep)
        hooks = {"DALSEGNO_HOOKS": "hook_of_nobody"}
    context = node.workers(Script(sys.executable, ("-u", "../script.py")), 1, pool, **hooks)
    context.start()
    assert node.exits.get(timeout=30)[1] == 1
    context.stop(0)
    assert context.adopted == (pool is not None)
    file = f"{here}/../script.py"
    assert json.loads(Path(context.stdouts[0]).read_text()) == [
        *(file, "../script.py", str(here.parent), file, file, "class Thing: pass\n", "module", True)
    ]
    assert f'File "{file}", line 7, in <module>' in Path(context.stderrs[0]).read_text()


def test_a_traceback_shows_the_script_only(node: Node) -> None:
    """An error of an adopted script reads as under plain Python, and ends with status 1."""
    script = script_in(node.directory, "def f():\n    raise ValueError('no luck')\n\nf()\n")
    context = node.workers(script, 1, node.pool(1))
    context.start()
    said = f"ValueError: no luck (script.py, line 2, in f) (see {context.stderrs[0]})"
    assert node.exits.get(timeout=30) == (0, 1, said)
    context.stop(0)
    lines = Path(context.stderrs[0]).read_text().splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "script.py" in lines[1]
    assert lines[-1] == "ValueError: no luck"
    assert not any("standby" in line for line in lines)


@pytest.mark.parametrize(
    ("last", "code", "errors"),
    [("", 0, ""), ("sys.exit(7)", 7, ""), ("sys.exit('no')", 1, "no\n"), ("sys.exit(256)", 0, "")],
)
def test_an_adopted_script_ends_as_python_would(node: Node, last: str, code: int, errors: str) -> None:
    """Its threads and exit handlers run to their end, its output is flushed; no library's destructor gets a say."""
    text = f"""
import atexit, ctypes, sys, threading, time
atexit.register(lambda: print("handler"))
threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)
sys.stdout.write("last line, ")
{last}
"""
    context = node.workers(script_in(node.directory, text), 1, node.pool(1))
    context.start()
    assert node.exits.get(timeout=30)[:2] == (0, code)
    context.stop(0)
    assert Path(context.stdouts[0]).read_text() == "last line, thread\nhandler\n"
    assert Path(context.stderrs[0]).read_text() == errors


@pytest.mark.parametrize(
    "known", [False, pytest.param(True, marks=pytest.mark.full)], ids=["unknown", "imported before"]
)
def test_a_script_is_seen_to_import_what_a_session_comes_from(node: Node, known: bool) -> None:
    """Once, also where a module of its own imports it; where the nursery had imported it its text has said so."""
    script = script_in(node.directory, "import own, os\nprint(own.WHERE)\nfrom dalsegno.elastic import session\n")
    (node.directory / "scripts" / "own.py").write_text("import json\nimport dalsegno.elastic\nWHERE = __file__\n")
    context = node.workers(script, 1, node.pool(1, ("dalsegno.elastic.script.session",) if known else ("json",)))
    context.start()
    assert node.exits.get(timeout=30) == (0, 0, "")
    context.stop(0)
    assert [node.imports.get(timeout=10) for _ in range(not known)] == [True] * (not known)
    assert node.imports.empty()


@pytest.mark.parametrize(
    "text",
    [
        "",
        pytest.param("import json, dalsegno.protos\n", marks=pytest.mark.full),
        "import os\nos.execv('/bin/true', ['true'])\n",
        # It imports all rendezvous handlers, and with ours a part of the library.
        pytest.param("import torch.distributed.checkpoint\n", marks=pytest.mark.full),
    ],
)
def test_a_script_that_imports_no_session_is_not_said_to(node: Node, text: str) -> None:
    """Nor is one that becomes another program."""
    context = node.workers(script_in(node.directory, text), 1, node.pool(1))
    context.start()
    assert node.exits.get(timeout=30) == (0, 0, "")
    context.stop(0)
    assert node.imports.empty()


def test_a_scripts_files_are_its_own(node: Node) -> None:
    """One that closes all descriptors and opens its own finds nothing of ours in them."""
    text = """
import os
os.closerange(3, 100)
files = [os.open(f"{os.environ['WHERE']}/{number}", os.O_RDWR | os.O_CREAT) for number in range(60)]
import dalsegno.elastic
print(sum(os.fstat(file).st_size for file in files))
"""
    files = node.directory / "files"
    files.mkdir()
    context = node.workers(script_in(node.directory, text), 1, node.pool(1), WHERE=str(files))
    context.start()
    assert node.exits.get(timeout=30) == (0, 0, "")
    context.stop(0)
    assert Path(context.stdouts[0]).read_text() == "0\n"
    assert node.imports.empty()


def test_an_error_file_gives_the_message(node: Node) -> None:
    """The first line of what torch's @record wrote comes with the exit."""
    script = script_in(
        node.directory,
        "import json, os, sys\n"
        "error = {'message': {'message': 'RuntimeError: out of luck\\nmore'}}\n"
        "json.dump(error, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\n"
        "sys.exit(4)\n",
    )
    context = node.workers(script, 1, None)
    context.start()
    assert node.exits.get(timeout=30) == (0, 4, "RuntimeError: out of luck")
    context.stop(0)


def test_what_a_standby_imports_is_there_and_costs_no_priority(node: Node) -> None:
    """torch is in memory, CUDA untouched, the imports ran at low priority and the training thread does not."""
    code = (
        "import os, sys, json, time\n"
        "loaded = [m for m in ('torch', 'torch.distributed', 'torch._dynamo') if m in sys.modules]\n"
        "import torch\n"
        "nices = [os.getpriority(os.PRIO_PROCESS, int(t)) for t in os.listdir('/proc/self/task')]\n"
        "print(json.dumps([loaded, torch.cuda.is_initialized(), nices, time.process_time()]))\n"
    )
    script = script_in(node.directory, code)
    pool = node.pool(1, modules_of(script.source), low_priority=True)
    assert node.warm.wait(60)
    context = node.workers(script, 1, pool)
    context.start()
    assert node.exits.get(timeout=60)[1] == 0
    context.stop(0)
    loaded, cuda, nices, took = json.loads(Path(context.stdouts[0]).read_text())
    assert loaded == list(ALWAYS)
    assert not cuda
    assert set(nices) == {os.getpriority(os.PRIO_PROCESS, 0)}
    # CPU time of its own, however busy the machine is: a cold one imports for more than a second.
    assert took < 1.0


def test_the_text_of_a_script_names_what_is_imported(tmp_path: Path) -> None:
    """Only known heavy modules are imported ahead, and only when the text imports them."""
    script = tmp_path / "train.py"
    script.write_text("import deepspeed.ops\nfrom dalsegno.elastic import session\n# import transformers\nimport os\n")
    assert modules_of(script)[:5] == (*ALWAYS, "deepspeed", "dalsegno.elastic")
    assert all(module.endswith("?") for module in modules_of(script)[5:])
    assert modules_of(None) == ALWAYS
    assert modules_of(tmp_path / "missing.py") == ALWAYS


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("import json, os\nfrom pathlib import Path\nimport os.path\n", True),
        ("import os, torch\n", False),
        ("def late():\n    import numpy\n", False),
        ("from . import model\n", False),
        ("import beside\n", False),
        ("import runpy\nrunpy.run_path('train.py')\n", False),
        ("exec(open('train.py').read())\n", False),
        ("from importlib import import_module\n", False),
        ("import json\nthis is no Python\n", False),
        ("", True),
    ],
)
def test_a_script_of_pythons_own_library_waits_for_no_torch(tmp_path: Path, text: str, plain: bool) -> None:
    """Whatever else its text may import is imported ahead, as always."""
    (tmp_path / "train.py").write_text(text)
    assert (modules_of(tmp_path / "train.py") == ()) is plain


def test_the_name_of_a_module_tells_what_it_runs() -> None:
    """Its file is not looked for: that could take imports."""
    assert modules_of("torchvision.train") == (*ALWAYS, "torchvision")
    assert {"dalsegno.swift_plugin", "swift"} < set(modules_of("dalsegno.swift_plugin.sft"))
    assert "swift" in modules_of("swift.cli.sft")
    assert modules_of("swiftly") == ALWAYS


def test_what_a_script_sets_before_its_imports_has_its_effect(node: Node) -> None:
    """As under Python: what a standby worker had imported would not read it any more."""
    value = "/big/hub"
    text = f"import os\nos.environ['HF_HOME'] = '{value}'\nimport datasets\nprint(datasets.config.HF_CACHE_HOME)\n"
    script = script_in(node.directory, text)
    context = node.workers(script, 1, node.pool(1, modules_of(script.source)))
    context.start()
    assert node.exits.get(timeout=90) == (0, 0, "")
    context.stop(0)
    assert context.adopted == 1
    assert Path(context.stdouts[0]).read_text() == f"{value}\n"


@pytest.mark.parametrize("fork", [True, False])
def test_without_a_usable_nursery_it_starts_cold(node: Node, fork: bool) -> None:
    """Dead ones are passed over; one that still imports is used."""
    script = script_in(node.directory, REPORT)
    pool = node.pool(2, fork=fork)
    assert node.warm.wait(20)
    os.kill(pool._nurseries[0].process.pid, signal.SIGKILL)
    wait_for(lambda: not pool._nurseries[0].usable)
    context = node.workers(script, 2, pool)
    context.start()
    assert context.adopted == (0 if fork else 1)
    assert {node.exits.get(timeout=30)[:2], node.exits.get(timeout=30)[:2]} == {(0, 0), (1, 0)}
    context.stop(0)
    # A fresh filling that nobody waited for: used while it is still importing.
    pool.fill(low_priority=False)
    context = node.workers(script, 2, pool)
    context.start()
    assert context.adopted == 2
    assert {node.exits.get(timeout=30)[:2], node.exits.get(timeout=30)[:2]} == {(0, 0), (1, 0)}
    context.stop(0)


def says_here(context: WorkersContext, rank: int) -> bool:
    out = Path(context.stdouts[rank])
    return out.exists() and "here" in out.read_text()


def test_a_worker_that_cannot_be_forked_says_why(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before it lives on, and so does the nursery, until the agent has decided."""
    script = script_in(node.directory, "import time\nprint('here', flush=True)\ntime.sleep(300)\n")
    (node.directory / "scripts" / "few.py").write_text(
        "import errno, os\n"
        "plain, calls = os.fork, iter(range(100))\n"
        "def fork():\n"
        "    if next(calls) == 1:\n"
        "        raise BlockingIOError(errno.EAGAIN, 'Resource temporarily unavailable')\n"
        "    return plain()\n"
        "os.fork = fork\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(node.directory / "scripts"), prepend=os.pathsep)
    pool = node.pool(2, ("few",))
    assert node.warm.wait(20)
    context = node.workers(script, 2, pool)
    context.start()
    rank, code, why = node.exits.get(timeout=30)
    assert (rank, code) == (1, 71)
    assert "no more processes and threads are allowed here" in why
    wait_for(lambda: says_here(context, 0))
    assert node.exits.empty()
    context.stop(0)
    context = node.workers(script, 2, pool)
    context.start()
    assert context.adopted == 2
    wait_for(lambda: says_here(context, 0) and says_here(context, 1))
    context.stop(0)


@pytest.mark.parametrize("limited", [False, True])
def test_a_nursery_that_dies_at_its_imports_costs_no_worker(
    node: Node, monkeypatch: pytest.MonkeyPatch, limited: bool
) -> None:
    """Those that it was to start start cold; where that cannot be done either, they say why."""
    script = script_in(node.directory, "print('here')\n")
    begin = node.directory / "begin"
    (node.directory / "scripts" / "deadly.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(begin)!r}):\n    time.sleep(0.02)\nos._exit(3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(node.directory / "scripts"), prepend=os.pathsep)
    context = node.workers(script, 1, node.pool(1, ("deadly",)))
    context.start()
    assert context.adopted == 1
    assert not node.warm.is_set()

    def refused(**options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    if limited:
        monkeypatch.setattr(workers, "get_subprocess_handler", refused)
    begin.touch()
    rank, code, why = node.exits.get(timeout=30)
    assert (rank, code) == (0, 71 if limited else 0)
    assert ("worker 0 cannot be started: no more processes" in why) == limited
    assert node.warm.wait(10), "nobody waits for it"
    context.stop(0)


def test_a_standby_worker_that_cannot_be_had_costs_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it, and workers start cold."""
    plain = nursery_start.subprocess.Popen

    def refused(*arguments: Any, **options: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(nursery_start.subprocess, "Popen", refused)
    pool = node.pool(1)
    assert node.warm.is_set()
    monkeypatch.setattr(nursery_start.subprocess, "Popen", plain)
    context = node.workers(script_in(node.directory, "print('here')\n"), 1, pool)
    context.start()
    assert context.adopted == 0
    assert node.exits.get(timeout=30)[:2] == (0, 0)
    context.stop(0)


@pytest.mark.parametrize("fits", [True, False])
def test_a_nursery_that_was_started_before_is_used_if_it_fits(node: Node, fits: bool) -> None:
    """One that has begun with other variables than are known now is ended: modules have read them."""
    environment = {**os.environ, **node.lifeline.environment(), **({} if fits else {"OMP_NUM_THREADS": "77"})}
    spec = nursery_start.NurserySpec(("json",), node.directory / "standby.log", (), environment)
    early = nursery_start.start_nursery(spec, node.lifeline, low_priority=False)
    pool = node.pool(1, early=early)
    assert node.warm.wait(30)
    assert (early.process.poll() is None) == fits
    context = node.workers(script_in(node.directory, "import os\nprint(os.getppid())"), 1, pool)
    context.start()
    assert context.adopted == 1
    assert node.exits.get(timeout=30)[:2] == (0, 0)
    parent = int(Path(context.stdouts[0]).read_text())
    assert (parent == early.process.pid) == fits
    context.stop(0)


def test_one_nursery_serves_world_after_world(node: Node) -> None:
    """Three epochs of two workers from one process; generators of random numbers are not shared."""
    code = (
        "import json, os, random, numpy\n"
        "print(json.dumps([os.getpid(), os.getppid(), random.random(), numpy.random.rand()]))"
    )
    script = script_in(node.directory, code)
    pool = node.pool(2, ("numpy.random", "random"))
    assert node.warm.wait(20)
    said = []
    for _ in range(3):
        context = node.workers(script, 2, pool)
        context.start()
        assert pool.warm() == 2
        assert {node.exits.get(timeout=30)[:2], node.exits.get(timeout=30)[:2]} == {(0, 0), (1, 0)}
        context.stop(0)
        said += [json.loads(Path(context.stdouts[rank]).read_text()) for rank in range(2)]
    for column, different in ((0, 6), (1, 1), (2, 6), (3, 6)):
        assert len({row[column] for row in said}) == different, said


def test_an_adopted_worker_takes_signals_as_python_does(node: Node) -> None:
    """Its nursery passes over them; what the worker has of that is nothing."""
    code = (
        "import os, signal, sys\n"
        "numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)\n"
        "print(*[signal.getsignal(n) for n in numbers], *signal.pthread_sigmask(signal.SIG_BLOCK, ()), sep='|')\n"
        "sys.stdout.flush()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "signal.pause()\n"
    )
    notices = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    script = script_in(node.directory, code)
    said = []
    for pool in (node.pool(1, notices=notices), node.pool(1, fork=False, notices=notices), None):
        if pool is not None:
            assert node.warm.wait(20)
            for number in notices:
                os.kill(pool._nurseries[0].process.pid, number)
        context = node.workers(script, 1, pool)
        context.start()
        assert context.adopted == (pool is not None)
        assert node.exits.get(timeout=30)[:2] == (0, -signal.SIGTERM)
        context.stop(0)
        said.append(Path(context.stdouts[0]).read_text().strip())
    assert len(set(said)) == 1, said
    assert said[0].split("|")[0] == str(signal.SIG_DFL)


def test_workers_end_with_their_nursery(node: Node) -> None:
    """Killed by the kernel for memory, say: the exits are told, nothing is left, and the next nursery serves."""
    script = script_in(node.directory, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(300)\n")
    pool = node.pool(2)
    assert node.warm.wait(20)
    context = node.workers(script, 2, pool)
    context.start()
    outs = [Path(context.stdouts[rank]) for rank in range(2)]
    wait_for(lambda: all(out.exists() and out.read_text().strip() for out in outs))
    os.kill(pool._nurseries[0].process.pid, signal.SIGKILL)
    assert {node.exits.get(timeout=10)[:2], node.exits.get(timeout=10)[:2]} == {(0, -9), (1, -9)}
    wait_for(lambda: not any(alive(int(out.read_text())) for out in outs), 2.0)
    context.stop(0)
    node.warm.clear()
    pool.fill(low_priority=True)
    assert node.warm.wait(20)


def test_workers_that_do_not_exist_yet_are_stopped_too(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The world changes while the nursery still imports: stopping waits for nothing, and nothing runs afterwards."""
    ran, go_on = node.directory / "ran", node.directory / "go-on"
    script = script_in(node.directory, f"open({str(ran)!r}, 'w')")
    slow = node.directory / "scripts" / "slow_module.py"
    slow.write_text(f"import os, time\nwhile not os.path.exists({str(go_on)!r}):\n    time.sleep(0.01)\n")
    monkeypatch.setenv("PYTHONPATH", str(slow.parent), prepend=os.pathsep)
    pool = node.pool(1, ("slow_module",))
    context = node.workers(script, 1, pool)
    context.start()
    context.stop(0)
    assert node.exits.get(timeout=1)[:2] == (0, -9)
    go_on.touch()
    assert node.warm.wait(60)
    context = node.workers(script_in(node.directory, "pass"), 1, pool)
    context.start()
    assert node.exits.get(timeout=60)[:2] == (0, 0)
    context.stop(0)
    assert not ran.exists()


@pytest.mark.parametrize("fork", [True, False])
def test_a_nursery_that_is_stuck_in_an_import_is_given_up(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fork: bool
) -> None:
    """A deadlock, or a file system that is away: what waits for it starts cold, and after two of them all do."""
    scripts = node.directory / "scripts"
    script = script_in(node.directory, REPORT)
    (scripts / "endless.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setenv("PYTHONPATH", str(scripts), prepend=os.pathsep)
    pool = node.pool(2, ("endless",), fork=fork, patience_seconds=1.0)
    stuck = [nursery.process.pid for nursery in pool._nurseries]
    context = node.workers(script, 2, pool)
    context.start()
    assert context.adopted == 2
    assert {node.exits.get(timeout=60)[:2] for _ in range(2)} == {(0, 0), (1, 0)}
    context.stop(0)
    assert all(not json.loads(Path(context.stdouts[rank]).read_text())["standby"] for rank in range(2))
    assert node.warm.wait(20)
    wait_for(lambda: not any(alive(pid) for pid in stuck))
    if fork:
        assert caplog.text.count("given up") == 1
        node.warm.clear()
        pool.fill(low_priority=True)
        assert node.warm.wait(20)
    pool.fill(low_priority=True)
    assert pool._nurseries == []


def test_workers_of_a_stuck_nursery_can_be_stopped(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing starts afterwards."""
    ran = node.directory / "ran"
    script = script_in(node.directory, f"open({str(ran)!r}, 'w')")
    (node.directory / "scripts" / "endless.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.setenv("PYTHONPATH", str(node.directory / "scripts"), prepend=os.pathsep)
    pool = node.pool(1, ("endless",), patience_seconds=5.0)
    context = node.workers(script, 1, pool)
    context.start()
    context.stop(0)
    assert node.exits.get(timeout=1)[:2] == (0, -9)
    # It was not given up yet.
    assert not node.warm.is_set()
    assert node.warm.wait(60)
    assert not ran.exists()


@pytest.mark.parametrize(
    "harm",
    [
        "import sys\nsys.modules['__main__'].cuda_started = lambda: True\n",
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    ],
    ids=["CUDA", "threads"],
)
def test_imports_that_forbid_forking(node: Node, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    """Those who asked early get fresh interpreters, later ones a process each, which nobody forked."""
    scripts = node.directory / "scripts"
    script = script_in(node.directory, REPORT)
    (scripts / "harmful.py").write_text(harm)
    monkeypatch.setenv("PYTHONPATH", str(scripts), prepend=os.pathsep)
    pool = node.pool(2, ("harmful",))
    reports = []
    for round_ in range(2):
        if round_:
            assert node.warm.wait(60)
        context = node.workers(script, 2, pool)
        context.start()
        assert context.adopted == 2
        ended = {node.exits.get(timeout=60)[:2] for _ in range(2)}
        assert ended == {(0, 0), (1, 0)}
        context.stop(0)
        reports += [json.loads(Path(context.stdouts[rank]).read_text()) for rank in range(2)]
    assert [report["standby"] for report in reports] == [False, False, True, True]
    assert all(report["nine"] == 9 for report in reports)


@pytest.mark.parametrize(("loaded", "answer", "started"), [(False, 0, False), (True, 3, False), (True, 0, True)])
def test_the_driver_is_asked_whether_it_was_started(
    monkeypatch: pytest.MonkeyPatch, loaded: bool, answer: int, started: bool
) -> None:
    """Not loaded, loaded but not initialized (CUDA_ERROR_NOT_INITIALIZED), initialized."""

    class Driver:
        def cuDeviceGetCount(self, count: object) -> int:
            return answer

    monkeypatch.setattr("builtins.open", lambda *a, **k: io.StringIO("7f /usr/lib/libcuda.so.1\n" if loaded else "\n"))
    monkeypatch.setattr(standby.ctypes, "CDLL", lambda name: Driver())
    result = standby.cuda_started()
    monkeypatch.undo()
    assert result is started


def test_a_program_that_is_not_python(node: Node) -> None:
    """`--no-python` starts cold."""
    script = Script("/bin/sh", ("-c", "exit 3"))
    assert not script.adoptable
    context = node.workers(script, 1, node.pool(1))
    context.start()
    assert context.adopted == 0
    assert node.exits.get(timeout=30) == (0, 3, "")
    context.stop(0)


def test_a_script_that_cannot_be_started(node: Node) -> None:
    """The error comes out of start, nothing is left behind."""
    context = node.workers(Script(str(node.directory / "no-such-program"), ()), 1, None)
    with pytest.raises(OSError, match="no-such-program"):
        context.start()


@pytest.mark.parametrize("how", ["adopted", "cold"])
def test_stop_kills_the_whole_group_at_once(node: Node, how: str) -> None:
    """Grace 0: SIGKILL for workers that ignore SIGTERM, and for their children; all exits are told first."""
    text = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        # Both share the file, and what `print` writes without a buffer is a number and a newline.
        "os.write(1, b'%d\\n' % os.getpid())\ntime.sleep(300)\n"
    )
    script = script_in(node.directory, text)
    context = node.workers(script, 2, node.pool(2) if how == "adopted" else None)
    context.start()
    outs = [Path(context.stdouts[rank]) for rank in range(2)]
    wait_for(lambda: all(out.exists() and len(out.read_text().split()) == 2 for out in outs))
    begin = time.monotonic()
    context.stop(0)
    # SIGKILL has that long; they would sleep for minutes.
    assert time.monotonic() - begin < workers._KILL_TIMEOUT_SECONDS
    assert {node.exits.get(timeout=0.1)[:2], node.exits.get(timeout=0.1)[:2]} == {(0, -9), (1, -9)}
    pids = [int(pid) for out in outs for pid in out.read_text().split()]
    wait_for(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.full
@pytest.mark.parametrize("writes", [True, False], ids=["writes", "stands still"])
def test_a_notice_lasts_as_long_as_workers_write(node: Node, writes: bool) -> None:
    """One catches the signal and saves for seconds, another one does nothing about it: that one is not waited for."""
    text = f"""
        import os, pathlib, signal, sys, threading, time
        told = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: told.set())
        pathlib.Path("ready").touch()
        told.wait()
        for part in range(12 if {writes} else 0):
            with open(f"part-{{part}}", "wb") as file:
                file.write(os.urandom(4_000_000))
            time.sleep(0.5)  # why: longer in all than a worker that writes nothing is waited for
        time.sleep(0 if {writes} else 300)
    """
    script = script_in(node.directory, f"import os; os.chdir({str(node.directory)!r})\n{textwrap.dedent(text)}")
    context = node.workers(script, 1, None)
    context.start()
    wait_for((node.directory / "ready").exists)
    begin = time.monotonic()
    context.stop(100, 3)
    assert node.exits.get(timeout=0.1)[:2] == ((0, 0) if writes else (0, -9))
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("grace", [0, 5])
def test_workers_that_end_while_they_are_stopped(node: Node, grace: float) -> None:
    """Eight whose own ends fall together with the stop, again and again: each stop ends, after every exit was told."""
    for number in range(15):
        context = node.workers(Script("/bin/sh", ("-c", f"sleep 0.{10 + number % 5}")), 8, None)
        context.start()
        node.exits.get(timeout=30)
        context.stop(grace)
        assert len({node.exits.get(timeout=0.1)[0] for _ in range(7)}) == 7
        assert node.exits.empty()


@pytest.mark.full
def test_a_worker_is_signalled_under_its_own_number_only(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its watcher has reaped it, the number may be somebody else's."""
    context = node.workers(Script("/bin/true", ()), 1, None)
    context.start()
    assert node.exits.get(timeout=30)[:2] == (0, 0)
    signalled: list[int] = []
    monkeypatch.setattr("dalsegno.agent.workers.workers.kill_group", lambda pid, signum=9: signalled.append(pid))
    context._running[0].ended.clear()
    context.stop(0)
    assert signalled == []


def test_the_end_of_a_worker_that_is_another_users_is_noticed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `--no-python sudo …`: a plain user may signal nothing of its group, also behind its end."""
    monkeypatch.setattr(os, "killpg", raising)
    context = node.workers(Script("/bin/sh", ("-c", "exit 3")), 1, None)
    context.start()
    assert node.exits.get(timeout=60)[:2] == (0, 3)
    assert context.over
    with pytest.raises(PermissionError):
        kill_group(os.getpid(), signal.SIGTERM)


def test_workers_are_stopped_without_room_for_a_thread(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It only ends what copies their files to the console; it cost the node its exit code."""
    context = node.workers(Script("/bin/sh", ("-c", "sleep 1000")), 1, None)
    context.start()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_room)
        context.stop(0)
    assert node.exits.get(timeout=60)[:2] == (0, -9)
    assert context._output is None
    context.stop(0)
    assert context._output is not None


def no_room(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("where", ["lifeline.drop_group", "link.clean", "link.flush"])
def test_the_exit_of_a_worker_is_reported_whatever_fails_behind_it(
    node: Node, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The node waited for it for ever."""
    part, _, name = where.partition(".")
    monkeypatch.setattr(getattr(node, part), name, raising)
    context = node.workers(Script("/bin/sh", ("-c", "exit 3")), 1, None)
    context.start()
    assert node.exits.get(timeout=60)[:2] == (0, 3)
    assert context.over


@pytest.mark.parametrize("how", ["raises", "adoption raises", "ends"])
def test_the_word_that_workers_have_stopped_comes_in_any_case(how: str) -> None:
    """Whatever stopping them meets: the decisions wait for it."""

    class Context:
        over = False

        def stop(self, grace: float, still: float, signs: object) -> None:
            if how == "raises":
                raise ProcessLookupError

    class Adoption:
        met, signs = False, ()

        def interrupt(self) -> None:
            pass

        def stopped(self, timeout: float, given: float, *, noticed: bool) -> None:
            if how == "adoption raises":
                raise OSError

    mailbox, nothing = Mailbox(), cast("Any", None)
    order = ev.StopWorkers(3, save=False)
    context, adoption = cast("Any", Context()), cast("Any", Adoption())
    Stopping(order, context, adoption, nothing, 10.0, 0.0, nothing).start(mailbox.put)
    assert mailbox.get(30) == ev.WorkersStopped(3)


class FailingAdoption:
    """Meets an error in one of its methods, or in a sign that it gives."""

    met = False

    def __init__(self, where: str) -> None:
        self._where = where
        self.called: list[str] = []
        self.signs = [self._sign]

    def _call(self, name: str) -> None:
        self.called.append(name)
        if name == self._where:
            raise OSError(5, "Input/output error")

    def _sign(self, pids: object) -> bool:
        self._call("sign")
        return False

    def request(self) -> bool:
        self._call("request")
        return True

    def wait_met(self, within: float, gone: Callable[[], bool]) -> bool:
        self._call("wait_met")
        return True

    def interrupt(self) -> None:
        self._call("interrupt")

    def notice(self) -> None:
        self._call("notice")

    def settle(self, timeout_seconds: float) -> None:
        self._call("settle")

    def stopped(self, join_timeout: float, given: float, *, noticed: bool) -> None:
        self._call("stopped")


class FailingBeside:
    """The same of DLRover's memory, of which step 7 is written otherwise."""

    save_timeout = 0.0

    def __init__(self, where: str) -> None:
        self._where = where

    def freeze(self) -> None:
        if self._where == "freeze":
            raise OSError(5, "Input/output error")

    def stopped(self, epoch: int) -> ev.WorkersStopped:
        if self._where == "flash":
            raise OSError(5, "Input/output error")
        return ev.WorkersStopped(epoch, 7)


SEMAPHORES = """
import multiprocessing, os, time
from dalsegno.elastic.rank.semaphores import name_semaphores
name_semaphores()
queues = [multiprocessing.get_context("spawn").Queue() for _ in range(2)]
print(os.getpid(), flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("how", ["adopted", "cold"])
def test_semaphores_of_a_killed_worker_are_removed(node: Node, how: str) -> None:
    """The process that would have deleted them is killed with it. Those of the other worker stay."""
    script = script_in(node.directory, SEMAPHORES)
    context = node.workers(script, 2, node.pool(2) if how == "adopted" else None)
    context.start()
    outs = [Path(context.stdouts[rank]) for rank in range(2)]
    wait_for(lambda: all(out.exists() and out.read_text().endswith("\n") for out in outs))
    first, second = (int(out.read_text()) for out in outs)

    def left(pid: int) -> list[Path]:
        return list(Path("/dev/shm").glob(f"sem.mp-{node.link.directory.name}.{pid}-*"))

    assert left(first)
    assert left(second)
    os.kill(first, signal.SIGKILL)
    assert node.exits.get(timeout=60)[0] == 0
    assert not left(first)
    assert left(second)
    context.stop(0)
    assert not left(second)


FAILS = (
    "interrupt",
    "sign",
    "wait",
    "request",
    "wait_met",
    "ask",
    "notice",
    "freeze",
    "flash",
    "settle",
    "stopped",
    "",
)


@pytest.mark.parametrize("where", [*FAILS[:3], *(pytest.param(where, marks=pytest.mark.full) for where in FAILS[3:])])
def test_workers_are_ended_before_they_are_said_to_have_stopped(
    node: Node, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Whatever fails before and behind that: they would train on beside the next world's. What they saved is taken."""
    script = script_in(node.directory, "import signal, time; signal.signal(15, lambda *_: None)\ntime.sleep(300)")
    context = node.workers(script, 2, None)
    context.start()
    wait_for(lambda: all(listeners([one.process.pid], signal.SIGTERM) for one in context._running))
    if where == "ask":
        monkeypatch.setattr(context, "ask", raising)
    if where == "wait":
        monkeypatch.setattr(context, "_wait_while_signs", raising)
    adoption, beside, mailbox = FailingAdoption(where), FailingBeside(where), Mailbox()
    order = ev.StopWorkers(7, 1.0, ask="SIGTERM", still=0.2)
    Stopping(order, context, cast("Any", adoption), cast("Any", beside), 0.0, 0.0, raising).start(mailbox.put)
    told = mailbox.get(60)
    assert isinstance(told, ev.WorkersStopped)
    assert context.over
    assert not any(alive(one.process.pid) for one in context._running)
    assert sorted(node.exits.get(timeout=0.1)[0] for _ in range(2)) == [0, 1]
    assert told.flash_step == (0 if where == "flash" else 7)
    assert "stopped" in adoption.called


def raising(*_: object, **__: object) -> None:
    raise PermissionError(1, "Operation not permitted")


def alive(pid: int) -> bool:
    return process_state(pid) not in (None, "Z", "X")


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["adopted", "cold"])
def test_last_words_come_before_the_exit(node: Node, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A worker that speaks and ends at once is heard in full, although a child of its holds the connection."""
    # Nothing waits for the end of the connection.
    monkeypatch.setattr(workers, "_LAST_WORDS_SECONDS", 1000.0)
    script = script_in(node.directory, SPEAK)
    node.slowness = 0.01
    context = node.workers(script, 1, node.pool(1) if how == "adopted" else None)
    context.start()
    out = Path(context.stdouts[0])
    wait_for(lambda: out.exists() and out.read_text().endswith("\n"))
    assert node.exits.get(timeout=60) == (0, 83, "")
    assert not alive(int(out.read_text()))
    assert node.order == ["hello"] + ["progress"] * 50 + ["finished", "exit"]
    epoch, rank, _ = node.said.get()
    assert (epoch, rank) == (7, 3)
    context.stop(0)


@pytest.mark.parametrize("how", ["adopted", "cold"])
def test_only_the_worker_speaks_for_its_rank(node: Node, how: str) -> None:
    """It is heard while it lives; this process, which did not come from it, is not."""
    script = script_in(node.directory, SPEAK.replace("os._exit(83)", "time.sleep(300)"))
    context = node.workers(script, 1, node.pool(1) if how == "adopted" else None)
    context.start()
    wait_for(lambda: "finished" in node.order)
    context.stop(0)
    before = len(node.order)
    stranger = connect(node)
    stranger.sendall(frame(hello=worker_pb2.Hello(epoch=7, rank=3)) + frame(finished=worker_pb2.Finished(step=1)))
    assert told(stranger) == (False, False)
    assert stranger.recv(1) == b""
    assert len(node.order) == before


# ---- the socket ------------------------------------------------------------------------------------------------------


def frame(**body: object) -> bytes:
    data = worker_pb2.ToAgent(**body).SerializeToString()  # type: ignore[arg-type]
    return struct.pack(">I", len(data)) + data


def told(channel: socket.socket) -> tuple[bool, bool]:
    (length,) = struct.unpack(">I", channel.recv(4, socket.MSG_WAITALL))
    message = worker_pb2.ToWorker.FromString(channel.recv(length, socket.MSG_WAITALL) if length else b"")
    return message.drain, message.master_seen


def connect(node: Node) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX)
    channel.settimeout(10)
    channel.connect(str(node.link.path))
    return channel


def test_the_socket_is_private_and_short(node: Node) -> None:
    """0600 in 0700, and well below the limit of unix(7)."""
    assert stat.S_IMODE(node.link.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(node.link.directory.stat().st_mode) == 0o700
    with pytest.raises(OSError, match="too long"):
        WorkerLink(node.hear, long_directory(node.directory))


def long_directory(base: Path) -> Path:
    deep = base / ("d" * 90)
    deep.mkdir()
    return deep


def test_everybody_learns_the_flags(node: Node) -> None:
    """A newcomer gets the present flags at once; a change goes to all, once."""
    first = connect(node)
    assert told(first) == (False, False)
    node.link.tell(worker_pb2.ToWorker(drain=False, master_seen=True))
    assert told(first) == (False, True)
    node.link.tell(worker_pb2.ToWorker(drain=False, master_seen=True))
    node.link.tell(worker_pb2.ToWorker(drain=True, master_seen=True))
    second = connect(node)
    assert told(first) == (True, True)
    assert told(second) == (True, True)
    first.settimeout(0.2)
    with pytest.raises(TimeoutError):
        first.recv(1)


def test_frames_may_come_in_pieces(node: Node) -> None:
    """Split and joined frames are the same to the reader."""
    channel = connect(node)
    data = frame(hello=worker_pb2.Hello(epoch=7, rank=3)) + frame(progress=worker_pb2.Progress(step=9))
    for byte in data:
        channel.send(bytes([byte]))
    assert node.said.get(timeout=5)[2].hello.epoch == 7
    assert node.said.get(timeout=5)[2].progress.step == 9


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", (1 << 20) + 1),
        frame(progress=worker_pb2.Progress(step=1)),
        struct.pack(">I", 2) + b"\xff\xff",
    ],
    ids=["too long", "no hello", "not a message"],
)
def test_nonsense_is_cut_off(node: Node, data: bytes) -> None:
    """A peer that breaks the protocol is cut; the others are served on."""
    bad, good = connect(node), connect(node)
    told(bad)
    bad.sendall(data)
    assert bad.recv(1) == b""
    good.sendall(frame(hello=worker_pb2.Hello(epoch=7, rank=3)))
    assert node.said.get(timeout=5)[0] == 7


def test_a_worker_that_never_reads_harms_nobody(node: Node) -> None:
    """Its messages are dropped at a bound; a reader still gets the newest."""
    deaf, good = connect(node), connect(node)
    told(good)
    for number in range(1, 3001):
        node.link.tell(worker_pb2.ToWorker(drain=bool(number % 2), master_seen=bool(number % 3)))
    node.link.tell(worker_pb2.ToWorker(drain=True, master_seen=True))
    wait_for(lambda: told(good) == (True, True))
    deaf.close()
