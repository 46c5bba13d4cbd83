"""Evaluation that gives the same numbers at every batch size and world size.

    def measure(model, batch):
        losses = cross_entropy(model(batch.x), batch.y, reduction="none")
        return {"loss": (losses, len(losses))}           # a total and its count; see Counts.add

    metrics = Evaluator(dataset, measure, batch_size=64).run(model)

Each sample is measured once. Totals and counts are summed over batches and ranks before any division.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from ..rank import rng
from ..rank.together import together
from .counts import Counts, Finish, Measured, Totals
from .evaluated_alike import LENGTH, ReadTogether, compare, length_of
from .evaluated_samples import PATIENCE_SECONDS, SHORT_PATIENCE_SECONDS, EvaluatedSamples
from .fetching import begun, is_iterable

_OWN_OPTIONS = ("batch_size", "batch_sampler", "sampler", "shuffle", "drop_last", "collate_fn", "generator")


class Interrupted(Exception):
    """The evaluation was abandoned on all ranks, because ``interrupt`` said so."""


@dataclass(frozen=True)
class Share:
    """One rank's part of one round, as positions in the data set. A filler is empty, and its result does not count.

    Attributes:
        start: First position.
        stop: One past the last.
    """

    start: int
    stop: int

    @property
    def filler(self) -> bool:
        return self.start == self.stop


def shares(size: int, batch_size: int, world_size: int, rank: int) -> Share:
    """This rank's part of a round of ``size`` samples; the ranks' parts differ by at most one.

    Raises:
        ValueError: More samples than a round can have, or a negative number.
    """
    if not 0 <= size <= batch_size * world_size:
        raise ValueError(f"a round of {world_size} batches of {batch_size} cannot have {size} samples")
    short, longer = divmod(size, world_size)
    start = rank * short + min(rank, longer)
    return Share(start, start + short + (rank < longer))


class Evaluator:
    """Runs a model over a data set on all ranks together, and returns metrics.

    The data set is cut into rounds of one batch per rank. All ranks make the same number of forward passes, because
    these contain collectives in a sharded model. A rank that has no samples in the last round computes a sample of
    another rank, and discards the result.

    Args:
        dataset: Map-style, or iterable; the same samples in the same order on every rank.
        measure: ``measure(model, data)`` returns totals and counts of one batch, see `Counts.add`. It runs without
            gradients and with the model in evaluation mode.
        batch_size: The most samples of one forward pass.
        collate: Makes ``data`` from a list of samples; default: torch's.
        finish: Makes metrics from the summed `Totals`, for those that are no plain ratio (a perplexity, an F1 score);
            default: `Totals.metrics`.
        loader_options: For ``torch.utils.data.DataLoader``: ``num_workers``, ``pin_memory``, ….
        interrupt_every: Number of batches between two calls of ``interrupt``, see `run`.
        check_data: Before the first run look at a few samples of a map-style data set, and compare them between the
            ranks; of an iterable one the first samples of each run. False: other data of the same length are not
            noticed. None: as the `Trainer` does that runs it; without one, True.

    Raises:
        ValueError: A size below 1, or a loader option that would change what is measured.
    """

    def __init__(
        self,
        dataset: Any,
        measure: Callable[[Any, Any], Measured],
        *,
        batch_size: int = 32,
        collate: Callable[[list[Any]], Any] | None = None,
        finish: Finish | None = None,
        loader_options: dict[str, Any] | None = None,
        interrupt_every: int = 8,
        check_data: bool | None = None,
    ) -> None:
        if batch_size < 1 or interrupt_every < 1:
            raise ValueError(f"batch_size and interrupt_every must be at least 1: {batch_size}, {interrupt_every}")
        for name in (loader_options or {}).keys() & set(_OWN_OPTIONS):
            raise ValueError(f"loader_options cannot have {name!r}: the Evaluator deals the samples itself")
        if is_iterable(dataset) and loader_options:
            raise ValueError("an iterable data set is read by each rank itself: leave loader_options out")
        if isinstance(dataset, Iterator):
            raise ValueError("an iterator or generator object can be read only once: give what makes one anew")
        self._dataset, self._measure, self._batch_size = dataset, measure, batch_size
        self._collate, self._finish = collate or default_collate, finish or Totals.metrics
        self._options, self._interrupt_every = dict(loader_options or {}), interrupt_every
        self._check_data = check_data
        self._samples = None if is_iterable(dataset) else EvaluatedSamples(dataset, self._options)
        # A stream's samples are random: they are compared no more.
        self._varies = False

    def check(
        self,
        model: nn.Module,
        *,
        device: torch.device | str | None = None,
        interruptible: bool = False,
        busy: Callable[[], None] = lambda: None,
        check_data: bool = True,
    ) -> None:
        """Compares between the ranks what `run` will: all that is known of the data before they are measured.

        Each run does so, too. Called before a long training, this refuses it while nothing is lost. Collective over the
        default process group, if there is one; where there is one rank, nothing is read.

        Args:
            model: As of `run`. It is in evaluation mode, and without gradients, while samples are looked at.
            device: As of `run`.
            interruptible: The runs will be given an ``interrupt``.
            busy: As of `run`; called before and behind each look at the samples.
            check_data: For an Evaluator that was not told; the runs that follow do the same.

        Raises:
            Unlike: A ValueError: the ranks have other data, or evaluate otherwise. On all ranks.
            Refusal, Trouble: A ValueError and a RuntimeError: some rank's data set cannot say its length. The latter if
                another start may succeed. Or the model is split over ranks that compute together. On all ranks.
        """
        if self._check_data is None:
            self._check_data = check_data
        rank, world_size = _place()
        if world_size > 1:
            with _evaluating(model, rank), torch.no_grad():
                self._compare(model, _device_for(model, device), interruptible, busy)

    def run(
        self,
        model: nn.Module,
        *,
        device: torch.device | str | None = None,
        interrupt: Callable[[], bool] | None = None,
        busy: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Evaluates. Collective over the default process group, if there is one.

        Afterwards the model's training mode, module by module, and the random generators are what they were before.
        During the run the generators are seeded, so that a second run gives the same result.

        Args:
            model: The model that ``measure`` gets.
            device: Where batches are moved and totals are summed; default: the model's device.
            interrupt: Called from time to time on all ranks; must return the same on all of them.
            busy: Called with every batch (``session.busy``), and before and behind each look at the samples.

        Returns:
            Metrics, the same on every rank; empty if there are no samples.

        Raises:
            Interrupted: ``interrupt`` returned True.
            Unlike: A ValueError: the ranks have other data, or evaluate otherwise. On all ranks.
            Refusal, Trouble: As of `check`.
        """
        where = _device_for(model, device)
        rank, world_size = _place()
        counts, stream = Counts(where), self._stream(where, rank, busy, asked=interrupt is not None)
        with _evaluating(model, rank), torch.no_grad():
            # All readings are in here, because a data set may ask the model itself for a sample.
            length = self._compare(model, where, interrupt is not None, busy)
            for number, (data, filler) in enumerate(self._batches(rank, world_size, length, stream)):
                if stream is not None:
                    # Whoever has come to its end would come neither to ``interrupt``, whatever group that is of, nor to
                    # a forward pass in which the ranks of a sharded model meet.
                    stream.meet(end=False)
                if interrupt is not None and number % self._interrupt_every == 0 and interrupt():
                    raise Interrupted
                busy()
                measured = self._measure(model, to_device(data, where))
                if not filler:
                    counts.add(measured)
            if stream is not None:
                stream.meet(end=True)
                self._varies = self._varies or stream.varies
        return dict(self._finish(totals)) if _anything(totals := counts.reduce()) else {}

    def _stream(self, where: torch.device, rank: int, busy: Callable[[], None], *, asked: bool) -> ReadTogether | None:
        """Of an iterable data set: what the ranks have read of it in this run."""
        if not is_iterable(self._dataset):
            return None
        looked_at = None if self._check_data is False or self._varies else self._dataset
        return ReadTogether(where, looked_at, rank, busy, _patience(asked=asked))

    def _compare(self, model: nn.Module, where: torch.device, asked: bool, busy: Callable[[], None]) -> int | None:
        """Compares what is evaluated, see `compare`; returns the length of the data set, None: unknown."""
        samples = None if self._check_data is False else self._samples
        told = compare(
            lambda: self._alike(asked),
            where,
            samples,
            problem=_split(model),
            busy=busy,
            patience_seconds=_patience(asked=asked),
        )
        length: int | None = told[LENGTH]
        return length

    def _alike(self, asked: bool) -> dict[str, Any]:
        """What must be alike on all ranks, by name; ``asked``: there is an ``interrupt``."""
        stream = is_iterable(self._dataset)
        return {
            "whether the data set is iterable": stream,
            LENGTH: length_of(self._dataset, stream=stream),
            "batch_size": int(self._batch_size),
            "whether interrupt is given": asked,
            **({"interrupt_every": int(self._interrupt_every)} if asked else {}),
        }

    def _batches(
        self, rank: int, world_size: int, length: int | None, stream: ReadTogether | None
    ) -> Iterator[tuple[Any, bool]]:
        """This rank's batches, as many as on every other rank, each with whether it is a filler."""
        if stream is not None:
            yield from self._of_iterable(rank, world_size, stream)
            return
        assert length is not None
        deal = _Deal(length, self._batch_size, world_size, rank)
        # A generator of its own, because the loader would draw its workers' seed from the training's.
        generator = torch.Generator().manual_seed(rng.derive("evaluation-loader"))
        loader = DataLoader(
            self._dataset, batch_sampler=deal, collate_fn=self._collate, generator=generator, **self._options
        )
        for data, share in zip(begun(loader), deal.shares(), strict=True):
            yield data, share.filler

    def _of_iterable(self, rank: int, world_size: int, stream: ReadTogether) -> Iterator[tuple[Any, bool]]:
        """The same for an iterable data set. Every rank reads the whole stream, so that all know where it ends."""
        samples = iter(self._dataset)
        first: list[Any] = []
        while gathered := list(islice(samples, self._batch_size * world_size)):
            first = first or gathered[:1]
            stream.read(gathered)
            share = shares(len(gathered), self._batch_size, world_size, rank)
            yield self._collate(first if share.filler else gathered[share.start : share.stop]), share.filler


