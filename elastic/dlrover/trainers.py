"""DLRover's trainer, optimizer and scheduler: as many micro-steps on every rank, and every sample weighs as much."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch.distributed as dist

from ..data.micro_batch import MicroBatch
from .passes import Dealt, Pass
from .samplers import Slices, handed_last, largest_world, put
from .weights import weighted

__all__ = ["change"]


def change(module: ModuleType) -> None:
    """Changes the classes of DLRover's module in place."""
    put(_Optimizer, module._ElasticOptimizer)
    put(_Scheduler, module._ElasticLRScheduler)
    put(_Trainer, module.ElasticTrainer)


class _Batch:
    """The global batch that a script is in: which gradients are there, and what is done once it has stepped."""

    def __init__(self) -> None:
        # A backward pass since the last step of the optimizer; and one in this micro-step.
        self.accumulated = self.ran = False
        self.one: Pass | None = None
        self.done = 0
        # The script steps the optimizer that it got from the trainer, so that tells when a batch is done.
        self.has_optimizer = False

    def enter(self, one: Pass | None, done: int) -> None:
        """A micro-step begins. `done`: samples of the data epoch that are done once the optimizer has stepped."""
        self.ran, self.one, self.done = False, one, done

    def backward(self) -> None:
        """There are gradients."""
        self.accumulated = self.ran = True

    def stepped(self) -> None:
        """The optimizer has taken them."""
        self.accumulated = False
        if self.one is not None:
            self.one.finish(self.done)


_batch = _Batch()


class _Optimizer:
    _plain: dict[str, Any]
    optimizer: Any
    gradient_state: Any

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        # Scripts call it before the backward pass, or behind the step. Neither may lose what other micro-batches of
        # the same batch have left.
        if (self.gradient_state.sync_gradients and _batch.ran) or not _batch.accumulated:
            self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self._plain["step"](self, closure)
        _batch.has_optimizer = True
        if self.gradient_state.sync_gradients:
            _batch.stepped()


class _Scheduler:
    _plain: dict[str, Any]
    gradient_state: Any

    def step(self, *arguments: Any, **named: Any) -> None:
        # Theirs goes on with each micro-batch, so that its pace depends on the world.
        if self.gradient_state.sync_gradients:
            self._plain["step"](self, *arguments, **named)


class _Trainer:
    _plain: dict[str, Any]
    model: Any
    dataloader: Any
    gradient_state: Any
    _syncs: bool | None

    def _set_gradient_accumulation_steps(self) -> None:
        """Alike on all ranks."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.gradient_accumulation_steps = -(-largest_world() // world)

    @contextlib.contextmanager
    def step(self, fix_total_batch_size: bool = False) -> Iterator[None]:
        """As theirs, one micro-batch; its loss is weighted by its part of the global batch."""
        one = self._pass()
        dealt = _check(one, fix_total_batch_size)
        if one is None or dealt is None:
            factor = self._without_slices(fix_total_batch_size)
            self._syncs = None
            _batch.enter(None, 0)
        else:
            whole = dealt.batch if fix_total_batch_size else dealt.row
            factor = dealt.n * one.world / whole
            self._syncs = dealt.is_last or not fix_total_batch_size
            _batch.enter(one, dealt.after_batch if fix_total_batch_size else dealt.after_row)
        theirs = self._plain["step"](self, fix_total_batch_size)
        with _silent(self.model, factor), weighted(factor, _batch.backward), theirs:
            yield
        if self.gradient_state.sync_gradients and not _batch.has_optimizer:
            _batch.stepped()

    def _before_step(self, fix_total_batch_size: bool) -> None:
        self._plain["_before_step"](self, fix_total_batch_size)
        if self._syncs is not None:
            self.gradient_state.sync_gradients = self._syncs

    def _pass(self) -> Pass | None:
        """The pass whose micro-batch the script has: its own loader's, or the last one that handed one out."""
        if self.dataloader is None:
            return handed_last()
        slices = getattr(self.dataloader, "batch_sampler", None)
        return slices.newest if isinstance(slices, Slices) else None

    def _without_slices(self, fix_total_batch_size: bool) -> float:
        """The script cuts its batches itself. Returns the factor of their losses."""
        if not fix_total_batch_size:
            return 1.0
        _say_once(self.gradient_accumulation_steps)
        return 1.0 / self.gradient_accumulation_steps


def _check(one: Pass | None, fixed: bool) -> Dealt | None:
    """The micro-batch that the script has.

    Raises:
        RuntimeError: it cannot be told, or the batch cannot be what the script asks for.
    """
    if one is None or one.current is None:
        return None
    one.trained += 1
    if one.trained != one.handed:
        raise RuntimeError(
            f"--dlrover-fixes: {one.handed} batches were taken from the loader, and elastic_trainer.step() was entered"
            f" {one.trained} times: which samples a step trains on is then not known. Enter it once for each batch, in"
            " their order, and give the training's loader to ElasticTrainer(model, dataloader=loader)"
        )
    if fixed and one.most != largest_world():
        raise RuntimeError(
            "--dlrover-fixes: step(fix_total_batch_size=True) for batches that were not cut so: write that argument "
            "into the script's own text, and give the sampler the ranks of the whole world"
        )
    return one.current


@contextlib.contextmanager
def _silent(model: Any, factor: float) -> Iterator[None]:
    """Keeps every trace of a micro-batch that counts for nothing out of the gradients, even NaN."""
    micro = MicroBatch[None](None, (), 0, 0, factor, is_last=False, rows=1)
    if factor == 0.0:
        micro.zero_gradients(model.parameters())
    try:
        yield
    finally:
        micro.close()


_said: set[int] = set()


def _say_once(accumulation: int) -> None:
    """Says that the batch is not what it would be in the largest world, if it is not."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    most = largest_world()
    if most % world and world not in _said and (not dist.is_initialized() or dist.get_rank() == 0):
        _said.add(world)
        # Not among the errors: those go to a file.
        print(
            f"--dlrover-fixes: {accumulation * world} micro-batches make a global batch on {world} ranks, and {most} on"
            f" {most}: without ElasticDistributedSampler nobody can cut them smaller",
            flush=True,
        )
