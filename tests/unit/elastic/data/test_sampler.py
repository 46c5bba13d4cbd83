"""Order and sampler: the same samples in the same order at every world size, from any position on."""

from __future__ import annotations

import json
import pickle
import time
import tracemalloc
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.elastic.checkpoint import Order, Position
from dalsegno.elastic.data.permutation import Permutation
from dalsegno.elastic.data.plan import BatchPlan
from dalsegno.elastic.data.sampler import STATE_VERSION, ElasticSampler

RECORDED = Path(__file__).parents[2] / "recorded"


@pytest.mark.slow
@given(st.integers(1, 3000), st.integers(-5, 2**64), st.integers(0, 9))
def test_permutation_is_one(length: int, seed: int, data_epoch: int) -> None:
    """Every index occurs exactly once, and one by one gives the same as all together."""
    permutation = Permutation(length, seed, data_epoch)
    together = permutation.slice(0, length)
    assert sorted(together) == list(range(length))
    assert permutation[length // 2] == together[length // 2]


@pytest.mark.slow
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
PINNED_TABLE = [6, 14, 15, 19, 10, 0, 13, 11, 17, 1, 7, 3, 8, 4, 12, 2, 5, 16, 9, 18]
PINNED_HUGE = 964568453428


def test_permutation_never_changes() -> None:
    """The order is a format: runs saved by an older version must go on in it."""
    assert Permutation(20, 0, 0, version=1).slice(0, 20) == PINNED
    assert Permutation(20, 0, 0).slice(0, 20) == PINNED_TABLE
    assert Permutation(256, 7, 3).slice(100, 106) == [143, 59, 130, 141, 145, 240]
    assert Permutation(257, 7, 3).slice(100, 106) == [131, 10, 159, 197, 175, 123]
    assert Permutation(10**12, 7, 3)[123_456_789_012] == PINNED_HUGE


def test_order_versions_differ_only_where_orders_do() -> None:
    """A manifest names a version only for short orders; for the others every version is the same order."""
    assert (ElasticSampler(256, 8).order.version, ElasticSampler(257, 8).order.version) == (2, 1)
    assert ElasticSampler(20, 8, shuffle=False).order.version == 1
    assert Permutation(257, 5, version=1).slice(0, 257) == Permutation(257, 5, version=2).slice(0, 257)
    for version in (0, 3):
        with pytest.raises(ValueError, match=f"order version {version} is not known"):
            Permutation(20, 0, version=version)


@pytest.mark.slow
@given(st.integers(1, 2000), st.data())
def test_windows_are_the_slices_that_they_stand_for(length: int, data: st.DataObject) -> None:
    """What is asked of a lazy window is what a list of the same positions would have said."""
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    permutation = Permutation(length, 3)
    window, whole = permutation.window(start, stop), permutation.slice(start, stop)
    assert len(window) == len(whole)
    assert window == whole
    assert list(window) == whole
    cut = data.draw(st.slices(len(whole)))
    assert window[cut] == whole[cut]
    if whole:
        index = data.draw(st.integers(-len(whole), len(whole) - 1))
        assert window[index] == whole[index]
    with pytest.raises(IndexError):
        permutation.window(0, length + 1)


@pytest.mark.slow
@settings(max_examples=60)
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


def test_without_shuffle_the_order_is_the_data_set_s() -> None:
    """In every data epoch, with and without the short last batch."""
    for drop_last, last in [
        (False, [range(0, 16), range(16, 32), range(32, 40)]),
        (True, [range(0, 16), range(16, 32)]),
    ]:
        sampler = ElasticSampler(40, 16, shuffle=False, drop_last=drop_last)
        batches = list(islice(sampler, 2 * len(last)))
        assert [list(b.sample_ids) for b in batches] == [list(ids) for ids in last] * 2
        assert [b.position.data_epoch for b in batches] == [0] * len(last) + [1] * len(last)
        assert sampler.position == Position(2, 0)


def test_data_epochs_have_orders_of_their_own() -> None:
    """Each data epoch consumes the whole data set, in another order than the one before."""
    sampler = ElasticSampler(100, 25, seed=1)
    epochs = [[i for batch in islice(sampler, 4) for i in batch.sample_ids] for _ in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def recorded_states() -> list[Any]:
    return [case for path in sorted(RECORDED.glob("sampler_state_*.json")) for case in json.loads(path.read_text())]


@pytest.mark.parametrize("case", recorded_states(), ids=lambda c: f"{c['arguments']}-{c['state'].get('version', 1)}")
def test_states_of_earlier_versions_go_on_in_their_order(case: Any) -> None:
    """What each version of the format wrote down, and the batches that followed then, follow now."""
    sampler = ElasticSampler(**case["arguments"])
    sampler.load_state_dict(case["state"])
    if case["next"] is not None:
        assert [list(batch.sample_ids) for batch in islice(sampler, 3)] == case["next"]
    again = ElasticSampler(**case["arguments"])
    sampler.load_state_dict(case["state"])
    again.load_state_dict(sampler.state_dict())
    assert again.state_dict() == sampler.state_dict()
    assert again.order == sampler.order


def test_every_version_of_the_state_is_recorded() -> None:
    """A new version of the format comes with a record of what it writes."""
    versions = [
        {case["state"].get("version", 1) for case in json.loads(path.read_text())}
        for path in sorted(RECORDED.glob("sampler_state_*.json"))
    ]
    assert versions == [{version} for version in range(1, STATE_VERSION + 1)]
    assert (
        ElasticSampler(20, 6).state_dict().keys()
        == json.loads((RECORDED / f"sampler_state_{STATE_VERSION}.json").read_text())[0]["state"].keys()
    )


def test_foreign_states_are_refused() -> None:
    """Of a newer version, of something else, with other settings: one line each, and the sampler stays where it was."""
    sampler = ElasticSampler(100, 16)
    good = sampler.state_dict()
    for change, message in [
        ({"version": 3}, "version 3, this program reads 1 to 2"),
        ({"order_version": 9}, "of version 9, this program knows 1 to 2"),
        ({"seed": 9}, "seed was 9 and is 0"),
        ({"length": 99}, "length was 99 and is 100"),
        ({"global_batch_size": 8}, "global_batch_size was 8 and is 16"),
        ({"shuffle": False}, "shuffle was False and is True"),
        ({"drop_last": True}, "drop_last=True, this is False"),
        ({"samples": 8}, "not where a batch"),
    ]:
        with pytest.raises(ValueError, match=message):
            sampler.load_state_dict({**good, **change})
        assert sampler.state_dict() == good
    with pytest.raises(ValueError, match="it has no data_epoch, drop_last"):
        sampler.load_state_dict({"epoch": 1})


def test_a_run_goes_on_in_the_order_version_that_it_began_in() -> None:
    """A manifest of before short orders were tables keeps its order for the rest of the run."""
    sampler = ElasticSampler(20, 20, seed=0)
    assert list(next(iter(sampler)).sample_ids) != PINNED
    sampler.seek(Position())
    sampler.adopt_order(Order(0, 20, 20, True))
    assert list(next(iter(sampler)).sample_ids) == PINNED
    assert sampler.order.version == 1
    with pytest.raises(ValueError, match="of version 7"):
        sampler.adopt_order(replace(sampler.order, version=7))


def test_memory_does_not_grow_with_the_data_set() -> None:
    """10^12 samples take as much as 300: the sampler, the first batches, a seek."""

    def peak(length: int) -> int:
        tracemalloc.start()
        sampler = ElasticSampler(length, 64)
        for batch in islice(sampler, 4):
            assert len(list(batch.sample_ids)) == 64
        sampler.seek(Position(3, (length // 128) * 64))
        list(next(iter(sampler)).sample_ids)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(300)
    small = peak(300)
    assert peak(10**12) < small + 16_384


def test_a_seek_takes_microseconds() -> None:
    """Anywhere in 10^12 samples, with the first sample there; bounded by a hundred times what it takes."""
    sampler = ElasticSampler(10**12, 512)
    times = []
    for number in range(300):
        target = Position(number % 3, (number * 7919 * 512) % 10**12 // 512 * 512)
        began = time.perf_counter()
        sampler.seek(target)
        first = sampler.batch_at(sampler.position).sample_ids[0]
        times.append(time.perf_counter() - began)
        assert 0 <= first < 10**12
    assert sorted(times)[len(times) // 2] < 5e-3


def test_the_first_index_takes_microseconds() -> None:
    """Of a new sampler, as a start or a change of the world makes one; bounded by a hundred times what it takes."""
    times = []
    for seed in range(100):
        began = time.perf_counter()
        first = next(iter(ElasticSampler(10**12, 512, seed=seed))).sample_ids[0]
        times.append(time.perf_counter() - began)
        assert 0 <= first < 10**12
    assert sorted(times)[len(times) // 2] < 5e-3


def test_batches_are_computed_only_where_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank pays for its own slices, not for the global batch; a seek pays for nothing."""
    asked = []
    whole = Permutation.slice
    monkeypatch.setattr(
        Permutation, "slice", lambda self, start, stop: asked.append(stop - start) or whole(self, start, stop)
    )
    sampler = ElasticSampler(10**9, 4096)
    sampler.seek(Position(0, 4096 * 1000))
    batch = sampler.batch_at(sampler.position)
    assert len(batch.sample_ids) == 4096
    assert asked == []
    assert len(batch.sample_ids[64:128]) == 64
    assert asked == [64]


def test_the_sampler_can_be_pickled() -> None:
    """DataLoader workers that are spawned get a copy of it."""
    sampler = ElasticSampler(1000, 16, seed=3)
    next(iter(sampler))
    copy = pickle.loads(pickle.dumps(sampler))
    assert list(next(iter(copy)).sample_ids) == list(next(iter(sampler)).sample_ids)


def test_an_unknown_length_has_positions_but_no_order() -> None:
    """For iterable data sets: it keeps the position, and says what it cannot know."""
    with pytest.raises(ValueError, match="shuffle=False"):
        ElasticSampler(None, 16)
    sampler = ElasticSampler(None, 16, shuffle=False)
    sampler.seek(Position(4, 16 * 10**9))
    assert sampler.state_dict()["length"] == 0
    with pytest.raises(ValueError, match="does not say how many batches"):
        sampler.batch_at(sampler.position)
    with pytest.raises(ValueError, match="not where a batch of 16 begins in an unknown number of samples"):
        sampler.seek(Position(0, 15))


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


def test_a_number_of_numpys_is_a_number() -> None:
    """It compares equal to Python's and is written otherwise: the order must be the same, and have a JSON form."""
    theirs = ElasticSampler(np.int64(50), np.int32(8), seed=np.int64(5))
    ours = ElasticSampler(50, 8, seed=5)
    assert [list(batch.sample_ids) for batch in islice(theirs, 9)] == [
        list(batch.sample_ids) for batch in islice(ours, 9)
    ]
    assert json.dumps(theirs.state_dict()) == json.dumps(ours.state_dict())
    with pytest.raises(TypeError):
        ElasticSampler(50, 8, seed=5.0)  # type: ignore[arg-type]
