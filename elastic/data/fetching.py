"""Makes micro-batches from data sets, in the training process or in a DataLoader's workers.

Map-style data sets are asked only for this rank's samples. Every rank reads all of an iterable one, and so does each of
its workers, but each worker makes only its own micro-batches: put expensive work into ``collate``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ..checkpoint import Position
from ..rank import rng
from .epochs import DataEpoch
from .looking import Inspected, Inspection, look_at, name_of
from .plan import BatchPlan, Slice
from .prints import print_of
from .sampler import ElasticSampler
from .stand_in import StandIn, parts_of

T = TypeVar("T")


@dataclass(frozen=True)
class PlannedMicroBatch:
    """One micro-batch, before it is made.

    Attributes:
        slice: Its place in the global batch.
        total: Real samples of the whole global batch.
        sample_ids: The samples that it computes, without padding; for an iterable data set, numbers in the order of its
            data epoch.
        position: Where the global batch begins.
        position_after: Where the next global batch begins.
    """

    slice: Slice
    total: int
    sample_ids: tuple[int, ...]
    position: Position
    position_after: Position


@dataclass(frozen=True)
class Maker(Generic[T]):
    """Turns samples into the data of a micro-batch.

    Attributes:
        collate: Makes a micro-batch from a list of samples; None: torch's.
        seed: If given, what ``collate`` draws from the global generators depends on the micro-batch alone.
        worker_seed: The seed of the generators in a DataLoader's worker, if there is no ``seed``.
    """

    collate: Callable[[list[Any]], T] | None
    seed: int | None
    worker_seed: int = 0

    def settle(self, part: PlannedMicroBatch) -> None:
        """Seeds a worker's generators for ``part`` from its position, so that the worker's start does not matter."""
        if self.seed is None and get_worker_info() is not None:
            place = part.position
            rng.seed_cpu(rng.derive("worker", self.worker_seed, place.data_epoch, place.samples, part.slice.number))

    def make(self, samples: list[Any], part: PlannedMicroBatch) -> T:
        """Pads and collates samples to the data of a micro-batch."""
        collate: Callable[[list[Any]], T] = self.collate or default_collate
        rows = samples + samples[:1] * part.slice.padding
        if self.seed is None:
            return collate(rows)
        with rng.aside("collate", self.seed, part.position.data_epoch, part.sample_ids[0]):
            return collate(rows)


def is_iterable(dataset: object) -> bool:
    """Whether it can only be read from the beginning."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


