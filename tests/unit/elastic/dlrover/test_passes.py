"""What one pass over a data epoch deals to each rank."""

from __future__ import annotations

import pytest

from dalsegno.elastic.dlrover.passes import Dealt, Pass

MOST, LENGTH, MICRO = 4, 101, 5


def one(rank: int, world: int, start: int = 0, most: int = MOST, drop_last: bool = False, length: int = LENGTH) -> Pass:
    """A pass whose order is that of the data set."""
    return Pass(range, 0, start, length, lambda: MICRO, rank, world, most, drop_last)


def dealt(of: Pass) -> list[tuple[list[int], Dealt]]:
    """All of a pass, as a script gets it."""
    found = []
    for ids in of:
        of.hand()
        assert of.current is not None
        found.append((ids, of.current))
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("start", [0, 37, 100])
def test_every_world_makes_the_same_batches(world: int, start: int) -> None:
    """Each sample once and in order, batch by batch; as many micro-batches on each rank, and each sample as heavy."""
    ranks = [dealt(one(rank, world, start)) for rank in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    assert {len(rank) for rank in ranks} == {len(one(0, world, start))}
    position, batch, weights = start, list[int](), 0.0
    for row in zip(*ranks, strict=True):
        real = [sample for ids, micro in row for sample in ids[: micro.n]]
        assert real == list(range(position, position + len(real)))
        position += len(real)
        batch += real
        assert all(len(ids) <= MICRO for ids, _ in row)
        assert {(micro.row, micro.after_row, micro.is_last) for _, micro in row} == {
            (len(real), position, row[0][1].is_last)
        }
        weights += sum(micro.n / micro.batch for _, micro in row)
        if row[0][1].is_last:
            assert len(batch) == min(MOST * MICRO, LENGTH - position + len(batch))
            assert weights == pytest.approx(1.0)
            assert row[0][1].after_batch == position
            batch, weights = [], 0.0
    assert position == LENGTH
    assert not batch


def test_a_slice_without_samples_repeats_one_of_its_batch() -> None:
    """The last global batch has one sample, and three ranks."""
    ids, micro = dealt(one(2, 3))[-1]
    assert (ids, micro.n, micro.is_last) == ([100], 0, True)


def test_a_short_batch_can_be_left_out() -> None:
    """By the sampler or by the loader; at every world size the same."""
    for world in (1, 2, 3):
        last = dealt(one(0, world, drop_last=True))[-1][1]
        assert last.after_batch == 100
        assert len(one(0, world, drop_last=True)) == len(dealt(one(0, world, drop_last=True)))


def test_a_larger_micro_batch_counts_from_the_next_batch_on() -> None:
    """As the loader's `update_batch_size` makes it."""
    size = MICRO
    made = Pass(range, 0, 0, LENGTH, lambda: size, 0, 2, 4, False)
    first = [next(made)]
    size = 10
    assert [len(ids) for ids in [*first, *made]] == [5, 5, 10, 10, 10, 10, 1, 1]


def test_what_is_done_is_what_was_trained_on() -> None:
    """The loader reads ahead; with a trainer only its word counts, else the script's own."""
    made = one(0, 2)
    for _ in range(4):
        next(made)
    assert made.done(0) == 0
    made.hand()
    made.hand()
    assert (made.done(1), made.done(2)) == (10, 20)
    assert made.done(57) == 20, "a number that counts from elsewhere"
    made.trained += 1
    assert made.done(2) == 0
    made.finish(20)
    assert made.done(0) == 20
