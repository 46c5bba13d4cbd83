"""Jobs of scripts that use DLRover's client library, which is installed into a directory of its own for them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from .cluster import LEFT, ROOT, Cluster, Node, Training
from .foreign import DLROVER, OLD_DEEPSPEED, installed

FIXED = ROOT / "tests" / "support" / "workers" / "fixed_worker.py"
FLASH = ROOT / "tests" / "support" / "workers" / "flash_worker.py"


@dataclass(frozen=True)
class FlashTraining(Training):
    """`flash_worker.py`, which knows no flags of the examples."""

    script: Path = FLASH
    extra: tuple[str, ...] = ()

    def flags(self, step_log: Path) -> list[str]:
        return [f"--directory={step_log}", *self.extra]

    def environment(self, step_log: Path) -> dict[str, str]:
        step_log.mkdir(exist_ok=True)
        if "--zero" not in self.extra:
            return {"PYTHONPATH": f"{installed(*DLROVER)}{os.pathsep}{ROOT}"}
        paths = (installed(*OLD_DEEPSPEED), installed(*DLROVER), ROOT)
        # DLRover's class loads with the default that torch had before 2.6.
        return {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}


@dataclass(frozen=True)
class World:
    """What a world noted: the step that it resumed from, its size, NODE_NUM, WORKER_NUM."""

    first: int
    size: int
    nodes: int
    workers: int


def notes(job: Cluster) -> list[list[str]]:
    """All notes so far, in words."""
    try:
        text = (job.step_log / "notes").read_text(encoding="ascii")
    except FileNotFoundError:
        return []
    return [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]


def worlds(job: Cluster) -> list[World]:
    """All worlds so far."""
    return [World(*map(int, words[1:])) for words in notes(job) if words[0] == "world"]


def wait_steps(job: Cluster, world: int, steps: int = 8) -> int:
    """Until the world of this number, from 0, has made so many steps. Returns the last one noted."""

    def look() -> int | None:
        found = notes(job)
        starts = [number for number, words in enumerate(found) if words[0] == "world"]
        made = found[starts[world] + 1 :] if len(starts) > world else []
        return int(made[-1][1]) if len(made) >= steps else None

    return job.wait_for(look, f"{steps} steps of world {world}")


def sums(job: Cluster) -> dict[int, set[str]]:
    """By step, each sum of the weights that was noted for it."""
    found: dict[int, set[str]] = {}
    for words in notes(job):
        if words[0] == "step":
            found.setdefault(int(words[1]), set()).add(words[2])
    return found


def crash(job: Cluster, rank: int) -> None:
    """Kills the worker of this rank between two steps: while it writes, it would leave torn memory."""
    gate, stands = job.step_log / f"stand-{rank}", job.step_log / f"stands-{rank}"
    gate.touch()
    job.wait_for(stands.exists, f"rank {rank} between two steps")
    os.kill(int((job.step_log / f"rank-{rank}").read_text(encoding="ascii")), signal.SIGKILL)
    gate.unlink()
    stands.unlink()


def crash_and_leave(job: Cluster, last: int, leaver: Node) -> Node:
    """A worker crashes behind step ``last`` of the first world, then a node leaves: no step is lost.

    Returns:
        The node that comes next.
    """
    crash(job, 1)
    wait_steps(job, 1)
    assert worlds(job)[1].first >= last - 1
    last = wait_steps(job, 1, 12)
    job.leave(leaver, LEFT)
    job.wait_exit(leaver)
    (newcomer,) = job.start("c")
    wait_steps(job, 2)
    assert worlds(job)[2].first >= last - 1
    return newcomer


def left_behind(job: Cluster) -> list[str]:
    """Sockets and segments of the job."""
    places = ((Path("/tmp/ckpt_sock"), job.job), (Path("/dev/shm"), job.job))
    return [str(path) for place, name in places for path in place.glob(f"{name}*")] if os.path.isdir("/dev/shm") else []


def end(job: Cluster) -> None:
    """Has the script make its last step. Nothing may be left of the job."""
    (job.step_log / "over").touch()
    for node in job.alive():
        node.process.wait(120)
    job.check_exits()
    job.close()
    assert left_behind(job) == []


def finish(job: Cluster) -> int:
    """The same where the script saves beside its notes. Returns the last step."""
    end(job)
    last = notes(job)[-1]
    assert last[0] == "over"
    assert (job.step_log / "dlrover_latest.txt").read_text(encoding="ascii") == last[1]
    return int(last[1])


def assert_one_history(job: Cluster) -> None:
    """Every step that was made twice led to the same weights: nothing was resumed that another world had made."""
    assert {step: found for step, found in sums(job).items() if len(found) > 1} == {}
