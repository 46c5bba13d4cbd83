"""One agent's own place for sockets and shared memory of DLRover's classes, and its removal.

The file `<run's name>_ckpt_shm_owner` in shared memory is the claim. Its owner holds a lock on it while it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
from itertools import count
from pathlib import Path

from .names import SHARED_MEMORY, SOCKETS, run_name, segments, sockets

__all__ = ["NameClaim", "sweep"]

# Agents of one job on one machine.
_MOST = 1000
_OWNER = "owner"


class NameClaim:
    """The first name that no agent has: a directory of sockets, and the beginning of segments' names.

    Both are taken, because containers may share one of the two places.

    Args:
        job_id: the job's.

    Raises:
        OSError: nothing can be made there.
    """

    def __init__(self, job_id: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(SOCKETS)
            # Other users make directories of their own there.
            os.chmod(SOCKETS, 0o1777)
        for number in count():
            self.name = run_name(job_id, number)
            try:
                self._lock = _take(self.name)
                return
            except (FileExistsError, BlockingIOError):
                # It belongs to an agent that lives, or that its keeper is just cleaning up after.
                if number > _MOST:
                    raise

    def close(self) -> None:
        """Removes all that stands under the name."""
        _remove(self.name)
        os.close(self._lock)


def sweep() -> list[str]:
    """Removes what agents of this user have left whose keepers were killed with them. Returns their names."""
    found = []
    for path in glob.glob(f"{SHARED_MEMORY}/*_ckpt_shm_{_OWNER}"):
        name = Path(path).name.removesuffix(f"_ckpt_shm_{_OWNER}")
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(name)
                    found.append(name)
            finally:
                os.close(lock)
    return found


def _take(name: str) -> int:
    """Makes both places. Returns the lock's descriptor."""
    owner = f"{segments(name)}{_OWNER}"
    lock = os.open(owner, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # No other user may enter: DLRover speaks pickle there.
        os.mkdir(sockets(name), 0o700)
    except OSError:
        os.close(lock)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(owner)
        raise
    return lock


def _remove(name: str) -> None:
    """Removes everything under the name, the claim last."""
    shutil.rmtree(sockets(name), ignore_errors=True)
    for path in sorted(glob.glob(f"{glob.escape(segments(name))}*"), key=lambda path: path.endswith(_OWNER)):
        with contextlib.suppress(OSError):
            os.unlink(path)
