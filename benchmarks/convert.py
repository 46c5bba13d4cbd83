"""Conversion into the universal form beside a plain copy and DeepSpeed's converter: time, and memory at its peak.

Two ranks of real DeepSpeed make a checkpoint of ZeRO-2 and one of ZeRO-3, of more than 1 GB each. Then, several times
and in turn, each in a process of its own that has imported what it needs before the clock starts:

- copy: the same files, one after the other, each made durable (fsync) as ours are;
- copy, parallel: the same with as many threads as ours;
- ours: verified against the source's checksums, converted, made durable, sealed;
- DeepSpeed: ``ds_to_universal`` with its own numbers of workers. It verifies nothing and makes nothing durable.

Memory is that of the process and all its children: resident, sampled, in runs that are not timed. Shared pages count
once for each process (RSS), and once altogether (PSS).

A virtual machine's memory is several times slower when it is touched for the first time. So before the clock starts the
page cache is made to fill what is free, and what was written stays until the end: what a run is given was used before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.results import report

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("zero_ranks.py")
STAGES = (2, 3)
RANKS = 2
MODEL = {"layers": 14, "width": 768, "words": 32000}
REPEATS = 7
STEP = 2
# Seconds between two looks at memory, and for one run.
LOOK_EVERY, PATIENCE = 0.01, 600.0
# What is left free when memory is touched, for everybody else.
SPARE_BYTES = 1 << 30
WAYS = ("copy", "copy, parallel", "ours", "DeepSpeed")


def main() -> int:
    """A line for each way and stage, medians; 0 if all could be measured."""
    rows: list[dict[str, Any]] = []
    settings: dict[str, Any] = {"ranks": RANKS, "repeats": REPEATS, **MODEL}
    with tempfile.TemporaryDirectory(dir=os.environ.get("DALSEGNO_BENCH_SCRATCH")) as folder:
        _touch_memory(Path(folder) / "touched")
        for stage in STAGES:
            source, parameters = _make(Path(folder), stage)
            settings["parameters"] = parameters
            rows += _measure(Path(folder), source, stage)
    report("convert", rows, title="Conversion of a ZeRO checkpoint into its universal form", settings=settings)
    return 0


def _make(folder: Path, stage: int) -> tuple[Path, int]:
    """A sealed checkpoint, and how many parameters it has."""
    from tests.support.zero_runs import run_worker, seal_sharded

    source = folder / f"zero{stage}" / f"step-{STEP}.e1.0"
    task = {"stage": stage, "save": str(source), "out": str(source.parent), **MODEL}
    (result, *_) = run_worker(RANKS, task, worker=WORKER, seconds=PATIENCE)
    seal_sharded(source, stage=stage, world=RANKS, step=STEP)
    return source, int(result["parameters"])


def _measure(folder: Path, source: Path, stage: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    target = (source.parent / f"{source.name}.universal.{number}" for number in range(1, 1000))
    for repeat in range(REPEATS + 1):
        for way in WAYS[repeat % len(WAYS) :] + WAYS[: repeat % len(WAYS)]:
            # What others have written, or DeepSpeed has left to the kernel, must not be this one's to wait for.
            os.sync()
            took = _run(way, source, next(target))["seconds"]
            if repeat > 0:  # the first round warms up
                seconds[way].append(took)
    memory = {way: _peak(way, source, next(target)) for way in WAYS}
    copied = statistics.median(seconds["copy"])
    theirs = statistics.median(seconds["DeepSpeed"])
    size = sum(path.stat().st_size for path in source.iterdir())
    rows = []
    for way in WAYS:
        median = statistics.median(seconds[way])
        rows.append(
            {
                "way": f"ZeRO-{stage}: {way}",
                "bytes": size,
                "median (s)": round(median, 3),
                "fastest (s)": round(min(seconds[way]), 3),
                "slowest (s)": round(max(seconds[way]), 3),
                "times the copy": round(median / copied, 2),
                "DeepSpeed's, times this": round(theirs / median, 2),
                "peak RSS (MB)": round(memory[way]["rss"] / 1e6),
                "peak PSS (MB)": round(memory[way]["pss"] / 1e6),
                "before (MB)": round(memory[way]["before"] / 1e6),
            }
        )
    shutil.rmtree(source.parent)
    return rows


def _run(way: str, source: Path, target: Path) -> dict[str, float]:
    with _child(way, source, target) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        child.stdin.write("\n")
        child.stdin.flush()
        line = child.stdout.readline()
        if child.wait(PATIENCE) != 0:
            raise RuntimeError(f"{way} failed: {child.stderr and child.stderr.read()[-2000:]}")
    return {"seconds": float(json.loads(line)["seconds"])}


def _peak(way: str, source: Path, target: Path) -> dict[str, int]:
    """Bytes of memory of the process and its children: at most, and before it began."""
    most = {"rss": 0, "pss": 0}
    with _child(way, source, target) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        before = _memory(child.pid)["rss"]
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(LOOK_EVERY):
                for kind, now in _memory(child.pid).items():
                    most[kind] = max(most[kind], now)

        looking = threading.Thread(target=look)
        looking.start()
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        stop.set()
        looking.join()
        child.wait(PATIENCE)
    return {**most, "before": before}


def _memory(pid: int) -> dict[str, int]:
    total = {"rss": 0, "pss": 0}
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return total
    for process in family:
        try:
            full = process.memory_full_info()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        total["rss"] += full.rss
        total["pss"] += full.pss
    return total


@contextmanager
def _child(way: str, source: Path, target: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.convert", way, str(source), str(target)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        try:
            yield child
        finally:
            child.kill()
            child.wait()


# ---- what runs in a child --------------------------------------------------------------------------------------------


def _copy(threads: int) -> Callable[[Path, Path], None]:
    def copy(source: Path, target: Path) -> None:
        from dalsegno.elastic.checkpoint.files import fsync_directory

        def one(path: Path) -> None:
            shutil.copyfile(path, target / path.name)
            descriptor = os.open(target / path.name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

        target.mkdir()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(one, sorted(source.iterdir())))
        fsync_directory(target)
        fsync_directory(target.parent)

    return copy


def _ours(source: Path, target: Path) -> None:
    from dalsegno.elastic.universal import convert

    convert(source, target)


def _deepspeed(source: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=4,
            num_merge_workers=2,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def _act(way: str, source: Path, target: Path) -> None:
    from dalsegno.elastic.universal.effort import THREADS

    ways = {"copy": _copy(1), "copy, parallel": _copy(THREADS), "ours": _ours, "DeepSpeed": _deepspeed}
    if way == "ours":
        from dalsegno.elastic.universal import check, streaming  # noqa: F401 (not timed)
    elif way == "DeepSpeed":
        import deepspeed.checkpoint.ds_to_universal  # noqa: F401 (not timed)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed's converter prints
    print("ready", file=answers, flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    ways[way](source, target)
    print(json.dumps({"seconds": time.perf_counter() - began}), file=answers, flush=True)


def _touch_memory(path: Path) -> None:
    """Fills free memory with pages of a file that has none on the disk; the kernel takes them back when it wants."""
    free = psutil.virtual_memory().free - SPARE_BYTES
    if free <= 0:
        return
    with open(path, "w+b") as file:
        file.truncate(free)
        buffer = bytearray(64 << 10)
        while file.readinto(buffer):
            pass


if __name__ == "__main__":
    _act(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
