"""What a change of the world costs on a card, part by part, and what a save does: `python -m benchmarks gpu`.

For each size of state a run saves a checkpoint. Then ranks start from it like those of a changed world, with a fresh
interpreter ("cold") and from a warm nursery ("standby", which is how `dlrover-run` starts them). The parts are process,
imports, CUDA context, session (which reads the checkpoint and compares checksums), process group with its first
collective, model, load, and first step. Each part ends when the card has finished it; of several ranks the slowest
counts. What an agent adds, to notice and to agree, is in the other benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import report
from dalsegno.agent.processes.lifeline import Lifeline
from dalsegno.agent.script import modules_of
from dalsegno.agent.standby.standby_pool import StandbyPool
from dalsegno.agent.standby.worker_main import Assignment

SIZES, REPEATS, SAVES = "1,10", 3, 3
RANK = Path(__file__).with_name("gpu_rank.py")
# The most seconds of one start, and of the imports of a nursery.
PATIENCE = 500.0
PARTS = ("process", "imports", "context", "session", "process group", "model", "load", "first step")

Start = Callable[[list[str], dict[str, str]], Any]


def main(arguments: Sequence[str] = ()) -> int:
    """Prints a line for each size and way to start or save; returns 0 if all was measured, or without a card."""
    flags = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__.splitlines()[0])
    flags.add_argument("--sizes", default=SIZES, help="of the state, in GB, with commas (%(default)s)")
    flags.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it (%(default)s)")
    flags.add_argument("--ranks", type=int, help="default: as many as there are cards")
    flags.add_argument("--repeats", type=int, default=REPEATS, help="starts of each kind (%(default)s)")
    flags.add_argument("--saves", type=int, default=SAVES, help="saves of each kind (%(default)s)")
    flags.add_argument("--directory", type=Path, help="on the disk to measure, with room for three times the state")
    options = flags.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no card here: nothing was measured (--device=cpu to try it)")
        return 0
    ranks = options.ranks or max(1, torch.cuda.device_count() if options.device == "cuda" else 1)
    starts: list[dict[str, Any]] = []
    saves: list[dict[str, Any]] = []
    for size in (float(part) for part in options.sizes.split(",")):
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            one = _Measuring(Path(folder), options.device, ranks, int(size * 1e9))
            saves += [{"state (GB)": size, **row} for row in one.saves(options.saves)]
            starts += [{"state (GB)": size, **row} for row in one.starts(options.repeats)]
    settings = {"ranks": ranks, "repeats": options.repeats, "saves": options.saves, **_card(options.device)}
    settings["backend"] = one.backend
    report("gpu", starts, title="A rank of a changed world, part by part (s, medians)", settings=settings)
    report("gpu-saves", saves, title="A save (s, medians)", settings=settings)
    return 0


class _Measuring:
    """One size of state, in a directory of its own."""

    def __init__(self, folder: Path, device: str, ranks: int, state_bytes: int) -> None:
        self._folder, self._device, self._ranks, self._bytes = folder, device, ranks, state_bytes
        self.backend = ""

    def saves(self, count: int) -> list[dict[str, Any]]:
        """Times saves, and so makes the checkpoint, too."""
        found = self._run(_cold, ["--saves", str(count)])
        rows = []
        for way in dict.fromkeys(row["way"] for row in found[0]["saves"]):
            own = [row for rank in found for row in rank["saves"] if row["way"] == way]
            rows.append({"way": way, **{name: _median(own, name) for name in own[0] if name != "way"}})
        return rows

    def starts(self, repeats: int) -> list[dict[str, Any]]:
        """Medians of the slowest rank's parts."""
        rows = [self._medians("cold", [self._parts(_cold) for _ in range(repeats)])]
        lifeline, warm = Lifeline(), threading.Event()
        pool = StandbyPool(lifeline, self._ranks, modules_of(RANK), self._folder / "standby.log", warm.set)
        try:
            pool.fill(low_priority=False)
            if not warm.wait(PATIENCE):
                raise RuntimeError(f"no standby worker within {PATIENCE:.0f} s")

            def standby(command: list[str], environment: dict[str, str]) -> Any:
                return pool.start_worker(Assignment(command, False, environment, os.getcwd()))

            rows.append(self._medians("standby", [self._parts(standby) for _ in range(repeats)]))
        finally:
            pool.close()
            lifeline.close()
        return rows

    def _parts(self, start: Start) -> dict[str, float]:
        found = self._run(start, [])
        if not all(rank["resumed"] for rank in found):
            raise RuntimeError("a rank found no checkpoint")
        return {part: max(rank["parts"][part] for rank in found) for part in PARTS}

    def _medians(self, start: str, runs: list[dict[str, float]]) -> dict[str, Any]:
        medians = {part: _median(runs, part) for part in PARTS}
        return {"start": start, **medians, "sum": round(sum(medians.values()), 3)}

    def _run(self, start: Start, more: list[str]) -> list[dict[str, Any]]:
        out = Path(tempfile.mkdtemp(dir=self._folder))
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
        told = [f"--directory={self._folder / 'run'}", f"--bytes={self._bytes}", f"--device={self._device}"]
        made = []
        for rank in range(self._ranks):
            command = [str(RANK), f"--began={time.monotonic()}", *told, f"--out={out}", *more]
            made.append(start(command, _environment(rank, self._ranks, port)))
        try:
            codes = [process.wait(PATIENCE) for process in made]
        finally:
            for process in made:
                if process.poll() is None:
                    os.kill(process.pid, 9)
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}: see above")
        found = [json.loads((out / f"result-{rank}.json").read_text()) for rank in range(self._ranks)]
        self.backend = found[0]["backend"]
        return found


def _cold(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *command], env=environment)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {**os.environ, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in own.items()}}


def _median(rows: Sequence[dict[str, Any]], name: str) -> float:
    return round(statistics.median(float(row[name]) for row in rows), 4)


def _card(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"card": "none: tried on the CPU"}
    return {"card": torch.cuda.get_device_name(0), "cards": torch.cuda.device_count(), "CUDA": torch.version.cuda}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
