"""Compares ElasticSampler with torch's DistributedSampler: time to the first index, memory, and seeking to the middle.

Each measurement is a process of its own with bounded memory, whose peak is reported. The task is to begin a shuffled
data epoch on rank 0 of 8, and to continue in the middle of one, as after a resume. DistributedSampler has no position:
to continue, it must draw the order again and skip what was consumed.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from benchmarks import results

LENGTHS = (10**6, 10**7, 10**8, 10**9)
GLOBAL_BATCH, RANKS = 256, 8
# The share of free memory that it may use, so that other processes do not suffer.
SHARE = 0.5
BUDGET = 600.0
REPEATS = 2000


class Data:
    """What DistributedSampler needs of a data set."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _microseconds(action: Callable[[], Any], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        action()
    return (time.perf_counter() - began) / repeats * 1e6


def _ours(length: int) -> dict[str, Any]:
    from dalsegno.elastic import BatchPlan, ElasticSampler, Position

    mine = BatchPlan(GLOBAL_BATCH, RANKS, GLOBAL_BATCH).slices(0)[0]
    middle = Position(0, length // 2 // GLOBAL_BATCH * GLOBAL_BATCH)

    def first() -> int:
        sampler = ElasticSampler(length, GLOBAL_BATCH)
        return sampler.batch_at(sampler.position).sample_ids[0]

    resumed = ElasticSampler(length, GLOBAL_BATCH)

    def seek() -> int:
        resumed.seek(middle)
        return resumed.batch_at(resumed.position).sample_ids[0]

    def batch() -> list[int]:
        return list(resumed.batch_at(middle).sample_ids[mine.start : mine.stop])

    first()
    before = _peak()
    return {
        "first index us": _microseconds(first, REPEATS),
        "seek to the middle us": _microseconds(seek, REPEATS),
        "a rank's share of a batch us": _microseconds(batch, REPEATS),
        "peak memory MB": (_peak() - before) / 1e6,
    }


def _torch(length: int) -> dict[str, Any]:
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(Data(length), num_replicas=RANKS, rank=0, shuffle=True, seed=0)  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    share = GLOBAL_BATCH // RANKS
    before = _peak()
    found["first index us"] = _microseconds(lambda: next(iter(sampler)), 1)
    found["seek to the middle us"] = _microseconds(
        lambda: next(islice(iter(sampler), length // 2 // RANKS, None)),
        1,
    )
    each = iter(sampler)
    found["a rank's share of a batch us"] = _microseconds(lambda: list(islice(each, share)), 200)
    found["peak memory MB"] = (_peak() - before) / 1e6
    return found


WAYS: dict[str, Callable[[int], dict[str, Any]]] = {"ElasticSampler": _ours, "DistributedSampler": _torch}


def _measure(way: str, length: int, limit: int) -> dict[str, Any]:
    """One measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.sampler", way, str(length), str(limit)]
    row: dict[str, Any] = {"sampler": way, "samples": length}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUDGET, check=False)
    except subprocess.TimeoutExpired:
        return {**row, "note": f"not done after {BUDGET:.0f} s"}
    if done.returncode == 0:
        return {**row, **json.loads(done.stdout.splitlines()[-1])}
    if "MemoryError" in done.stderr or "can't allocate memory" in done.stderr or done.returncode == -9:
        return {**row, "note": f"needs more than {limit / 1e9:.1f} GB"}
    raise RuntimeError(f"{way} with {length} samples failed:\n{done.stderr[-2000:]}")


def main() -> int:
    """Prints the table and writes it as JSON."""
    limit = int(SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    rows = [_measure(way, length, limit) for length in LENGTHS for way in WAYS]
    rows.append(_measure("ElasticSampler", 10**12, limit))
    results.report(
        "sampler",
        rows,
        title="A shuffled data epoch: beginning it, going on in its middle",
        settings={"global batch": GLOBAL_BATCH, "ranks": RANKS, "memory limit GB": limit / 1e9},
    )
    return 0


def _child(way: str, length: int, limit: int) -> None:
    import torch  # counted with neither

    assert torch.__version__
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + limit, mapped + limit))
    print(json.dumps(WAYS[way](length)))


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
