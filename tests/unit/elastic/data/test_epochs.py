"""Map-style data sets that want to know the data epoch: told in each process that reads, whatever the script tells."""

from __future__ import annotations

import copy
import ctypes
import logging
import multiprocessing
import random
import types
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset

from dalsegno.elastic import Batches, BatchPlan, ElasticSampler, Position
from dalsegno.elastic.data.epochs import DataEpoch
from dalsegno.elastic.rank import rng

LENGTH, SIZE = 12, 4


class Curriculum(Dataset[Tensor]):
    """Sample i of data epoch e is i + 1000 e."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length, self.epoch, self.told = length, 0, [-1]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index + 1000 * self.epoch])


class Shared(Curriculum):
    """All processes have one epoch, as some do to reach workers that go on."""

    def __init__(self) -> None:
        self.shared = multiprocessing.Value(ctypes.c_int64, 0)
        super().__init__()

    def set_epoch(self, epoch: int) -> None:
        self.shared.value = epoch  # type: ignore[attr-defined]

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index + 1000 * self.shared.value])  # type: ignore[attr-defined]


class Forgetful(Curriculum):
    """Begins anew wherever it is sent."""

    def __reduce__(self) -> Any:
        return type(self), ()


class Ordered(Curriculum):
    """Draws the order of an epoch from a global generator that it may seed."""

    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(LENGTH))

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.order = list(range(LENGTH))
        random.shuffle(self.order)
        torch.manual_seed(epoch)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.order[index] + 1000 * self.epoch])


class Around:
    """A wrapper of the script's own, of no known class."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Tensor:
        return torch.as_tensor(self.inner[index])


class Handing(Around):
    """Answers with what is inside."""

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


def unstacked(rows: list[Any]) -> Tensor:
    """What `StackDataset` makes of one data set, by name or without."""
    return torch.stack([row["x"] if isinstance(row, dict) else row[0] for row in rows])


def make(data: Any, *, at: Position | None = None, workers: int = 0, world: int = 1, rank: int = 0, **more: Any) -> Any:
    sampler = ElasticSampler(len(data), SIZE, seed=3)
    sampler.seek(at or Position())
    options = {"num_workers": workers, "prefetch_factor": 4, **more.pop("loader", {})} if workers else {}
    return Batches(data, sampler, BatchPlan(SIZE, world, 2), rank, loader_options=options, **more)


