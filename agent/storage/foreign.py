"""Finds what a script saved below its directory: which files are one checkpoint, and which of its parts is the newest.

Only names are read here; nothing is opened, no link is followed. `layouts` tells what is complete.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.elastic.checkpoint.errors import printable

from .naming import counts_progress, is_data, is_setting, matches, number_of, series_of, unversioned

__all__ = [
    "ACCELERATE",
    "COUNTED",
    "DEEPSPEED",
    "DIRECTORY",
    "DISTCP",
    "FILES",
    "MOST_ENTRIES",
    "NOTE_BYTES",
    "OURS",
    "TRANSFORMERS",
    "FoundUnits",
    "TooMany",
    "Unit",
    "shown",
    "survey",
]

DEEPSPEED, TRANSFORMERS, ACCELERATE, DISTCP = "deepspeed", "transformers", "accelerate", "torch-distributed"
DIRECTORY, FILES = "directory", "files"
# Layouts with a number of steps in each name, and nothing beside their directories that a script would need.
COUNTED = (DEEPSPEED, TRANSFORMERS)
# The most entries that are looked at, and the most directories in each other.
MOST_ENTRIES = 100_000
DEEPEST = 12
# Of directories that differ in a number only, so many of the largest numbers are looked into: a run of weeks keeps
# thousands, and only the newest counts. More than `adoption.MOST_MEMBERS`.
NEWEST = 32
# What names of ours in the script's directory begin with.
OURS = ".dalsegno"
# The most bytes of a note, which names a checkpoint.
NOTE_BYTES = 4096

_GLOBAL_STEP = re.compile("global_step[0-9]{1,15}")
_CHECKPOINT = re.compile("checkpoint-[0-9]{1,15}")
_STATES = re.compile(r".*_(?:model|optim)_states\.pt")
_OF_TRAINER = re.compile(r"trainer_state\.json|training_args\.bin|rng_state(_[0-9]{1,9})?\.pth")
_RANDOM_STATES = re.compile(r"random_states_[0-9]{1,9}\.pkl")
_DISTCP_FILE = re.compile(r"__[0-9]{1,9}_[0-9]{1,9}\.distcp")
# Nothing but digits, and no step: a date, also with a time behind it, or seconds since 1970.
_TIME = re.compile(r"20[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])[0-9]*|[1-9][0-9]{9,}")
_CHECKPOINT_FILE = re.compile("checkpoint|ckpt")
_KEPT = re.compile(r"(?<![a-z])(?:best|last|latest)(?![a-z])")


@dataclass(frozen=True)
class Unit:
    """One checkpoint in the script's directory, or one of several things that make it up.

    Attributes:
        path: a directory, or the only file, relative to the script's directory; of several files the directory that
            they are in.
        series: the same for the same unit of other steps.
        layout: one of this module's names.
        number: the number in its name that says how far the training was.
        names: of `FILES`, the files, relative to the script's directory.
        together: of `FILES`, each rank saved one of them.
    """

    path: str
    series: str
    layout: str
    number: int | None = None
    names: tuple[str, ...] = ()
    together: bool = False


@dataclass
class FoundUnits:
    """What is below a script's directory.

    Attributes:
        units: all that may be checkpoints, or parts of one.
        links: links and what they lead to, both relative to the script's directory; those that lead out are not here.
        notes: small files, which may name a checkpoint: `latest`, `latest_checkpointed_iteration.txt`.
        other: other files, which are nobody's checkpoint.
        settings: those of them that may be needed to load one; none where a pattern says what is one.
    """

    units: list[Unit] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)

    def series(self) -> list[list[Unit]]:
        """The units of each series, newest first. Where there are checkpoints that count steps, only these."""
        counted = [unit for unit in self.units if unit.layout in COUNTED]
        by_series: dict[str, list[Unit]] = {}
        for unit in counted or self.units:
            by_series.setdefault(unit.series, []).append(unit)
        every = by_series.values()
        return [sorted(units, key=lambda one: (one.number or 0, one.path), reverse=True) for units in every]


class TooMany(ValueError):
    """More files than can be looked at every second."""


def survey(directory: Path, pattern: str = "") -> FoundUnits:
    """Looks at all names below a script's directory.

    Args:
        directory: the script's directory.
        pattern: only what matches is a checkpoint (`--checkpoint-glob`); empty: what looks like one.

    Raises:
        TooMany: there is too much.
        OSError: the file system says no.
    """
    walk = _Walk(directory, pattern)
    walk.place("", 0)
    return walk.found


@dataclass
class _Names:
    directories: list[str] = field(default_factory=list)
    files: list[os.DirEntry[str]] = field(default_factory=list)


class _Walk:
    def __init__(self, root: Path, pattern: str) -> None:
        self._root, self._pattern = root, pattern
        self._left = MOST_ENTRIES
        self.found = FoundUnits()

    def place(self, where: str, depth: int) -> None:
        """A directory that holds checkpoints, or directories with such."""
        self._place(where, self._scan(where), depth)

    def _place(self, where: str, names: _Names, depth: int) -> None:
        for name in _newest(names.directories):
            if depth < DEEPEST and not name.startswith((".", "__pycache__")) and name != "wandb":
                self._directory(f"{where}{name}", depth + 1)
        data: dict[str, int] = {}
        for entry in names.files:
            path = f"{where}{entry.name}"
            if matches(self._pattern, path) if self._pattern else is_data(entry.name) and not _is_note(entry):
                data[path] = _written(entry)
            elif _is_note(entry):
                self.found.notes.append(path)
            elif not entry.name.startswith("."):
                self.found.other.append(path)
                if not self._pattern and is_setting(entry.name):
                    self.found.settings.append(path)
        if not self._pattern and _layout("", names) in (ACCELERATE, DISTCP):
            # The script's directory itself, or another without a number: what numbers there are, are of ranks.
            every = [*data, *(path for path in (f"{where}.metadata",) if os.path.lexists(self._root / path))]
            self.found.units.append(Unit(where.rstrip("/") or ".", f"{where}*", FILES, None, tuple(sorted(every))))
        else:
            self.found.units += _files(where, data)

    def _directory(self, path: str, depth: int) -> None:
        name = path.rpartition("/")[2]
        names = self._scan(f"{path}/")
        chosen = bool(self._pattern) and matches(self._pattern, path)
        layout = _layout(name, names)
        number = number_of(name, directory=True)
        if not layout and not chosen and _is_place(name, names):
            number = None
        if not layout and (chosen or (number is not None and self._has_data(path, names))):
            layout = DIRECTORY
        if layout == DEEPSPEED and number is None and name.startswith("global_step"):
            return  # no number that anybody counts to
        if layout and (chosen or not self._pattern):
            self.found.units.append(Unit(path, series_of(path) if number is not None else path, layout, number))
        else:
            self._place(f"{path}/", names, depth)

    def _has_data(self, path: str, names: _Names) -> bool:
        """Whether there is data in it, or one directory below (`step_5/model/…`, `5/mp_rank_00/…`)."""
        if any(is_data(entry.name) and not _is_note(entry) for entry in names.files):
            return True
        return any(
            is_data(entry.name) and not _is_note(entry)
            for below in names.directories
            for entry in self._scan(f"{path}/{below}/").files
        )

    def _scan(self, where: str) -> _Names:
        names = _Names()
        try:
            with os.scandir(self._root / where) as entries:
                for entry in entries:
                    self._left -= 1
                    if self._left < 0:
                        raise TooMany(
                            f"there are more than {MOST_ENTRIES:,} files there, so nothing that the script saves is "
                            "taken: have it save to a directory of its own, or delete old ones"
                        )
                    self._sort(names, entry, where)
        except FileNotFoundError:
            if not where:
                raise
            # The script has deleted it meanwhile.
        return names

    def _sort(self, names: _Names, entry: os.DirEntry[str], where: str) -> None:
        if entry.name.startswith(OURS):
            return
        if entry.is_symlink():
            target = os.path.normpath(os.path.join(self._root, where, os.readlink(entry.path)))
            inside = os.path.relpath(target, self._root)
            if inside != "." and not inside.startswith(".."):
                self.found.links[f"{where}{entry.name}"] = inside
        elif entry.is_dir(follow_symlinks=False):
            names.directories.append(entry.name)
        elif entry.is_file(follow_symlinks=False):
            names.files.append(entry)


def _newest(directories: Sequence[str]) -> list[str]:
    """Those without a number, and of each series those with the largest numbers."""
    series: dict[str, set[int]] = {}
    numbers = {name: number_of(name, directory=True) for name in directories}
    for name, number in numbers.items():
        if number is not None:
            series.setdefault(series_of(name), set()).add(number)
    newest = {key: set(heapq.nlargest(NEWEST, own)) for key, own in series.items()}
    return [name for name, number in numbers.items() if number is None or number in newest[series_of(name)]]


def _is_place(name: str, inside: _Names) -> bool:
    """Whether a directory that is named by the time is no checkpoint: what is in it are several, or a best one.

    Numbers of files that are not named for progress or checkpoints may be those of ranks (`model_0.pt`).
    """
    if not _TIME.fullmatch(name):
        return False
    data = [entry.name for entry in inside.files if is_data(entry.name)]
    numbers = (number_of(one, directory=True) for one in inside.directories)
    return any(number is not None for number in numbers) or any(map(_is_checkpoint, data))


def _is_checkpoint(file: str) -> bool:
    of_its_own = counts_progress(file) or (_CHECKPOINT_FILE.match(file.lower()) and number_of(file) is not None)
    return bool(of_its_own or _KEPT.search(file.lower()))


def _is_note(entry: os.DirEntry[str]) -> bool:
    if "." in entry.name and not entry.name.endswith(".txt"):
        return False
    try:
        return entry.stat(follow_symlinks=False).st_size <= NOTE_BYTES
    except FileNotFoundError:
        return False


def _written(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:
        return 0


def _layout(name: str, names: _Names) -> str:
    files = [entry.name for entry in names.files]
    if _GLOBAL_STEP.fullmatch(name) or any(_STATES.fullmatch(one) for one in files):
        return DEEPSPEED
    if _CHECKPOINT.fullmatch(name) and any(_OF_TRAINER.fullmatch(one) for one in files):
        return TRANSFORMERS
    if any(_RANDOM_STATES.fullmatch(one) for one in files):
        return ACCELERATE
    if ".metadata" in files or any(_DISTCP_FILE.fullmatch(one) for one in files):
        return DISTCP
    return ""


def _files(where: str, data: Mapping[str, int]) -> list[Unit]:
    """Files of one directory: those of one series and number together, and all without a number together.

    Args:
        where: the directory.
        data: when each file was written. Of the versions of one file only the newest counts.
    """
    newest: dict[str, str] = {}
    for path in sorted(data, key=lambda path: (data[path], path)):
        newest[unversioned(path)] = path
    groups: dict[tuple[str, int | None], list[str]] = {}
    for path, file in newest.items():
        number = number_of(path.rpartition("/")[2])
        series = f"{where}*" if number is None else series_of(path)
        groups.setdefault((series, number), []).append(file)
    return [
        Unit(names[0] if len(names) == 1 else where.rstrip("/") or ".", series, FILES, number, tuple(sorted(names)))
        for (series, number), names in groups.items()
    ]


def shown(paths: Iterable[str], most: int = 3) -> str:
    """Some paths, for people."""
    every = list(paths)
    text = ", ".join(printable(path) for path in every[:most])
    return text if len(every) <= most else f"{text} and {len(every) - most} more"
