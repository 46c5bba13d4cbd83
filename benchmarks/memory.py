"""What a memory checkpoint costs: beside a plain copy of the state, beside one on the disk, and in the loop."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results import report
from dalsegno.agent.commands.tuning import stream_large_copies
from tests.support.workers.fake_agent import FakeAgent

WORKER = Path(__file__).with_name("memory_rank.py")
RANKS = 2
SAVES = 5
MEGABYTES = (150, 480)
# Of the loop: seconds of a step, steps of a stretch, stretches of each kind.
STEP, STEPS, STRETCHES = 0.4, 20, 6
SHARED_MEMORY = Path("/dev/shm")
SECONDS = 900.0


class Agent(FakeAgent):
    """Its nodes' memory is memory."""

    held: Path

    def memory(self, rank: int) -> Path:
        return self.held / f"memory-{rank}"


def main() -> int:
    """A line for each way of saving, with medians of the slowest rank; and one for the loop."""
    stream_large_copies(os.environ)  # as an agent does
    rows = [row for strategy in ("ddp", "zero1", "hf") for size in MEGABYTES for row in _measure(strategy, size)]
    settings = {"ranks": RANKS, "saves": SAVES, "step (s)": STEP, "steps": STEPS, "stretches": STRETCHES}
    settings["load"] = round(os.getloadavg()[0], 1)
    report("memory", rows, title="What the loop waits for a save", settings=settings)
    return 0


def _measure(strategy: str, megabytes: int) -> list[dict[str, Any]]:
    loop = megabytes == min(MEGABYTES)
    task = {"strategy": strategy, "megabytes": megabytes, "saves": SAVES, "step": STEP, "steps": STEPS}
    results = _run({**task, "stretches": STRETCHES if loop else 0})
    copy = _slowest([result["copy"] for result in results])
    rows: list[dict[str, Any]] = []
    for way in results[0]["saves"]:
        waited = _slowest([result["saves"][way] for result in results])
        row = {"strategy": strategy, "state (MB)": megabytes, "way": way, "waited (s)": waited}
        rows.append({**row, "in copies of the state": waited / copy})
    if loop:
        row = {"strategy": strategy, "state (MB)": megabytes, "way": "every 10 steps", "waited (s)": None}
        slower = [_slower(result["loop"], which) for which in (0, 1) for result in results]
        rows.append({**row, "slower (%)": max(slower[:RANKS]), "CPU time (%)": max(slower[RANKS:])})
    return rows


def _slower(loop: dict[str, list[list[float]]], which: int) -> float:
    """By how much, in percent: the median of pairs of stretches that follow each other.

    What else the machine does changes more slowly.
    """
    pairs = zip(loop["with"], loop["without"], strict=True)
    return 100 * (statistics.median(with_saves[which] / without[which] for with_saves, without in pairs) - 1)


def _slowest(ranks: list[list[float]]) -> float:
    return statistics.median(max(times) for times in zip(*ranks, strict=True))


def _run(task: dict[str, Any]) -> list[dict[str, Any]]:
    held = Path(tempfile.mkdtemp(prefix="dalsegno-benchmark-", dir=SHARED_MEMORY))
    Agent.held = held
    try:
        with tempfile.TemporaryDirectory() as out, Agent(Path(out), world=RANKS, epoch=1, memory=True) as agent:
            agent.start("--task", json.dumps({**task, "out": out}), script=WORKER)
            codes = agent.wait(SECONDS)
            if any(codes):
                raise RuntimeError(f"the ranks ended with {codes}: {agent.outputs}")
            return [json.loads((Path(out) / f"result-{rank}.json").read_text()) for rank in range(RANKS)]
    finally:
        shutil.rmtree(held, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
