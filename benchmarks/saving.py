"""How long a save holds up the training: while the loop waits for it, and in the background."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.results import report
from dalsegno.elastic import background, session
from dalsegno.elastic.saving.background_save import Background

BYTES = 512 << 20
FILES = 16
SAVES = 4


def main() -> int:
    """Prints seconds for which the loop stands still for a save, in one process with all state on the CPU."""
    weights = {f"layer-{number}": torch.randn(BYTES // FILES // 4) for number in range(FILES)}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        s = session(checkpoint_dir=folder, keep=1)

        def write(path: Path) -> None:
            torch.save(weights, path / "model.pt")

        ways: dict[str, Callable[[Path], None] | Background] = {
            "waiting": write,
            "background": background(lambda: {"model.pt": weights}),
        }
        for way, save in ways.items():
            for number in range(1, SAVES + 1):
                s.begin_step()
                s.end_step()
                began = time.perf_counter()
                s.save(save, wait=False)
                stopped = time.perf_counter() - began
                s.settle()
                whole = time.perf_counter() - began
                rows.append({"way": way, "save": number, "stopped (s)": stopped, "until sealed (s)": whole})
        s.close()
    report("saving", rows, title="A save of 0.5 GiB", settings={"bytes": BYTES, "files": FILES})
    return 0
