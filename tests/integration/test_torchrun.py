"""Plain torchrun with our rendezvous, and `dlrover-run` with torchrun's usual line."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import grpc
import pytest

from dalsegno.agent.storage.job_directory import JobDirectory
from tests.support.jobs.master_process import Agent, MasterProcess, master_process, settings
from tests.support.jobs.ports import free_port
from tests.support.jobs.programs import Programs, Started, wait_for

pytestmark = [pytest.mark.timeout(180), pytest.mark.executed]

TORCHRUN = """
import itertools, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
out = sys.argv[1]
for step in itertools.count(1):
    told = torch.tensor([1.0, float(os.path.exists(f"{out}/end"))])
    dist.all_reduce(told)
    ranks, ending = told.tolist()
    with open(f"{out}/rank-{dist.get_rank()}-{os.getpid()}", "a") as log:
        print(step, int(ranks), file=log)
    if ending:
        break
    if os.path.exists(f"{out}/crash-{dist.get_rank()}"):
        os.unlink(f"{out}/crash-{dist.get_rank()}")
        sys.exit(3)
    time.sleep(0.02)
dist.destroy_process_group()
"""


def steps_of(out: Path) -> dict[str, list[tuple[int, int]]]:
    """Per file of a rank: (step, world size)."""
    found = {}
    for path in sorted(out.glob("rank-*")):
        lines = [line.split() for line in path.read_text().splitlines()]
        found[path.name] = [(int(line[0]), int(line[1])) for line in lines if len(line) == 2]
    return found


class Torchrun:
    """Nodes of plain torchrun with our rendezvous, and a master of their own.

    Args:
        programs: starts them.
        master: where they meet.
        text: of the script.
    """

    def __init__(self, programs: Programs, master: MasterProcess, text: str = TORCHRUN) -> None:
        self.out = programs.directory / "out"
        self.out.mkdir()
        script = programs.directory / "script.py"
        script.write_text(text)
        self._programs = programs
        self._command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=dalsegno", "--rdzv-id=job"]
        self._command += [f"--rdzv-endpoint={master.address}", "--nnodes=1:2", "--max-restarts=9"]
        self._command += ["--rdzv-conf", "checkpoint_dir=ck", str(script), str(self.out)]

    def start(self, name: str) -> Started:
        return self._programs.start(name, *self._command, LOGLEVEL="INFO")

    def ranks(self, world_size: int) -> set[str]:
        """Files of the ranks whose last step was one of a world of this size."""
        return {name for name, rows in steps_of(self.out).items() if rows and rows[-1][1] == world_size}

    def wait_for_world(self, world_size: int, what: str, known: Iterable[str] = ()) -> set[str]:
        """Until ranks that are not `known` train in such a world; returns their files."""
        known = set(known)
        wait_for(lambda: len(self.ranks(world_size) - known) == world_size, 120, what)
        return self.ranks(world_size) - known

    def crash(self, rank: int) -> None:
        (self.out / f"crash-{rank}").touch()

    def finish(self) -> None:
        (self.out / "end").touch()


@pytest.mark.timeout(420)
@pytest.mark.parametrize("second", ["together", pytest.param("late", marks=pytest.mark.full)])
@pytest.mark.full
def test_plain_torchrun(programs: Programs, second: str) -> None:
    """Two torchrun nodes meet through our rendezvous, survive a worker's crash, and one the loss of the other.

    On a busy machine one may come late: then it is taken in by a growth, and the crash comes soon after that.
    """
    log = programs.directory / "master.log"
    with master_process(programs.directory / "job.sqlite", "--nnodes", "1:2", "--log-file", str(log)) as master:
        nodes = Torchrun(programs, master)
        first = nodes.start("first")
        if second == "late":
            nodes.wait_for_world(1, "the first did not train alone")
        other = nodes.start("second")
        met = nodes.wait_for_world(2, "the two did not meet")
        nodes.crash(1)
        nodes.wait_for_world(2, "the world did not form again after a crash", known=met)
        before = nodes.ranks(1)
        other.send_signal(signal.SIGKILL)
        other.wait()
        nodes.wait_for_world(1, "no world of one", known=before)
        nodes.finish()
        told = time.monotonic()
        assert first.wait(120) == 0
        assert time.monotonic() - told < 25, "it waited for a word that had come"
        assert nodes.start("late").wait(120) == 0
    assert "Traceback" not in programs.log("late")
    text = programs.log("first")
    assert re.search(r"torchrun: .*worker failed", text), text


class Ghost:
    """A node that joins each world and never starts: nobody hears of it at the world's store, if that is its own."""

    def __init__(self, programs: Programs, master: MasterProcess) -> None:
        self._agent = Agent(master.address, "ghost")
        directory = JobDirectory(programs.directory / "ck", "job")
        directory.prepare()
        self._agent.probe = directory.probe()
        self._agent.register(settings(grow_wait=1.0))
        self._stream = self._agent.watch(timeout=300)
        self._over = threading.Event()
        self.sizes: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=run) for run in (self._obey, self._beat)]
        for thread in self._threads:
            thread.start()

    def vanish(self) -> None:
        """As if it was killed."""
        self._over.set()
        self._stream.cancel()
        for thread in self._threads:
            thread.join()
        self._agent.channel.close()

    def _obey(self) -> None:
        seen = 0
        with contextlib.suppress(grpc.RpcError):
            for directive in self._stream:
                if directive.gather.round or directive.wait.round:
                    self._agent.join(directive)
                elif directive.WhichOneof("order") == "run" and directive.run.epoch > seen:
                    seen = directive.run.epoch
                    self.sizes.put(directive.run.nodes)

    def _beat(self) -> None:
        while not self._over.wait(1.0):
            self._agent.heartbeat()


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_dies_before_its_world_starts_holds_up_nobody(programs: Programs, rank: int) -> None:
    """torch's agent waits at the world's store, or for it: without an end if the other node is no more."""
    log = programs.directory / "master.log"
    with master_process(programs.directory / "job.sqlite", "--log-file", str(log)) as master:
        nodes = Torchrun(programs, master)
        if rank == 0:
            ghost = Ghost(programs, master)
            assert ghost.sizes.get(timeout=30) == 1
        living = nodes.start("living")
        if rank == 1:
            nodes.wait_for_world(1, "the first did not train alone")
            ghost = Ghost(programs, master)
        try:
            while ghost.sizes.get(timeout=60) != 2:
                pass
            wait_for(lambda: programs.log("living").count("Rendezvous'ing worker group") == 1 + rank, 30, "no world")
            time.sleep(2)  # it stands at the store by now: there is no event to wait for
        finally:
            ghost.vanish()
        before = nodes.ranks(1)
        nodes.wait_for_world(1, "it waits for a node that is gone", known=before)
        nodes.finish()
        assert living.wait(60) == 0


