"""Iterable data sets: the same batches at every world size, with workers, through resumes; and what cannot be right."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from dalsegno.elastic import Batches, BatchPlan, Boundary, ElasticSampler, Position, background
from dalsegno.elastic.checkpoint import CheckpointStore
from dalsegno.elastic.data.epochs import DataEpoch
from dalsegno.elastic.data.fetching import Fetcher, Maker
from dalsegno.elastic.data.fetching import Stream as Parts
from dalsegno.elastic.rank.clearing import Unstepped
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.envelopes import Statement, Unlike, judge
from dalsegno.elastic.rank.exchange import Exchange, Flags
from dalsegno.elastic.rank.meetings import Meetings
from dalsegno.elastic.rank.reports import Reports
from dalsegno.elastic.saving import background_save
from dalsegno.elastic.training.copies import Copies
from dalsegno.elastic.training.examination import Examination
from dalsegno.elastic.training.loop import steps as training_steps
from tests.unit.elastic.training.test_unsaved import opened


class Stream(IterableDataset[Tensor]):
    """Numbers in order; each DataLoader worker gets a share of its own, as such data sets do it everywhere."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter([torch.tensor([float(i)]) for i in range(worker, self.length, workers)])


class Skipping:
    """Not torch's class; can begin anywhere, and has another order in each data epoch."""

    def __init__(self, length: int, first: int = 0, read: list[int] | None = None) -> None:
        self.length, self.first, self.data_epoch = length, first, 0
        self.read: list[int] = [] if read is None else read

    def set_epoch(self, data_epoch: int) -> None:
        self.data_epoch = data_epoch

    def skip(self, count: int) -> Skipping:
        other = Skipping(self.length, count, self.read)
        other.set_epoch(self.data_epoch)
        return other

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(self.first, self.length):
            self.read.append(i)
            yield torch.tensor([float(i + 1000 * self.data_epoch)])


def make(
    data: Any, size: int, world: int, micro: int, rank: int, *, start: Position | None = None, **options: Any
) -> Any:
    sampler = ElasticSampler(
        options.pop("length", None), size, shuffle=False, drop_last=options.pop("drop_last", False)
    )
    sampler.seek(start or Position())
    plan = BatchPlan(size, world, micro, options.pop("fixed", False), options.pop("pad", False))
    return Batches(data, sampler, plan, rank, **options)


