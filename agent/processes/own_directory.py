"""Private directories for temporary files, and the removal of those whose process is gone.

The process removes its own, and the keeper that of an agent that was killed. If the keeper is gone as well (all
processes killed at once, a power cut), the next process of this user that comes by does, see `remove_leftovers`.

Who owns one holds a lock (flock) on a file in it. The kernel drops the lock with the process. So nobody asks for a
process id, which may be somebody else's by now, and which means nothing in another PID namespace that shares the
place. A directory without such a file is left alone: nobody can tell whether its owner lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from .locked import held
from .mounts import file_system_of

__all__ = ["claim", "remove_leftovers"]

_OWNER = ".owner"
# Of these no other machine has anything open at the same time. Locks on the others may be each machine's own.
_OF_ONE_MACHINE = ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")

logger = logging.getLogger(__name__)


def claim(directory: Path) -> int | None:
    """Makes this process the owner of a directory of its own, until it ends or closes the descriptor.

    Returns:
        The descriptor; None: there are no locks here, so nobody will take the directory for left behind.
    """
    # Locked before it has its name: nobody sees it without its lock.
    unnamed = directory / f"{_OWNER}-unnamed"
    descriptor = -1
    try:
        descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(unnamed, directory / _OWNER)
    except OSError as error:
        logger.warning("if this process is killed with its keeper, %s stays: %s", directory, error)
        if descriptor >= 0:
            os.close(descriptor)
        return None
    return descriptor


def remove_leftovers(place: Path, prefix: str) -> list[Path]:
    """Removes directories in `place` that are called `prefix`… and were claimed by a process of this user that is gone.

    Returns those that it removed. Whatever cannot be told or removed stays.
    """
    found: list[Path] = []
    if file_system_of(place) not in _OF_ONE_MACHINE:
        return found
    for path in _private(place, prefix):
        with contextlib.suppress(OSError), held(path / _OWNER, os.O_RDWR):
            _remove(path)
            found.append(path)
    return found


def _private(place: Path, prefix: str) -> Iterator[Path]:
    """This user's directories that nobody else can write to; no links."""
    try:
        with os.scandir(place) as entries:
            named = [entry for entry in entries if entry.name.startswith(prefix)]
    except OSError:
        return
    for entry in named:
        with contextlib.suppress(OSError):
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
                yield Path(entry.path)


def _remove(path: Path) -> None:
    """The owner's file last: what is killed in the middle of this is found again."""
    with os.scandir(path) as entries:
        inside = [entry for entry in entries if entry.name != _OWNER]
    for entry in inside:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
    os.unlink(path / _OWNER)
    os.rmdir(path)
