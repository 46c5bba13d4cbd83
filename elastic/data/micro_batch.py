"""One forward and backward pass: its data, which rows count, and with what factor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Computed(IntEnum):
    """How far a micro-batch of a step has come, as far as it shows. It never goes back."""

    # It counts for nothing: nobody waits for its gradient.
    SILENT = 1
    # `MicroBatch.scale` was given its loss.
    BEGUN = 2
    # Its backward pass is through, or its `loss_scale` was asked for.
    DONE = 3


@dataclass
class MicroBatch(Generic[T]):
    """The data of one forward and backward pass.

    Attributes:
        data: What the collate function made from the samples.
        sample_ids: Its own real samples; none for a filler.
        n: Their number. They are the first n rows.
        number: Number of the micro-batch in the global batch.
        factor: The `loss_scale`, or a function that returns it, called once when it is asked for.
        is_last: The last one of this rank's step: gradients must be synchronised in its backward pass.
        rows: Rows in ``data``; more than n in a filler, and in a short micro-batch of a plan with ``pad``.
        tokens: With token means: its real tokens; else None.
        padded: The plan pads: `scale` then takes the loss of each row, unless it is a mean over tokens.
        batch: The batch that it is a part of. It notes that a `loss_scale` was asked for, and what was computed.
    """

    data: T
    sample_ids: tuple[int, ...]
    n: int
    number: int
    factor: float | Callable[[], float]
    is_last: bool
    rows: int
    tokens: int | None = None
    padded: bool = False
    batch: Any = field(default=None, repr=False)
    _hooks: list[Any] = field(default_factory=list, repr=False)

    def _note_scaled(self) -> None:
        if self.batch is not None:
            self.batch.scaled = True

    @property
    def loss_scale(self) -> float:
        """The factor by which to multiply the mean loss of the n real rows.

        With token means it is known once all ranks' tokens are summed, which happens while the first forward pass
        computes. Ask for it after that pass, as `scale` does.
        """
        self._note_scaled()
        self._note_computed()  # the script does the rest by itself
        return self._known_factor()

    def _known_factor(self) -> float:
        if callable(self.factor):
            self.factor = self.factor()
        return self.factor

    def _note_computed(self) -> None:
        if self.batch is not None:
            self.batch.note(self.number, Computed.DONE)

    def _watch(self, loss: Tensor) -> Tensor:
        """Has the batch note it once all of the backward pass from this loss is through."""
        if not loss.requires_grad or torch.compiler.is_compiling():
            self._note_computed()  # or nobody can tell
        elif self.batch is not None:
            self.batch.note(self.number, Computed.BEGUN)
            loss.register_hook(self._at_the_end)  # type: ignore[no-untyped-call]
        return loss

    def _at_the_end(self, _: Tensor) -> None:
        # What DDP and FSDP use, too: autograd calls it behind the last node, and never behind an error.
        torch.autograd.Variable._execution_engine.queue_callback(self._note_computed)

    @property
    def silent(self) -> bool:
        """Whether its `loss_scale` is 0, so that it counts for nothing. Known without waiting."""
        return not callable(self.factor) and self.factor == 0.0

    @property
    def filler(self) -> bool:
        """Whether it repeats samples of another slice, only so that this rank takes part; it must count for nothing."""
        return self.n == 0

    @property
    def mask(self) -> Tensor:
        """A mask of the rows that count: booleans of shape (rows,), on the CPU."""
        return torch.arange(self.rows) < self.n

    def guard(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """``values`` with ``fill`` in the rows that do not count. In the backward pass these rows get zero gradients.

        Both are replaced, not multiplied by 0, so that no NaN passes. With padding, pass the model's output through
        this, so that whatever the loss makes of those rows is dropped. (The model itself gets real data in them: they
        repeat the first row of their micro-batch.)

        Args:
            values: Shape (rows, …).
            fill: The value for those rows.

        Raises:
            ValueError: ``values`` has another number of rows.
        """
        if values.dim() < 1 or len(values) != self.rows:
            raise ValueError(f"this micro-batch has {self.rows} rows, not a tensor of shape {tuple(values.shape)}")
        if self.n == self.rows:
            return values
        aside = torch.arange(self.rows, device=values.device) >= self.n
        return values.masked_fill(aside.reshape(-1, *[1] * (values.dim() - 1)), fill)

    def mean(self, losses: Tensor) -> Tensor:
        """The mean of ``losses``, shape (rows,), over the rows that count; 0 for a filler. Other rows have no effect.

        Raises:
            ValueError: ``losses`` has another shape.
        """
        if losses.dim() != 1:
            raise ValueError(f"one loss for each of {self.rows} rows is wanted, not a tensor of {tuple(losses.shape)}")
        return self.guard(losses).sum() / max(1, self.n)

    def scale(self, loss: Tensor, parameters: Iterable[Tensor] = ()) -> Tensor:
        """``loss * loss_scale``; exactly 0 with zero gradients if the factor is 0, even if the loss is NaN or infinite.

        The factor is 0 for a filler and, with token means, for a slice without a real token, whose mean is 0 / 0.

        Args:
            loss: The mean loss of the real rows (or with token means of the real tokens), a scalar. Or the loss of each
                row, shape (rows,), of which the mean is taken here.
            parameters: The model's. If they are given, the gradients of such a slice are zeroed one by one, so that
                even an infinite derivative inside the model leaves no NaN (``0 * inf``); `Accumulation` does that by
                itself. Without both, only the loss is guarded.

        Raises:
            ValueError: ``loss`` has neither shape, or is a scalar although a plan with ``pad`` needs the rows, or has
                rows although a mean over tokens is wanted.
        """
        self._check(loss)
        self._note_scaled()
        if not self.silent:
            return self._watch((self.mean(loss) if loss.dim() else loss) * self._known_factor())
        self.zero_gradients(parameters)
        return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0).sum() * 0.0

    def zero_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replaces every gradient that reaches ``parameters`` until the next micro-batch by zeros."""
        for parameter in parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(torch.zeros_like))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Ends its backward pass: removes the hooks that it has put on parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _check(self, loss: Tensor) -> None:
        if loss.dim() == 0:
            if self.padded and self.tokens is None:
                raise ValueError(
                    "with BatchPlan(pad=True) a mean would count padded rows: give the loss of each row "
                    "(reduction='none'), shape (rows,)"
                )
        elif loss.shape != (self.rows,):
            raise ValueError(
                f"the loss is a scalar or one value for each of {self.rows} rows, not {tuple(loss.shape)}: "
                "take the mean first"
            )
        elif self.tokens is not None:
            raise ValueError("with count_tokens the loss is the mean over the micro-batch's real tokens, a scalar")
