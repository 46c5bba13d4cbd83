"""``for micro in batch``: `Accumulation`, and what a loop of one's own gets wrong around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.batch import Batch
from ..data.micro_batch import MicroBatch
from ..rank.remarks import remark
from ..training.accumulation import Accumulation

T = TypeVar("T")


class Micros(Accumulation):
    """The loop over a batch's micro-batches, behind which the optimizer steps and the gradients are cleared.

    Args:
        model, optimizers: See `Accumulation`.
    """

    def __init__(self, model: nn.Module, *optimizers: Optimizer) -> None:
        super().__init__(model, *optimizers)
        self._inside = False
        self._training: bool | None = None
        # In the first step: a gradient that must not be cleared between micro-batches.
        self._watched: tuple[nn.Parameter, Tensor] | None = None
        self._watch = not self._engine and not self._sharded and not _moves_gradients(model)

    def _micro_batches(self, batch: Batch[T]) -> Iterator[MicroBatch[T]]:
        try:
            for micro in super()._micro_batches(batch):
                self._inside = True
                yield micro
                if self._watch and batch.accumulation > 1:
                    self._look_at_gradients(batch.step)
        finally:
            self._inside, self._watched = False, None
        self._watch = False
        self._look_at_mode(batch.step)

    def _look_at_gradients(self, step: int) -> None:
        """Raises RuntimeError if the gradients of earlier micro-batches are gone."""
        if self._watched is None:
            found = ((p, p.grad) for p in self.model.parameters() if p.grad is not None and _grows_in_place(p.grad))
            self._watched = next(found, None)
        elif self._watched[0].grad is not self._watched[1]:
            raise RuntimeError(
                f"the gradients of step {step} were cleared between its micro-batches: call optimizer.zero_grad() "
                "behind `for micro in batch`, once for all of them"
            )

    def _look_at_mode(self, step: int) -> None:
        training = self.model.training
        if self._training and not training:
            remark(
                "step %d was computed with the model in evaluation mode, unlike the steps before: call model.train() "
                "after an evaluation",
                step,
            )
        self._training = training if self._training is None else self._training and training

    def _before_optimizer(self, *arguments: Any) -> None:
        if self._inside and self._batch is not None:
            raise RuntimeError(
                f"the optimizer steps inside `for micro in batch` (step {self._batch.step}), where the gradient is "
                "that of a part of the global batch: call optimizer.step() behind that loop"
            )
        super()._before_optimizer(*arguments)


def _grows_in_place(gradient: Tensor) -> bool:
    """Whether torch adds to it where it lies; it does not where somebody wants the gradient of a gradient."""
    return not (gradient.is_sparse or gradient.requires_grad)


def _moves_gradients(model: Any) -> bool:
    """Whether gradients become other tensors without anybody clearing them."""
    flat = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    return flat or bool(getattr(model, "gradient_as_bucket_view", False))
