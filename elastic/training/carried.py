"""Gradients that a script carries over the end of a step: no checkpoint has them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..rank.hooks import until_gone, weakly
from ..rank.remarks import remark

__all__ = ["CarriedGradients"]

# So many boundaries without an optimizer's step are looked at: each may wait for a card.
_LOOKS = 8


class CarriedGradients:
    """Remarks once on gradients that were there at a boundary and that an optimizer uses behind it.

    A step that was left out (a loss scale that was too large, a loss that stands out) is none of it: what it had is
    dropped.

    Args:
        say: For tests.
    """

    def __init__(self, say: Callable[..., None] = remark) -> None:
        self._say, self._looks, self._stepped = say, _LOOKS, False
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # The boundary, a parameter and its gradient then.
        self._there: tuple[int, weakref.ref[Tensor], weakref.ref[Tensor]] | None = None
        until_gone(self, register_optimizer_step_pre_hook(weakly(self._begins)))

    def boundary(self, step: int) -> None:
        """Step ``step`` is done."""
        if self._stepped or not self._looks or not self._optimizers:
            self._stepped = False
            return
        self._looks -= 1
        found = next((one for one in map(_used, self._optimizers) if one is not None), None)
        self._there = None if found is None else (step, *found)

    def _begins(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped = True
        if self._looks:
            self._optimizers.add(optimizer)
        if self._there is None:
            return
        (step, parameter, gradient), self._there = self._there, None
        owner, there = parameter(), gradient()
        if owner is None or there is None or owner.grad is not there:
            return
        self._looks = 0
        self._say(
            "gradients were carried over the end of step %d: no checkpoint has them, so a change of the world there"
            " loses a part of what an optimizer steps by. Give each of its steps a batch: a larger global batch, in"
            " micro-batches",
            step,
        )


def _used(optimizer: Optimizer) -> tuple[weakref.ref[Tensor], weakref.ref[Tensor]] | None:
    """A parameter that has a gradient, and that; None: there is none, or a step with it was left out."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                here = getattr(gradient, "_local_tensor", gradient).detach()  # of a DTensor: nothing is exchanged
                good = here.layout is not torch.strided or bool(torch.isfinite(here).all() and here.any())
                return (weakref.ref(parameter), weakref.ref(gradient)) if good else None
    return None
