"""One agent's own place for sockets and shared memory of DLRover's classes, and its removal."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from itertools import count

from .names import SOCKETS, run_name, segments, sockets

__all__ = ["claim", "remove"]

# Agents of one job on one machine.
_MOST = 1000


def claim(job_id: str) -> str:
    """Takes the first name that no agent has: its directory of sockets, and the beginning of its segments' names.

    Both are taken, because containers may share one of the two places. Whatever is there stays: it belongs to an agent
    that lives, or that its keeper is just cleaning up after.

    Returns:
        The run's name for DLRover's classes. The directory can be entered by this user alone.

    Raises:
        OSError: nothing can be made there.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(SOCKETS)
        # Other users make directories of their own there.
        os.chmod(SOCKETS, 0o1777)
    for number in count():
        name = run_name(job_id, number)
        try:
            os.close(os.open(f"{segments(name)}owner", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            if number > _MOST:
                raise
            continue
        try:
            os.mkdir(sockets(name), 0o700)
        except FileExistsError:
            os.unlink(f"{segments(name)}owner")
            if number > _MOST:
                raise
            continue
        return name
    raise AssertionError("unreachable")


def remove(name: str) -> None:
    """Removes all that stands under the name, the claim last."""
    for path in sorted(glob.glob(f"{glob.escape(segments(name))}*"), key=lambda path: path.endswith("owner")):
        with contextlib.suppress(OSError):
            os.unlink(path)
    shutil.rmtree(sockets(name), ignore_errors=True)
