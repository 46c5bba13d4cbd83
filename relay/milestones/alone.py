"""One process at a time for a part of the volume, as far as its file system has locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ("alone",)

_LOOK_SECONDS = 2.0


@contextlib.contextmanager
def alone(path: Path, waits: Callable[[], None]) -> Iterator[bool]:
    """Waits until no other process is in it. A process that is killed has left it.

    Args:
        path: the lock's file; its directory is made.
        waits: says, once, that this one waits.

    Yields:
        Whether locks hold here. False: on a volume without them nobody waits.

    Raises:
        OSError: the file cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield _taken(descriptor, waits)
    finally:
        os.close(descriptor)


def _taken(descriptor: int, waits: Callable[[], None]) -> bool:
    said = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not said:
                waits()
            said = True
            time.sleep(_LOOK_SECONDS)  # why: flock has no deadline, and a signal must end this
        except OSError:
            return False
