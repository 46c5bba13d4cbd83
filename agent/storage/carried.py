"""What a script has not saved again since it resumed: each new checkpoint of the run has it, too.

A script that reads its resume point among the run's own begins each epoch with an empty directory. What it saves
seldom, such as the best model, does not come again for long, or never. Its copy goes on from one checkpoint to the
next, as a hard link: otherwise it would be lost with the last checkpoint from before the resume.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePosixPath

from dalsegno.elastic.checkpoint import CheckpointDamaged

from .foreign import FILES, Unit, goes_together, is_plain, survey
from .layouts import Complete, complete
from .naming import goes_on_from, slot_of
from .present import files_of
from .slices import KeptUnits, SaveSlice
from .taking import Before

__all__ = ["CarriedOn", "key_of"]

logger = logging.getLogger(__name__)


def key_of(unit: Unit, name: str) -> str:
    """The same text for a file and for what replaces it when the script saves again.

    Args:
        unit: what it is a part of.
        name: the file's.
    """
    return slot_of(name) if is_plain(unit) and not goes_together(unit.names) else unit.series.removesuffix("*")


class CarriedOn:
    """What of the resume point is still to be carried on in an epoch.

    Args:
        before: the resume point, or the epoch's last checkpoint; None: nothing.
        pattern: `--checkpoint-glob`.
    """

    def __init__(self, before: Before | None, pattern: str = "") -> None:
        self._before = before if before is not None and before.away and not before.saved_as.below else None
        self._pattern = pattern
        self._units: tuple[Complete, ...] | None = None

    def beside(self, piece: SaveSlice) -> SaveSlice:
        """A new checkpoint with all that the script has not saved again."""
        if self._before is None or piece.below:
            return piece
        if self._units is None:
            self._units = self._found(self._before)
        own = {key_of(one.unit, file.name) for one in piece.units for file in one.files}
        taken = _places(file.name for file in piece.files)
        kept = tuple(rest for one in self._units if (rest := _without(one, own, taken)) is not None)
        if not kept:
            return piece
        series = {one.unit.series.removesuffix("*") for one in kept}
        mine = {name for name, _ in piece.numbers}
        numbers = [
            (name, number)
            for name, number in self._before.saved_as.numbers
            if name not in mine and name.removesuffix("*") in series
        ]
        there = {one.unit.path for one in kept} | {file.name for one in kept for file in one.files}
        links = [
            (name, target) for name, target in self._before.saved_as.links if target in there and name not in taken
        ]
        units = {one: _beside(one, kept) for one in piece.units}
        return replace(
            piece,
            units=tuple(units.values()),
            changed=tuple(units[one] for one in piece.changed),
            newest=units[piece.newest],
            kept=KeptUnits(kept, tuple(numbers), tuple(links)),
        )

    def took(self, piece: SaveSlice) -> None:
        """This is the run's now. What the script has saved again is its own: it may delete it."""
        if self._before is not None and not piece.below:
            self._units = piece.kept.units

    def _found(self, before: Before) -> tuple[Complete, ...]:
        found = []
        try:
            for unit in survey(before.directory, self._pattern).units:
                one = _whole(before, unit)
                if all(file.name in before.away for file in one.files):
                    found.append(one)
                elif is_plain(unit):
                    found.append(_only(one, [file.name for file in one.files if file.name in before.away]))
        except (OSError, ValueError) as error:
            logger.warning("not all of %s is carried on: %s", before.directory.name, error)
        return tuple(one for one in found if one.files)


def _whole(before: Before, unit: Unit) -> Complete:
    """A unit of a sealed checkpoint. It may be carried on since a world of another size."""
    with contextlib.suppress(ValueError, CheckpointDamaged):  # by another layout's rules than when it was taken
        for size in (before.world_size, 1):
            if isinstance(one := complete(before.directory, unit, size), Complete):
                return one
    return Complete(unit, "files", True, tuple(files_of(before.directory, unit)))


def _places(names: Iterable[str]) -> set[str]:
    """These, and the directories that they are in."""
    return {str(place) for name in names for place in (PurePosixPath(name), *PurePosixPath(name).parents)} - {"."}


def _without(one: Complete, own: set[str], taken: set[str]) -> Complete | None:
    """What is left of a unit where the script has saved again what has these keys, at these places."""
    left = [file.name for file in one.files if key_of(one.unit, file.name) not in own]
    free = [name for name in left if name not in taken]
    if not free or (len(free) < len(one.files) and not is_plain(one.unit)):
        return None
    return one if len(free) == len(one.files) else _only(one, free)


def _only(one: Complete, names: list[str]) -> Complete:
    unit = replace(one.unit, path=names[0] if len(names) == 1 else one.unit.path, names=tuple(names))
    return replace(one, unit=unit, files=tuple(file for file in one.files if file.name in names))


def _beside(one: Complete, kept: Iterable[Complete]) -> Complete:
    """The same; it is not sure to be complete if it is a checkpoint only together with what is carried on.

    Of a model and an optimizer, only one may be there yet.
    """
    if one.unit.layout != FILES or not is_plain(one.unit):
        return one
    others = [name for other in kept if other.unit.series == one.unit.series for name in other.unit.names]
    return replace(one, sure=False) if others and not goes_on_from((*one.unit.names, *others)) else one
