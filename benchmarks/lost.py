"""Steps made again over a random trace of kills: saves on the disk alone, memory checkpoints beside them, and torchrun.

Three nodes of one rank train plain DDP (`examples/ddp.py`). At random times, the same for all that are compared, a node
and everything in it is killed, and another one comes a little later. Node 0, which hosts the master or torchrun's
store, lives on, because its death ends a torchrun job. Time is compressed: with the defaults a minute of the trace is a
second here, so that an hour with a kill every six minutes and a save every half hour takes a minute. What counts are
the steps that had to be made again, from the ranks' own logs, and whether every sample was trained once.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import Job, a_job, hosts
from benchmarks.results import report
from examples import history
from examples.demo import end_by_signals
from tests.support.jobs import local_processes as processes

NODES = 3
# What is compared: the launcher of `peers`, its flags, and those of the script.
WAYS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "disk": ("dlrover-run", (), ()),
    "disk and memory": ("dlrover-run", ("--memory-replicas=1",), ("--memory-every={memory_every}",)),
    "torchrun, tuned": ("torchrun, tuned", (), ()),
}


def trace(seconds: float, apart: float, seed: int) -> list[tuple[float, float]]:
    """When a node is killed, and which one, as a share of those that are there. Seconds from the beginning."""
    dice = random.Random(seed)
    kills, now = list[tuple[float, float]](), 0.0
    while True:
        now += dice.expovariate(1.0 / apart)
        if now >= seconds:
            return kills
        kills.append((now, dice.random()))


def measure(way: str, kills: Sequence[tuple[float, float]], flags: argparse.Namespace) -> dict[str, Any]:
    """Plays the trace. A kill waits until all nodes train again, so no way is spared one because it is slow.

    Raises:
        TimeoutError: The job did not go on.
    """
    launcher, more, script = WAYS[way]
    given = ["--steps=1000000", f"--save-every={flags.save_every}", f"--step-time={flags.step_time}", *script]
    options: dict[str, Any] = {"nnodes": f"1:{NODES}", "more": (*more, "--grow-interval=0")}
    options["flags"] = tuple(flag.format(memory_every=flags.memory_every) for flag in given)
    with a_job(launcher, flags.directory, **options) as job:
        job.start_node()
        job.wait(lambda: hosts(job), "node 0 hosts")
        for _ in range(NODES - 1):
            job.start_node()
        living = list(range(NODES))
        began, trained = _all_train(job, 0.0), 0.0
        for at, share in kills:
            # The trace's clock stands while a change is under way: it counts time in which all nodes train.
            time.sleep(max(0.0, at - trained - (time.time() - began)))  # why: the trace says when
            trained = at
            victim = living.pop(1 + int(share * (len(living) - 1)))
            event = time.time()
            processes.send([job.nodes[victim].pid, *job.node_processes(victim)], signal.SIGKILL)
            job.nodes[victim].wait(30)
            time.sleep(flags.away)  # why: the trace says when
            job.start_node()
            living.append(len(job.nodes) - 1)
            began = _all_train(job, event)
        lines = job.poll()
    again = made_again(lines)
    row = {"way": way, "kills": len(kills), "steps": max(line.step for line in lines)}
    row |= {"made again": sum(again), "most at once": max(again, default=0)}
    problems = history.sample_problems(history.kept_history(lines)) if launcher == "dlrover-run" else None
    return {**row, "samples wrong": None if problems is None else len(problems)}


def made_again(lines: Sequence[history.StepLine]) -> list[int]:
    """For each restart the steps that rank 0 had to make again. (torchrun's worlds have no number.)"""
    found, highest, last = list[int](), 0, 0
    for line in (line for line in lines if line.rank == 0):
        if line.step <= highest:
            if line.step <= last:
                found.append(0)
            found[-1] += 1
        highest, last = max(highest, line.step), line.step
    return found


def _all_train(job: Job, since: float) -> float:
    """Waits until a world of all nodes has made some steps; returns since when it does."""
    job.wait(lambda: len(job.steps_of_world(NODES, since)) >= 5, f"a world of {NODES}")
    return time.time()


def main(arguments: Sequence[str] = ()) -> int:
    """Prints a table; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks lost", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the trace (%(default)s)")
    parser.add_argument("--apart", type=float, default=6.0, help="mean seconds between two kills (%(default)s)")
    parser.add_argument("--away", type=float, default=1.0, help="seconds until another node comes (%(default)s)")
    parser.add_argument("--step-time", type=float, default=0.05, help="least seconds of a step (%(default)s)")
    parser.add_argument("--save-every", type=int, default=500, help="steps between two saves (%(default)s)")
    parser.add_argument("--memory-every", type=int, default=10, help="the same in memory (%(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="for checkpoints")
    flags = parser.parse_args(arguments)
    # Each `with` ends what it has started, even if this process is ended by a signal.
    end_by_signals()
    kills = trace(flags.seconds, flags.apart, flags.seed)
    rows = [measure(way, kills, flags) for way in flags.ways]
    settings = {name: value for name, value in vars(flags).items() if name not in ("ways", "directory")}
    settings["load"] = round(os.getloadavg()[0], 1)
    report("lost", rows, title="Steps made again over a random trace of kills", settings=settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