def history(
    data: Any, size: int, world: int, micro: int, steps: int, *, workers: int = 0, **options: Any
) -> list[tuple[Position, Position, int, list[float]]]:
    """Position, position after, size and content of each batch, put together from all ranks."""
    if workers:
        options["loader_options"] = {"num_workers": workers, "prefetch_factor": 3}
    ranks = [islice(make(data, size, world, micro, rank, **options), steps) for rank in range(world)]
    found = []
    for together in zip(*ranks, strict=True):
        parts = [part for batch in together for part in batch.micro_batches if not part.filler]
        values = [part.data[: part.n, 0].tolist() for part in sorted(parts, key=lambda part: part.number)]
        first = together[0]
        assert {(b.position, b.position_after, b.n) for b in together} == {
            (first.position, first.position_after, first.n)
        }
        found.append((first.position, first.position_after, first.n, [x for value in values for x in value]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("length", [None, 37])
@pytest.mark.parametrize(("world", "micro", "workers"), [(1, 4, 0), (1, 4, 2), (3, 2, 0), (3, 2, 2), (4, 12, 0)])
def test_a_stream_is_dealt_alike_at_every_world_size(length: int | None, world: int, micro: int, workers: int) -> None:
    """Each sample once in each data epoch, in the stream's order, with a short last batch, at any number of workers."""
    found = history(Stream(37), 12, world, micro, 8, workers=workers, length=length, data_epochs=2)
    samples = [float(i) for i in range(37)]
    assert [values for *_, values in found] == [samples[i : i + 12] for i in (0, 12, 24, 36)] * 2
    assert [n for *_, n, _ in found] == [12, 12, 12, 1] * 2
    assert [before for before, *_ in found] == [Position(e, s) for e in (0, 1) for s in (0, 12, 24, 36)]
    assert [after for _, after, *_ in found] == [*(p for p, *_ in found[1:]), Position(2, 0)]


def test_a_short_last_batch_can_be_dropped() -> None:
    """Then the batch before it ends the data epoch, which is known before it is trained."""
    found = history(Stream(37), 12, 2, 3, 6, drop_last=True, data_epochs=2)
    assert [n for *_, n, _ in found] == [12] * 6
    ends = [(0, 12), (0, 24), (1, 0), (1, 12), (1, 24), (2, 0)]
    assert [after for _, after, *_ in found] == [Position(*end) for end in ends]


@pytest.mark.slow
@pytest.mark.parametrize("data", [Stream(37), Skipping(37)], ids=["read again", "skip"])
def test_a_stream_resumes_where_the_training_stood(data: Any) -> None:
    """Any number of times within a data epoch, at other world sizes, whether or not it can begin in the middle."""
    whole = history(data, 8, 1, 8, 10)
    found, position = [], Position()
    for world, steps in [(1, 1), (2, 1), (3, 2), (1, 1), (4, 3), (2, 2)]:
        life = history(data, 8, world, 3, steps, start=position, workers=world % 2)
        position = life[-1][1]
        found += life
    assert found == whole
    assert position == Position(2, 0)


def test_a_data_set_is_told_the_data_epoch() -> None:
    """`set_epoch`, before each pass and before it is skipped into, as torch's samplers and others have it."""
    for start, workers in [(Position(), 0), (Position(1, 8), 0), (Position(1, 8), 1)]:
        for before, *_, values in history(Skipping(20), 8, 1, 8, 3, start=start, workers=workers):
            assert [value // 1000 for value in values] == [before.data_epoch] * len(values)


def test_skip_spares_the_reading() -> None:
    """What lies before the position is not read where the data set can pass over it."""
    data = Skipping(1000)
    next(iter(make(data, 8, 1, 8, 0, start=Position(0, 960))))
    assert min(data.read) == 960


def test_what_is_left_of_an_unknown_length_is_known_one_batch_ahead() -> None:
    """So that the ranks end together: 1 until the last batch is handed out, then 0; without an end, None."""
    batches = make(Stream(20), 8, 2, 4, 1, data_epochs=1)
    assert batches.left == 1
    assert [batches.left for _ in batches] == [1, 1, 0]
    assert make(Stream(20), 8, 2, 4, 1).left is None
    assert make(Stream(20), 8, 2, 4, 1, data_epochs=1, start=Position(1, 0)).left == 0
    known = make(Stream(20), 8, 2, 4, 1, data_epochs=2, length=20)
    assert [known.left for _ in known] == [5, 4, 3, 2, 1, 0]


class Alone:
    """As much of a session as the training loop asks for: the real exchange, in a world of one."""

    rank, world_size, resume, can_save, worth_saving = 0, 1, None, False, False
    left_in_a_step, loop = False, None

    def __init__(self) -> None:
        self.examination = Examination(0, False, 1, 1, False)
        self.copies, self.meetings, self.reports = Copies(Solo()), Meetings(Solo(), None), Reports(None)
        self.step, self.finished, self._exchange = 0, False, Exchange(Solo(), interval=0.0)
        self.unstepped = Unstepped()

    def compare(self, alike: Any, *, problem: str = "", final: bool = True) -> None: ...

    def gather(self, message: Any) -> list[Any]:
        return [message]

    def meet(self, ahead: int) -> int:
        return self._exchange.meet(ahead)

    def begin_step(self, ahead: int) -> None:
        self._exchange.begin(self.step + 1, Flags(), ahead)

    def end_step(self) -> Boundary:
        self.step += 1
        return self._exchange.end(1e-3)

    def finish(self) -> None:
        self.finished = True

    def restore_rng(self, seed: int | None) -> None: ...


@pytest.mark.parametrize("length", [None, 37])
def test_the_training_loop_ends_with_the_stream(length: int | None) -> None:
    """Also where nobody knew its length; entering the loop again trains nothing twice."""
    session: Any = Alone()
    batches = make(Stream(37), 12, 1, 5, 0, length=length, data_epochs=2)
    seen = [part.sample_ids for batch in training_steps(session, batches, max_steps=3) for part in batch.micro_batches]
    assert (session.step, session.finished, batches.left) == (3, True, 5 if length else 1)
    session.finished = False
    seen += [part.sample_ids for batch in training_steps(session, batches) for part in batch.micro_batches]
    assert (session.step, session.finished, batches.left) == (8, True, 0)
    assert [i for ids in seen for i in ids] == [*range(37), *range(37)]


class Beside(Alone):
    """A rank beside another one, which has compared ``theirs`` in the same order; notes what it compares itself."""

    def __init__(self, theirs: Sequence[Any]) -> None:
        super().__init__()
        self._theirs, self.compared = iter(theirs), list[Any]()

    def compare(self, alike: Any, *, problem: str = "", final: bool = True) -> None:
        self.compared.append(alike)
        judge([Statement(alike), Statement(next(self._theirs, alike))])


@pytest.mark.parametrize("data_epochs", [1, None], ids=["its end", "it begins anew"])
@pytest.mark.parametrize(("length", "alike"), [(24, False), (37, True)])
def test_a_stream_that_is_shorter_on_one_rank_is_no_success(length: int, alike: bool, data_epochs: int | None) -> None:
    """It ends the loop for all ranks, or is read twice there. Of data that know their length nothing is compared."""

    def trained(samples: int, theirs: Sequence[Any] = (), known: int | None = None) -> Any:
        one: Any = Beside(theirs)
        batches = make(Stream(samples), 12, 1, 5, 0, data_epochs=data_epochs, length=known)
        for batch in training_steps(one, batches, max_steps=2):
            list(batch.micro_batches)
        return one

    first = trained(37)
    assert first.finished
    if alike:
        assert trained(length, first.compared).finished
    else:
        said = "in the iterable data set is data_epoch=1 samples=0 on rank 0, data_epoch=0 samples=24 on rank 1"
        with pytest.raises(Unlike, match=said):
            trained(length, first.compared)
    assert len(trained(37, known=37).compared) == len(first.compared) - 1


def exhaust(batches: Iterable[Iterable[Any]]) -> None:
    """Goes through all parts of all batches."""
    for batch in batches:
        list(batch)


def test_a_save_under_way_is_finished_before_a_stream_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends here ends all ranks, and under an agent what they still write."""
    write = background_save.save

    def slow(*given: Any, **options: Any) -> Any:
        time.sleep(0.5)  # why: a disk that is slower than a step
        return write(*given, **options)

    def compare(alike: Any, **options: Any) -> None:
        if any("behind the last step" in name for name in alike):
            raise Unlike("the ranks were not started alike")

    monkeypatch.setattr(background_save, "save", slow)
    with opened(tmp_path) as session:
        monkeypatch.setattr(session, "compare", compare)
        batches = make(Stream(30), 12, 1, 5, 0, data_epochs=1)
        loop = session.steps(batches, save=background(lambda: {"model.pt": {"a": 1}}), save_every=2)
        with pytest.raises(Unlike):
            exhaust(batch.micro_batches for batch in loop)
        assert (session.step, [one.step for one in CheckpointStore(tmp_path).sealed()]) == (3, [2])


@pytest.mark.slow
def test_the_position_moves_with_the_training() -> None:
    """As with map-style data sets: what workers read ahead does not count."""
    batches = make(Stream(100), 8, 1, 4, 0, loader_options={"num_workers": 2})
    for batch in islice(batches, 3):
        list(batch.micro_batches)
    assert [list(b.sample_ids) for b in islice(batches, 1)] == [list(range(24, 32))]


@pytest.mark.slow
def test_padding_and_random_collate_work_on_streams_too() -> None:
    """Micro-batches have one shape; with fixed ones what collate draws is the same at every world size."""

    def collate(samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) + random.random() + np.random.rand() + torch.rand(1)

    def values(world: int, workers: int = 0) -> list[list[float]]:
        found = history(Stream(30), 8, world, 3, 6, workers=workers, fixed=True, pad=True, seed=5, collate=collate)
        return [x for *_, x in found]

    assert values(1) == values(3) == values(2, workers=2)
    shapes = {
        tuple(part.data.shape)
        for batch in islice(make(Stream(30), 8, 3, 3, 2, pad=True), 5)
        for part in batch.micro_batches
    }
    assert shapes == {(3, 1)}


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (Stream(30), {"length": 37}, "ended after 30 samples in data epoch 0, the sampler has 37"),
        (Stream(40), {"length": 37}, "more than the 37 samples"),
        (Stream(0), {}, "fewer than 1 samples in data epoch 0"),
        (Stream(7), {"drop_last": True}, "fewer than 8 samples in data epoch 0"),
        (Stream(30), {"start": Position(0, 64)}, "ends before sample 64 of data epoch 0, where the run goes on"),
        (iter([torch.zeros(1)] * 30), {}, "data epoch 1: an iterable one must give a new iterator each time"),
    ],
)
def test_a_stream_that_is_not_what_was_said_ends_the_run(data: Any, options: dict[str, Any], message: str) -> None:
    """Nothing is silently repeated or left out."""
    batches = islice(make(data, 8, 2, 4, 0, **options), 8)
    with pytest.raises(RuntimeError, match=message):
        list(batches)


def test_a_worker_that_finds_out_ends_the_run() -> None:
    """What goes wrong in a DataLoader's worker is raised in the training."""
    batches = islice(make(Stream(30), 8, 2, 4, 0, length=37, loader_options={"num_workers": 2}), 8)
    with pytest.raises(RuntimeError, match="ended after 30 samples in data epoch 0, the sampler has 37"):
        list(batches)


def test_a_stream_is_not_shuffled() -> None:
    """It has its own order, and to be told so is better than to get no shuffle."""
    for data in (Stream(30), (x for x in range(30))):
        assert isinstance(data, Iterable)
        with pytest.raises(ValueError, match="give the ElasticSampler shuffle=False"):
            Batches(data, ElasticSampler(30, 8), BatchPlan(8, 1, 4), 0)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    length=st.integers(1, 60),
    size=st.integers(1, 20),
    lives=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(0, 2)), min_size=1, max_size=6),
    micro=st.integers(1, 6),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
def test_any_lives_and_worlds_give_the_stream_s_own_history(
    length: int, size: int, lives: list[tuple[int, int, int]], micro: int, flags: tuple[bool, bool, bool, bool]
) -> None:
    """As for map-style data sets: drains, crashes and worlds at any points, each sample once, in order."""
    fixed, known, drop_last, skipping = flags
    drop_last = drop_last and length >= size
    data: Any = Skipping(length) if skipping else Stream(length)
    options = {"length": length if known else None, "drop_last": drop_last, "fixed": fixed}
    found, position = [], Position()
    for world, steps, lost in lives:
        life = history(data, size, world, micro, steps, start=position, **options)[: max(0, steps - lost)]
        found += life
        position = life[-1][1] if life else position
    count = length // size * size if drop_last else length
    epoch = [range(i, min(i + size, count)) for i in range(0, count, size)]
    assert [[value % 1000 for value in values] for *_, values in found] == [
        [float(i) for i in epoch[k % len(epoch)]] for k in range(len(found))
    ]
    assert [p.data_epoch for p, *_ in found] == [k // len(epoch) for k in range(len(found))]


def test_what_workers_are_sent_can_be_pickled() -> None:
    """Workers that are spawned, not forked, get the data set, the maker and the parts that way."""
    sampler, plan = ElasticSampler(30, 8, shuffle=False), BatchPlan(8, 2, 3, pad=True)
    maker: Maker[Tensor] = Maker(None, 4)
    data_set, rows = Stream(30), torch.arange(30.0)
    stream = Parts(data_set, sampler, plan, 1, maker, Position(0, 8), 2, None, DataEpoch(data_set, stream=True))
    copied = pickle.loads(pickle.dumps(stream))
    part, data = next(iter(copied))
    assert torch.equal(data, next(iter(stream))[1])
    fetcher: Fetcher[Tensor] = Fetcher(rows, maker, DataEpoch(rows))
    again = pickle.loads(pickle.dumps((fetcher, part)))
    assert torch.equal(again[0][again[1]], fetcher[part])
    assert fetcher[part].tolist()[: part.slice.n] == [float(i) for i in part.sample_ids]
