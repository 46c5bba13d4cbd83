"""What the file system says of a path, as of a store's, which may lie on a mount that fails for the moment."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ("is_directory", "is_wrong")

# A path that is closed to this user, too long, or a link to itself: a person names another one.
_WRONG = frozenset({errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP})


def is_directory(path: Path) -> bool:
    """Whether a directory is there, also through links.

    Unlike `Path.is_dir` it says no in no version of Python where nobody can tell.

    Raises:
        OSError: Nobody can tell.
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_wrong(error: OSError) -> bool:
    """Whether it is the path that cannot be looked at; all else (a stale handle, a server that is away) passes."""
    return error.errno in _WRONG