def read(data: Any, steps: int = 9, **options: Any) -> list[tuple[int, list[int]]]:
    """The data epoch of each batch, and its values."""
    found = []
    for batch in islice(make(data, **options), steps):
        values = [int(x) for micro in batch.micro_batches for x in micro.data[: micro.n].flatten()]
        found.append((batch.position.data_epoch, values))
    return found


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines about the data set."""
    return [text for record in caplog.records if "data set" in (text := record.getMessage())]


def is_right(found: list[tuple[int, list[int]]], samples: int = LENGTH) -> None:
    assert {e for e, _ in found} == {0, 1, 2}
    for epoch in (0, 1, 2):
        values = sorted(x for e, values in found if e == epoch for x in values)
        assert values == [i + 1000 * epoch for i in range(samples)], (epoch, values)


@pytest.mark.parametrize("make_it", [Curriculum, Shared])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_samples_are_those_of_their_data_epoch(workers: int, make_it: Any) -> None:
    """Whoever reads, and however far ahead: also where all processes share what one of them is told."""
    is_right(read(make_it(), workers=workers))


@pytest.mark.parametrize("more", [{}, {"persistent_workers": True}, {"multiprocessing_context": "spawn"}])
def test_each_kind_of_worker_is_told(more: dict[str, Any]) -> None:
    """Also workers that began with a data set which the script had told something, and that make it anew."""
    data = Forgetful()
    batches = make(data, workers=1, at=Position(1, 4), loader=more)
    data.set_epoch(1)
    found = [(b.position.data_epoch, [int(x) for m in b.micro_batches for x in m.data]) for b in islice(batches, 5)]
    assert [{x // 1000 for x in values} for _, values in found] == [{e} for e, _ in found] == [{1}] * 2 + [{2}] * 3


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_compared_is_of_that_epoch_too(workers: int) -> None:
    """The few samples that are looked at before the first step are named by their data epoch, and must be of it."""

    def prints(at: Position) -> dict[str, str]:
        batches = make(Curriculum(), at=at, workers=workers)
        found: dict[str, str] = batches._look(patient=False)["prints"]
        return found

    first, second = prints(Position()), prints(Position(1, 4))
    assert list(second) == [f"{name} of data epoch 1" for name in first]
    assert not set(first.values()) & set(second.values())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_run_that_goes_on_elsewhere_reads_the_same(workers: int, world: int) -> None:
    """A new data set in a new process, in a world of any size, from the middle of a data epoch."""
    wanted = read(Curriculum())[5:]
    ranks = [read(Curriculum(), 4, at=Position(1, 8), workers=workers, world=world, rank=r) for r in range(world)]
    assert [(step[0][0], sorted({x for _, v in step for x in v})) for step in zip(*ranks, strict=True)] == [
        (e, sorted(values)) for e, values in wanted
    ]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda data: Subset(data, range(LENGTH)),
        lambda data: Subset(Subset(data, range(LENGTH)), range(LENGTH)),
        lambda data: ConcatDataset([[], data]),
        lambda data: StackDataset(data),
        lambda data: StackDataset(x=data),
        Around,
        Handing,
        lambda data: Around(Subset(Around(data), range(LENGTH))),
    ],
)
def test_a_data_set_inside_of_another_is_told(wrap: Any) -> None:
    """Wrappers do not hand the number on, so what is inside is looked for."""
    data = wrap(Curriculum())
    is_right(read(data, collate=unstacked if isinstance(data, StackDataset) else None))


def test_the_outermost_that_can_be_told_is_told_alone() -> None:
    """What it makes of the number for those inside is its own affair."""

    class Slowly(Subset[Tensor]):
        def set_epoch(self, epoch: int) -> None:
            self.dataset.set_epoch(epoch // 2)  # type: ignore[attr-defined]

    found = read(Slowly(Curriculum(), range(LENGTH)))
    assert [{x // 1000 for x in values} for _, values in found] == [{0}] * 6 + [{1}] * 3


def test_it_is_told_once_in_each_data_epoch() -> None:
    """Some make a whole order of it. Where others read, the training's own data set is not told: it may take long."""
    for workers, told in ((0, [-1, 0, 1, 2]), (2, [-1])):
        data = Curriculum()
        for _ in islice(make(data, workers=workers), 9):
            pass
        assert data.told == told


def test_the_natural_call_of_a_script_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """At an epoch's end, for the next one; or in its first batch: both are as ours, so nothing is said."""
    for when in ("end", "begin"):
        for workers in (0, 1):
            data = Curriculum()
            found = []
            for batch in islice(make(data, workers=workers), 9):
                at = batch.position
                found.append((at.data_epoch, [int(x) for m in batch.micro_batches for x in m.data]))
                if when == "end" and batch.ends_data_epoch:
                    data.set_epoch(epoch=at.data_epoch + 1)
                if when == "begin" and at.samples == 0:
                    data.set_epoch(at.data_epoch)
            is_right(found)
    assert not said(caplog)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("inside", [False, True])
