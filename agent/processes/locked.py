"""Locks (flock) on files and directories that their owner holds while it lives, and that others remove behind it.

Whoever gets such a lock may have got that of what was removed meanwhile, while somebody else has made another one. So
each time it is looked whether the path still leads there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

__all__ = ["held", "is_at", "lock_of"]


def lock_of(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor that holds the lock of what this user has there.

    Args:
        flags: how it is opened.

    Raises:
        BlockingIOError: somebody else holds it.
        OSError: it is a link, another user's, or gone.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_uid != os.geteuid() or not is_at(descriptor, path):
            raise FileNotFoundError(errno.ENOENT, "it is not there any more, or another user's", os.fspath(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def held(path: str | os.PathLike[str], flags: int) -> Iterator[int]:
    """Holds the lock meanwhile. Raises as `lock_of`."""
    descriptor = lock_of(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_at(descriptor: int, path: str | os.PathLike[str]) -> bool:
    """Whether a path, itself and no link, still leads to what is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
