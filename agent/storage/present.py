"""How the files of a script are that are there just now; it may delete any of them meanwhile."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from dalsegno.elastic.checkpoint.reading import is_there

from .foreign import Unit
from .layouts import FileState, state_of

__all__ = ["extent_of", "files_of", "may_be_there", "size_of", "states_of"]


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where it is gone."""
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def may_be_there(path: Path) -> bool:
    """Whether something is there, for all that anybody can tell."""
    try:
        return is_there(path)
    except OSError:
        return True


def extent_of(root: Path, unit: Unit) -> tuple[int, int]:
    """Files and bytes of a unit."""
    every = files_of(root, unit)
    return len(every), sum(file.size for file in every)


def files_of(root: Path, unit: Unit) -> list[FileState]:
    """Files of a unit that are there, whether or not it is complete."""
    names: Iterable[str] = unit.names or (
        os.path.relpath(os.path.join(where, name), root)
        for where, _, names in os.walk(root / unit.path)
        for name in names
    )
    return states_of(root, names)


def states_of(root: Path, names: Iterable[str]) -> list[FileState]:
    """How those are that are there."""
    found: list[FileState] = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            found += state_of(root, [name])
    return found