class Loading(Generic[T]):
    """Where parts and their data come from.

    Args:
        dataset: Map-style or iterable.
        sampler: The order; each start gives a position to begin at.
        plan, rank: The plan, and the rank whose parts these are.
        maker: See `Maker`.
        data_epochs: Stop before this data epoch; None: never.
        options: For ``torch.utils.data.DataLoader``.

    Attributes:
        is_stream: The data set is iterable.
        epoch: Tells it the data epoch, in this process.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: ElasticSampler,
        plan: BatchPlan,
        rank: int,
        maker: Maker[T],
        data_epochs: int | None,
        options: dict[str, Any],
    ) -> None:
        self._dataset, self._sampler, self._plan, self._rank = dataset, sampler, plan, rank
        self._maker, self._data_epochs, self._options = maker, data_epochs, options
        self.is_stream = is_iterable(dataset)
        self.epoch = DataEpoch(dataset, maker.worker_seed, stream=self.is_stream)

    @property
    def length(self) -> int | None:
        """Samples of the data set as it now is; None: unknown, or a stream, which counts them itself."""
        return len(self._dataset) if not self.is_stream and hasattr(self._dataset, "__len__") else None

    def start(self, position: Position, generator: Any) -> Iterator[tuple[PlannedMicroBatch, T]]:
        """The parts of this rank from ``position`` on, in order.

        Args:
            position: Where a batch begins.
            generator: The generator from which workers' seeds are drawn.
        """
        asked: deque[PlannedMicroBatch] = deque()
        return self._parts(self._read(position, generator, asked), asked)

    def look(
        self, position: Position, generator: Any, look: Inspection
    ) -> tuple[list[Inspected], Iterator[tuple[PlannedMicroBatch, T]]]:
        """What each reader of the data sees of them, and the iterator of ``start``, which begins with that look.

        The training process must not open anything here that its reading processes, which start later, must not share.
        """
        asked: deque[PlannedMicroBatch] = deque()
        reading = self._read(position, generator, asked, look)
        # Each process that reads an iterable data set first yields what it has seen of it.
        readers = max(1, self._options.get("num_workers", 0)) if is_iterable(self._dataset) else 1
        return list(islice(reading, readers)), self._parts(reading, asked)

    def _parts(self, reading: Iterator[Any], asked: deque[PlannedMicroBatch]) -> Iterator[tuple[PlannedMicroBatch, T]]:
        if is_iterable(self._dataset):
            yield from reading
            return
        for data in reading:
            # Data come in the order in which they were requested, also from several workers.
            yield asked.popleft(), data

    def _read(
        self, position: Position, generator: Any, asked: deque[PlannedMicroBatch], look: Inspection | None = None
    ) -> Iterator[Any]:
        """An iterator whose workers, if there are any, have begun to read."""
        if is_iterable(self._dataset):
            plan, maker = self._plan, self._maker
            stream = Stream(
                self._dataset, self._sampler, plan, self._rank, maker, position, self._data_epochs, look, self.epoch
            )
            return begun(self._loader(stream, generator))
        # A data set may share what it is told between processes. So no worker reads ahead into another data epoch.
        apart = self.epoch.wanted and self._options.get("num_workers", 0) > 0
        asking = _Asking(self._ask, position, asked, apart, look)
        keep = {"persistent_workers": True} if apart else {}
        loader = self._loader(Fetcher(self._dataset, self._maker, self.epoch), generator, sampler=asking, **keep)
        return chain(begun(loader), _goes_on(loader, asking))

    def _loader(self, dataset: Any, generator: Any, **options: Any) -> DataLoader[Any]:
        # batch_size=None, because each item of the data set is a micro-batch already.
        return DataLoader(
            dataset, batch_size=None, collate_fn=_as_is, generator=generator, **{**self._options, **options}
        )

    def _ask(self, position: Position) -> Iterator[PlannedMicroBatch]:
        while self._data_epochs is None or position.data_epoch < self._data_epochs:
            whole = self._sampler.batch_at(position)
            total = len(whole.sample_ids)
            for piece in self._plan.slices(self._rank, total):
                ids = tuple(whole.sample_ids[piece.start : piece.stop])
                yield PlannedMicroBatch(piece, total, ids, position, whole.position_after)
            position = whole.position_after


class _Asking:
    """What a loader asks of a map-style data set: a look, if there is one, and parts, all or one data epoch's a time.

    Attributes:
        over: No part is left.
    """

    def __init__(
        self,
        ask: Callable[[Position], Iterator[PlannedMicroBatch]],
        position: Position,
        asked: deque[PlannedMicroBatch],
        apart: bool,
        look: Inspection | None,
    ) -> None:
        self._parts, self._asked, self._apart, self.over = ask(position), asked, apart, False
        self._next: list[PlannedMicroBatch | Inspection] = [] if look is None else [look]

    def __iter__(self) -> Iterator[PlannedMicroBatch | Inspection]:
        data_epoch = None
        for part in chain(self._next, self._parts):
            if isinstance(part, PlannedMicroBatch):
                if self._apart and data_epoch not in (None, part.position.data_epoch):
                    self._next = [part]
                    return
                data_epoch = part.position.data_epoch
                self._asked.append(part)
            yield part
        self.over = True


def _goes_on(loader: DataLoader[Any], asking: _Asking) -> Iterator[Any]:
    while not asking.over:
        yield from begun(loader)


def begun(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's iterator. What torch then draws with our generator is on the CPU, whatever the script's default."""
    with torch.device("cpu"):
        return iter(loader)


class Fetcher(StandIn["T | Inspected"]):
    """A map-style data set whose items are micro-batches."""

    def __init__(self, dataset: Any, maker: Maker[T], epoch: DataEpoch) -> None:
        super().__init__(dataset, (maker, epoch))

    def __getattr__(self, name: str) -> Any:
        # Earlier versions had the data set under this name. One that has it itself may be what torch's documents show,
        # but a part of another one the script knows as what it gave.
        if name == "dataset":
            dataset, _ = parts_of(self)
            if isinstance(dataset, Subset) or not hasattr(dataset, name):
                return dataset
        return super().__getattr__(name)

    def __getitem__(self, part: PlannedMicroBatch | Inspection) -> T | Inspected:
        dataset, (maker, epoch) = parts_of(self)
        if isinstance(part, Inspection):
            epoch.tell(part.data_epoch)
            return look_at(dataset, lambda index: _together(dataset, maker, [index])[0], part)
        epoch.tell(part.position.data_epoch)
        maker.settle(part)
        made: T = maker.make(_samples(dataset, maker, part), part)
        return made


def _together(dataset: Any, maker: Maker[Any], ids: list[int]) -> list[Any]:
    together = getattr(dataset, "__getitems__", None)
    if callable(together) and maker.seed is None:
        return list(together(ids))
    return [dataset[index] for index in ids]


