"""A save in several numbered files, as `model_100.pt` and `optimizer_100.pt`: one of them alone is half a checkpoint.

Each is whole by itself, and of a series of its own. So while the second is written the first would be taken with the
second of the save before, and a script that resumes would load both.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from .foreign import FILES, FoundUnits, Unit
from .layouts import FileState, is_torn
from .naming import number_of
from .present import files_of
from .slices import SaveSlice

__all__ = ["Halves", "is_parted"]

# The most notes that are looked at.
_MOST_NOTES = 64
# So many saves, of each of which a half was seen and nothing was taken: the script saves all the time.
_MOST_WAITED_FOR = 3


class Halves:
    """Which units stay incomplete from look to look, and since when they do not change.

    Args:
        root: the script's directory.
        patience_seconds: what does not change for so long is left by its writer.
    """

    def __init__(self, root: Path, patience_seconds: float) -> None:
        self._root, self._patience = root, patience_seconds
        self._before: dict[str, tuple[list[FileState], float]] = {}
        self._now: dict[str, tuple[list[FileState], float]] = {}
        self._units: list[Unit] = []
        # What was waited for since something was taken, and since when.
        self._waited: dict[str, float] = {}

    def begin(self, found: FoundUnits) -> None:
        """A look begins. A file without an ending counts as a note while there is little of it."""
        self._before, self._now, self._units = self._now, {}, []
        for name in found.notes[:_MOST_NOTES]:
            number = number_of(name.rpartition("/")[2])
            with contextlib.suppress(OSError):
                if number is not None and is_torn(self._root / name):
                    self.note(Unit(name, name, FILES, number, (name,)))

    def note(self, unit: Unit) -> None:
        """The newest of its series, which this look found incomplete."""
        files, now = files_of(self._root, unit), time.monotonic()
        before, since = self._before.get(unit.path, ([], now))
        self._now[unit.path] = files, since if before == files else now
        self._units.append(unit)

    def waits(self, piece: SaveSlice) -> bool:
        """Whether a part of the same save lies beside it and is to come, unless its writer is gone."""
        new = {(_place(one.unit), one.unit.number) for one in piece.changed if one.unit.number is not None}
        now = time.monotonic()
        for unit in self._units:
            if (_place(unit), unit.number) in new and now - self._now[unit.path][1] < self._patience:
                self._waited.setdefault(unit.path, now)
                return True
        return False

    def never_end(self) -> bool:
        """Whether the script saves so often that there is a half at every look."""
        since = time.monotonic() - min(self._waited.values(), default=0.0)
        return len(self._waited) >= _MOST_WAITED_FOR and since > self._patience

    def took(self) -> None:
        """Something was taken."""
        self._waited.clear()


def is_parted(piece: SaveSlice, before: Mapping[str, int | None]) -> bool:
    """Whether only some of those that had one number when they were taken last have a newer one: the rest may come.

    Args:
        before: the number of each series then.
    """
    now = {one.unit.series: one.unit.number for one in piece.units}
    beside = [series for series in before if not series.endswith("*") and "best" not in series.lower()]
    return not piece.below and any(
        _folder(series) == _folder(mine) and before[series] == before[mine] and now.get(series) != now[mine]
        for mine in {one.unit.series for one in piece.changed}.intersection(beside)
        for series in beside
    )


def _place(unit: Unit) -> str:
    return _folder(unit.names[0] if unit.layout == FILES else unit.path)


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
