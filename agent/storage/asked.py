"""A script without a session was asked to save: which of its saves answers that."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from .foreign import OURS
from .layouts import FileState
from .naming import is_log

__all__ = ["Growth", "Request", "request"]

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
        there: numbers of all inodes then.
    """

    at: int
    doubtful: frozenset[int]
    there: frozenset[int]

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
    doubtful, there = set(), set()
    for where, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(os.path.join(where, name), follow_symlinks=False)
                there.add(found.st_ino)
                if found.st_mtime_ns >= at - _FRESH_NANOSECONDS and name != _ASKED:
                    doubtful.add(found.st_ino)
    return Request(at, frozenset(doubtful), frozenset(there))


class Growth:
    """Whether the script is writing a newer checkpoint than was taken, of which there may be too little yet to know it.

    Args:
        request: what it was asked.
        least_bytes: of a file that may be a part of one, though nothing says so.
        patience_seconds: without a change it is none, or given up.
    """

    def __init__(self, request: Request, least_bytes: int, patience_seconds: float) -> None:
        self._request, self._least, self._patience = request, least_bytes, patience_seconds
        self._seen: list[FileState] = []
        self._changed = 0.0

    def goes_on(
        self, data: Iterable[FileState], others: Iterable[FileState], taken: Collection[FileState], now: float
    ) -> bool:
        """Looks once more.

        Args:
            data: files of what looks like a checkpoint.
            others: files that are nobody's; those count that are large, were begun behind the request, and are no logs.
            taken: files of what was taken last.
            now: monotonic, in seconds.
        """
        there, least = self._request.there, self._least
        begun = (one for one in others if one.size >= least and one.number not in there and not is_log(one.name))
        newest = max((one.written for one in taken), default=0)
        since = max(newest, self._request.at)
        found = [one for one in (*data, *begun) if one.written >= since and one not in taken]
        if found != self._seen:
            self._seen, self._changed = found, now
        return bool(found) and now - self._changed < self._patience
