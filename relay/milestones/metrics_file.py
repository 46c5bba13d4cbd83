"""Finds the trainer's metrics file, whichever epoch's it is, and reads what is new there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dalsegno.elastic.checkpoint.metrics import Record
from dalsegno.elastic.checkpoint.metrics_reader import MetricsReader

__all__ = ("MetricsFile",)

_EPOCH = re.compile(r"e([0-9]{1,18})", re.ASCII)


class MetricsFile:
    """A trainer's metrics. A script saves below a directory of its epoch's own, so there may be one file for each.

    Args:
        name: the file; below ``${save_dir}`` unless it is absolute.
        metric: the key.
    """

    def __init__(self, name: Path, metric: str) -> None:
        self._name, self._reader = name, MetricsReader(metric)

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
        return [] if path is None else self._reader.news(path)
