"""Seconds from the start of a node's process to its workers' first step, beside torchrun's with the same script.

As a new pod has it: the master runs already, everything else starts cold. *first step* is wall-clock time, *script* the
part of it before the script's own first line behind its imports, and *CPU* is that of all the node's processes, to
their end. The load of the machine counts: compare only the ways of one run, which take turns.
"""

from __future__ import annotations

import argparse
import os
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import MARK
from benchmarks.results import report
from tests.support.jobs import local_processes as processes
from tests.support.jobs.master_process import master_process

RANK = Path(__file__).with_name("start_rank.py")
# Seconds that one start may take.
_PATIENCE_SECONDS = 180.0


def dlrover_run(directory: Path, address: str, nproc: int) -> list[str]:
    """The command line of a node whose master is at `address`."""
    return [
        *(sys.executable, "-m", "dalsegno.agent.commands.dlrover_run", "--nnodes=1", f"--nproc-per-node={nproc}"),
        *(f"--master={address}", "--job-id=job", f"--checkpoint-dir={directory / 'checkpoints'}"),
        *(f"--log-dir={directory / 'logs'}", str(RANK), str(directory / "noted")),
    ]


def torchrun(directory: Path, address: str, nproc: int) -> list[str]:
    """The same script under torchrun alone; it needs no master."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1", f"--nproc-per-node={nproc}"),
        *(str(RANK), str(directory / "noted")),
    ]


WAYS = {"dlrover-run": dlrover_run, "torchrun": torchrun}


def timed(way: str, nproc: int, python_path: str | None = None) -> dict[str, float]:
    """One start: seconds to the script's first line, to the first step, and of CPU.

    Args:
        python_path: Where the agent's package is taken from instead, to compare two versions.

    Raises:
        RuntimeError: It failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment[MARK] = f"start-{secrets.token_hex(4)}"
    if python_path:
        environment["PYTHONPATH"] = python_path
    with tempfile.TemporaryDirectory(prefix="dalsegno-start-") as name:
        directory = Path(name)
        with master_process(directory / "job.db") as master:
            command = WAYS[way](directory, master.address, nproc)
            used = _children_seconds()
            with open(directory / "output", "wb") as output:
                began = time.monotonic()
                process = subprocess.Popen(
                    command, stdout=output, stderr=output, env=environment, start_new_session=True
                )
                try:
                    code = process.wait(_PATIENCE_SECONDS)
                finally:
                    process.kill()
                    # torchrun's workers are in sessions of their own, and outlive it.
                    processes.send(processes.carriers(f"{MARK}={environment[MARK]}"))
                    process.wait()
            seconds = _children_seconds() - used
            if code:
                raise RuntimeError(f"{way} ended with {code}: {(directory / 'output').read_text(errors='replace')}")
            script, step = map(float, (directory / "noted").read_text(encoding="ascii").split())
    return {"script": script - began, "first step": step - began, "CPU": seconds}


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str] = ()) -> int:
    """Starts a node some times each way, in turn, and reports medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks start", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="starts each way")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="workers of the node")
    parser.add_argument("--before", metavar="DIR", help="a directory with another version's package, to compare")
    options = parser.parse_args(arguments)
    # Name of a row, the way, and where the package comes from.
    ways: list[tuple[str, str, str | None]] = [(way, way, None) for way in WAYS]
    if options.before:
        ways.insert(1, ("dlrover-run before", "dlrover-run", options.before))
    found: dict[str, list[dict[str, float]]] = {name: [] for name, _, _ in ways}
    loads = []
    for _ in range(options.runs):
        for name, way, path in ways:
            loads.append(os.getloadavg()[0])
            found[name].append(timed(way, options.nproc, path))
            print(name, {key: round(value, 2) for key, value in found[name][-1].items()}, flush=True)
    rows = []
    for name, runs in found.items():
        medians = {f"{key} (s)": round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        rows.append({"way": name, **medians, "least first step (s)": round(min(run["first step"] for run in runs), 2)})
    settings = {"runs": options.runs, "nproc": options.nproc, "load": f"{min(loads):.1f} to {max(loads):.1f}"}
    report("start", rows, title="From a process's start to the first step", settings=settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
