"""Numbers in the names of files that count no steps: those of ranks, and of files that are written in turn.

`model_0.pt` and `model_1.pt` may be the parts of two ranks; `ckpt_0.pt` and `ckpt_1.pt` the last two saves. Then the
largest number is not the newest checkpoint, and the same number again is another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from .foreign import FILES, Unit
from .layouts import FileState, is_torn, number_of_file, state_of
from .naming import counts_progress, number_of

__all__ = ["Slots"]

# The most files of a series that are looked at.
_MOST_MEMBERS = 16
# Behind the name of a series whose numbers do not count: another series than if they did.
_UNCOUNTED = "*"


class Slots:
    """What one epoch's directory shows of this.

    Args:
        root: the script's directory.
        world_size: of the epoch.
        resumed: the series of the resume point.
        files: those of it that are in the directory.
    """

    def __init__(
        self, root: Path, world_size: int, resumed: Iterable[str] = (), files: Iterable[FileState] = ()
    ) -> None:
        self._root, self._world_size = root, world_size
        self._in_turn = {series.removesuffix(_UNCOUNTED) for series in resumed if series.endswith(_UNCOUNTED)}
        self._of_ranks: set[str] = set()
        # As it was taken last, and the number in it.
        self._taken: dict[str, tuple[FileState, int | None]] = {}
        self.took(files)

    def took(self, files: Iterable[FileState]) -> None:
        """These are the run's now."""
        for file in files:
            if number_of(file.name.rpartition("/")[2]) is not None:
                self._taken[file.name] = file, self._number_in(file.name)

    def arrange(self, members: list[Unit]) -> list[Unit]:
        """The members of one series, the newest first.

        Args:
            members: the same by their numbers.

        Raises:
            OSError: one is gone meanwhile.
        """
        series = members[0].series
        if members[0].layout != FILES or members[0].number is None:
            return members
        if self._are_of_ranks(members):
            names = tuple(sorted(name for one in members for name in one.names))
            where = names[0].rpartition("/")[0] or "."
            return [Unit(where, series + _UNCOUNTED, FILES, None, names, together=True)]
        if any(self._was_written_again(one) for one in members[:_MOST_MEMBERS]):
            self._in_turn.add(series)
        if series not in self._in_turn:
            return members
        written = {one.path: max(file.written for file in state_of(self._root, one.names)) for one in members}
        newest = sorted(members, key=lambda one: written[one.path], reverse=True)
        return [replace(one, series=series + _UNCOUNTED, number=None) for one in newest]

    def _are_of_ranks(self, members: list[Unit]) -> bool:
        """Whether there is one for each rank, and what is in them does not say that they are several checkpoints."""
        size, numbers = self._world_size, sorted(one.number or 0 for one in members)
        if size < 2 or numbers not in (list(range(size)), list(range(1, size + 1))):
            return False
        series = members[0].series
        if any(counts_progress(name.rpartition("/")[2]) for name in members[0].names):
            return False
        if series not in self._of_ranks and len({self._number_in(name) for one in members for name in one.names}) == 1:
            self._of_ranks.add(series)
        return series in self._of_ranks

    def _was_written_again(self, unit: Unit) -> bool:
        """Whether it is another checkpoint now under the same name, and not the same one, saved twice."""
        taken: Mapping[str, tuple[FileState, int | None]] = self._taken
        again = [name for name in unit.names if name in taken and state_of(self._root, [name])[0] != taken[name][0]]
        for name in again:
            if not is_torn(self._root / name):
                number = self._number_in(name)
                if number is None or number != taken[name][1]:
                    return True
        return False

    def _number_in(self, name: str) -> int | None:
        try:
            return number_of_file(self._root / name)
        except OSError:
            return None