def test_another_count_of_the_script_is_said_once(workers: int, inside: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It would hold for one process only: samples stay those of their data epoch, and one line of rank 0 says so."""
    for rank in (0, 1):
        data = Curriculum()
        for batch in islice(make(Around(data) if inside else data, workers=workers, world=2, rank=rank), 9):
            for micro in batch.micro_batches:
                assert {int(x) // 1000 for x in micro.data} == {batch.position.data_epoch}
            if batch.ends_data_epoch:
                data.set_epoch(batch.position.data_epoch + 2)
    (line,) = said(caplog)
    assert "set_epoch(2) of the data set, called by the script, counts for nothing" in line


def test_a_number_from_before_the_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    """A script may begin with 0, also where the run goes on; with anything else it means something."""
    for number, lines in ((0, 0), (1, 0), (7, 1)):
        caplog.clear()
        data = Curriculum()
        batches = make(data, at=Position(1, 4))
        data.set_epoch(number)
        for _ in islice(batches, 3):
            pass
        assert len(said(caplog)) == lines


def test_what_it_draws_is_the_same_everywhere_and_moves_nothing() -> None:
    """A shuffle without a seed is one order in all processes, and a seed that it sets is not the training's."""
    torch.manual_seed(5)
    random.seed(5)
    before = rng.cpu_state()
    whole = read(Ordered())
    assert torch.equal(rng.cpu_state()[1], before[1])
    assert rng.cpu_state()[0] == before[0]
    is_right(whole)
    random.seed(6)
    assert read(Ordered(), 4, at=Position(1, 8)) == read(Ordered(), 4, at=Position(1, 8), workers=1) == whole[5:]


def test_a_script_that_tells_it_first_tells_it_nothing_else() -> None:
    """It draws its order as it does where the script says nothing, in each process."""
    found = []
    for seed in (None, 1, 2):
        data, values = Ordered(), list[int]()
        random.seed(seed)
        for batch in islice(make(data), 9):
            values += [int(x) for m in batch.micro_batches for x in m.data]
            if batch.ends_data_epoch and seed is not None:
                data.set_epoch(batch.position.data_epoch + 1)
        found.append(values)
    assert found[0] == found[1] == found[2]


class Two(Curriculum):
    def set_epoch(self, epoch: int, total: int) -> None:  # type: ignore[override]
        pytest.fail("it was told")


class Named(Curriculum):
    def set_epoch(self, *, epoch: int) -> None:  # type: ignore[override]
        pytest.fail("it was told")


class Strange(Dataset[Tensor]):
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


@pytest.mark.parametrize("make_it", [Two, Named, lambda: Around(Strange())])
def test_what_takes_no_epoch_is_left_alone(make_it: Any) -> None:
    assert not DataEpoch(make_it()).wanted


class Slotted:
    """Nothing can be put on it."""

    __slots__ = ("epoch",)

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index + 1000 * self.epoch])


class Assigned(Curriculum):
    """Its method is the object's, so nobody hears what the script tells it."""

    def __init__(self) -> None:
        super().__init__()
        self.set_epoch = lambda epoch: setattr(self, "epoch", epoch)  # type: ignore[method-assign]


class Bound(Curriculum):
    """So is this one, though its class has one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.set_epoch = types.MethodType(lambda self, epoch: setattr(self, "epoch", epoch), self)  # type: ignore[method-assign]


@pytest.mark.parametrize("make_it", [Slotted, Assigned, Bound])
def test_a_script_is_overruled_also_where_it_is_not_heard(make_it: Any) -> None:
    """Whatever its class lets one do, it is told before it is read."""
    data = make_it()
    for batch in islice(make(data), 9):
        assert {int(x) // 1000 for m in batch.micro_batches for x in m.data} == {batch.position.data_epoch}
        data.set_epoch(77)


def test_copies_are_data_sets_of_their_own() -> None:
    """What is told to a copy, as for an evaluation, neither reaches the training's nor is heard as if it had."""
    data = Curriculum()
    epoch = DataEpoch(data)
    epoch.tell(1)
    for other in (copy.copy(data), copy.deepcopy(data), Curriculum()):
        other.set_epoch(5)
        assert (data.epoch, other.epoch) == (1, 5)
    assert epoch.contradicted(1) is None
    data.set_epoch(5)
    assert (epoch.contradicted(1), epoch.contradicted(1)) == (5, None)
    epoch.tell(1)
    assert data.epoch == 1


