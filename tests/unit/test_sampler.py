"""Order, sampler and batch plan: the same samples in the same order at every world size."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.elastic.checkpoint import Position
from dalsegno.elastic.permutation import Permutation
from dalsegno.elastic.plan import BatchPlan
from dalsegno.elastic.sampler import ElasticSampler


@given(st.integers(1, 3000), st.integers(-5, 2**64), st.integers(0, 9))
def test_permutation_is_one(length: int, seed: int, data_epoch: int) -> None:
    """Every index occurs exactly once, and one by one gives the same as all together."""
    permutation = Permutation(length, seed, data_epoch)
    together = permutation.slice(0, length)
    assert sorted(together) == list(range(length))
    assert permutation[length // 2] == together[length // 2]


@given(st.integers(10**12, 2**62), st.data())
def test_permutation_of_huge_lengths_is_random_access(length: int, data: st.DataObject) -> None:
    """A trillion samples cost what one costs; neighbours do not collide."""
    permutation = Permutation(length, 1, 2)
    start = data.draw(st.integers(0, length - 64))
    values = permutation.slice(start, start + 64)
    assert len(set(values)) == 64
    assert all(0 <= value < length for value in values)
    assert [permutation[start + i] for i in range(64)] == values


PINNED = [3, 11, 9, 8, 1, 0, 4, 17, 19, 10, 7, 5, 13, 2, 6, 14, 15, 18, 12, 16]
PINNED_HUGE = 964568453428


def test_permutation_never_changes() -> None:
    """The order is a format: runs saved by an older version must go on in it."""
    assert list(Permutation(20, 0, 0).slice(0, 20)) == PINNED
    assert Permutation(10**12, 7, 3)[123_456_789_012] == PINNED_HUGE


def test_permutation_looks_random() -> None:
    """No visible relation between position and index, nor between data epochs."""
    n = 100_000
    first, second = (np.array(Permutation(n, 3, epoch).slice(0, n), dtype=float) for epoch in (0, 1))
    positions = np.arange(n, dtype=float)
    for one, other in [(first, positions), (second, positions), (first, second), (first[1:], first[:-1])]:
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.02
    counts = np.bincount((first[: n // 10] // (n / 100)).astype(int), minlength=100)
    assert counts.min() > 50
    assert counts.max() < 160


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 400),
    size=st.integers(1, 70),
    worlds=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 6)), min_size=1, max_size=6),
    micro=st.integers(1, 9),
    fixed=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 5),
)
def test_any_sequence_of_worlds_consumes_each_sample_once(
    length: int, size: int, worlds: list[tuple[int, int]], micro: int, fixed: bool, drop_last: bool, seed: int
) -> None:
    """Changing worlds at any step, through saved states only, gives the undisturbed history sample by sample."""
    if drop_last and length < size:
        return

    def make() -> ElasticSampler:
        return ElasticSampler(length, size, seed=seed, drop_last=drop_last)

    history: list[list[int]] = []
    state = make().state_dict()
    for world, steps in worlds:
        sampler = make()
        sampler.load_state_dict(state)
        plan = BatchPlan(size, world, micro, fixed)
        for batch in islice(sampler, steps):
            ids = batch.sample_ids
            dealt = [
                (s.number, [ids[i] for i in range(s.start, s.stop)])
                for rank in range(world)
                for s in plan.slices(rank, len(ids))
                if not s.filler
            ]
            history.append([sample for _, part in sorted(dealt) for sample in part])
        state = sampler.state_dict()
    undisturbed = [list(batch.sample_ids) for batch in islice(make(), len(history))]
    assert history == undisturbed
    per_epoch = make().batches_per_data_epoch
    for first in range(0, len(history) - per_epoch + 1, per_epoch):
        seen = [sample for step in history[first : first + per_epoch] for sample in step]
        assert len(seen) == len(set(seen)) == (length // size * size if drop_last else length)


def test_order_depends_on_seed_epoch_and_length_alone() -> None:
    """The global batch size cuts the order but does not change it; seed, data epoch and length do."""

    def order(length: int, size: int, seed: int, data_epoch: int) -> list[int]:
        sampler = ElasticSampler(length, size, seed=seed)
        sampler.seek(Position(data_epoch, 0))
        batches = islice(sampler, sampler.batches_per_data_epoch)
        return [sample for batch in batches for sample in batch.sample_ids]

    assert order(100, 16, 1, 0) == order(100, 7, 1, 0)
    assert len({tuple(order(100, 16, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    assert [x for x in order(101, 16, 1, 0) if x < 100] != order(100, 16, 1, 0)


def test_sampler_refuses_foreign_positions_and_orders() -> None:
    """A position inside a batch, and a state of another order, would repeat or miss samples."""
    sampler = ElasticSampler(100, 16)
    for bad in [Position(0, 8), Position(0, 112), Position(0, 100)]:
        with pytest.raises(ValueError, match="not where a batch"):
            sampler.seek(bad)
    state = ElasticSampler(100, 16, seed=9).state_dict()
    with pytest.raises(ValueError, match="seed was 9 and is 0"):
        sampler.load_state_dict(state)
    with pytest.raises(ValueError, match="drop_last"):
        sampler.load_state_dict(ElasticSampler(100, 16, drop_last=True).state_dict())
    with pytest.raises(ValueError, match="leaves nothing"):
        ElasticSampler(10, 16, drop_last=True)


@pytest.mark.parametrize("micro", [1, 2, 3, 4, 7, 16, 64, 600])
def test_plan_formulas_over_the_whole_table(micro: int) -> None:
    """For every W in 1..64 and G in 1..512: a and b as designed, enough slices, none too large."""
    g, w = np.arange(1, 513)[:, None], np.arange(1, 65)[None, :]
    a = -(-g // (w * micro))
    b = -(-g // (a * w))
    assert (b <= micro).all()
    assert (a * w * b >= g).all()
    short, longer = np.divmod(g, a * w)
    assert (short * (a * w) + longer == g).all()
    for size in [1, 2, 15, 16, 17, 63, 64, 100, 511, 512]:
        for world in [1, 2, 3, 4, 5, 7, 16, 31, 64]:
            plan = BatchPlan(size, world, micro)
            assert plan.accumulation == a[size - 1, world - 1]
            assert plan.micro_batch_size == b[size - 1, world - 1]
            _check_cut(plan, size)


@given(st.integers(1, 512), st.integers(1, 64), st.integers(1, 40), st.booleans(), st.data())
def test_plan_cuts_every_batch_exactly(size: int, world: int, micro: int, fixed: bool, data: st.DataObject) -> None:
    """Whole and short batches are dealt completely, evenly, in equal numbers of micro-steps."""
    _check_cut(BatchPlan(size, world, micro, fixed), data.draw(st.integers(1, size)))


def _check_cut(plan: BatchPlan, total: int) -> None:
    dealt = [plan.slices(rank, total) for rank in range(plan.world_size)]
    assert {len(part) for part in dealt} == {plan.accumulation}
    everything = sorted((s for part in dealt for s in part), key=lambda s: s.number)
    real = [s for s in everything if not s.filler]
    assert [p for s in real for p in range(s.start, s.stop)] == list(range(total))
    sizes = {s.n for s in real}
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= plan.max_micro_batch_size
    assert all(0 <= s.start < s.stop <= total for s in everything)
    scale = sum(plan.loss_scale(s.n, total) for s in everything)
    assert scale == pytest.approx(plan.world_size)
    if not plan.fixed_micro_batch:
        per_rank = [sum(s.n for s in part) for part in dealt]
        assert max(per_rank) - min(per_rank) <= 1


@given(st.integers(1, 200), st.integers(1, 20), st.data())
def test_fixed_cut_is_the_same_at_every_world_size(size: int, micro: int, data: st.DataObject) -> None:
    """With fixed micro-batches the world decides only who computes which."""
    total = data.draw(st.integers(1, size))

    def cut(world: int) -> set[tuple[int, int, int]]:
        plan = BatchPlan(size, world, micro, fixed_micro_batch=True)
        return {(s.number, s.start, s.stop) for r in range(world) for s in plan.slices(r, total) if not s.filler}

    assert cut(1) == cut(2) == cut(3) == cut(7) == cut(16)


def test_plan_scales() -> None:
    """The factors of the two frameworks, and refusals."""
    plan = BatchPlan(16, 3, 2)
    assert (plan.accumulation, plan.micro_batch_size) == (3, 2)
    assert plan.loss_scale(2, 16) == 2 * 3 / 16
    assert plan.loss_scale(2, 16, "deepspeed") == 2 * 3 * 3 / 16
    with pytest.raises(ValueError, match="'ddp' or 'deepspeed'"):
        plan.loss_scale(1, 16, "fsdp")
    with pytest.raises(ValueError, match="at least 1"):
        BatchPlan(0, 1, 1)
    with pytest.raises(ValueError, match="rank 3 of 3"):
        plan.slices(3)
