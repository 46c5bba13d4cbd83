"""Marks of what was sealed once: an empty file with the checkpoint's name in the directory ``.sealed`` beside it.

A save that was given up leaves a directory without a manifest, which is deleted once the run has gone on without it. If
there is a mark, the directory is a checkpoint that has lost its manifest, by accident or by somebody's hand. All its
files may be there, so nobody deletes it unasked. The mark says nothing else; a checkpoint is no less sealed without
one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from .layout import SEALED

log = logging.getLogger(__name__)

# Errors when there is nothing, or something that is no directory: a file, a link.
_NONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def mark(directory: Path) -> None:
    """Notes that ``directory`` is sealed. If that fails, the checkpoint goes without a mark."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory.parent / SEALED)
        with _opened(directory.parent) as marks:
            if marks is not None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                os.close(os.open(directory.name, flags, 0o644, dir_fd=marks))
    except OSError as error:
        log.warning("%s has no mark that it was sealed: %s", directory, error)


def unmark(directory: Path) -> None:
    """Notes that ``directory`` is deleted on purpose, so that its remains are not taken for a damaged checkpoint.

    Raises:
        OSError: The file system failed.
    """
    with _opened(directory.parent) as marks, contextlib.suppress(FileNotFoundError):
        if marks is not None:
            os.unlink(directory.name, dir_fd=marks)


def marked(run_dir: Path) -> frozenset[str]:
    """Names of everything in a run's directory that was sealed and has not been deleted since.

    Raises:
        OSError: The marks cannot be read.
    """
    with _opened(run_dir) as marks:
        return frozenset() if marks is None else frozenset(os.listdir(marks))


@contextlib.contextmanager
def _opened(run_dir: Path) -> Iterator[int | None]:
    try:
        marks = os.open(run_dir / SEALED, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _NONE:
            raise
        yield None
        return
    try:
        yield marks
    finally:
        os.close(marks)
