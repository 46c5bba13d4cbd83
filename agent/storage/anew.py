"""Scripts whose names count anew after a resume, as Accelerate's examples do behind their first data epoch.

They resume from `step_80` and save `step_30` next, which is step 90. By its name alone it could as well be the save of
a script that has loaded nothing. What it holds can tell: the count of its scheduler goes on from the resume point's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from dalsegno.elastic.checkpoint.errors import printable

from .foreign import COUNTED, FILES, Unit
from .headers import count_in
from .layouts import Complete, FileState, state_of
from .naming import series_of
from .present import files_of
from .taking import Before

__all__ = ["Resumed"]


class Resumed:
    """The resume point, beside which an epoch's new checkpoints are seen.

    Args:
        root: the script's directory.
        before: it, and its files where they were put below `root`; None: there is none that a script had saved.
    """

    def __init__(self, root: Path, before: Before | None) -> None:
        self._root, self._before = root, before
        self._placed: Mapping[str, FileState] = before.files if before is not None else {}
        self._told = False

    def beside(self, members: list[Unit], *, taken: bool) -> list[Unit]:
        """The members of one series, without the resume point's own copy where there is or was anything else.

        Args:
            members: the newest come first.
            taken: one of this series was taken in this epoch.
        """
        # Files may be parts of several ranks, or be written in turn: `slots` looks at all of them.
        plain = not self._placed or members[0].layout in (*COUNTED, FILES) or members[0].number is None
        if plain or (len(members) == 1 and not taken):
            return members
        return [unit for unit in members if not self._is_copy(unit)]

    def how_anew(self, one: Complete) -> str:
        """For people, once: what happens to a script whose names count anew, and what that means."""
        if self._told or self._before is None:
            return ""
        self._told = True
        return (
            f"the script counts anew since it resumed: {printable(one.unit.path)} comes behind "
            f"{printable(self._before.saved_as.newest)}, as its scheduler shows, and is taken. A script that finds its "
            "place in the data by that name goes on at another place when it resumes: have it count on"
        )

    def went_on(self, one: Complete) -> bool:
        """Whether a checkpoint was made behind the resume point, whatever the numbers in their names are."""
        if self._before is None or one.unit.layout in COUNTED:
            return False
        then = self._of_series(one.unit.series)
        mine = {os.path.relpath(file.name, one.unit.path): file.name for file in one.files}
        counters = [name for name in mine if "scheduler" in name.rpartition("/")[2].lower()]
        counts = [(_count(then / name), _count(self._root / mine[name])) for name in counters] if then else []
        return bool(counts) and all(old is not None and new is not None and old < new for old, new in counts)

    def _of_series(self, series: str) -> Path | None:
        """The resume point's checkpoint of a series of directories."""
        assert self._before is not None
        top, below = self._before.directory, self._before.saved_as.below
        for where, directories, _ in os.walk(top):
            for name in directories:
                path = Path(where, name)
                if series_of(os.path.join(below, path.relative_to(top))) == series:
                    return path
        return None

    def _is_copy(self, unit: Unit) -> bool:
        files = files_of(self._root, unit)
        return bool(files) and all(self._placed.get(file.name) == file for file in files)


def _count(path: Path) -> int | None:
    """What a scheduler's file counts; None: it is not there, or counts nothing."""
    try:
        (state,) = state_of(path.parent, [path.name])
        return _count_in(path, state)
    except OSError:
        return None


@lru_cache(maxsize=64)
def _count_in(path: Path, state: FileState) -> int | None:
    return count_in(path)
