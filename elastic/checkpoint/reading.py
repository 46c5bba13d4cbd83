"""Opens what lies in a checkpoint directory, where anything may lie: pipes, links, files without end.

Nothing here follows a link in the last part of a path, waits for the writer of a pipe, or reads without a bound.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

# Errors that say that nothing is there: no entry, or a file or a link to itself on the way.
NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


class NotRegular(OSError):
    """A link, pipe, device, socket or directory where a file must be."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "it is no regular file", str(path))


def is_directory(path: Path) -> bool:
    """Whether a directory is there, also through links. Unlike `os.path.isdir` it does not say "no" for "unknown".

    Raises:
        OSError: Nobody can tell: the file system fails (ESTALE, EIO, a mount that is away), or forbids it.
    """
    return stat.S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    """Whether a regular file is there, also through links, see `is_directory`.

    Raises:
        OSError: Nobody can tell.
    """
    return stat.S_ISREG(_mode(path))


def is_there(path: Path) -> bool:
    """Whether anything is there, if only a link, see `is_directory`.

    Raises:
        OSError: Nobody can tell.
    """
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return False
    return True


def walk(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk`, which takes a directory that cannot be listed for an empty one, without that.

    Raises:
        OSError: One cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise error

    return os.walk(top, onerror=fail)


def size_below(top: Path, missed: type[OSError] = FileNotFoundError) -> int:
    """Bytes of all files below a directory, where files may come and go; of a link its own.

    Args:
        top: The directory. One that cannot be listed counts as empty.
        missed: A file at which nobody can look does not count, where that is why.

    Raises:
        OSError: Nobody can look at a file for another reason.
    """
    total = 0
    for directory, _, names in os.walk(top):
        for name in names:
            with contextlib.suppress(missed):
                total += os.lstat(os.path.join(directory, name)).st_size
    return total


def _mode(path: Path) -> int:
    """Kind and rights of what is there; 0: nothing is."""
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return 0


def open_regular(path: Path) -> int:
    """A descriptor of a regular file, to be read.

    Raises:
        FileNotFoundError: Nothing is there.
        NotRegular: Something other than a regular file is there.
        OSError: The file system failed in another way.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        # It is a link or a socket. (A loop of links in the directories of the path is ELOOP, too.)
        if (error.errno == errno.ELOOP and os.path.islink(path)) or error.errno == errno.ENXIO:
            raise NotRegular(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular(path)
    return descriptor


def read_regular(path: Path, limit: int) -> bytes:
    """The content of a small regular file.

    Args:
        path: The file.
        limit: The most bytes that it may have.

    Raises:
        ValueError: It has more.
        FileNotFoundError: Nothing is there.
        NotRegular: Something other than a regular file is there.
        OSError: The file system failed in another way.
    """
    with open(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise ValueError(f"it has more than {limit} bytes")
        data = file.read(limit + 1)
    if len(data) > limit:  # it grows
        raise ValueError(f"it has more than {limit} bytes")
    return data


def size_of_regular(path: Path) -> int:
    """Size of a regular file in bytes. The file is not opened.

    Raises:
        FileNotFoundError: Nothing is there.
        NotRegular: Something other than a regular file is there.
        OSError: The file system failed in another way.
    """
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise NotRegular(path)
    return status.st_size
