"""File descriptors: as many as the system gives, most for connections, and a few kept back for the store."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Iterator

__all__ = ("HTTP_CONNECTIONS", "Reserve", "are_exhausted", "connections_left", "raise_limit")

# More than any job has agents. If the hard limit is "unlimited", the kernel's tables still are not.
MOST = 1 << 16
# What the process itself needs: libraries that it loads late, the log, the store, listening sockets, gRPC's wake-ups.
OWN = 128
# Connections of the HTTP edge: people, and a scraper or two. As many again are being closed while new ones come.
HTTP_CONNECTIONS = 128
# With fewer connections no job can run, and the limit must be raised.
LEAST = 32


def raise_limit() -> None:
    """Raises the soft limit to the hard one. A shell's soft limit is often 1024, fewer than a job has agents."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # A container may forbid it; then the soft limit stays.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_left() -> int:
    """The number of agents' connections that leaves enough descriptors for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)
    return max(LEAST, limit - OWN - 2 * HTTP_CONNECTIONS)


def are_exhausted() -> bool:
    """Whether this process, or the machine, has no descriptor left at this moment."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


class Reserve:
    """Descriptors held for code that must be able to open files when nothing else can. Thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: list[int] = []
        self._lock = threading.Lock()
        self._fill()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Frees them inside, for one caller at a time. What cannot be taken back is taken the next time."""
        with self._lock:
            self._let_go()
            try:
                yield
            finally:
                self._fill()

    def close(self) -> None:
        """Releases them for good; safe to repeat."""
        with self._lock:
            self._let_go()

    def _fill(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._held) < self._size:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _let_go(self) -> None:
        while self._held:
            os.close(self._held.pop())
