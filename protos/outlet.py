"""The way to a terminal. The terminal may stop reading or go away, and that must not hold writers up."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections import deque

from .ready import writable

__all__ = ["Outlet"]

# The most bytes that wait to be read, and that one write takes.
_CAPACITY_BYTES = 1 << 20
_PIECE_BYTES = 4096
_UNREAD = "nobody read them"

logger = logging.getLogger(__name__)


class Outlet:
    """Writes to a descriptor on a thread of its own, in order. What finds no room is dropped and counted.

    So is what a file system does not take: the next piece is tried again.

    Args:
        fd: the descriptor; it stays open. None: write nowhere.
        name: the program's name, before the line that says how much was dropped.
    """

    def __init__(self, fd: int | None, name: str = "dlrover-run") -> None:
        self._fd = fd
        self._name = name
        self._changed = threading.Condition()
        # With the number of lines that are missing where one is not written.
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._size_bytes = 0
        # Bytes written so far, which tell whether somebody reads.
        self._written = 0
        self._dropped = 0
        self._why = _UNREAD
        # Nobody reads; only a caller that could wait has found that out.
        self._stalled = False
        self._gone = fd is None
        if fd is not None:
            threading.Thread(target=self._write_all, name="outlet", daemon=True).start()

    def put(self, data: bytes, patience_seconds: float = 0.0) -> bool:
        """Queues some whole lines. False: they were dropped.

        Args:
            data: what to write.
            patience_seconds: how long to wait for room while not a byte is read. After one such wait in vain
                nothing waits any more, until somebody reads again.
        """
        with self._changed:
            if patience_seconds and not self._stalled and not self._room(len(data), patience_seconds):
                self._stalled = True
            if self._gone:
                return False
            if self._size_bytes and self._size_bytes + len(data) > _CAPACITY_BYTES:
                self._dropped += data.count(b"\n") or 1
                return False
            self._waiting.append((data, data.count(b"\n") or 1))
            self._size_bytes += len(data)
            self._changed.notify_all()
            return True

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until everything is written, at most `timeout_seconds`. False: not within them."""
        # A thread that hangs may hold the lock.
        if not self._changed.acquire(timeout=timeout_seconds):
            return False
        try:
            return self._changed.wait_for(lambda: self._gone or not self._size_bytes, timeout_seconds)
        finally:
            self._changed.release()

    def _room(self, size: int, patience_seconds: float) -> bool:
        """Waits for room as long as anything is read; the caller holds the lock."""
        seen, deadline = self._written, time.monotonic() + patience_seconds
        while self._size_bytes and self._size_bytes + size > _CAPACITY_BYTES and not self._gone:
            if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                return False
            if self._written != seen:
                seen, deadline = self._written, time.monotonic() + patience_seconds
        return True

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data, lines = self._waiting.popleft()
            try:
                self._write(data)
            except OSError as error:
                if self._is_over(error):
                    logger.info("nobody sees what is written to the console any more: %s", error)
                    with self._changed:
                        self._gone = True
                        self._waiting.clear()
                        self._changed.notify_all()
                    return
                self._drop(lines, error)
            else:
                self._note_dropped()

    def _is_over(self, error: OSError) -> bool:
        """Whether nothing can be shown any more: the reader or the terminal is gone. A disk has room again later."""
        assert self._fd is not None
        if error.errno != errno.EIO:
            return error.errno in (errno.EPIPE, errno.EBADF)
        # A terminal that has hung up answers isatty() with no.
        return stat.S_ISCHR(os.fstat(self._fd).st_mode)

    def _drop(self, lines: int, error: OSError) -> None:
        """Counts what could not be written. Without a line in a log, which may be what is written here."""
        with self._changed:
            self._dropped += lines
            self._why = error.strerror or str(error)
            self._size_bytes = sum(len(data) for data, _ in self._waiting)
            self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        """Writes, blocking, in pieces that show whether anybody reads."""
        assert self._fd is not None
        view = memoryview(data)
        while view:
            try:
                written = os.write(self._fd, view[:_PIECE_BYTES])
            except BlockingIOError:
                # Another process that shares the terminal may have made it non-blocking.
                writable(self._fd)
                continue
            view = view[written:]
            with self._changed:
                self._written += written
                self._size_bytes -= written
                self._changed.notify_all()

    def _note_dropped(self) -> None:
        with self._changed:
            if self._waiting or not (self._dropped or self._stalled):
                return
            dropped, self._dropped, self._stalled = self._dropped, 0, False
            if dropped:
                why, self._why = self._why, _UNREAD
                line = f"{self._name}: warning: {dropped} lines are not shown here: {why}\n".encode()
                self._waiting.append((line, dropped))
                self._size_bytes += len(line)
