"""Settings that a script keeps beside its data, and cannot load it without: `config.json`, SpeechBrain's `CKPT.yaml`.

They are no checkpoint: nothing is taken because one of them is new or has changed.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from dalsegno.elastic.checkpoint.layout import MANIFEST

from .foreign import FILES, FoundUnits, Unit
from .layouts import FileState
from .naming import number_of
from .present import states_of
from .slices import SaveSlice

__all__ = ["Beside"]

# The most of them in one directory for one checkpoint: where there are more, they are a data set, or what the script
# makes of one.
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

    def look(self, found: FoundUnits, units: Iterable[Unit], *, interrupted: bool) -> None:
        """Looks once more.

        Args:
            found: all that is in the script's directory.
            units: what of it a checkpoint may have soon. Settings of other numbers are not looked at: some scripts
                never delete any.
            interrupted: nobody writes any more, so one look is enough.
        """
        places = {_place(name) for unit in found.units if unit.layout == FILES for name in unit.names}
        numbers = _numbers_of(units)
        names: defaultdict[str, list[str]] = defaultdict(list)
        for name in found.settings:
            if _place(name) in places and name != MANIFEST and _number(name) in numbers[_place(name)]:
                names[_place(name)].append(name)
        every = {one.name: one for own in names.values() if len(own) <= _MOST_FILES for one in _small(self._root, own)}
        self._still = {name: one for name, one in every.items() if interrupted or self._seen.get(name) == one}
        self._seen = every

    def of(self, piece: SaveSlice) -> tuple[FileState, ...]:
        """Those that lie with files of a checkpoint, and have its number or none."""
        numbers = _numbers_of(one.unit for one in piece.units)
        return tuple(one for name, one in self._still.items() if _number(name) in numbers[_place(name)])


def _numbers_of(units: Iterable[Unit]) -> defaultdict[str, set[int | None]]:
    """Those that settings in each directory may have. Of files that are written in turn the unit has none."""
    numbers: defaultdict[str, set[int | None]] = defaultdict(lambda: {None})
    for unit in units:
        if unit.layout == FILES:
            for name in unit.names:
                numbers[_place(name)] |= {unit.number, _number(name)}
    return numbers


def _place(name: str) -> str:
    return name.rpartition("/")[0]


def _number(name: str) -> int | None:
    return number_of(name.rpartition("/")[2])


def _small(root: Path, names: Iterable[str]) -> list[FileState]:
    """How these files are; of those that are too large together, the smallest."""
    small: list[FileState] = []
    with contextlib.suppress(OSError):
        left = _MOST_BYTES
        for one in sorted(states_of(root, names), key=lambda one: (one.size, one.name)):
            left -= one.size
            if left >= 0:
                small.append(one)
    return small
