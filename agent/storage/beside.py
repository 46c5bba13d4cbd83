"""Settings that a script keeps beside its data, and cannot load it without: `config.json`, SpeechBrain's `CKPT.yaml`.

They are no checkpoint: nothing is taken because one of them is new or has changed.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from dalsegno.elastic.checkpoint.layout import MANIFEST

from .foreign import FILES, FoundUnits
from .layouts import FileState
from .naming import number_of
from .present import states_of
from .slices import SaveSlice

__all__ = ["Beside"]

# The most of them in one directory: where there are more, they are a data set, or what the script makes of one.
_MOST_FILES = 64
# The most bytes of one, and of all in one directory. Tokenizers of large vocabularies have 33 MB.
_MOST_BYTES = 64 << 20


class Beside:
    """Looks at them once for each look at the script's directory. What did not change since then is not being written.

    Args:
        root: the script's directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[str, FileState] = {}
        self._still: dict[str, FileState] = {}

    def look(self, found: FoundUnits, *, interrupted: bool) -> None:
        """Looks once more.

        Args:
            found: all that is in the script's directory.
            interrupted: nobody writes any more, so one look is enough.
        """
        places = {_place(name) for unit in found.units if unit.layout == FILES for name in unit.names}
        names: defaultdict[str, list[str]] = defaultdict(list)
        for name in found.settings:
            if _place(name) in places and name != MANIFEST:
                names[_place(name)].append(name)
        every = {one.name: one for own in names.values() if len(own) <= _MOST_FILES for one in _small(self._root, own)}
        self._still = {name: one for name, one in every.items() if interrupted or self._seen.get(name) == one}
        self._seen = every

    def of(self, piece: SaveSlice) -> tuple[FileState, ...]:
        """Those that lie with files of a checkpoint, and have its number or none."""
        numbers: defaultdict[str, set[int | None]] = defaultdict(lambda: {None})
        for one in piece.units:
            if one.unit.layout == FILES:
                for name in one.unit.names:
                    numbers[_place(name)].add(one.unit.number)
        return tuple(one for name, one in self._still.items() if _number(name) in numbers.get(_place(name), ()))


def _place(name: str) -> str:
    return name.rpartition("/")[0]


def _number(name: str) -> int | None:
    return number_of(name.rpartition("/")[2])


def _small(root: Path, names: Iterable[str]) -> list[FileState]:
    """How these files are; none if they are too large together."""
    with contextlib.suppress(OSError):
        found = [one for one in states_of(root, names) if one.size <= _MOST_BYTES]
        if sum(one.size for one in found) <= _MOST_BYTES:
            return found
    return []
