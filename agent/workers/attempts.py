"""The files of output and errors that torch makes for each epoch: those of old epochs that stayed empty go."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs

__all__ = ["KEPT", "drop_if_empty", "forgetting"]

# Epochs whose files stay, empty or not. A job may have thousands, each with a directory and one of each rank.
KEPT = 50


class _Forgetting(DefaultLogsSpecs):
    """torch's choice of files; with each new epoch an old one goes, if nothing was written in it."""

    def __init__(self, given: DefaultLogsSpecs) -> None:
        # What it was made of is private in torch, and differs from version to version.
        self.__dict__.update(given.__dict__)
        self._attempts: deque[Path] = deque()

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        """Makes the files of one epoch, as torch does."""
        made = super().reify(envs)
        if made.error_files and (first := made.error_files[min(made.error_files)]) != os.devnull:
            # `attempt_<n>/<local rank>/error.json`; the same epoch again has made it anew.
            attempt = Path(first).parent.parent
            self._attempts = deque(path for path in self._attempts if path != attempt)
            self._attempts.append(attempt)
        while len(self._attempts) > KEPT:
            drop_if_empty(self._attempts.popleft())
        return made


def forgetting(given: LogsSpecs) -> LogsSpecs:
    """The same choice of files, of which only the newest `KEPT` epochs stay if they are empty.

    Args:
        given: torch's; another one of the user's own stays as it is, as nobody knows where it puts its files.
    """
    return _Forgetting(given) if type(given) is DefaultLogsSpecs else given


def drop_if_empty(attempt: Path) -> None:
    """Removes one epoch's directory; nothing of it where anything but empty files and directories is in it."""
    found = list(os.walk(attempt, topdown=False))
    with contextlib.suppress(OSError):
        files = [os.path.join(directory, name) for directory, _, names in found for name in names]
        if not all(_is_empty(file) for file in files):
            return
        for file in files:
            os.unlink(file)
        for directory, _, _ in found:
            os.rmdir(directory)


def _is_empty(path: str) -> bool:
    found = os.lstat(path)
    return stat.S_ISREG(found.st_mode) and found.st_size == 0
