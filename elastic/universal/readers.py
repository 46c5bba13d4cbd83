"""Says of a checkpoint that a conversion reads it, so that `checkpoints prune` leaves it alone.

A converter holds a shared lock (flock) on the manifest, or on the directory where there is none, as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ..checkpoint import MANIFEST, is_checkpoint_name
from .errors import EnvironmentFailed

# How often a lock is asked for that somebody has for a moment, and what lies between.
_TRIES, _PAUSE_SECONDS = 20, 0.05


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Holds the checkpoint that ``path`` is, or lies in, meanwhile. Nothing is held where there is none, or no locks.

    Raises:
        EnvironmentFailed: It is just being deleted.
    """
    place = Path(os.path.realpath(path))
    checkpoint = next((one for one in (place, *place.parents) if is_checkpoint_name(one.name)), None)
    with contextlib.ExitStack() as held:
        if checkpoint is not None:
            manifest = checkpoint / MANIFEST
            with contextlib.suppress(OSError):
                descriptor = _open(manifest if os.path.isfile(manifest) else checkpoint, os.O_RDONLY)
                held.callback(os.close, descriptor)
                if not _shares(descriptor):
                    raise EnvironmentFailed(f"{checkpoint} is just being deleted, or looked at for that")
        yield


def _shares(descriptor: int) -> bool:
    """Takes the lock, for which whoever asks `is_read` has it for a moment, too. False: it stays taken."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE_SECONDS)  # why: a lock that is waited for without a limit may never come
        else:
            return True
    return False


def is_read(directory: Path) -> bool:
    """Whether a living conversion reads the checkpoint ``directory``."""
    for path in (directory / MANIFEST, directory):
        # Network file systems grant an exclusive lock only on what is open for writing, which a directory cannot be.
        for access in (os.O_RDWR, os.O_RDONLY):
            try:
                descriptor = _open(path, access)
            except OSError:
                continue  # none, or it cannot be written
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:
                pass  # no locks, and then nobody can tell
            finally:
                os.close(descriptor)
            break
    return False


def _open(path: Path, access: int) -> int:
    return os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
