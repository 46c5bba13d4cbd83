"""Where memory checkpoints lie: `<root>/<job>/<id>/`, one directory for each agent process, which goes with it.

Anybody may make a directory below /dev/shm, so the root is believed only if it is ours and closed to all others. An
agent holds a lock (flock) on its directory as long as it lives. What nobody holds was left behind, and is removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from dalsegno.elastic.checkpoint.reading import size_below
from dalsegno.protos.text import is_component

from ..processes.locked import held, is_at, lock_of
from ..processes.mounts import file_system_of

__all__ = ["Leftover", "MemoryPlace", "NoMemoryError", "default_root", "remove_leftovers"]

SHARED_MEMORY = Path("/dev/shm")
# What Docker gives a container that asks for nothing, in bytes: not enough for any model.
DOCKERS = 64 << 20
HELP = (
    "give the container more (`docker run --shm-size=32g`; in Kubernetes an emptyDir with `medium: Memory`, mounted at"
    " /dev/shm)"
)
_IN_MEMORY = ("tmpfs", "ramfs")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
# Other agents that start sweep, too, and may take what was made just now for left behind.
_TRIES = 8

logger = logging.getLogger(__name__)


class NoMemoryError(Exception):
    """There can be no memory checkpoints here: one line that says why, and what to change."""


@dataclass(frozen=True)
class Leftover:
    """The directory of an agent that is gone, and what was in it in bytes."""

    path: Path
    size: int


def default_root() -> Path:
    """Where this user's agents have their memory.

    Raises:
        NoMemoryError: there is no shared memory here.
    """
    if not SHARED_MEMORY.is_dir():
        raise NoMemoryError(f"there is no {SHARED_MEMORY} here; mount a tmpfs there")
    kind = file_system_of(SHARED_MEMORY)
    if kind and kind not in _IN_MEMORY:
        raise NoMemoryError(f"{SHARED_MEMORY} is no memory here, but {kind}; mount a tmpfs there")
    return root_of_user()


def root_of_user() -> Path:
    """Its name, whether or not it is there."""
    return SHARED_MEMORY / f"dalsegno-{os.geteuid()}"


def remove_leftovers(root: Path) -> list[Leftover]:
    """Removes what agents that are gone have left below `root`; tells what it was. Living ones keep theirs.

    Raises:
        NoMemoryError: `root` is not ours alone.
    """
    found: list[Leftover] = []
    if not os.path.lexists(root):
        return found
    _check_ours(root)
    for job in _directories(root):
        for path in _directories(job):
            with contextlib.suppress(OSError), held(path, _DIRECTORY):
                found.append(Leftover(path, size_below(path, OSError)))
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            job.rmdir()  # unless another agent of the job lives
    return found


class MemoryPlace:
    """The directory of this agent process; made, locked, and removed by `close`.

    Args:
        root: made if need be; its owner's alone.
        job_id: one path component.

    Raises:
        NoMemoryError: it cannot be had.
    """

    def __init__(self, root: Path, job_id: str) -> None:
        if not is_component(job_id):
            raise NoMemoryError(f"{job_id!r} is no name of a directory: give another --job-id")
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise NoMemoryError(f"{root} cannot be made: {error.strerror or error}") from error
        # No link in any path from here on.
        root = self._root = Path(os.path.realpath(root.parent)) / root.name
        _check_ours(root)
        size = _bytes(root, "f_blocks")
        if size <= DOCKERS:
            raise NoMemoryError(f"{root.parent} has only {size >> 20} MiB in all; {HELP}")
        for left in remove_leftovers(root):
            logger.info("removed what an agent that is gone has left: %s, %d MB", left.path, left.size // 1_000_000)
        with contextlib.suppress(FileNotFoundError):  # Another agent of the job may have just gone.
            _check_ours(root / job_id)
        try:
            self.path, self._lock = _make_below(root / job_id)
        except OSError as error:
            raise NoMemoryError(f"{root} cannot be written: {error.strerror or error}") from error

    def run(self, run_id: str) -> Path:
        """A run's directory, whether or not it is there.

        Raises:
            ValueError: `run_id` is not one path component.
        """
        if not is_component(run_id):
            raise ValueError(f"not a run id: {run_id!r}")
        return self.path / run_id

    def stand(self) -> bool:
        """Makes the directory again if somebody has deleted it, as a cleaner of /dev/shm may. Whether that was so.

        Raises:
            NoMemoryError: the root is somebody else's by now.
            OSError: it cannot be made.
        """
        # Ranks that write just then make another directory of that name, which nobody has locked.
        if self._lock < 0 or is_at(self._lock, self.path):
            return False
        self._root.mkdir(mode=0o700, exist_ok=True)
        _close(self._root)
        _check_ours(self._root)
        _, lock = _make_below(self.path.parent, self.path.name)
        os.close(self._lock)
        self._lock = lock
        return True

    def free_bytes(self) -> int:
        """What its file system has left."""
        return _bytes(self.path, "f_bavail")

    def close(self) -> None:
        """Removes it. Safe to repeat."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()  # unless another agent of the job lives


def _make_below(job: Path, name: str = "") -> tuple[Path, int]:
    for _ in range(_TRIES):
        path = job / (name or secrets.token_hex(8))
        try:
            job.mkdir(mode=0o700, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=bool(name))
            descriptor = lock_of(path, _DIRECTORY)
        except (FileNotFoundError, BlockingIOError):
            continue  # swept away meanwhile
        return path, descriptor
    raise OSError(errno.EBUSY, "others remove it while it is made", str(job))


def _close(root: Path) -> None:
    """Closes a directory that this user has made for all to read, as ranks do that write where a cleaner was."""
    found = os.lstat(root)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        os.chmod(root, 0o700)


def _check_ours(root: Path) -> None:
    found = os.lstat(root)
    if not stat.S_ISDIR(found.st_mode):
        raise NoMemoryError(f"{root} is a link or a file: delete it, the agent makes a directory of its own")
    if found.st_uid != os.geteuid():
        raise NoMemoryError(
            f"{root} belongs to user {found.st_uid}, this agent is user {os.geteuid()}: whoever made it must delete it"
        )
    if found.st_mode & 0o077:
        raise NoMemoryError(
            f"{root} is open to others (mode {stat.S_IMODE(found.st_mode):o}): `chmod 700` it if nobody else has"
            " written there, else delete it"
        )


def _directories(path: Path) -> list[Path]:
    """No links among them."""
    try:
        with os.scandir(path) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _bytes(path: Path, blocks: str) -> int:
    found = os.statvfs(path)
    # A tmpfs without a limit says that it has no blocks at all.
    return int(getattr(found, blocks)) * found.f_frsize if found.f_blocks else sys.maxsize
