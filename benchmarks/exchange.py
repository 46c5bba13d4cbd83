"""What the session's exchange adds to a step, compared with no agreement and with an all-reduce in each step."""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.exchange_rank import WAYS
from benchmarks.results import report

WORKER = Path(__file__).with_name("exchange_rank.py")
RANKS = (2, 4)
# Seconds of a step, and number of steps.
STEPS = {0.001: 2000, 0.02: 200}
REPEATS = 3


def main() -> int:
    """Prints a line for each number of ranks, length of step and way; medians of the slowest rank's mean."""
    rows = [row for ranks in RANKS for seconds, steps in STEPS.items() for row in _measure(ranks, seconds, steps)]
    report("exchange", rows, title="One optimizer step", settings={"repeats": REPEATS, "backend": "gloo"})
    return 0


def _measure(ranks: int, seconds: float, steps: int) -> list[dict[str, Any]]:
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(REPEATS):
        for way in WAYS:
            taken[way].append(_run(ranks, way, seconds, steps))
    nothing = statistics.median(taken["nothing"])
    return [
        {
            "ranks": ranks,
            "step's own work (ms)": seconds * 1e3,
            "with": way,
            "a step (ms)": round(statistics.median(all_taken) * 1e3, 3),
            "more than with nothing (us)": round((statistics.median(all_taken) - nothing) * 1e6, 1),
        }
        for way, all_taken in taken.items()
    ]


def _run(ranks: int, way: str, seconds: float, steps: int) -> float:
    from tests.support.workers.zero_runs import run_worker

    with tempfile.TemporaryDirectory() as out:
        task = {"way": way, "seconds": seconds, "steps": steps, "out": out}
        return max(float(result["seconds"]) for result in run_worker(ranks, task, worker=WORKER))


if __name__ == "__main__":
    sys.exit(main())