def test_another_length_in_a_later_epoch_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The order is made once, so what a data set grows by is never trained."""

    class Grows(Curriculum):
        def __len__(self) -> int:
            return LENGTH + 4 * self.epoch

    is_right(read(Grows()))
    (line,) = said(caplog)
    assert "the data set has 16 samples in data epoch 1, and the order of the run is of 12" in line


def test_samples_are_not_gone_through() -> None:
    """What is no data set is not asked anything, and what answers to every name is no data set."""

    class Anything:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: pytest.fail(f"{name} was called")

        def __getitem__(self, index: int) -> Any:
            pytest.fail("it was read")

    data = Around([0] * LENGTH)
    data.more = [Anything()] * 100_000, Anything(), {"x": Anything()}, data  # type: ignore[attr-defined]
    data.itself = data  # type: ignore[attr-defined]
    data.any = Anything()  # type: ignore[attr-defined]
    for _ in range(5000):
        data = Around(data)
    assert not DataEpoch(data).wanted


class Stream(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor([i + 1000 * self.epoch]) for i in range(LENGTH)])


class Rows(IterableDataset[Tensor]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.inner)


class Hands(Rows):
    """Hands the number on, as transformers' shards and ms-swift's packing do."""

    def set_epoch(self, epoch: int) -> None:
        self.inner.set_epoch(epoch)


@pytest.mark.parametrize("wrap", [lambda data: data, Rows, Hands, lambda data: torch.utils.data.ChainDataset([data])])
@pytest.mark.parametrize("workers", [0, 2])
def test_streams_inside_of_others_are_told(workers: int, wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As map-style ones. What a script tells them is over with the next reading, and some tell themselves."""
    inner = Stream()
    options = {"num_workers": workers} if workers else {}
    data = Batches(
        wrap(inner),
        ElasticSampler(None, SIZE, shuffle=False),
        BatchPlan(SIZE, 1, 4),
        0,
        loader_options=options,
    )
    found = []
    with caplog.at_level(logging.WARNING):
        for batch in islice(data, 9):
            found.append((batch.position.data_epoch, [int(x) for m in batch.micro_batches for x in m.data]))
            if batch.ends_data_epoch:
                inner.set_epoch(9)
    is_right(found)
    assert not said(caplog)


class Seeds(Stream):
    """What it seeds in `set_epoch` is for its iterator."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        random.seed(100 + epoch)

    def __iter__(self) -> Iterator[Tensor]:
        order = list(range(LENGTH))
        random.shuffle(order)
        return iter([torch.tensor([i + 1000 * self.epoch]) for i in order])


class Uses(Stream):
    """What it makes in `set_epoch` is used up by a reading."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.random = random.Random(100 + epoch)

    def __iter__(self) -> Iterator[Tensor]:
        order = list(range(LENGTH))
        self.random.shuffle(order)
        return iter([torch.tensor([i + 1000 * self.epoch]) for i in order])


@pytest.mark.parametrize("make_it", [Seeds, Uses])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_told_before_each_reading(workers: int, make_it: Any) -> None:
    """Also where it is read again in a data epoch: a loop that was left, or processes that stay."""
    options = {"num_workers": workers} if workers else {}
    data = Batches(
        make_it(), ElasticSampler(None, SIZE, shuffle=False), BatchPlan(SIZE, 1, 4), 0, loader_options=options
    )
    found = []
    for steps in (1, 4, 4):
        for batch in islice(data, steps):
            found.append((batch.position.data_epoch, [int(x) for m in batch.micro_batches for x in m.data]))
        random.seed(steps)
    is_right(found)


class Keeps(Curriculum):
    """It makes the data set inside anew wherever it is sent, which nobody could send."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Curriculum()
        self.inner.file = lambda: None  # type: ignore[attr-defined]

    set_epoch = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return type(self), ()

    def __getitem__(self, index: int) -> Tensor:
        return self.inner[index]


def test_a_data_set_that_another_process_makes_anew_is_told_there() -> None:
    is_right(read(Keeps(), workers=1, loader={"multiprocessing_context": "spawn"}))


def test_workers_do_not_change_each_others_epoch() -> None:
    """Hugging Face's streams share it, and add to it: two workers that enter a data epoch at once could add twice."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [[i] for i in range(LENGTH)]}).to_iterable_dataset()
    data = rows.shuffle(seed=1, buffer_size=LENGTH).with_format("torch")
    made = [
        Batches(
            wrap(data),
            ElasticSampler(None, SIZE, shuffle=False),
            BatchPlan(SIZE, 1, 4),
            0,
            collate=unstacked,
            loader_options={"num_workers": workers},
        )
        for wrap, workers in ((lambda data: data, 2), (Rows, 2), (Hands, 2), (lambda data: data, 0))
    ]
    read = [[[int(x) for m in batch.micro_batches for x in m.data] for batch in islice(one, 7)] for one in made[:3]]
    assert int(data._epoch) == 0
    right = [[int(x) for m in b.micro_batches for x in m.data] for b in islice(made[3], 7)]
    assert read == [right] * 3
    assert int(data._epoch) == 2
    assert read[0][:3] != read[0][3:6]