@pytest.mark.full
def test_a_crash_while_another_node_has_finished(programs: Programs) -> None:
    """torch's agent of that one waits for the others' end, and cannot start again: the others go on without it."""
    script = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
open(f"{sys.argv[1]}/rank-{size}-{rank}-{os.getpid()}", "w").close()
dist.barrier()
while rank == size - 1 and not os.path.exists(f"{sys.argv[1]}/crash-1"):
    time.sleep(0.05)
os._exit(3 if rank else 0)
"""
    log = programs.directory / "master.log"
    with master_process(programs.directory / "job.sqlite", "--log-file", str(log)) as master:
        nodes = Torchrun(programs, master, script)
        running = [nodes.start("first"), nodes.start("second")]
        text = lambda: programs.log("first") + programs.log("second")  # noqa: E731
        wait_for(lambda: "Waiting 300 seconds for other agents to finish" in text(), 120, "none has finished")
        nodes.crash(1)
        began = time.monotonic()
        assert [node.wait(120) for node in running] == [0, 0]
        assert time.monotonic() - began < 60, "they waited for each other"
    assert list(nodes.out.glob("rank-1-0-*"))
    assert "the others start again without it" in text()
    assert "exit barrier" not in text()


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_crash_while_the_master_is_away(programs: Programs, rank: int) -> None:
    """What must be told is kept: when the master is back the world forms again."""
    store, port = programs.directory / "job.sqlite", str(free_port())
    arguments = ("--port", port, "--log-file", str(programs.directory / "master.log"))
    with master_process(store, *arguments) as master:
        nodes = Torchrun(programs, master)
        running = [nodes.start("first"), nodes.start("second")]
        met = nodes.wait_for_world(2, "the two did not meet")
        master.kill()
    nodes.crash(rank)
    wait_for(lambda: not (nodes.out / f"crash-{rank}").exists(), 30, "it did not crash")
    time.sleep(1)  # torch's agents notice it
    with master_process(store, *arguments):
        nodes.wait_for_world(2, "the world did not form again", known=met)
        nodes.finish()
        assert [node.wait(120) for node in running] == [0, 0]


@pytest.mark.full
def test_torchruns_own_limit_of_restarts_counts(programs: Programs) -> None:
    """Its --max-restarts is 9: five failures in a row are survived."""
    script = """
