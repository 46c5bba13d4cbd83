"""Ranks of scripts that are not ours, held between two steps: there a test kills them while they write nothing."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["stand_while_told"]


def stand_while_told(directory: Path, rank: int) -> None:
    """While `DIRECTORY/stand-<rank>` is there, waits, and says so by `DIRECTORY/stands-<rank>`."""
    while (directory / f"stand-{rank}").exists():
        (directory / f"stands-{rank}").touch()
        time.sleep(0.01)  # why: the test is another process
