"""Flash Checkpoint under `dlrover-run` beside DLRover's own launcher and torchrun: the same script, the same machine.

Measured are how long a save to memory holds the training up (one node), and the longest time without a step around the
crash of a worker (2 nodes) and the kill of a node (3 to 2, not node 0). Under torchrun the saver is a child of the
ranks, so nothing in memory outlives them, and only the save is measured. DLRover's launcher is measured if
`DLROVER_PYTHON` names an interpreter that has DLRover, what its master imports (kubernetes, tornado), and this package.
Saves of all launchers alternate, so that they meet the same load; the changes come one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.results import report
from tests.support.jobs import foreign

SCRIPT = Path(__file__).with_name("flash_rank.py")
SETTLES_SECONDS = 20.0
TITLE = "Flash Checkpoint: what a save, a crash and a kill cost"


def _options(megabytes: float, step_time: float) -> dict[str, Any]:
    places = [str(foreign.directory_of(*foreign.DLROVER)), str(peers.ROOT), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, places))
    return {
        "script": SCRIPT,
        "flags": (f"--megabytes={megabytes}", f"--step-time={step_time}"),
        "environment": {"PYTHONPATH": path, "WORKER_NUM": "4"},
        "more": ("--grow-wait=0",),
    }


def stalls(launchers: Sequence[str], megabytes: float, saves: int) -> dict[str, list[float]]:
    """Seconds that each of so many saves of one node took, once all that is started beside the training is up.

    The jobs run together, and their saves come one by one, so that all meet the same load.
    """
    with contextlib.ExitStack() as jobs, tempfile.NamedTemporaryFile(prefix="turn-") as turn:
        options = {"nnodes": "1:1", **_options(megabytes, 0.05)}
        found = {one: jobs.enter_context(peers.a_job(one, **options)) for one in launchers}
        for job in found.values():
            job.flags = (*job.flags, f"--turn={turn.name}")
            job.start_node()
            job.wait(lambda job=job: bool(_saves(job)), "a save")  # type: ignore[misc]
        time.sleep(SETTLES_SECONDS)  # why: a launcher may import torch for the next workers, which takes processor time
        first = {one: len(_saves(job)) for one, job in found.items()}
        for one, job in found.items():
            job.wait(lambda one=one, job=job: len(_saves(job)) >= first[one] + saves, "saves")  # type: ignore[misc]
        return {one: _saves(job)[first[one] : first[one] + saves] for one, job in found.items()}


def _saves(job: peers.Job) -> list[float]:
    file = job.directory / "stalls"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [float(line) for line in lines if line.endswith("\n")]


def main(arguments: Sequence[str] = ()) -> int:
    """Prints two tables and writes their JSON; or that it is left out, without DLRover's library."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks flash", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=200.0, help="of weights in a save (%(default)s)")
    parser.add_argument("--saves", type=int, default=200, help="of each launcher (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    flags = parser.parse_args(arguments)
    try:
        foreign.directory_of(*foreign.DLROVER)
    except foreign.NotInstalled as error:
        print(f"left out: {error}", flush=True)
        return 0
    launchers = ["dlrover-run", *(["DLRover"] if os.environ.get("DLROVER_PYTHON") else [])]
    if len(launchers) > 1:
        peers.LAUNCHERS["DLRover"] = peers.dlrover
    settings = {**vars(flags), "load": round(os.getloadavg()[0], 1)}
    found = stalls([*launchers, "torchrun"], flags.megabytes, flags.saves)
    rows = [
        {"launcher": launcher, "save, median s": statistics.median(times), "p90 s": sorted(times)[len(times) * 9 // 10]}
        for launcher, times in found.items()
    ]
    report("flash-save", rows, title=TITLE, settings=settings)
    rows = [_change(scene, launcher, flags.repeats) for scene in ("crashed", "killed") for launcher in launchers]
    report("flash-changes", rows, title=TITLE, settings=settings)
    return 0


def _change(scene: str, launcher: str, repeats: int) -> dict[str, object]:
    pauses, failed = list[float](), 0
    for _ in range(repeats):
        try:
            pauses.append(getattr(peers, scene)(launcher, **_options(1.0, peers.STEP_TIME))[0])
        except TimeoutError as error:
            failed += 1
            print(f"{scene}: {error}", flush=True)
    row: dict[str, object] = {"scene": scene, "launcher": launcher, "not within the limit": failed}
    if pauses:
        row |= {"no step for, median s": statistics.median(pauses), "min s": min(pauses), "max s": max(pauses)}
    return row


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
