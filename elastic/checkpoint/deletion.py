"""Deleting checkpoints, and nothing but: no link is ever followed, whatever lies in a run's directory."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

from .layout import MANIFEST

log = logging.getLogger(__name__)


def delete(directory: Path) -> None:
    """Deletes one checkpoint's directory; one that is not there is done already.

    The manifest goes first, so that what an interrupted deletion leaves is not sealed. Of a link to a directory the
    link goes, and what it leads to stays.

    Raises:
        OSError: The file system refused, in the first place where it did; all else is gone.
    """
    if os.path.islink(directory):
        directory.unlink(missing_ok=True)
        log.warning("%s was a link: what it leads to stays", directory)
        return
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        # Never sealed, gone already, or no file at all, and then no seal either.
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(MANIFEST, dir_fd=descriptor)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    failures: list[BaseException] = []

    def failed(function: object, path: str, failure: tuple[type[BaseException], BaseException, object]) -> None:
        # Another deleter was quicker: what it took is gone as wanted.
        if not issubclass(failure[0], FileNotFoundError):
            failures.append(failure[1])

    # Goes on after what fails; where a link was put in the place of a directory meanwhile, that fails too.
    shutil.rmtree(directory, onerror=failed)
    if failures:
        raise failures[0]