class _Deal:
    """The indices of this rank's batches, computed when asked for. A filler is sample 0."""

    def __init__(self, length: int, batch_size: int, world_size: int, rank: int) -> None:
        self._length, self._batch_size, self._world_size, self._rank = length, batch_size, world_size, rank

    def __len__(self) -> int:
        step = self._batch_size * self._world_size
        return (self._length + step - 1) // step

    def __iter__(self) -> Iterator[list[int]]:
        for share in self.shares():
            yield [0] if share.filler else list(range(share.start, share.stop))

    def shares(self) -> Iterator[Share]:
        """This rank's share of each round."""
        step = self._batch_size * self._world_size
        for begin in range(0, self._length, step):
            share = shares(min(step, self._length - begin), self._batch_size, self._world_size, self._rank)
            yield Share(begin + share.start, begin + share.stop)


def to_device(data: Any, device: torch.device) -> Any:
    """``data`` with every tensor on ``device``: by its own ``to``, or those in dicts, lists and tuples."""
    if isinstance(data, Tensor):
        # A copy to the CPU that does not wait would return memory that is not filled yet.
        return data.to(device, non_blocking=device.type != "cpu")
    # It knows better what belongs there: a PackedSequence keeps its sizes on the CPU. A container is not asked for
    # attributes: they may be its items, and what one lacks raises KeyError.
    asked = type(data) if isinstance(data, dict | list | tuple) else data
    if callable(getattr(asked, "to", None)):
        moved = data.to(device)
        return data if moved is None else moved  # moved in place
    if isinstance(data, dict):
        moved = {key: to_device(value, device) for key, value in data.items()}
        return moved if type(data) is dict else _as_copy(data, moved)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(value, device) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(to_device(value, device) for value in data)
    return data


