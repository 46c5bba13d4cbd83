"""Reads what is new in a metrics file that a trainer appends to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .metrics import Record, records
from .reading import open_regular

__all__ = ("MetricsReader",)

# What is read at once; a file that grew by more is read in several turns.
_PIECE_BYTES = 4 << 20


class MetricsReader:
    """Reads files of JSON lines, each from where it stopped there.

    Args:
        metric: the key whose values are wanted.
    """

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._read: dict[Path, tuple[int, int]] = {}

    def news(self, path: Path) -> list[Record]:
        """Values since the last call, oldest first, of one piece. A file that was made anew is read anew."""
        return self._piece(path)[0]

    def all_news(self, path: Path) -> Iterator[Record]:
        """All values since the last call, oldest first."""
        count = 1
        while count:
            found, count = self._piece(path)
            yield from found

    def _piece(self, path: Path) -> tuple[list[Record], int]:
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
            return [], 0
        self._read[path] = (status.st_ino, start + count)
        return found, count
