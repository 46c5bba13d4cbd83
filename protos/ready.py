"""Waits for a file descriptor, whatever its number: `select.select` refuses those from 1024 on.

A process that has raised its limit of open files, or was started by one that has many open, gets such numbers.
"""

from __future__ import annotations

import math
import select

__all__ = ["first_readable", "readable", "writable"]


def readable(fd: int, seconds: float | None = None) -> bool:
    """Whether something can be read within so many seconds (None: it waits), even if it is only the end."""
    return bool(_poll((fd,), select.POLLIN, seconds))


def writable(fd: int, seconds: float | None = None) -> bool:
    """Whether something can be written within so many seconds (None: it waits), even if it is only refused."""
    return bool(_poll((fd,), select.POLLOUT, seconds))


def first_readable(*fds: int) -> set[int]:
    """Waits until something can be read from one of them; returns which."""
    return _poll(fds, select.POLLIN, None)


def _poll(fds: tuple[int, ...], event: int, seconds: float | None) -> set[int]:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, event)
    return {fd for fd, _ in poll.poll(None if seconds is None else math.ceil(seconds * 1000))}
