"""A map-style data set as optimizer steps: this rank's micro-batches of every global batch, with their factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from . import rng
from .checkpoint import Order, Position
from .plan import BatchPlan, Slice
from .sampler import ElasticSampler, GlobalBatch

T = TypeVar("T")


@dataclass
class MicroBatch(Generic[T]):
    """What one forward and backward pass computes.

    Attributes:
        data: What the collate function made of the samples.
        sample_ids: Its own real samples; none for a filler.
        n: Their number.
        number: Number of the micro-batch in the global batch.
        loss_scale: Multiply the mean loss of ``data`` by it.
        is_last: The last one of this rank's step: gradients are to be synchronised in its backward pass.
    """

    data: T
    sample_ids: tuple[int, ...]
    n: int
    number: int
    loss_scale: float
    is_last: bool
    _hooks: list[Any] = field(default_factory=list, repr=False)

    @property
    def filler(self) -> bool:
        """It repeats a sample that another slice owns, so that this rank takes part; it must count for nothing."""
        return self.n == 0

    def scale(self, loss: Tensor, parameters: Iterator[Tensor] | Sequence[Tensor] = ()) -> Tensor:
        """``loss * loss_scale``, and nothing at all where the factor is 0, even if the loss is NaN or infinite.

        That is a filler, or with token means a slice without a real token, whose mean is 0 / 0.

        Args:
            loss: The mean loss of ``data``, a scalar.
            parameters: The model's. With them the gradients of such a slice are zeroed one by one, so that even an
                infinite derivative inside the model leaves no NaN (``0 * inf``); without them only the loss itself is
                guarded.
        """
        if self.loss_scale != 0.0:
            return loss * self.loss_scale
        for parameter in parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(torch.zeros_like))  # type: ignore[no-untyped-call]
        return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0) * 0.0

    def _close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


@dataclass
class Batch(Generic[T]):
    """One optimizer step of this rank.

    Attributes:
        step: The optimizer step, counted from 1.
        n: Real samples of the whole global batch.
        sample_ids: This rank's real samples.
        position: Where the global batch begins.
        position_after: The run's position once this step is done.
        tokens: Real tokens of the whole global batch, with token means; else 0. Known once ``micro_batches`` began.
    """

    step: int
    n: int
    sample_ids: tuple[int, ...]
    position: Position
    position_after: Position
    tokens: int = 0
    _parts: list[tuple[Slice, T]] = field(default_factory=list, repr=False)
    _owner: Batches[T] | None = field(default=None, repr=False)

    @property
    def micro_batches(self) -> Iterator[MicroBatch[T]]:
        """The micro-batches in order; one pass. With token means all ranks must begin it in the same step."""
        if self._owner is None:
            raise RuntimeError("this batch was not made by Batches")
        return self._owner.micro_batches(self, self._parts)


class Batches(Generic[T]):
    """Iterates over ``Batch`` objects from the sampler's position on.

    What is fetched ahead by DataLoader workers does not count: a batch carries the position after it, and a run that
    saves that position goes on with the next batch. Iterating does not move ``sampler``.

    Args:
        dataset: Map-style; anything with ``__getitem__``.
        sampler: The order and where to begin.
        plan: Who computes what. Its global batch size must be the sampler's.
        rank: This rank's number in the data-parallel group.
        collate: Makes ``data`` of a list of samples; default: torch's.
        scale: ``"ddp"`` or ``"deepspeed"``, see ``BatchPlan.loss_scale``.
        resume: Begin after this checkpoint: its position and step, its order compared. Anything with ``position``,
            ``step`` and ``manifest.order``; None: at the sampler's position, with step 1.
        data_epochs: Stop before this data epoch; None: never.
        seed: With a ``fixed_micro_batch`` plan: generators are set from (seed, step, number) before every micro-batch.
        count_tokens: For token means: real tokens in ``data``. Factors are then by tokens instead of samples.
        reduce: For token means: sums a number over all ranks (``session.sum``).
        loader_options: For ``torch.utils.data.DataLoader``: ``num_workers``, ``pin_memory``, ….

    Raises:
        ValueError: Sizes that disagree, a position in another order, or ``count_tokens`` without ``reduce``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: ElasticSampler,
        plan: BatchPlan,
        rank: int,
        *,
        collate: Callable[[list[Any]], T] | None = None,
        scale: str = "ddp",
        resume: Any = None,
        data_epochs: int | None = None,
        seed: int | None = None,
        count_tokens: Callable[[T], int] | None = None,
        reduce: Callable[[float], float] | None = None,
        loader_options: dict[str, Any] | None = None,
    ) -> None:
        if sampler.order.global_batch_size != plan.global_batch_size:
            raise ValueError(
                f"the sampler deals {sampler.order.global_batch_size} samples a step, the plan {plan.global_batch_size}"
            )
        if (count_tokens is None) != (reduce is None):
            raise ValueError("token means need both count_tokens and reduce")
        if resume is not None and resume.manifest.order is not None:
            sampler.check_order(resume.manifest.order)
        self._dataset, self._plan, self._rank, self._scale = dataset, plan, rank, scale
        self._start = sampler.position if resume is None else resume.position
        self._first_step = 1 if resume is None else resume.step + 1
        self._sampler = sampler
        self._collate, self._seed = collate, seed
        self._count_tokens, self._reduce = count_tokens, reduce
        self._options = dict(loader_options or {})
        self._data_epochs = data_epochs
        self._left = self._count_left()
        sampler.batch_at(self._start)
        plan.loss_scale(1, 1, scale)

    @property
    def order(self) -> Order:
        """For the manifest of checkpoints."""
        return self._sampler.order

    @property
    def left(self) -> int | None:
        """Batches not handed out yet, alike on all ranks; None: without end."""
        return self._left

    def __iter__(self) -> Iterator[Batch[T]]:
        self._left = self._count_left()
        dealt: Iterator[GlobalBatch] = self._global_batches()
        loader: Iterator[T] = iter(self._loader())
        for step, whole in enumerate(dealt, start=self._first_step):
            slices = self._plan.slices(self._rank, len(whole.sample_ids))
            parts = [(part, next(loader)) for part in slices]
            ids = [i for part in slices if not part.filler for i in whole.sample_ids[part.start : part.stop]]
            if self._left is not None:
                self._left -= 1
            yield Batch(
                step=step,
                n=len(whole.sample_ids),
                sample_ids=tuple(ids),
                position=whole.position,
                position_after=whole.position_after,
                _parts=parts,
                _owner=self,
            )

    def micro_batches(self, batch: Batch[T], parts: list[tuple[Slice, T]]) -> Iterator[MicroBatch[T]]:
        """See ``Batch.micro_batches``."""
        weights = [float(part.n) for part, _ in parts]
        total = float(batch.n)
        if self._count_tokens is not None and self._reduce is not None:
            weights = [0.0 if part.filler else float(self._count_tokens(data)) for part, data in parts]
            total = self._reduce(sum(weights))
            batch.tokens = round(total)
        remaining = list(batch.sample_ids)
        for index, (part, data) in enumerate(parts):
            own, remaining = tuple(remaining[: part.n]), remaining[part.n :]
            # A step without any real token has nothing to learn from.
            scale = self._plan.loss_scale(weights[index], total, self._scale) if total else 0.0
            if self._seed is not None and self._plan.fixed_micro_batch:
                rng.seed_micro_batch(self._seed, batch.step, part.number)
            micro = MicroBatch(data, own, part.n, part.number, scale, index == len(parts) - 1)
            try:
                yield micro
            finally:
                micro._close()

    def _global_batches(self) -> Iterator[GlobalBatch]:
        position = self._start
        while self._data_epochs is None or position.data_epoch < self._data_epochs:
            batch = self._sampler.batch_at(position)
            yield batch
            position = batch.position_after

    def _loader(self) -> DataLoader[Any]:
        options = self._options
        if self._collate is not None:
            options = {**options, "collate_fn": self._collate}
        # The loader draws its workers' seed from a generator of its own: the global one must run on bit-exactly.
        generator = torch.Generator().manual_seed(rng.derive("loader", self.order.seed, self._first_step, self._rank))
        return DataLoader(
            self._dataset,
            batch_sampler=_SliceIds(self._global_batches, self._plan, self._rank),
            generator=generator,
            **options,
        )

    def _count_left(self) -> int | None:
        if self._data_epochs is None:
            return None
        per_epoch, done = self._sampler.batches_per_data_epoch, self._start.samples // self.order.global_batch_size
        return max(0, (self._data_epochs - self._start.data_epoch) * per_epoch - done)


class _SliceIds:
    """The batch sampler of one rank: the sample ids of each of its micro-batches in turn."""

    def __init__(self, batches: Callable[[], Iterator[GlobalBatch]], plan: BatchPlan, rank: int) -> None:
        self._batches, self._plan, self._rank = batches, plan, rank

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches():
            for part in self._plan.slices(self._rank, len(batch.sample_ids)):
                yield list(batch.sample_ids[part.start : part.stop])
