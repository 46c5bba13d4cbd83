"""File descriptors: as many as the system gives, most for connections, a few that the store never has to ask for."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Iterator

__all__ = ("HTTP_CONNECTIONS", "Reserve", "are_exhausted", "connections_left", "raise_limit")

# More than any job has agents; where the hard limit is "unlimited", the tables of the kernel are not.
MOST = 1 << 16
# What the process itself uses: libraries that it loads late, the log, the store, listening sockets, gRPC's wake-ups.
OWN = 128
# Of the HTTP edge: people, and a scraper or two. As many again are being ended while new ones come.
HTTP_CONNECTIONS = 128
# Fewer make no job; it is then the limit that has to be raised.
LEAST = 32


def raise_limit() -> None:
    """Raises the soft limit to the hard one. A shell's soft limit is often 1024: fewer than a job has agents."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # A container may forbid it; then the soft limit is what there is.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_left() -> int:
    """How many connections of agents leave enough descriptors for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)
    return max(LEAST, limit - OWN - 2 * HTTP_CONNECTIONS)


def are_exhausted() -> bool:
    """Whether this process, or the machine, has none left at this moment."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


class Reserve:
    """Descriptors that are held for somebody who must be able to open files when nobody else can. Thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: list[int] = []
        self._lock = threading.Lock()
        self._fill()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """They are free inside, for one caller at a time. What cannot be taken again is taken the next time."""
        with self._lock:
            self._let_go()
            try:
                yield
            finally:
                self._fill()

    def close(self) -> None:
        """Lets go of them for good; safe to repeat."""
        with self._lock:
            self._let_go()

    def _fill(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._held) < self._size:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _let_go(self) -> None:
        while self._held:
            os.close(self._held.pop())
