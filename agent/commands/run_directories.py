"""Where the commands that look at checkpoints find the runs that a person means, and how they say what they found."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from dalsegno.elastic.checkpoint import is_checkpoint_name
from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.protos.options import UsageError, no_directory

from ..decisions.events import EXIT_FAILED, EXIT_FINISHED

__all__ = ["run_directories", "say"]


def say(text: str) -> None:
    """Prints one line, whatever characters the names of directories contain."""
    print(printable(text))


def run_directories(directory: Path, *, follow: bool = True) -> tuple[list[Path], int]:
    """The run directories that a person may mean: the directory itself, or those one or two levels below.

    Args:
        directory: As the person gave it.
        follow: Also follow links below it. False: a link that leads out of it is reported and skipped.

    Returns:
        The directories, and the exit code so far: what cannot be read is reported, and the others count.
    """
    if problem := no_directory(directory):
        raise UsageError(problem)
    found, code = [], EXIT_FINISHED
    level = [directory]
    for depth in range(3):
        below = []
        for candidate in level:
            if depth and not follow and candidate.is_symlink():
                if directory.resolve() not in candidate.resolve().parents:
                    code = EXIT_FAILED
                    say(f"{candidate}: it is a link out of {directory}: nothing was deleted there")
                continue
            try:
                names = sorted(os.listdir(candidate))
            except OSError as error:
                code = EXIT_FAILED
                say(f"{candidate}: it cannot be read: {error.strerror}")
                continue
            if any(is_checkpoint_name(name) for name in names):
                found.append(candidate)
            others = [candidate / name for name in names if not name.startswith(".") and not is_checkpoint_name(name)]
            directories, closed = _directories(others)
            below += directories
            if closed is not None:
                code = EXIT_FAILED
                say(f"{closed.filename}: it cannot be looked at: {closed.strerror}")
        level = below
    return found, code


def _directories(paths: Sequence[Path]) -> tuple[list[Path], OSError | None]:
    """Those that are directories, and why one could not be looked at. Links that lead nowhere are passed over."""
    found: list[Path] = []
    closed: OSError | None = None
    for path in paths:
        try:
            if stat.S_ISDIR(os.stat(path).st_mode):
                found.append(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                closed = closed or error
    return found, closed
