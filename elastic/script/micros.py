"""``for micro in batch``: `Accumulation`, and what a loop of one's own gets wrong around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.batch import Batch
from ..data.micro_batch import MicroBatch
from ..rank.clearing import listen
from ..rank.remarks import remark
from ..training.accumulation import Accumulation

T = TypeVar("T")


class Micros(Accumulation):
    """The loop over a batch's micro-batches, behind which the optimizer steps and the gradients are cleared.

    Args:
        model, optimizers: See `Accumulation`.
        schedules: Of learning rates; they step behind the loop, too.
    """

    def __init__(self, model: nn.Module, *optimizers: Optimizer, schedules: Iterable[Any] = ()) -> None:
        super().__init__(model, *optimizers)
        self._inside = self._said = False
        self._training: bool | None = None
        self._schedules = [one for one in schedules if hasattr(one, "last_epoch")]
        # In the first step: a gradient that must not be cleared between micro-batches.
        self._watched: tuple[nn.Parameter, Tensor] | None = None
        # Until a batch follows that was gone through.
        self._first, self._whole = True, False
        # Ids of the parameters whose gradients of earlier micro-batches are gone.
        self._lost: set[int] = set()
        self._watch = not self._engine and not self._sharded and not _moves_gradients(model)
        listen(self)

    def _micro_batches(self, batch: Batch[T]) -> Iterator[MicroBatch[T]]:
        self._lost, self._first = set(), not self._whole
        try:
            for micro in super()._micro_batches(batch):
                self._inside = True
                stood = [one.last_epoch for one in self._schedules]
                yield micro
                self._look_at_schedules(stood, batch.step)
                if self._watch and self._first and batch.accumulation > 1:
                    self._look_at_gradients(batch.step)
        finally:
            self._inside, self._watched = False, None
        self._whole = True
        self._look_at_mode(batch.step)

    def close(self) -> None:
        """See `Accumulation`."""
        super().close()
        self._schedules, self._lost = [], set()

    def clears(self, owner: Optimizer | nn.Module) -> None:
        """See `ClearListener`. It is no mistake as long as no optimizer steps what is cleared.

        The half of a GAN whose turn it is not has gradients that nobody wants. An engine clears in its own step, which
        belongs inside.
        """
        if self._engine or self._batch is None:
            return
        if not self._inside:
            if self._lost:  # what is computed from here on is a gradient of its own
                self._lost.difference_update(id(one) for one in _parameters_of(owner))
        elif self._batch.handed_out > 1:
            self._lost.update(id(one) for one in _parameters_of(owner) if one.grad is not None)

    def cleared(self, owner: Optimizer | nn.Module) -> None:
        """See `ClearListener`."""

    def made(self, optimizer: Optimizer) -> None:
        """See `ClearListener`."""

    def _look_at_schedules(self, stood: list[Any], step: int) -> None:
        """Raises RuntimeError if a schedule has moved."""
        for one, before in zip(self._schedules, stood, strict=False):
            if one.last_epoch != before:
                raise RuntimeError(
                    f"{type(one).__name__} steps inside `for micro in batch` (step {step}), once for each of the "
                    "micro-batches, whose number depends on the number of ranks: call it behind that loop"
                )

    def _look_at_gradients(self, step: int) -> None:
        """Looks whether the gradients of earlier micro-batches are gone; RuntimeError if no optimizer is known."""
        if self._watched is None:
            found = ((p, p.grad) for p in self.model.parameters() if p.grad is not None and _grows_in_place(p.grad))
            self._watched = next(found, None)
        elif self._watched[0].grad is not self._watched[1]:
            self._lost.add(id(self._watched[0]))
            if not self.optimizers:
                raise RuntimeError(_cleared(step))

    def _look_at_mode(self, step: int) -> None:
        training = self.model.training
        if self._training and not training:
            remark(
                "step %d was computed with the model in evaluation mode, unlike the steps before: call model.train() "
                "after an evaluation",
                step,
            )
        self._training = training if self._training is None else self._training and training

    def _before_optimizer(self, optimizer: Optimizer, *arguments: Any) -> None:
        if self._inside and self._batch is not None:
            raise RuntimeError(
                f"the optimizer steps inside `for micro in batch` (step {self._batch.step}), where the gradient is "
                "that of a part of the global batch: call optimizer.step() behind that loop, with clipping, "
                "zero_grad() and the scheduler's step()"
            )
        if self._batch is not None and self._lost and any(id(p) in self._lost for p in _parameters_of(optimizer)):
            if self._first:
                raise RuntimeError(_cleared(self._batch.step))
            if not self._said:
                self._said = True
                remark("%s", _cleared(self._batch.step))
        super()._before_optimizer(optimizer, *arguments)


def _cleared(step: int) -> str:
    return (
        f"the gradients of step {step} were cleared between its micro-batches: call optimizer.zero_grad() behind "
        "`for micro in batch`, once for all of them"
    )


def _parameters_of(owner: Optimizer | nn.Module) -> Iterable[Tensor]:
    """Those whose gradients its ``zero_grad`` clears."""
    if isinstance(owner, nn.Module):
        return owner.parameters()
    return (parameter for group in owner.param_groups for parameter in group["params"])


def _grows_in_place(gradient: Tensor) -> bool:
    """Whether torch adds to it where it lies; it does not where somebody wants the gradient of a gradient."""
    return not (gradient.is_sparse or gradient.requires_grad)


def _moves_gradients(model: Any) -> bool:
    """Whether gradients become other tensors without anybody clearing them."""
    flat = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    return flat or bool(getattr(model, "gradient_as_bucket_view", False))
