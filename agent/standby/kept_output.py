"""Keeps what a script writes to a stream while it runs ahead of its place, and writes it out with the place."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable

from dalsegno.protos.ready import readable, writable

from .stillness import stillness

__all__ = ["KeptOutput"]

# The most bytes that are kept; a script that writes more waits.
_MOST_BYTES = 1 << 20
# Seconds without a word after which a script counts as not writing now; how long that is waited for; and how long a
# write under way may pause.
_QUIET_SECONDS = 0.05
_PATIENCE_SECONDS = 2.0
_PAUSE_SECONDS = 1.0
_READS = 64


class KeptOutput:
    """One stream, 1 or 2, which is a pipe until `release`.

    The script may have moved it by then: its duplicates count as output as well, and what the script has put in its
    place stays.
    """

    def __init__(self, stream: int) -> None:
        self._reader, self._writer = os.pipe()
        os.dup2(self._writer, stream)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._reader, fcntl.F_SETPIPE_SZ, _MOST_BYTES)
        os.set_blocking(self._reader, False)

    @property
    def full(self) -> bool:
        """Whether so much is kept that a further write must wait."""
        return not writable(self._writer, 0)

    def release(self, path: str | None, console: int, *, writes: bool) -> None:
        """Writes out what was kept, then connects the stream to the file of this path, or to the console.

        Args:
            writes: The script may be writing now.

        Raises:
            OSError: the output cannot be written there.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        target = os.dup(console) if path is None else os.open(path, flags, 0o666)
        with stillness(writes) as is_still:
            ended = self._move(target, is_still)
        if ended:
            os.close(self._reader)
            os.close(target)
            return
        # A process that native code has started has the pipe, too.
        threading.Thread(target=_pass_all_on, args=(self._reader, target), name="kept-output", daemon=True).start()

    def _move(self, target: int, is_still: Callable[[], bool]) -> bool:
        """What the script writes goes to `target` from now on, behind what it wrote before. Returns whether that ended.

        Only while the script is still does nothing overtake what is in the pipe.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        _pass_on(self._reader, target)
        while not is_still() and time.monotonic() < deadline and readable(self._reader, _QUIET_SECONDS):
            _pass_on(self._reader, target)
        os.close(self._writer)
        for fd in _duplicates(self._reader):
            os.dup2(target, fd, inheritable=os.get_inheritable(fd))
        # A write under way still has the pipe, and must not be cut off. Nobody can begin another one.
        while readable(self._reader, _PAUSE_SECONDS):
            if _pass_on(self._reader, target):
                return True
        return False


def _duplicates(reader: int) -> list[int]:
    """The descriptors with which this process can write to the pipe."""
    found = []
    pipe = os.fstat(reader)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor with which the directory was read
            if int(name) != reader and os.path.samestat(os.fstat(int(name)), pipe):
                found.append(int(name))
    return found


def _pass_on(source: int, target: int) -> bool:
    """Writes what can be read now. Returns whether that was all that will ever come."""
    for _ in range(_READS):  # there may be no end of it
        try:
            data = os.read(source, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            return True
        while data:
            try:
                data = data[os.write(target, data) :]
            except BlockingIOError:  # another process has made the console non-blocking
                writable(target)
    return False


def _pass_all_on(source: int, target: int) -> None:
    with contextlib.suppress(OSError):
        while not _pass_on(source, target):
            readable(source)
