"""How many nodes of each kind have a given number of workers together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd

__all__ = ("how_many",)


def how_many(kinds: Sequence[tuple[int, int]], workers: int, counts: Iterable[int]) -> tuple[int, ...]:
    """How many of each kind have exactly so many workers.

    Of several answers it is the one with most of the first kind, of these with most of the second, and so on.

    Args:
        kinds: the workers of one such node, at least 1, and how many of them there are.
        workers: of all together.
        counts: how many nodes that may be, at least 1 each. The first of these that is possible is taken.

    Returns:
        One number for each kind; () if no number of nodes is possible.
    """
    counts, divisor = list(counts), gcd(*(nproc for nproc, _ in kinds))
    if not counts or not kinds or workers % divisor:
        return ()
    kinds, workers = [(nproc // divisor, there) for nproc, there in kinds], workers // divisor
    if len(kinds) == 1:
        return (workers,) if workers in counts and workers <= kinds[0][1] else ()
    # For each kind what it and those behind it can be: by number of nodes the numbers of workers, as bits.
    sums = [[1] + [0] * max(counts)]
    for nproc, there in reversed(kinds):
        sums.append(with_more(sums[-1], nproc, there, workers))
    left = next((count for count in counts if sums[-1][count] >> workers & 1), None)
    if left is None:
        return ()
    found: list[int] = []
    for (nproc, there), behind in zip(kinds, reversed(sums[:-1]), strict=True):
        most = min(there, left, workers // nproc)
        taken = next(n for n in range(most, -1, -1) if behind[left - n] >> (workers - n * nproc) & 1)
        left, workers = left - taken, workers - taken * nproc
        found.append(taken)
    return tuple(found)


def with_more(sums: Sequence[int], nproc: int, there: int, most: int) -> list[int]:
    """The same where up to `there` nodes of `nproc` workers are added, up to `most` workers in all.

    They are added in parts of 1, 2, 4, ... nodes and the rest: each number of nodes is the sum of some of these.
    """
    wider, below, part = list(sums), (1 << most + 1) - 1, 1
    while there:
        part = min(part, there)
        for count in range(len(wider) - 1, part - 1, -1):
            wider[count] |= wider[count - part] << part * nproc & below
        there, part = there - part, 2 * part
    return wider
