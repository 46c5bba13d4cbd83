"""Reads what is new in the trainer's metrics file, whichever epoch's it is."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dalsegno.elastic.checkpoint.reading import open_regular

from .due import Record
from .records import records

__all__ = ("MetricsFile",)

_EPOCH = re.compile(r"e([0-9]{1,18})", re.ASCII)
# What is read at once; a file that grew by more is read in several turns.
_PIECE_BYTES = 4 << 20


class MetricsFile:
    """A trainer's metrics. A script saves below a directory of its epoch's own, so there may be one file for each.

    Args:
        name: the file; below ``${save_dir}`` unless it is absolute.
        metric: the key.
    """

    def __init__(self, name: Path, metric: str) -> None:
        self._name, self._metric = name, metric
        self._read: dict[Path, tuple[int, int]] = {}

    def path(self, run_dir: Path) -> Path | None:
        """The newest epoch's file; None: there is none yet."""
        if self._name.is_absolute():
            return self._name
        try:
            names = os.listdir(run_dir)
        except OSError:
            return None
        epochs = sorted((int(found[1]) for name in names if (found := _EPOCH.fullmatch(name))), reverse=True)
        paths = (run_dir / f"e{epoch}" / self._name for epoch in epochs)
        return next((path for path in paths if path.is_file()), None)

    def news(self, run_dir: Path) -> list[Record]:
        """Values that were noted since the last call, oldest first. A file that was made anew is read anew."""
        path = self.path(run_dir)
        if path is None:
            return []
        try:
            with open(open_regular(path), "rb") as file:
                status = os.fstat(file.fileno())
                inode, start = self._read.get(path, (status.st_ino, 0))
                if inode != status.st_ino or start > status.st_size:
                    start = 0
                file.seek(start)
                text = file.read(_PIECE_BYTES)
                found, count = records(text, self._metric)
                if len(text) == _PIECE_BYTES and not count:
                    count = len(text)  # no line of metrics is as long as that
        except OSError:
            return []
        self._read[path] = (status.st_ino, start + count)
        return found