def _samples(dataset: Any, maker: Maker[Any], part: PlannedMicroBatch) -> list[Any]:
    seed, ids = maker.seed, list(part.sample_ids)
    if seed is None:
        return _together(dataset, maker, ids)
    samples = []
    for index in ids:
        with rng.aside("sample", seed, part.position.data_epoch, index):
            samples.append(dataset[index])
    return samples


class Stream(IterableDataset["tuple[PlannedMicroBatch, T] | Inspected"]):
    """An iterable data set as micro-batches: worker k of n makes every n-th one of this rank, starting with number k.

    DataLoader takes from its workers in turn, so their micro-batches come in order.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        sampler: ElasticSampler,
        plan: BatchPlan,
        rank: int,
        maker: Maker[T],
        start: Position,
        data_epochs: int | None,
        look: Inspection | None,
        epoch: DataEpoch,
    ) -> None:
        self.dataset, self.maker, self.epoch = dataset, maker, epoch
        # What is seen of the first samples is noted while they are read, because many data sets cannot be read twice.
        self._looked_at, self._seen = 0 if look is None else len(look.sample_ids), Inspected()
        self._order, self._drop_last = sampler.order, sampler.drop_last
        self._plan, self._rank, self._start, self._data_epochs = plan, rank, start, data_epochs

    def __iter__(self) -> Iterator[tuple[PlannedMicroBatch, T] | Inspected]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None:
            self.epoch.keep_apart()
        number = 0
        for samples, position, after in self._batches():
            if self._looked_at:
                self._looked_at = 0
                yield self._seen
            for piece in self._plan.slices(self._rank, len(samples)):
                if number % workers == worker:
                    ids = tuple(range(position.samples + piece.start, position.samples + piece.stop))
                    part = PlannedMicroBatch(piece, len(samples), ids, position, after)
                    self.maker.settle(part)
                    yield part, self.maker.make(samples[piece.start : piece.stop], part)
                number += 1

    def _batches(self) -> Iterator[tuple[list[Any], Position, Position]]:
        """Global batches, each with its position and the next one's; two of them are in memory."""
        position = self._start
        while self._data_epochs is None or position.data_epoch < self._data_epochs:
            reading = self._read(position)
            samples = self._take(reading)
            if not samples:
                raise RuntimeError(self._nothing_at(position))
            while samples:
                following = self._take(reading)
                after = Position(position.data_epoch, position.samples + len(samples))
                if not following:
                    after = Position(position.data_epoch + 1, 0)
                yield samples, position, after
                samples, position = following, after

    def _take(self, reading: Iterator[Any]) -> list[Any]:
        size = self._order.global_batch_size
        with _as_only_reader():
            samples = list(islice(reading, size))
        return [] if self._drop_last and len(samples) < size else samples

    def _read(self, position: Position) -> Iterator[Any]:
        """The samples of a data epoch from ``position`` on. The epoch's length is checked if it is known."""
        dataset, count = self.dataset, position.samples
        self.epoch.tell(position.data_epoch)
        skip = getattr(dataset, "skip", None)
        # A shuffled data set of Hugging Face's would then give another order, and not all samples.
        if count and callable(skip) and type(dataset).__module__.partition(".")[0] != "datasets":
            source = iter(skip(count))
        else:
            source = iter(dataset)
            count = 0
        for sample in source:
            count += 1
            if self._order.length and count > self._order.length:
                raise RuntimeError(f"the data set has more than the {self._order.length} samples that the sampler has")
            if count <= self._looked_at or 0 < count - position.samples <= self._looked_at:
                self._seen.prints[name_of(count - 1, position.data_epoch)] = print_of(sample)
            if count > position.samples:
                yield sample
        if self._order.length and count < self._order.length:
            raise RuntimeError(
                f"the data set ended after {count} samples in data epoch {position.data_epoch}, "
                f"the sampler has {self._order.length}"
            )

    def _nothing_at(self, position: Position) -> str:
        if position.samples:
            where = f"sample {position.samples} of data epoch {position.data_epoch}, where the run goes on"
            return f"the data set ends before {where}: it is not the one that the run began with"
        least = self._order.global_batch_size if self._drop_last else 1
        return (
            f"the data set has fewer than {least} samples in data epoch {position.data_epoch}: an iterable one must "
            "give a new iterator each time (an iterator or generator object can be read only once)"
        )


@contextmanager
def _as_only_reader() -> Iterator[None]:
    """Hides the DataLoader's worker from the data set.

    Many iterable data sets give each worker a share of their own. Here every worker reads all of it and picks.
    """
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def _as_is(data: T) -> T:
    return data
