"""How much a milestone's upload slows a training loop down.

Ranks of one thread each do a fixed amount of work per step, without an upload and during one, in turn. The mirror and
`huggingface_hub` are real. The hub is the tests' own, with the lowest priority, because where people use one it is on
another machine. So is its processor time told apart from the mirror's, which is all that an upload takes from a
training. The load of the machine counts: compare only what stands in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.results import report
from dalsegno.protos.processes import ends_with_parent
from tests.support.hub.scene import Scene

# Work of one step: so many products of square matrices of this size. Some 30 ms.
_PRODUCTS, _SIDE = 8, 384
_CODE = """
import sys, time
import numpy
products, side = map(int, sys.argv[1:])
one = numpy.random.default_rng(0).standard_normal((side, side))
while True:
    begun = time.perf_counter()
    for _ in range(products):
        one @ one
    ended = time.perf_counter()
    print(time.time(), ended - begun, flush=True)
"""
_USED = ("mirror (CPU s)", "hub (CPU s)")
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# Seconds within which an upload must be done.
_PATIENCE_SECONDS = 300.0


class Ranks:
    """Trainers that note each step."""

    def __init__(self, directory: Path, count: int) -> None:
        self._logs = [directory / f"rank{number}" for number in range(count)]
        self._processes = []
        for log in self._logs:
            with open(log, "wb") as output:
                command = [sys.executable, "-c", _CODE, str(_PRODUCTS), str(_SIDE)]
                environment = {**os.environ, **_ONE_THREAD}
                # They would go on for ever, also where this process is killed.
                bind = ends_with_parent(signal.SIGKILL, os.getpid())
                self._processes.append(
                    subprocess.Popen(command, stdout=output, env=environment, start_new_session=True, preexec_fn=bind)
                )

    def steps(self, begin: float, end: float) -> list[float]:
        """Seconds of each step that ended between two moments (Unix seconds), of all ranks."""
        found = []
        for log in self._logs:
            for line in log.read_text(encoding="ascii").splitlines()[:-1]:
                at, seconds = map(float, line.split())
                if begin <= at <= end:
                    found.append(seconds)
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def measured(options: argparse.Namespace) -> list[dict[str, float]]:
    """One line for each upload: how long it took, and how much slower steps were than just before and behind it."""
    lines = []
    with contextlib.ExitStack() as ends:
        name = ends.enter_context(tempfile.TemporaryDirectory(prefix="dalsegno-upload-"))
        rate = options.megabytes_per_second * 1_000_000
        scene = ends.enter_context(contextlib.closing(Scene(Path(name), interval_seconds=1, upload_limit=rate)))
        hub = psutil.Process(scene.hub.pid)
        hub.nice(19)
        with contextlib.suppress(OSError):  # as `yield_to_others`
            Path(f"/proc/{hub.pid}/autogroup").write_text("19")
        ranks = ends.enter_context(contextlib.closing(Ranks(Path(name), options.ranks)))
        mirror = psutil.Process(scene.mirror().process.pid)
        time.sleep(5.0)  # why: imports, and first steps
        before = _quiet(ranks, options.seconds)
        for number in range(1, options.runs + 1):
            scene.commit(number, size=options.megabytes * 2_000_000 // 3, seed=number)
            begun, used = time.time(), [_processor_seconds(one) for one in (mirror, hub)]
            # To look more often takes from what is measured.
            scene.wait_milestone(number, _PATIENCE_SECONDS, every_seconds=0.25)
            took = time.time() - begun
            during = ranks.steps(begun, begun + took)
            used = [_processor_seconds(one) - past for one, past in zip((mirror, hub), used, strict=True)]
            after = _quiet(ranks, options.seconds)
            line = {"seconds": took, **dict(zip(_USED, used, strict=True))}
            lines.append({**line, **_slower(during, before + after)})
            print({key: round(value, 2) for key, value in lines[-1].items()}, flush=True)
            before = after
    return lines


def _processor_seconds(process: psutil.Process) -> float:
    """Its own, and those of its ended children."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def _quiet(ranks: Ranks, seconds: float) -> list[float]:
    begun = time.time()
    time.sleep(seconds)  # why: this is what is measured
    return ranks.steps(begun, begun + seconds)


def _slower(during: list[float], without: list[float]) -> dict[str, float]:
    """In percent: of the median step, and of the mean one, in which a few long steps count, too."""
    return {
        "median step slower (%)": 100 * (statistics.median(during) / statistics.median(without) - 1),
        "mean step slower (%)": 100 * (statistics.fmean(during) / statistics.fmean(without) - 1),
    }


def main(arguments: Sequence[str] = ()) -> int:
    """Uploads some milestones, one after the other, and reports each, and medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks upload", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="uploads")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="trainers of one thread each")
    parser.add_argument("--megabytes", type=int, default=100, metavar="N", help="of each upload")
    parser.add_argument("--megabytes-per-second", type=int, default=5, metavar="N", help="upload_limit")
    parser.add_argument("--seconds", type=float, default=15.0, help="without an upload, before and behind each")
    options = parser.parse_args(arguments)
    lines = measured(options)
    rows = [{"upload": str(number), **line} for number, line in enumerate(lines, 1)]
    rows.append({"upload": "median", **{key: statistics.median(line[key] for line in lines) for key in lines[0]}})
    report(
        "upload",
        [{key: value if isinstance(value, str) else round(value, 2) for key, value in row.items()} for row in rows],
        title="A training loop beside an upload",
        settings=vars(options),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
