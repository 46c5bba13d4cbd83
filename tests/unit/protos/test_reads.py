"""Which ranks' files a rank of another world loads: the same as if each element were followed by itself."""

from __future__ import annotations

from itertools import chain
from random import Random
from typing import Any

import numpy
import pytest

from dalsegno.protos.reads import MOST_LENGTHS, Reads, parts_read, ranks_read, reads_of

WORLDS = [(1, 4), (4, 1), (4, 3), (3, 4), (8, 7), (7, 8), (5, 12), (16, 3)]


def owners(length: int, ranks: int, alignment: int) -> list[int]:
    """By element, its rank: all ranks have as many, in units of `alignment`; the last ones have fewer, or none."""
    each = next(size for size in range(0, length + alignment, alignment) if size * ranks >= length)
    return [element // each for element in range(length)]


def read(reads: Reads, saved: int, now: int, rank: int) -> set[int]:
    found = set()
    for length in reads.lengths:
        before, after = (owners(length, ranks, reads.alignment) for ranks in (saved, now))
        found |= {old for old, new in zip(before, after, strict=True) if new == rank}
    return found


@pytest.mark.parametrize("alignment", [1, 2])
@pytest.mark.parametrize(("saved", "now"), WORLDS)
def test_a_rank_loads_what_its_elements_had(saved: int, now: int, alignment: int) -> None:
    random = Random(f"{saved} {now}")
    for count in (0, 1, 2, 5):
        reads = reads_of(random.sample(range(1, 200), count), alignment)
        assert reads is not None
        for rank in range(now):
            assert ranks_read(reads, saved, now, rank, rank + 1) == read(reads, saved, now, rank)
        assert ranks_read(reads, saved, now, 0, now) == set(chain(*(read(reads, saved, now, r) for r in range(now))))


def test_as_many_ranks_load_their_own() -> None:
    """Whatever is cut: nothing is computed."""
    assert ranks_read(Reads((3,)), 8, 8, 2, 4) == {2, 3}
    assert ranks_read(Reads(), 8, 8, 2, 4) == {2, 3}


def test_nodes_need_the_first_part_and_those_of_the_ranks_that_they_read() -> None:
    """Nodes need not have equally many ranks."""
    long = Reads((1200,))
    assert parts_read(long, (2, 2, 2), (2, 2)) == ({0, 1}, {0, 1, 2})
    assert parts_read(long, (1, 3, 2), (2, 2)) == ({0, 1}, {0, 1, 2})
    assert parts_read(long, (2, 2), (1, 1, 1, 1)) == ({0}, {0}, {0, 1}, {0, 1})
    assert parts_read(long, (4,), (1, 3)) == ({0}, {0})
    assert parts_read(Reads(), (2, 2, 2), (2, 2)) == ({0}, {0})
    # With fewer elements than ranks, the first ranks have one each.
    assert parts_read(Reads((3,)), (2, 2, 2), (2, 2)) == ({0}, {0, 1})


def test_an_eighth_node_less() -> None:
    """Of a model of many layers: three parts of eight."""
    lengths = reads_of([4096 * 4096, 1024 * 4096, 14336 * 4096, 4096, 128256 * 4096])
    assert lengths is not None
    parts = parts_read(lengths, (8,) * 8, (8,) * 7)
    assert max(map(len, parts)) == 3
    assert set().union(*parts) == set(range(8))


def test_too_many_lengths_say_nothing() -> None:
    assert reads_of(range(1, MOST_LENGTHS + 1)) == Reads(tuple(range(1, MOST_LENGTHS + 1)))
    assert reads_of(range(1, MOST_LENGTHS + 2)) is None
    assert reads_of([5, 0, 3, 5]) == Reads((3, 5))


@pytest.mark.parametrize(
    ("lengths", "alignment"),
    [
        *(((2, 1), 1), ((1, 1), 1), ((0,), 1), ((-1,), 1), ((4,), 0), (tuple(range(1, 66)), 1)),
        # What could not be read again.
        *(((1 << 63,), 1), ((4,), 1 << 31), ((4.0,), 1), ((True,), 1), ((numpy.int64(4),), 1), ((4,), 1.0)),
    ],
)
def test_nonsense_is_refused(lengths: Any, alignment: Any) -> None:
    with pytest.raises(ValueError, match="ascending lengths above 0"):
        Reads(lengths, alignment)
