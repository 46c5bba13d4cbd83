"""Ranks of scripts that are not ours, held between two steps, where they write nothing; or killed while they write."""

from __future__ import annotations

import builtins
import os
import signal
import time
from pathlib import Path
from typing import Any

__all__ = ["die_where_told", "stand_while_told"]


def stand_while_told(directory: Path, rank: int) -> None:
    """While `DIRECTORY/stand-<rank>` is there, waits, and says so by `DIRECTORY/stands-<rank>`."""
    while (directory / f"stand-{rank}").exists():
        (directory / f"stands-{rank}").touch()
        time.sleep(0.01)  # why: the test is another process


def die_where_told(directory: Path) -> None:
    """Who opens a file for writing, and so cuts it off, is then killed if `DIRECTORY/die-in-<its name>` is there."""
    plain = builtins.open

    def opened(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        found = plain(file, mode, *arguments, **named)
        told = directory / f"die-in-{Path(file).name}" if "w" in mode and isinstance(file, str | Path) else None
        if told is not None and told.exists():
            told.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    builtins.open = opened
