"""Plain torchrun with our rendezvous, and `dlrover-run` with torchrun's usual line."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.jobs.master_process import MasterProcess, master_process
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
    """

    def __init__(self, programs: Programs, master: MasterProcess) -> None:
        self.out = programs.directory / "out"
        self.out.mkdir()
        script = programs.directory / "script.py"
        script.write_text(TORCHRUN)
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
