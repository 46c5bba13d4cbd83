"""A script without a session was asked to save: which of its saves answers that."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .foreign import OURS
from .layouts import FileState

__all__ = ["Request", "request"]

# What was written so shortly before may be what the script was just writing.
_FRESH_NANOSECONDS = 2 * 10**9
# In an epoch's directory: its time is when the script was asked, by the clock of the file system.
_ASKED = f"{OURS}-asked"


@dataclass(frozen=True)
class Request:
    """The script was asked to save.

    Attributes:
        at: when, in ns, by the clock of the file system.
        doubtful: numbers of the inodes that it may have been writing then.
    """

    at: int
    doubtful: frozenset[int]

    def is_answered_by(self, files: Iterable[FileState]) -> bool:
        """Whether these were all begun later; what the script was just saving does not have its last step."""
        return all(file.written >= self.at and file.number not in self.doubtful for file in files)


def request(root: Path) -> Request:
    """Notes that the script, which saves below `root`, is about to be asked.

    Raises:
        OSError: the file system says no.
    """
    mark = root / _ASKED
    mark.write_bytes(b"")
    at = os.stat(mark).st_mtime_ns
    doubtful = set()
    for where, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(os.path.join(where, name), follow_symlinks=False)
                if found.st_mtime_ns >= at - _FRESH_NANOSECONDS and name != _ASKED:
                    doubtful.add(found.st_ino)
    return Request(at, frozenset(doubtful))
