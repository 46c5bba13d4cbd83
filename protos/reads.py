"""Which of the ranks that saved a checkpoint have something that a rank of a world of another size loads.

Where a tensor is cut along one axis among all ranks, that follows from the axis's length and the numbers of ranks. So a
checkpoint says the lengths, and its readers and the master come to the same answer.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

__all__ = ("MOST_LENGTHS", "Reads", "cut", "parts_read", "ranks_read", "reads_of", "slot")

MOST_LENGTHS = 64
"""A model has 4 to 60 different lengths. With more of them nearly every rank's files are wanted."""


# What messages carry.
_MOST, _MOST_ALIGNMENT = (1 << 63) - 1, (1 << 31) - 1


@dataclass(frozen=True)
class Reads:
    """What the tensors are cut by, of which a rank of any world loads its own part.

    All else lies in the first node's files, or is of no use to another world.

    Attributes:
        lengths: Elements of the axes that are cut, each once, ascending; (): nothing is cut.
        alignment: What each rank has of them is a multiple of so many elements.
    """

    lengths: tuple[int, ...] = ()
    alignment: int = 1

    def __post_init__(self) -> None:
        # Other kinds of numbers, and larger ones, could not be read again.
        plain = all(type(one) is int for one in (*self.lengths, self.alignment))
        bounds = (0, *self.lengths, _MOST + 1)
        ascending = plain and all(before < after for before, after in pairwise(bounds))
        if not ascending or len(self.lengths) > MOST_LENGTHS or not 0 < self.alignment <= _MOST_ALIGNMENT:
            raise ValueError(f"not up to {MOST_LENGTHS} ascending lengths above 0, and an alignment")


def reads_of(lengths: Iterable[int], alignment: int = 1) -> Reads | None:
    """What says that axes of these lengths are cut; None: they are too many."""
    found = sorted({length for length in lengths if length > 0})
    return Reads(tuple(found), alignment) if len(found) <= MOST_LENGTHS else None


def slot(length: int, ranks: int, alignment: int = 1) -> int:
    """Elements of each rank's part of an axis: rank ``r`` owns ``[r * slot, (r + 1) * slot)``, as far as they go."""
    return -(-length // (alignment * ranks)) * alignment


def cut(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The ranks that own some of ``[start, stop)``, and what each owns of it; ``size``: of each rank's `slot`."""
    for rank in range(start // size, -(-stop // size)) if start < stop else ():
        yield rank, max(start, rank * size), min(stop, (rank + 1) * size)


def ranks_read(reads: Reads, saved: int, now: int, first: int, last: int) -> frozenset[int]:
    """The ranks whose files the ranks ``first`` up to, but not including, ``last`` load, beside the first node's.

    Args:
        saved: Ranks of the world that saved it.
        now: Ranks of the world that loads it. If as many saved it, each loads what the rank of its number saved.
    """
    return frozenset(chain.from_iterable(_runs(reads, saved, now, first, last)))


def _runs(reads: Reads, saved: int, now: int, first: int, last: int) -> Iterator[range]:
    """The same, as runs of ranks: those of one length are neighbours."""
    if saved == now:
        yield range(first, last)
        return
    for length in reads.lengths:
        mine, theirs = slot(length, now, reads.alignment), slot(length, saved, reads.alignment)
        start, stop = first * mine, min(last * mine, length)
        if start < stop:
            yield range(start // theirs, -(-stop // theirs))


@functools.lru_cache(maxsize=8)  # Asked again in every turn while nodes gather.
def parts_read(reads: Reads, saved: tuple[int, ...], now: tuple[int, ...]) -> tuple[frozenset[int], ...]:
    """The nodes whose files each node of a world loads, the first node's always among them.

    Args:
        saved: How many ranks each node of the world had that saved it, in order.
        now: The same of the world that loads it.
    """
    ends = list(accumulate(saved))
    found, first = [], 0
    for last in accumulate(now):
        parts = {0}
        for ranks in _runs(reads, ends[-1], sum(now), first, last) if last > first else ():
            # Only the ends of a run are looked up: there may be thousands of ranks.
            parts.update(range(bisect_right(ends, ranks[0]), bisect_right(ends, ranks[-1]) + 1))
        found.append(frozenset(parts))
        first = last
    return tuple(found)
