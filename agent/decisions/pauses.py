"""What a change of the world cost, part by part, computed from the marks of a job's processes. Pure.

A pause goes from the end of a step to the end of a step. A planned one begins with the last step before the change was
noticed, an unplanned one with the last step of the old world. Both end when every rank has made the new world's first
step. Each part ends with the latest mark of its name over all processes, and time is never counted twice. So the parts
are never negative, and their sum is the pause, whatever overlaps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dalsegno.protos.trace import STEP, Mark

__all__ = ("PARTS", "WorldChange", "pauses")

# Marks in the order in which they follow one another; a script may add its own between these.
PARTS = (
    *("noticed", "step finished", "written", "synced", "sealed", "committed", "stopped", "converted", "formed"),
    *("started", "met", "built", "verified", "loaded", "ready", "first step"),
)
# Marks at a worker's beginning that end a part of another name.
_NAMES = {"session": "started"}
_OF_THE_OLD = ("written", "synced", "sealed", "committed", "stopped", "converted")


@dataclass(frozen=True)
class WorldChange:
    """One change of the world.

    Attributes:
        epoch: the epoch to which it led.
        planned: the world before saved and stopped at an agreed step.
        began, ended: seconds of the marks' clock.
        ranks: how many ranks made the first step, as far as they share the clock.
        lost: steps that were made twice.
        parts: seconds of each part, in order; parts without a mark are missing.
        run: the run's id; empty if its marks do not name it.
    """

    epoch: int
    planned: bool
    began: float
    ended: float
    ranks: int
    lost: int
    parts: Mapping[str, float]
    run: str = ""

    @property
    def seconds(self) -> float:
        """The whole pause: the sum of the parts. Negative where the marks of several runs name one."""
        return self.ended - self.began


def pauses(marks: Iterable[Mark]) -> list[WorldChange]:
    """Every change between two worlds that made a step, in order of time, separately for each clock and run."""
    clocks: dict[str, list[Mark]] = {}
    for one in marks:
        clocks.setdefault(one.clock, []).append(one)
    return [pause for _, own in sorted(clocks.items()) for pause in _of_one_clock(own)]


def _of_one_clock(marks: Sequence[Mark]) -> Iterator[WorldChange]:
    began: dict[str, float] = {}
    for one in filter(_is_step, marks):
        began[one.run] = min(one.at, began.get(one.run, one.at))
    for run in sorted(began, key=lambda run: began[run]):
        history = _History(one for one in marks if one.run == run or not (one.run or _is_step(one)))
        for before, after in pairwise(history.epochs):
            yield replace(_pause(history, before, after), run=run)


def _is_step(one: Mark) -> bool:
    return one.name == STEP and one.rank >= 0 and one.epoch > 0


class _History:
    """The marks of one run, found by epoch and by time: there may be thousands of epochs, each with many."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        self._marks = sorted(marks, key=lambda one: one.at)
        self._times = [one.at for one in self._marks]
        self._of: dict[int, list[Mark]] = {}
        for one in self._marks:
            self._of.setdefault(one.epoch, []).append(one)
        # Those that made a step.
        self.epochs = sorted(epoch for epoch, own in self._of.items() if any(map(_is_step, own)))

    def of(self, epoch: int) -> Sequence[Mark]:
        return self._of[epoch]

    def between(self, began: float, ended: float) -> Sequence[Mark]:
        """Those after ``began``, up to ``ended``."""
        return self._marks[bisect_right(self._times, began) : bisect_right(self._times, ended)]


def _pause(history: _History, before: int, after: int) -> WorldChange:
    former = history.of(before)
    old = [one for one in former if _is_step(one)]
    firsts = _firsts(history.of(after))
    last, ended = max(one.at for one in old), max(one.at for one in firsts.values())
    stopping = [one.at for one in former if one.name == "stopping"]
    sealed = any(one.name == "sealed" and _counts(one, before) and last <= one.at <= ended for one in former)
    told = None if stopping else _told(former, last)
    began, ends = last, [("noticed", min(stopping))] if stopping else []
    if told is not None:
        began = max((one.at for one in old if one.at <= told), default=told)
        ends = [("noticed", told), ("step finished", last)]
    during = history.between(began, ended)
    for name in _OF_THE_OLD:
        ends += _latest(name, (one for one in during if one.name == name and _counts(one, before)))
    ends += _latest("formed", (one for one in during if one.name == "formed" and one.epoch == after))
    ends += _beginning(during, firsts)
    ends.append(("first step", ended))
    made = max(one.step for one in old)
    lost = max(0, made + 1 - min(one.step for one in firsts.values()))
    planned = not stopping and (told is not None or sealed)
    return WorldChange(after, planned, began, ended, len(firsts), lost, _parts(began, ended, ends))


def _firsts(marks: Iterable[Mark]) -> dict[str, Mark]:
    """Each process's first step, of marks in order of time."""
    firsts: dict[str, Mark] = {}
    for one in filter(_is_step, marks):
        firsts.setdefault(one.process, one)
    return firsts


def _told(marks: Iterable[Mark], last: float) -> float | None:
    """When the first rank was told of the change before the world's last step; None: by a signal, or not at all."""
    newest: dict[str, float] = {}
    for one in marks:
        # An earlier change may have been withdrawn: take each process's newest mark.
        if one.name == "told" and one.at <= last:
            newest[one.process] = max(one.at, newest.get(one.process, one.at))
    return min(newest.values(), default=None)


def _counts(one: Mark, epoch: int) -> bool:
    """Whether a mark counts for an epoch. Saves count by rank; a converter's marks have neither rank nor epoch."""
    if one.name in ("written", "synced", "sealed"):
        return one.rank >= 0 and one.epoch == epoch
    return one.name == "converted" or one.epoch == epoch


def _latest(name: str, found: Iterable[Mark]) -> list[tuple[str, float]]:
    times = [one.at for one in found]
    return [(name, max(times))] if times else []


def _beginning(during: Iterable[Mark], firsts: Mapping[str, Mark]) -> list[tuple[str, float]]:
    """What the new world's workers did until their first step, in order."""
    found: dict[str, float] = {}
    for one in during:
        if one.process in firsts and one.name != STEP and one.at <= firsts[one.process].at:
            name = _NAMES.get(one.name, one.name)
            found[name] = max(one.at, found.get(name, one.at))
    return sorted(found.items(), key=lambda item: item[1])


def _parts(began: float, ended: float, ends: Iterable[tuple[str, float]]) -> dict[str, float]:
    parts: dict[str, float] = {}
    now = began
    for name, at in ends:
        then = min(max(now, at), ended)
        parts[name] = parts.get(name, 0.0) + then - now
        now = then
    return parts
