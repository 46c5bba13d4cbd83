"""Deleting checkpoints, and nothing but: no link is ever followed, whatever lies in a run's directory."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

from .errors import CheckpointDamaged
from .layout import MANIFEST, SHARDED
from .manifest import Manifest
from .marks import unmark
from .spares import keep_retired

log = logging.getLogger(__name__)


def delete(directory: Path, *, replaced: bool = False) -> None:
    """Deletes one checkpoint's directory. Nothing happens if it is gone already.

    Mark and manifest go first. So what an interrupted deletion leaves is not sealed, and nobody misses it. A link to a
    directory is removed itself; what it points to stays.

    Args:
        directory: The checkpoint's.
        replaced: A newer one counts: the next one may be written over its files, see `spares`. (Not over what a
            script without a session has written: nobody would ever take these.)

    Raises:
        OSError: The file system refused a deletion; this is the first such error. Everything else is deleted.
    """
    if os.path.islink(directory):
        directory.unlink(missing_ok=True)
        log.warning("%s was a link: what it leads to stays", directory)
        return
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    files, gone = _written_here(directory) if replaced else [], False
    try:
        unmark(directory)
        # It was never sealed, is gone already, or is no file at all: then there is no seal either.
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(MANIFEST, dir_fd=descriptor)
            os.fsync(descriptor)
            gone = True
    finally:
        os.close(descriptor)
    # Its seal is gone for good, so nobody takes what is written there for its own. (Not known where another process has
    # just removed it.)
    if gone and files:
        keep_retired(directory.parent, directory, files)
    failures: list[BaseException] = []

    def failed(function: object, path: str, failure: tuple[type[BaseException], BaseException, object]) -> None:
        # Another process deleted this first.
        if not issubclass(failure[0], FileNotFoundError):
            failures.append(failure[1])

    # Goes on after a failure. It also fails where somebody has meanwhile put a link in place of a directory.
    shutil.rmtree(directory, onerror=failed)
    if failures:
        raise failures[0]


def _written_here(directory: Path) -> list[str]:
    """The files of a checkpoint that the session has written itself."""
    try:
        manifest = Manifest.read(directory)
    except (CheckpointDamaged, OSError, ValueError):
        return []
    if manifest.form != SHARDED or manifest.saved_as is not None:
        return []
    return [entry.path for entry in manifest.files]


def is_held_open(directory: Path) -> bool:
    """Whether this process has a file open or mapped that lies below it, or lay there; True where nobody can say."""
    below = os.path.join(os.path.realpath(directory), "")
    try:
        numbers = os.listdir("/proc/self/fd")
        mapped = Path("/proc/self/maps").read_bytes()
    except OSError:
        return True
    if os.fsencode(below) in mapped:
        return True
    for number in numbers:
        with contextlib.suppress(OSError):  # closed by now
            if os.readlink(f"/proc/self/fd/{number}").startswith(below):
                return True
    return False
