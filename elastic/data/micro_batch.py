"""One forward and backward pass: what it computes, which of its rows count, and with what factor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass
class MicroBatch(Generic[T]):
    """What one forward and backward pass computes.

    Attributes:
        data: What the collate function made of the samples.
        sample_ids: Its own real samples; none for a filler.
        n: Their number. They are the first n rows.
        number: Number of the micro-batch in the global batch.
        factor: The `loss_scale`, or what gives it, once, when it is asked for.
        is_last: The last one of this rank's step: gradients are to be synchronised in its backward pass.
        rows: Rows in ``data``; more than n in a filler, and in a short micro-batch of a plan with ``pad``.
        tokens: With token means: its real tokens; else None.
        padded: The plan pads: `scale` then takes the loss of each row, unless it is a mean over tokens.
        batch: That it is a part of, which notes that a `loss_scale` was asked for.
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
        """Multiply the mean loss of the n real rows by it.

        With token means it is known when all ranks' tokens are summed, which goes on while the first forward pass
        computes: ask for it behind that, as `scale` does.
        """
        self._note_scaled()
        if callable(self.factor):
            self.factor = self.factor()
        return self.factor

    @property
    def silent(self) -> bool:
        """Its `loss_scale` is 0: it counts for nothing. Known without waiting."""
        return not callable(self.factor) and self.factor == 0.0

    @property
    def filler(self) -> bool:
        """It repeats samples that another slice owns, so that this rank takes part; it must count for nothing."""
        return self.n == 0

    @property
    def mask(self) -> Tensor:
        """Which rows count: booleans of shape (rows,), on the CPU."""
        return torch.arange(self.rows) < self.n

    def guard(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """``values`` with ``fill`` in the rows that do not count; backwards these rows get zeros, whatever comes.

        Both are replaced, not multiplied by 0, so that no NaN passes. With padding, put the model's output through it:
        whatever the loss makes of those rows is then dropped. (What the model makes of them is what it makes of their
        micro-batch's first row, which they repeat.)

        Args:
            values: Shape (rows, …).
            fill: What takes the place of those rows.

        Raises:
            ValueError: Another number of rows.
        """
        if values.dim() < 1 or len(values) != self.rows:
            raise ValueError(f"this micro-batch has {self.rows} rows, not a tensor of shape {tuple(values.shape)}")
        if self.n == self.rows:
            return values
        aside = torch.arange(self.rows, device=values.device) >= self.n
        return values.masked_fill(aside.reshape(-1, *[1] * (values.dim() - 1)), fill)

    def mean(self, losses: Tensor) -> Tensor:
        """The mean of ``losses``, shape (rows,), over the rows that count, whatever is in the others; 0 for a filler.

        Raises:
            ValueError: Another shape.
        """
        if losses.dim() != 1:
            raise ValueError(f"one loss for each of {self.rows} rows is wanted, not a tensor of {tuple(losses.shape)}")
        return self.guard(losses).sum() / max(1, self.n)

    def scale(self, loss: Tensor, parameters: Iterable[Tensor] = ()) -> Tensor:
        """``loss * loss_scale``, and nothing at all where the factor is 0, even if the loss is NaN or infinite.

        That is a filler, or with token means a slice without a real token, whose mean is 0 / 0.

        Args:
            loss: The mean loss of the real rows (or with token means of the real tokens), a scalar. Or the loss of each
                row, shape (rows,), of which the mean is taken here.
            parameters: The model's. With them the gradients of such a slice are zeroed one by one, so that even an
                infinite derivative inside the model leaves no NaN (``0 * inf``); `Accumulation` does it by itself.
                Without either only the loss is guarded.

        Raises:
            ValueError: ``loss`` has neither shape, is a scalar where a plan with ``pad`` needs the rows, or has rows
                where a mean over tokens is wanted.
        """
        self._check(loss)
        self._note_scaled()
        if not self.silent:
            return (self.mean(loss) if loss.dim() else loss) * self.loss_scale
        self.zero_gradients(parameters)
        return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0).sum() * 0.0

    def zero_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Whatever gradient reaches ``parameters`` until the next micro-batch is replaced by zeros."""
        for parameter in parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(torch.zeros_like))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Its backward pass is over: takes away the hooks that it put on parameters."""
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
