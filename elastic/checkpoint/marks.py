"""What was sealed once: an empty file of a checkpoint's name beside it, in ``.sealed``.

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

# Nothing there, or something else: a file, a link.
_NONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def mark(directory: Path) -> None:
    """Notes that ``directory`` is sealed. Where that cannot be, it is done without."""
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
    """What is left of ``directory`` from here on was deleted on purpose.

    Raises:
        OSError: The file system says no.
    """
    with _opened(directory.parent) as marks, contextlib.suppress(FileNotFoundError):
        if marks is not None:
            os.unlink(directory.name, dir_fd=marks)


def marked(run_dir: Path) -> frozenset[str]:
    """Names of all that was sealed in a run's directory and not deleted since.

    Raises:
        OSError: They cannot be read.
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
