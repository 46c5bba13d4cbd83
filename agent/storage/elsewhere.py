"""Scripts that take their output directory out of their checkpoint, and save into an earlier epoch's for ever.

YOLO's do: what they resume from has all their arguments. Nothing is taken there, so the run has no checkpoint any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from dalsegno.elastic.checkpoint import CheckpointName

from .foreign import shown, survey
from .layouts import FileState
from .present import files_of
from .taking import Before, save_directory
from .untaken import LARGE_BYTES

__all__ = ["Elsewhere"]

# Seconds between two looks, and how many times what one takes: an earlier epoch may have saved much.
_EVERY_SECONDS = 10.0
_SHARE = 10


class Elsewhere:
    """Looks at the directory in which the resume point was saved, until something is taken in this epoch.

    Args:
        root: the script's directory.
        pattern: `--checkpoint-glob`; empty: none.
        say: prints one line for people.
    """

    def __init__(self, root: Path, pattern: str, say: Callable[[str], None]) -> None:
        self._root, self._pattern, self._say = root, pattern, say
        self._over, self._next = False, 0.0
        # As it was when this epoch began: clocks of a volume need not agree with ours.
        self._first: dict[str, tuple[int, int]] | None = None

    def look(self, before: Before | None) -> None:
        """Says once that the script saves there.

        Args:
            before: what was taken last, in this epoch or as its resume point; None: nothing was.
        """
        began = time.monotonic()
        if self._over or before is None or began < self._next:
            return
        directory = save_directory(self._root.parent, CheckpointName.parse(before.directory.name).epoch)
        self._over = directory == self._root
        now = {} if self._over else self._data(directory)
        ended = time.monotonic()
        self._next = ended + max(_EVERY_SECONDS, _SHARE * (ended - began))
        if self._first is None:
            self._first = {name: _contents(file) for name, file in now.items()}
        large = [file for file in now.values() if file.size >= LARGE_BYTES]
        saved = [file.name for file in large if self._first.get(file.name) != _contents(file)]
        if saved:
            self._over = True
            self._say(
                f"{shown(saved)} was saved into {directory.name}, the directory of an earlier epoch, where nothing is "
                "taken: the script has that path from what it resumed from; it must save below ${save_dir}"
            )

    def _data(self, directory: Path) -> dict[str, FileState]:
        try:
            found = survey(directory, self._pattern)
            return {file.name: file for unit in found.units for file in files_of(directory, unit)}
        except FileNotFoundError:  # it may come again
            return {}
        except (OSError, ValueError):  # what is wrong with an earlier epoch stops nothing
            self._over = True
            return {}


def _contents(file: FileState) -> tuple[int, int]:
    """What changes when it is written. FUSE mounts may give another inode to a file that nobody has touched."""
    return file.size, file.written