def _as_copy(data: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    """``data`` with other values, as torch's collate does it: nobody knows what a class of its own is made from.

    Where it can be neither copied nor set ``values`` are returned.
    """
    try:
        copied: Any = copy.copy(data)
        if copied is data:
            return values
        if getattr(data, "__dict__", None) is data:  # a copy's attributes are beside it
            copied.__dict__ = copied
        for key, value in values.items():
            copied[key] = value
    except Exception:  # whatever a class of the script's own says to it; all values are moved already
        return values
    found: dict[Any, Any] = copied
    return found


@contextmanager
def _evaluating(model: nn.Module, rank: int) -> Iterator[None]:
    # Not model.train() afterwards: a script may keep some modules in evaluation mode for good.
    modes = [(module, module.training) for module in model.modules()]
    generators = rng.capture()
    model.eval()
    rng.seed_all(rng.derive("evaluation", rank))
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        rng.restore(generators)


def _patience(*, asked: bool) -> float:
    """For so many seconds samples that differ are looked at. Where somebody asks, a leave may wait for this."""
    return SHORT_PATIENCE_SECONDS if asked else PATIENCE_SECONDS


def _split(model: nn.Module) -> str:
    """Why ranks that compute each sample together cannot be dealt samples of their own; "": each computes alone."""
    for one in together(model):
        if one.split:
            return (
                f"tensor parallelism: {one.what}, which compute each sample together, and the Evaluator deals each of "
                "them samples of its own. Evaluate in a loop of your own that gives such ranks the same samples, and "
                "add up with Counts(device, group=mesh['dp'].get_group()); see docs/dcp.md"
            )
    return ""


def _anything(totals: Totals) -> bool:
    return bool(totals.ratios or totals.counts)


def _place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _device_for(model: nn.Module, given: torch.device | str | None) -> torch.device:
    if given is not None:
        return torch.device(given)
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
