"""The factor of a micro-batch's loss, applied where the script calls `backward()` itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["apply", "weighted"]


class _Present:
    """The step that the script is in."""

    factor: float | None = None
    ran: Callable[[], None] | None = None


_present = _Present()


@contextlib.contextmanager
def weighted(factor: float, ran: Callable[[], None]) -> Iterator[None]:
    """Multiplies what `backward()` computes in this block by a factor.

    Args:
        factor: of the loss.
        ran: called after each backward pass.
    """
    _present.factor, _present.ran = factor, ran
    try:
        yield
    finally:
        _present.factor = _present.ran = None


def apply() -> None:
    """Has `torch.autograd.backward`, which `Tensor.backward` calls, heed it."""
    plain = torch.autograd.backward

    @functools.wraps(plain)
    def backward(tensors: Any, grad_tensors: Any = None, *arguments: Any, **named: Any) -> None:
        factor, ran = _present.factor, _present.ran
        if factor is None or ran is None:
            plain(tensors, grad_tensors, *arguments, **named)
            return
        # A backward pass inside this one, as of a checkpointed block, has the factor already.
        _present.factor = None
        try:
            plain(tensors, _scaled(tensors, grad_tensors, factor), *arguments, **named)
        finally:
            _present.factor = factor
        ran()

    torch.autograd.backward = backward


def _scaled(tensors: Any, gradients: Any, factor: float) -> Any:
    roots: Sequence[Tensor] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [None] * len(roots) if gradients is None else gradients
    given = [given] if isinstance(given, Tensor) else list(given)
    # A loss that is no scalar is torch's to refuse.
    both = zip(roots, given, strict=True)
    ones = [torch.ones_like(root) if root.numel() == 1 and one is None else one for root, one in both]
    return [one if one is None else one * factor for one in ones]
