"""What of a script's directory is one checkpoint of the run, and which step it is. Pure.

The newest of each series belongs to it: a script that resumes may need what it saved beside the newest. What counts is
what changed since the last one; a step is a number that the script gave it, or one more than the last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dalsegno.elastic.checkpoint import SavedAs

from .foreign import COUNTED, FILES, Unit
from .layouts import Complete, FileState
from .naming import goes_on_from, series_of

__all__ = ["Behind", "Latest", "SaveSlice", "choose", "names_it", "newest_number", "number_given"]


@dataclass(frozen=True)
class SaveSlice:
    """Parts of a script's directory that are one checkpoint of the run.

    Attributes:
        units: all its parts; `changed` are those that are new.
        step: for the manifest.
        newest: what was saved last.
        numbers: of the series of all parts, as far as they have numbers.
    """

    units: tuple[Complete, ...]
    changed: tuple[Complete, ...]
    step: int
    newest: Complete
    numbers: tuple[tuple[str, int | None], ...]

    @property
    def below(self) -> str:
        """The directory whose files lie at the checkpoint's top; "": they keep their paths."""
        # Loaders of these frameworks look at the top of `DALSEGNO_RESUME_DIR`, and so does the conversion.
        return self.newest.unit.path if self.newest.unit.layout in COUNTED else ""

    @property
    def files(self) -> tuple[FileState, ...]:
        return tuple(file for unit in self.units for file in unit.files)

    @property
    def strategy(self) -> str:
        """The parts' own if they agree."""
        names = {unit.strategy for unit in self.units}
        return names.pop() if len(names) == 1 else "files"

    @property
    def any_world_size(self) -> bool:
        return all(unit.any_world_size for unit in self.units)

    @property
    def sure(self) -> bool:
        """Whether rules say that nothing is missing; otherwise only that nothing changes says so."""
        return all(unit.sure for unit in self.units)

    def saved_as(self, links: Mapping[str, str]) -> SavedAs:
        """For the manifest; with links that lead to its parts.

        Args:
            links: of the whole directory.
        """
        unit = self.newest.unit
        if self.below:
            return SavedAs(self.below, unit.path, self.numbers)
        newest = goes_on_from(unit.names) if unit.layout == FILES and unit.number is None else ""
        there = {unit.unit.path for unit in self.units} | {file.name for file in self.files}
        own = [link for unit in self.units for link in unit.links]
        found = [(name, target) for name, target in sorted(links.items()) if target in there and name not in there]
        return SavedAs("", newest or unit.path, self.numbers, (*found, *own))


@dataclass(frozen=True)
class Behind:
    """The script saved something with a lower number than the resume point has: it began anew."""

    unit: Unit


@dataclass(frozen=True)
class Latest:
    """What was taken last in this epoch, of a layout that counts steps in each name.

    Attributes:
        series: its own.
        written: see `Complete`.
    """

    series: str
    written: int

    def follows(self, one: Complete) -> bool:
        """Whether it was written behind another one of such a layout, whose number is of another series."""
        return one.unit.layout in COUNTED and one.unit.series != self.series and one.written < self.written


def choose(
    units: Sequence[Complete],
    known: Mapping[str, FileState],
    numbers: Mapping[str, int | None],
    resumed: Mapping[str, int | None],
    found: Mapping[str, int],
    last: int,
    anew: Collection[str] = (),
    latest: Latest | None = None,
) -> SaveSlice | Behind | None:
    """What becomes the run's next checkpoint; None: nothing is new.

    Args:
        units: the newest complete one of each series.
        known: files as they were taken last, or put there from the resume point.
        numbers: of each series, as taken in this epoch.
        resumed: of each series, as the resume point has it.
        found: numbers that were read from the files of units without a number in their name, by path.
        last: the last step of the run.
        anew: paths of those that are known to be newer than the resume point, although their numbers are not larger.
        latest: what was taken last in this epoch, if it counts steps.
    """
    changed = [one for one in units if any(known.get(file.name) != file for file in one.files)]
    new: list[tuple[Complete, int | None]] = []
    for one in changed:
        unit = one.unit
        number = found.get(unit.path) if unit.number is None else unit.number
        taken, before = numbers.get(unit.series), resumed.get(unit.series)
        if unit.path in anew:
            before = None
        if number is not None and before is not None and taken is None and number < before:
            return Behind(unit)
        if latest is not None and latest.follows(one):
            continue
        least = taken if taken is not None else before
        # The same name again is the same step. A directory may get its rest later; files would be a unit that grows.
        has_rest = taken is not None and unit.layout != FILES and one.has_more(known)
        same = number == least and (unit.number is None or has_rest)
        if number is None or least is None or number > least or same:
            new.append((one, number))
    if not new:
        return None
    newest, number = max(new, key=lambda pair: (pair[0].written, pair[1] or 0))
    if newest.unit.layout in COUNTED:
        units = changed = [newest]
    step = number if number is not None and number > last else last + 1
    every = {one.unit.series: one.unit.number for one in units}
    every |= {one.unit.series: found[one.unit.path] for one in units if one.unit.path in found}
    return SaveSlice(tuple(units), tuple(changed), step, newest, tuple(sorted(every.items())))


def newest_number(series: str, numbers: Mapping[str, int | None], last: int) -> int:
    """The number up to which names of a series have nothing new; -1: there is nothing that they could be behind.

    Args:
        series: its names count steps, or passes over the data, from 0 or from 1.
        numbers: of each series that the run has. What has none there is taken to count the run's steps.
        last: the last step of the run; 0: it has none.
    """
    number = numbers.get(series)
    if number is not None:
        return number
    return last if last > 0 else -1


def number_given(saved_as: SavedAs) -> int | None:
    """The number that the script gave what it saved last, in its name or in its file; None: it gave none.

    Where several files were saved last, it is that of all parts, if they agree.
    """
    numbers = dict(saved_as.numbers)
    if (number := numbers.get(series_of(saved_as.newest))) is not None:
        return number
    every = {number for number in numbers.values() if number is not None}
    return every.pop() if len(every) == 1 else None


def names_it(text: str, units: Iterable[Complete], directory: str) -> bool:
    """Whether a note names a checkpoint: by its name, its path, or its number."""
    words = set()
    for one in units:
        for path in (one.unit.path, *one.unit.names):
            words |= {path, path.rpartition("/")[2], f"{directory}/{path}", f"./{path}"}
        if one.unit.number is not None:
            words.add(str(one.unit.number))
    return text.strip() in words
