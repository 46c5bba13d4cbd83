"""One agent's own place for sockets and shared memory of DLRover's classes, and its removal.

The file `<run's name>_ckpt_shm_owner` in shared memory and the directory of sockets are the claim. Their owner holds a
lock on each while it lives. Both are taken, because containers may share one of the two places.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import stat
from itertools import count
from pathlib import Path

from ..processes.keeper import remove_files
from ..processes.lifeline import Lifeline
from ..processes.locked import held, is_at, lock_of
from .names import SHARED_MEMORY, SOCKETS, run_name, segments, sockets

__all__ = ["NameClaim", "sweep"]

# Agents of one job on one machine.
_MOST = 1000
_OWNER = "_ckpt_shm_owner"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


class NameClaim:
    """The first name that no agent has: a directory of sockets, and the beginning of segments' names.

    Args:
        job_id: the job's.

    Raises:
        OSError: nothing can be made there, or others could put sockets of their own in the place of ours; one line.
    """

    def __init__(self, job_id: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(SOCKETS)
            # Real DLRover of other users makes directories of its own there.
            os.chmod(SOCKETS, 0o1777)
        _make_sticky()
        if why := _unsafe(os.lstat(SOCKETS)):
            raise PermissionError(why)
        for number in count():
            self.name = run_name(job_id, number)
            try:
                self._owner, self._directory = _take(self.name)
                return
            except (FileExistsError, FileNotFoundError, BlockingIOError):
                # It belongs to an agent that lives, or somebody is just cleaning up there.
                if number > _MOST:
                    raise

    def leave_to(self, lifeline: Lifeline) -> None:
        """Has the keeper remove all that stands under the name, if this agent cannot, and while nobody else has it."""
        lifeline.add_claim(Path(_owner_of(self.name)), Path(sockets(self.name)), segments(self.name))

    def close(self) -> None:
        """Removes all that stands under the name, as far as it is still ours."""
        if is_at(self._directory, str(sockets(self.name))):
            shutil.rmtree(sockets(self.name), ignore_errors=True)
        if is_at(self._owner, _owner_of(self.name)):
            remove_files(segments(self.name), _owner_of(self.name))
        os.close(self._directory)
        os.close(self._owner)


def sweep() -> list[str]:
    """Removes what agents of this user have left whose keepers were killed with them. Returns their names."""
    found = []
    is_safe = os.path.lexists(SOCKETS) and not _unsafe(os.lstat(SOCKETS))
    for name in (file.removesuffix(_OWNER) for file in _names_in(str(SHARED_MEMORY)) if file.endswith(_OWNER)):
        with contextlib.suppress(OSError), held(_owner_of(name), os.O_RDWR):
            if is_safe:
                _remove_sockets(name)
            remove_files(segments(name), _owner_of(name))
            found.append(name)
    for name in _names_in(str(SOCKETS)) if is_safe else ():
        # A power cut empties shared memory, and not this directory.
        if not os.path.lexists(_owner_of(name)) and _remove_sockets(name, without_owner=True):
            found.append(name)
    return found


def _make_sticky() -> None:
    """DLRover's own classes make it as the umask says, so perhaps without the bit. Only whoever owns it may."""
    found = os.lstat(SOCKETS)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and found.st_mode & 0o022:
        os.chmod(SOCKETS, stat.S_IMODE(found.st_mode) | stat.S_ISVTX)


def _unsafe(found: os.stat_result) -> str:
    """Why nobody may have sockets there, in one line that says what to do; empty: one may. The path is DLRover's."""
    if not stat.S_ISDIR(found.st_mode):
        return f"{SOCKETS}, where DLRover's classes look for their sockets, is a link or a file: delete it"
    if found.st_uid not in (0, os.geteuid()):
        return (
            f"{SOCKETS}, where DLRover's classes look for their sockets, belongs to user {found.st_uid}, who could put"
            f" others there that run code in this job: have root own it, `chown root: {SOCKETS}; chmod 1777 {SOCKETS}`,"
            " which disturbs nobody, or give this job a /tmp of its own"
        )
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        return (
            f"{SOCKETS}, where DLRover's classes look for their sockets, can be changed by all users (mode"
            f" {stat.S_IMODE(found.st_mode):o}), who could put others there: `chmod +t {SOCKETS}`"
        )
    return ""


def _owner_of(name: str) -> str:
    return f"{SHARED_MEMORY}/{name}{_OWNER}"


def _take(name: str) -> tuple[int, int]:
    """Makes both places. Returns the descriptors that hold their locks."""
    path = _owner_of(name)
    unnamed = f"{path}-{secrets.token_hex(8)}"
    owner = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            # Locked before it has its name: nobody who sweeps takes it for left behind.
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.link(unnamed, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unnamed)
        try:
            # No other user may enter: DLRover speaks pickle there.
            os.mkdir(sockets(name), 0o700)
            return owner, lock_of(str(sockets(name)), _DIRECTORY)
        except OSError:
            os.unlink(path)
            raise
    except OSError:
        os.close(owner)
        raise


def _remove_sockets(name: str, *, without_owner: bool = False) -> bool:
    """Removes a directory of sockets that no agent of this user holds. Whether it did.

    Args:
        without_owner: nothing says that an agent made it, but that only its user may enter, and that there are sockets
            at which nobody listens. Its memory goes, too, before anybody else can have the name.
    """
    path = str(sockets(name))
    try:
        with held(path, _DIRECTORY) as directory:
            if without_owner:
                closed = stat.S_IMODE(os.fstat(directory).st_mode) == 0o700
                # Without sockets it may be that of an agent that begins, in a container with another shared memory.
                if not closed or not os.listdir(path) or _is_heard(path):
                    return False
                remove_files(segments(name), _owner_of(name))
            shutil.rmtree(path)
            return True
    except OSError:
        return False


def _is_heard(directory: str) -> bool:
    """Whether anybody listens on a socket there."""
    for name in os.listdir(directory):
        # Of another type, so that whoever listens does not hear of it.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            try:
                asking.connect(f"{directory}/{name}")
            except (ConnectionRefusedError, FileNotFoundError):
                continue
            except OSError:
                pass
            return True
    return False


def _names_in(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
