"""Saves of Accelerate's `save_state` that the main process makes alone, as most of diffusers' examples do.

Where all ranks call it, each writes its random states, and one without those of a rank is not complete. Where the main
process calls it alone, those of the others never come. Accelerate loads it without them; a rank that has none counts
from 0 the batches whose gradients it accumulates (`step`). Weights and optimizer are whole, where ranks have no shards
of them: rank 0 writes its own states behind all that is common. The first such save does not show which of the two it
is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from .foreign import ACCELERATE, Unit
from .layouts import Complete, FileState, complete
from .naming import ranks_of
from .taking import Before

__all__ = ["MainAlone", "is_of_another"]

_OF_ANY, _OF_MAIN = "random_states_", "random_states_0.pkl"
# The most saves that are remembered: a script may delete each before the next.
_MOST_SAVES = 16
# Of `torch.distributed.checkpoint`, whose files are named `__0_0`. Others' have the word: `mp_rank_00_model_states.pt`.
_SHARD = ".distcp"


def is_of_another(path: str) -> bool:
    """Whether a file of this path is the random states of another rank than the first."""
    name = path.rpartition("/")[2]
    return name.startswith(_OF_ANY) and name != _OF_MAIN


def _is_sharded(one: Complete) -> bool:
    """Whether ranks have shards of its weights or its optimizer, so that it needs all ranks' files."""
    # Without where it lies: a path with "random" in it counts as no rank's.
    names = [file.name.removeprefix(f"{one.unit.path}/") for file in one.files]
    return bool(ranks_of(names)) or any(name.endswith(_SHARD) for name in names)


class MainAlone:
    """Judges what lacks nothing but the random states of other ranks. Not thread-safe.

    It counts as complete from the second such save on: the main process trained on, so the others are not behind in the
    first one. Or when it has stood for long, or nobody is left who could write more.

    Args:
        root: the script's directory.
        world_size: our workers.
        before: the resume point, and its files where they were put below `root`; None: there is none.
        patience_seconds: how long it must not change.
        others: others were seen to save in this epoch already.
    """

    def __init__(
        self, root: Path, world_size: int, before: Before | None, patience_seconds: float, *, others: bool = False
    ) -> None:
        self._root, self._world_size, self._patience = root, world_size, patience_seconds
        self._placed: Mapping[str, FileState] = before.files if before is not None else {}
        # Whether the main process saves alone, and whether others were seen to save, which outweighs it.
        self._alone, self._others = False, others
        # How each save was at the last look, and since when.
        self._seen: dict[str, tuple[tuple[FileState, ...], float]] = {}
        # By series, the least number of those that were so at two looks, and the largest of all.
        self._stood: dict[str, int] = {}
        self._newest: dict[str, int] = {}

    def judge(self, unit: Unit, found: Complete | str, *, ended: bool) -> Complete | str:
        """What it is, by what else this epoch shows.

        Args:
            unit: a part of the script's directory.
            found: what `complete` says of it.
            ended: the workers have ended, and all that they wrote is listed.

        Raises:
            CheckpointDamaged, ValueError, OSError: see `complete`.
        """
        if unit.layout != ACCELERATE or self._world_size < 2:
            return found
        one = complete(self._root, unit, 1) if isinstance(found, str) else found
        if isinstance(one, Complete) and all(self._placed.get(file.name) == file for file in one.files):
            return one  # as it was taken, in a world of any size
        names = os.listdir(self._root / unit.path)
        self._others = self._others or any(map(is_of_another, names))
        if self._others or isinstance(one, str) or _is_sharded(one):
            return found
        self._alone = self._alone or self._shows(one)
        return one if self._alone or ended else found

    def _shows(self, one: Complete) -> bool:
        """Whether it shows that nobody else saves."""
        now, unit = time.monotonic(), one.unit
        files, since = self._seen.pop(unit.path, ((), now))
        stands = files == one.files
        self._seen[unit.path] = one.files, since if stands else now
        for path in [*self._seen][:-_MOST_SAVES]:
            del self._seen[path]
        if unit.number is not None:
            self._newest[unit.series] = max(unit.number, self._newest.get(unit.series, 0))
            if stands:
                self._stood[unit.series] = min(unit.number, self._stood.get(unit.series, unit.number))
        behind = self._stood.get(unit.series)
        trained_on = behind is not None and behind < self._newest[unit.series]
        return trained_on or (stands and now - since >= self._patience)