import pathlib, sys
count = pathlib.Path(sys.argv[1], "count")
started = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(started))
sys.exit(3 if started < 6 else 0)
"""
    log = programs.directory / "master.log"
    with master_process(programs.directory / "job.sqlite", "--log-file", str(log)) as master:
        nodes = Torchrun(programs, master, script)
        assert nodes.start("only").wait(120) == 0
    assert (nodes.out / "count").read_text() == "6"
    assert "--max-restarts" not in log.read_text()


def test_torchrun_without_an_endpoint_says_so_in_one_line(programs: Programs) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=dalsegno", "script.py"]
    (programs.directory / "script.py").touch()
    assert programs.start("torchrun", *command).wait(60) == 1
    said = programs.log("torchrun")
    assert "torchrun: error: --rdzv-backend=dalsegno needs --rdzv-endpoint=HOST:PORT" in said.splitlines()[-1]
    assert "Traceback" not in said


def test_torchruns_usual_line_for_several_nodes(programs: Programs) -> None:
    """The node at the endpoint hosts the master there; the others find it, whoever comes first."""
    out = programs.directory / "out"
    out.mkdir()
    (out / "end").touch()
    script = programs.directory / "script.py"
    script.write_text(TORCHRUN)
    endpoint = f"127.0.0.2:{free_port()}"
    flags = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}")
    nodes = [programs.agent(name, *flags, str(script), str(out), job="job") for name in ("first", "second")]
    assert [node.wait(90) for node in nodes] == [0, 0], programs.log("first")
    assert sorted(rows for rows in steps_of(out).values()) == [[(1, 2)], [(1, 2)]]
    claim = json.loads(next(programs.directory.rglob("claim.json")).read_text())
    assert claim["address"] == endpoint


ENDS_AT_ONCE = """
import torch, torch.distributed as dist
from dalsegno.elastic import session
dist.init_process_group("gloo")
with session():
    pass

def gather():
    for _ in range(20):
        own = torch.ones(4)
        every = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)

gather()
"""


@pytest.mark.full
def test_a_script_that_ends_behind_a_collective_succeeds(programs: Programs) -> None:
    """A thread of gloo's that still holds its tensors would abort the process, in about half of these runs."""
    script = programs.directory / "script.py"
    script.write_text(ENDS_AT_ONCE)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    for attempt in range(3):
        started = {
            name: programs.start(name, *command, f"--master-port={free_port()}", str(script))
            for name in (f"{attempt}-first", f"{attempt}-second")
        }
        for name, run in started.items():
            assert run.wait(120) == 0, programs.log(name)


STRANDED = """
import errno, sys
import torch.distributed as dist
from dalsegno.elastic import session
from dalsegno.elastic.saving import stranded
stranded.ALONE_SECONDS = 4.0
dist.init_process_group("gloo")

def train():
    with session(sys.argv[1]) as s:
        def save(path):
            if s.rank == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            dist.barrier()
        for _ in s.steps([1] * 4, save=save, max_steps=4, save_every=2):
            pass

try:
    train()
except Exception as error:
    if sys.argv[2] != "shown":
        raise
    print("shown:", error, flush=True)
"""


@pytest.mark.parametrize("caught", ["raised", "shown"])
def test_a_rank_whose_disk_is_full_before_a_barrier_ends(programs: Programs, caught: str) -> None:
    """Its own wait is still under way in the session's group, whose threads would hold up its end."""
    script = programs.directory / "script.py"
    script.write_text(STRANDED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    run = programs.start("run", *command, str(script), str(programs.directory / "run"), caught)
    assert run.wait(60) == 1
    said = programs.log("run")
    ended = "shown: saving" if caught == "shown" else "SaveError: saving"
    assert f"{ended} step 2 failed: OSError: [Errno 28] No space left on device (rank 0)" in said
