"""The batch plan over the whole table of world sizes, global batches and micro-batches, in exact arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.elastic.data.plan import BatchPlan, Slice

WORLDS = range(1, 65)
BATCHES = range(1, 513)
MICRO = [1, 2, 3, 4, 7, 16, 64, 600]


@pytest.mark.slow
@pytest.mark.parametrize("micro", MICRO)
def test_every_world_and_batch_has_a_plan_with_fewest_micro_steps(micro: int) -> None:
    """W 1 to 64, G 1 to 512: a and b as designed, enough room, none too large, one micro-step less would not do."""
    for size in BATCHES:
        for world in WORLDS:
            plan = BatchPlan(size, world, micro)
            a, b = plan.accumulation, plan.micro_batch_size
            assert a == ceil(Fraction(size, world * micro))
            assert (a - 1) * world * micro < size <= a * world * b
            assert b == ceil(Fraction(size, a * world)) <= micro
            fixed = BatchPlan(size, world, micro, fixed_micro_batch=True)
            assert fixed.accumulation == a
            assert fixed.micro_batch_size <= micro


def check_cut(plan: BatchPlan, total: int, ranks: Iterable[int] | None = None) -> None:
    """All that must hold of one global batch; without ``ranks`` also what only all of them together show."""
    world, slots = plan.world_size, plan.accumulation * plan.world_size
    dealt = [plan.slices(rank, total) for rank in (range(world) if ranks is None else ranks)]
    assert {len(part) for part in dealt} == {plan.accumulation}
    everything = sorted((s for part in dealt for s in part), key=lambda s: s.number)
    real = [s for s in everything if not s.filler]
    cuts = ceil(Fraction(total, plan.micro_batch_size)) if plan.fixed_micro_batch else slots
    if plan.fixed_micro_batch and total == plan.global_batch_size:
        assert cuts == ceil(Fraction(total, plan.max_micro_batch_size))
    for s in everything:
        check_slice(plan, s, total, cuts)
    for scale, divisor in (("ddp", world), ("deepspeed", slots)):
        for n in {s.n for s in everything}:
            # The nearest number to the exact factor, and nothing else.
            assert plan.loss_scale(n, total, scale) == float(Fraction(n * divisor, total))
    if ranks is None:
        assert [s.number for s in everything] == list(range(slots))
        assert [p for s in real for p in range(s.start, s.stop)] == list(range(total))
        counts = Counter(s.n for s in everything)
        assert sum(Fraction(n * count, total) for n, count in counts.items()) == 1
        if not plan.fixed_micro_batch:
            per_rank = [sum(s.n for s in part) for part in dealt]
            assert max(per_rank) - min(per_rank) <= 1


def check_slice(plan: BatchPlan, s: Slice, total: int, cuts: int) -> None:
    low, high = total // cuts, -(-total // cuts)
    assert 0 <= s.start < s.stop <= total
    assert s.rows == (plan.micro_batch_size if plan.pad else s.stop - s.start)
    assert s.rows <= plan.max_micro_batch_size
    if s.filler:
        assert s.n == 0
        assert (s.start, s.stop) == (0, high)
    else:
        assert s.n in (low, high)
        # The slices before it have what they must: so it begins where it begins.
        longer = total - low * cuts
        assert s.start == s.number * low + min(s.number, longer)


@pytest.mark.slow
@pytest.mark.parametrize("micro", MICRO)
def test_slices_over_the_table(micro: int) -> None:
    """First, middle and last rank of every world, every tenth batch size: even slices, exact factors."""
    for size in BATCHES[micro % 10 :: 10]:
        for world in WORLDS:
            check_cut(BatchPlan(size, world, micro), size, {0, world // 2, world - 1})


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 63, 64, 100, 511, 512])
def test_slices_of_all_ranks_together(size: int) -> None:
    """Every world: each sample in one slice, in order, equal work on all ranks, factors that sum to exactly 1."""
    for world in WORLDS:
        for micro in (1, 4, 7):
            check_cut(BatchPlan(size, world, micro), size)


@pytest.mark.full
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("micro", MICRO)
def test_the_whole_table_slice_by_slice(micro: int, fixed: bool) -> None:
    """All ranks of all worlds with all batches, and a short last batch each."""
    for size in BATCHES:
        for world in WORLDS:
            for total in {size, ceil(size / 3)}:
                check_cut(BatchPlan(size, world, micro, fixed), total)


@given(st.integers(1, 512), st.integers(1, 64), st.integers(1, 40), st.booleans(), st.booleans(), st.data())
def test_plan_cuts_every_batch_exactly(
    size: int, world: int, micro: int, fixed: bool, pad: bool, data: st.DataObject
) -> None:
    """Whole and short batches, fixed and padded ones."""
    check_cut(BatchPlan(size, world, micro, fixed, pad), data.draw(st.integers(1, size)))


@given(st.integers(1, 200), st.integers(1, 20), st.data())
def test_fixed_cut_is_the_same_at_every_world_size(size: int, micro: int, data: st.DataObject) -> None:
    """With fixed micro-batches the world decides only who computes which."""
    total = data.draw(st.integers(1, size))

    def cut(world: int) -> set[tuple[int, int, int]]:
        plan = BatchPlan(size, world, micro, fixed_micro_batch=True)
        return {(s.number, s.start, s.stop) for r in range(world) for s in plan.slices(r, total) if not s.filler}

    assert cut(1) == cut(2) == cut(3) == cut(7) == cut(16)


def test_fillers_of_fixed_micro_batches_are_whole_ones() -> None:
    """What cannot compute a single row (BatchNorm) can compute a filler."""
    plan = BatchPlan(10, 4, 4, fixed_micro_batch=True)
    fillers = [s for rank in range(4) for s in plan.slices(rank) if s.filler]
    assert [(s.number, s.start, s.stop, s.n, s.rows) for s in fillers] == [(3, 0, 4, 0, 4)]
    assert BatchPlan(3, 4, 4).slices(3) == (Slice(3, 0, 1, filler=True),)


@given(st.integers(1, 500), st.integers(1, 8), st.integers(3, 40), st.data())
def test_fixed_micro_batches_have_more_than_one_row(size: int, world: int, micro: int, data: st.DataObject) -> None:
    """Also those of a short last batch, unless it is one sample itself: BatchNorm cannot train on a single row."""
    plan = BatchPlan(size, world, micro, fixed_micro_batch=True)
    total = data.draw(st.integers(2, size)) if size > 1 else 1
    if total > 1 and plan.micro_batch_size > 2:
        assert all(s.rows > 1 for rank in range(world) for s in plan.slices(rank, total))


def test_plan_scales() -> None:
    """The factors of the two frameworks, and refusals."""
    plan = BatchPlan(16, 3, 2)
    assert (plan.accumulation, plan.micro_batch_size) == (3, 2)
    assert plan.loss_scale(2, 16) == 2 * 3 / 16
    assert plan.loss_scale(2, 16, "deepspeed") == 2 * 3 * 3 / 16
    with pytest.raises(ValueError, match="not 'fsdp'"):
        plan.loss_scale(1, 16, "fsdp")
    with pytest.raises(ValueError, match="at least 1"):
        BatchPlan(0, 1, 1)
    with pytest.raises(ValueError, match="rank 3 of 3"):
        plan.slices(3)
    with pytest.raises(ValueError, match="17 of 16"):
        plan.slices(0, 17)
