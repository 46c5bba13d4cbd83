"""The private directory of an agent with the socket of its workers, and what to do if somebody deletes it.

It lies among temporary files, which cleaners delete by their age (systemd-tmpfiles after ten days). Whoever has a
connection keeps it, but nobody could make a new one.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from ..processes.own_directory import claim, remove_leftovers
from ..processes.semaphores import remove_semaphores

__all__ = ["SocketPlace", "sweep"]

# How many connections may wait to be accepted; the kernel's own limit is mostly 4096.
_BACKLOG = 4096
# Length of sun_path of unix(7), without the closing zero.
_MAX_PATH = 107
_SOCKET = "agent.sock"
_PREFIX = "dalsegno-"
# Where the socket goes if TMPDIR is too long a path.
_SHORT_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")

logger = logging.getLogger(__name__)


def _private_directory(wanted: Path | None) -> Path:
    """A directory of ours for the socket, with a path short enough for the kernel.

    Raises:
        OSError: there is none; one line that says what to change.
    """
    tried = [str(wanted)] if wanted is not None else [_default_directory(), *_SHORT_DIRECTORIES]
    reasons = []
    for place in filter(None, tried):
        try:
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        except OSError as error:
            reasons.append(f"{place}: {error.strerror or error}")
            continue
        if len(os.fsencode(directory / _SOCKET)) <= _MAX_PATH:
            if left := _remove_leftovers(place):
                logger.info("removed what agents that are gone have left in %s: %d directories", place, len(left))
            return directory
        os.rmdir(directory)
        reasons.append(f"{place}: too long a path")
    raise OSError(f"no place for the socket of the workers ({'; '.join(reasons)}); set TMPDIR to a short, writable one")


def sweep() -> list[Path]:
    """Removes the directories of agents of this user that are gone, and returns them."""
    places = dict.fromkeys(filter(None, (_default_directory(), *_SHORT_DIRECTORIES)))
    return [path for place in places for path in _remove_leftovers(place)]


def _remove_leftovers(place: str) -> list[Path]:
    """And the semaphores of their ranks."""
    found = remove_leftovers(Path(place), _PREFIX)
    for path in found:
        remove_semaphores(path.name)
    return found


def _default_directory() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return ""


class SocketPlace:
    """A directory (0700) for one agent's socket (0600), locked until `close` removes it.

    Args:
        wanted: where it is made; TMPDIR or a shorter one if None.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, wanted: Path | None = None) -> None:
        self.directory = _private_directory(wanted)
        self.path = self.directory / _SOCKET
        self._claim = claim(self.directory)
        # What is at the path, as it was made here.
        self._made: os.stat_result | None = None

    def listen(self) -> socket.socket:
        """A new socket that listens at the path. The directory is made again if it is gone.

        Raises:
            OSError: it cannot be made, or the directory is somebody else's by now; one line that names it.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if self._made is not None:
                self._make_again()
            listener.setblocking(False)
            listener.bind(str(self.path))
            os.chmod(self.path, 0o600)
            listener.listen(_BACKLOG)
            self._made = os.lstat(self.path)
        except OSError as error:
            listener.close()
            raise OSError(
                error.errno, f"no socket for the workers ({error.strerror or error})", str(self.path)
            ) from None
        return listener

    def is_there(self) -> bool:
        """Whether the path leads to what `listen` made last."""
        try:
            return self._made is not None and os.path.samestat(self._made, os.lstat(self.path))
        except OSError:
            return False

    def _make_again(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(self.directory)
        # Anybody could have made one of that name meanwhile.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise OSError(f"{self.directory} was deleted, and is not this user's alone any more: delete it")
        self.path.unlink(missing_ok=True)
        self._unlock()
        self._claim = claim(self.directory)

    def _unlock(self) -> None:
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def close(self) -> None:
        """Removes the directory. Safe to repeat."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self._unlock()
