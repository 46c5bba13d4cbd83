"""What each change of a running job costs: the demo's scene several times, medians of the time without steps."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = 3
BUDGET = 600.0
# Seconds in which a demo that is told to ends its nodes.
ENDS_WITHIN = 30.0
# The scene's worlds, in order, by what brought each of them about.
CHANGES = ("two nodes join, 2 to 4", "node 0 is killed, 4 to 3", "a node leaves, 3 to 2")


def _play(output: Path) -> list[tuple[float, int]]:
    """The seconds without steps and the steps lost of each change in one demo."""
    command = [sys.executable, "-m", "examples.demo", "--plain", f"--output={output}"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = demo.communicate(timeout=BUDGET)
    finally:
        if demo.poll() is None:
            demo.terminate()  # not killed: it ends what it has started
            with contextlib.suppress(subprocess.TimeoutExpired):
                demo.communicate(timeout=ENDS_WITHIN)
            demo.kill()
            demo.wait()
    if demo.returncode != 0:
        raise RuntimeError(f"the demo failed:\n{said[-4000:]}")
    (summary,) = output.glob("*/report.json")
    spans = json.loads(summary.read_text(encoding="utf-8"))["spans"]
    sizes = [span["world_size"] for span in spans]
    if sizes != [2, 4, 3, 2]:
        raise RuntimeError(f"the scene went through worlds of {sizes}, not 2, 4, 3, 2")
    return [(after["paused"], before["lost_steps"]) for before, after in itertools.pairwise(spans)]


def main() -> int:
    """Prints a line per change."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [_play(Path(folder) / str(number)) for number in range(RUNS)]
    for number, name in enumerate(CHANGES):
        pauses = [run[number][0] for run in runs]
        lost = [run[number][1] for run in runs]
        low, high = min(pauses), max(pauses)
        print(f"{name:>26}: {statistics.median(pauses):5.1f} s without steps ({low:.1f} to {high:.1f}), lost {lost}")
    return 0
