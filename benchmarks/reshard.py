"""Loads ZeRO shards as they are into a world of another size, compared with DeepSpeed's own load into the same size.

Real DeepSpeed makes a checkpoint with two ranks, and checkpoints of the same model with one and with three. Then two
fresh ranks load, several times and in turn: their own with DeepSpeed alone ("native"), the others' by re-sharding, and
one after converting it. The load is timed from barrier to barrier, without the processes' start; files are in the page
cache.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.convert import PATIENCE, STEP, WORKER, shape
from benchmarks.results import report

STAGES = (1, 2, 3)
RANKS, OTHERS = 2, (1, 3)
MEGABYTES, REPEATS = 1000, 5


def main(arguments: Sequence[str] = ()) -> int:
    """Prints a line for each way and stage, medians; returns 0 if all could be measured."""
    flags = argparse.ArgumentParser(prog="python -m benchmarks.reshard", description=__doc__.splitlines()[0])
    flags.add_argument("--megabytes", type=int, default=MEGABYTES, help="of the ZeRO-2 checkpoint (%(default)s)")
    flags.add_argument("--repeats", type=int, default=REPEATS, help="timed runs of each way (%(default)s)")
    flags.add_argument("--directory", type=Path, help="on the disk to measure, with room for five times as much")
    options = flags.parse_args(arguments)
    model = shape(options.megabytes * 10**6)
    rows: list[dict[str, Any]] = []
    for stage in STAGES:
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            rows += _measure(Path(folder), {"stage": stage, **model}, options.repeats)
    settings = {"ranks": RANKS, "saved by": [RANKS, *OTHERS], "repeats": options.repeats, **model}
    report("reshard", rows, title=f"Loading a ZeRO checkpoint into {RANKS} ranks", settings=settings)
    return 0


def _measure(folder: Path, model: dict[str, Any], repeats: int) -> list[dict[str, Any]]:
    saved = {ranks: _make(folder, ranks, model) for ranks in (RANKS, *OTHERS)}
    ways: dict[str, Callable[[], float]] = {
        "native, saved by as many": lambda: _load(folder, model, load=str(saved[RANKS]), native=True),
        "ours, saved by as many": lambda: _load(folder, model, load=str(saved[RANKS])),
        **{
            f"re-sharded, saved by {ranks}": lambda ranks=ranks: _load(  # type: ignore[misc]
                folder, model, load=str(saved[ranks]), reshard=True
            )
            for ranks in OTHERS
        },
        f"converted and loaded, saved by {OTHERS[0]}": lambda: _convert_and_load(folder, model, saved[OTHERS[0]]),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            seconds[way].append(run())
    native = statistics.median(seconds["native, saved by as many"])
    return [
        {
            "way": f"ZeRO-{model['stage']}: {way}",
            "median (s)": round(statistics.median(took), 3),
            "fastest (s)": round(min(took), 3),
            "slowest (s)": round(max(took), 3),
            "times native": round(statistics.median(took) / native, 2),
        }
        for way, took in seconds.items()
    ]


def _make(folder: Path, ranks: int, model: dict[str, Any]) -> Path:
    from tests.support.workers.zero_runs import run_worker, seal_sharded

    path = folder / str(ranks) / f"step-{STEP}.e1.0"
    run_worker(ranks, {"save": str(path), "out": str(path.parent), **model}, worker=WORKER, seconds=PATIENCE)
    seal_sharded(path, stage=model["stage"], world=ranks, step=STEP)
    return path


def _load(folder: Path, model: dict[str, Any], **task: Any) -> float:
    from tests.support.workers.zero_runs import run_worker

    results = run_worker(RANKS, {"out": str(folder), **model, **task}, worker=WORKER, seconds=PATIENCE)
    return max(float(result["seconds"]) for result in results)


def _convert_and_load(folder: Path, model: dict[str, Any], source: Path) -> float:
    from dalsegno.elastic.universal import convert

    target = source.parent / f"{source.name}.universal.1"
    began = time.perf_counter()
    convert(source, target)
    converting = time.perf_counter() - began
    try:
        return converting + _load(folder, model, load=str(source), universal=str(target))
    finally:
        shutil.rmtree(target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
