"""Conversion into the universal form beside a plain copy and DeepSpeed's converter: time, and memory at its peak.

Two ranks of real DeepSpeed make a checkpoint of ZeRO-2, then one of ZeRO-3. For each of them these run in turn, several
times, each in a process of its own that has imported what it needs before the clock starts:

- copy: the same files, one after the other, each made durable (fsync) as ours are;
- copy, parallel: the same with as many threads as ours;
- ours: verified against the source's checksums, converted, made durable, sealed;
- DeepSpeed: ``ds_to_universal`` with its own numbers of workers. It verifies nothing and makes nothing durable.

Memory is that of the process and all its children: resident, sampled, in runs that are not timed. Shared pages count
once for each process in RSS, and once altogether in PSS.

On a virtual machine memory is several times slower when it is touched for the first time. So before each run the page
cache is made to fill what is free: then whatever memory the run gets was in use before.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.convert_once import WAYS
from benchmarks.results import report

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("zero_ranks.py")
STAGES = (2, 3)
RANKS = 2
# The model, whose size grows with its width. ZeRO-2 saves 14 bytes per parameter: bf16, and fp32 three times. A layer
# has eight tensors.
LAYERS, WORDS_PER_WIDTH, BYTES_PER_PARAMETER = 14, 40, 14
MEGABYTES, REPEATS = 2000, 7
STEP = 2
# Seconds between two looks at memory, and the most seconds of one run.
LOOK_EVERY, PATIENCE = 0.01, 600.0
# Bytes left free for other processes when memory is touched.
SPARE_BYTES = 1 << 30


def main(arguments: Sequence[str] = ()) -> int:
    """Prints a line for each way and stage, medians; returns 0 if all could be measured."""
    flags = argparse.ArgumentParser(prog="python -m benchmarks.convert", description=__doc__.splitlines()[0])
    flags.add_argument("--megabytes", type=int, default=MEGABYTES, help="of the ZeRO-2 checkpoint (%(default)s)")
    flags.add_argument("--layers", type=int, default=LAYERS, help="of the model, eight tensors each (%(default)s)")
    flags.add_argument("--stages", type=int, nargs="+", default=STAGES, choices=(1, 2, 3), help="of ZeRO (2 3)")
    flags.add_argument("--repeats", type=int, default=REPEATS, help="timed runs of each way (%(default)s)")
    flags.add_argument("--directory", type=Path, help="on the disk to measure, with room for four times as much")
    options = flags.parse_args(arguments)
    model = shape(options.megabytes * 10**6, options.layers)
    settings: dict[str, Any] = {"ranks": RANKS, "repeats": options.repeats, **model}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        memory = _Touched(Path(folder) / "touched")
        for stage in options.stages:
            source, settings["parameters"] = _make(Path(folder), stage, model)
            rows += _measure(source, stage, options.repeats, memory)
            shutil.rmtree(source.parent)
    report("convert", rows, title="Conversion of a ZeRO checkpoint into its universal form", settings=settings)
    return 0


def shape(nbytes: int, layers: int = LAYERS) -> dict[str, int]:
    """A model of `layers` layers whose ZeRO-2 checkpoint has about `nbytes` bytes."""
    per_square = 12 * layers + 2 * WORDS_PER_WIDTH
    width = max(16, round(math.sqrt(nbytes / BYTES_PER_PARAMETER / per_square)))
    return {"layers": layers, "width": width, "words": WORDS_PER_WIDTH * width}


def _make(folder: Path, stage: int, model: dict[str, int]) -> tuple[Path, int]:
    """Makes a sealed checkpoint; returns it and its number of parameters."""
    from tests.support.workers.zero_runs import run_worker, seal_sharded

    source = folder / f"zero{stage}" / f"step-{STEP}.e1.0"
    task = {"stage": stage, "save": str(source), "out": str(source.parent), **model}
    (result, *_) = run_worker(RANKS, task, worker=WORKER, seconds=PATIENCE)
    seal_sharded(source, stage=stage, world=RANKS, step=STEP)
    return source, int(result["parameters"])


def _measure(source: Path, stage: int, repeats: int, memory: _Touched) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    ways = list(WAYS)
    for repeat in range(repeats + 1):
        first = repeat % len(ways)
        for way in ways[first:] + ways[:first]:
            with _target(source, memory) as target, _child(way, source, target) as child:
                took = child.finish()
            if repeat > 0:  # the first round warms up
                seconds[way].append(took)
    peaks = {}
    for way in WAYS:
        with _target(source, memory) as target, _child(way, source, target) as child:
            peaks[way] = _peak(child)
    size = sum(path.stat().st_size for path in source.iterdir())
    copied, theirs = statistics.median(seconds["copy"]), statistics.median(seconds["DeepSpeed"])
    rows = []
    for way, took_all in seconds.items():
        median = statistics.median(took_all)
        rows.append(
            {
                "way": f"ZeRO-{stage}: {way}",
                "bytes": size,
                "median (s)": round(median, 3),
                "fastest (s)": round(min(took_all), 3),
                "slowest (s)": round(max(took_all), 3),
                "times the copy": round(median / copied, 2),
                "DeepSpeed's, times this": round(theirs / median, 2),
                **{f"{kind} (MB)": round(nbytes / 1e6) for kind, nbytes in peaks[way].items()},
            }
        )
    return rows


@contextmanager
def _target(source: Path, memory: _Touched) -> Iterator[Path]:
    """A directory name for one run, whose output is deleted afterwards."""
    target = source.parent / f"{source.name}.universal.1"
    memory.touch()
    # This run must not wait for data that other processes have written, or DeepSpeed has left to the kernel.
    os.sync()
    try:
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _peak(child: _Child) -> dict[str, int]:
    """Bytes of memory of the process and its children: before it began, and at most."""
    before = _memory(child.pid)
    most = dict(before)
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(LOOK_EVERY):
            for kind, now in _memory(child.pid).items():
                most[kind] = max(most[kind], now)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        child.finish()
    finally:
        stop.set()
        looking.join()
    return {"RSS before": before["RSS"], **{f"peak {kind}": nbytes for kind, nbytes in most.items()}}


def _memory(pid: int) -> dict[str, int]:
    total = {"RSS": 0, "PSS": 0}
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # a zombie is one of these
                full = process.memory_full_info()
                total["RSS"] += full.rss
                total["PSS"] += full.pss
    return total


class _Child:
    """One run, ready to begin."""

    def __init__(self, way: str, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._way, self._process, self._errors = way, process, errors
        self.pid = process.pid
        self._line()  # says that it is ready

    def finish(self) -> float:
        """Lets it begin; returns the seconds that it took."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(json.loads(self._line())["seconds"])

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{self._way} failed: {self._errors.read()[-2000:]}")
        return line


@contextmanager
def _child(way: str, source: Path, target: Path) -> Iterator[_Child]:
    command = [sys.executable, "-m", "benchmarks.convert_once", way, str(source), str(target)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )

        def end() -> None:
            # Killed with its pool, because DeepSpeed's workers outlive their parent.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        deadline = threading.Timer(PATIENCE, end)
        deadline.start()
        try:
            yield _Child(way, process, errors)
        finally:
            deadline.cancel()
            end()
            process.communicate()


class _Touched:
    """Fills free memory with pages of files that are not on the disk, which the kernel takes back when it wants."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, 0
        folder.mkdir()

    def touch(self) -> None:
        free = psutil.virtual_memory().free - SPARE_BYTES
        if free <= 0:
            return
        self._files += 1
        with open(self._folder / str(self._files), "w+b") as file:
            file.truncate(free)
            buffer = bytearray(64 << 10)
            while file.readinto(buffer):
                pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
