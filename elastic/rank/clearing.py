"""Tells who is interested that a script clears gradients, or makes an optimizer: torch has no hooks for that.

``zero_grad`` of optimizers and modules, and an optimizer's ``__init__``, are wrapped once, when the first one asks. Who
clears gradients in another way (``parameter.grad = None``) is not seen.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .hooks import until_gone, weakly

__all__ = ["ClearListener", "Unstepped", "listen"]


class ClearListener(Protocol):
    """Is told; only as long as somebody else keeps it alive."""

    def clears(self, owner: Optimizer | Module) -> None:
        """The gradients of its parameters are cleared in a moment."""

    def cleared(self, owner: Optimizer | Module) -> None:
        """They are cleared, or set to zero."""

    def made(self, optimizer: Optimizer) -> None:
        """It is made, but for what its own class adds."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_wrapped = False


def listen(listener: ClearListener) -> None:
    """Has it told from now on."""
    global _wrapped
    _listeners.add(listener)
    if not _wrapped:
        _wrapped = True
        for kind in (Optimizer, Module):
            kind.zero_grad = _clearing(kind.zero_grad)  # type: ignore[method-assign]
        Optimizer.__init__ = _making(Optimizer.__init__)  # type: ignore[method-assign]


def _clearing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        for listener in list(_listeners):
            listener.clears(self)
        original(self, *args, **kwargs)
        for listener in list(_listeners):
            listener.cleared(self)

    return zero_grad


def _making(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for listener in list(_listeners):
            listener.made(self)

    return __init__


class Unstepped:
    """The optimizers that are made from now on, until they make their first step.

    Attributes:
        optimizers: Those of this moment.
        known: Some optimizer is known, whether it has made a step or not. One that was made before is once it steps.
    """

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.known = False
        listen(self)
        until_gone(self, register_optimizer_step_pre_hook(weakly(self._steps)))

    def made(self, optimizer: Optimizer) -> None:
        """See `ClearListener`."""
        self.optimizers.add(optimizer)
        self.known = True

    def clears(self, owner: Optimizer | Module) -> None:
        """See `ClearListener`."""

    def cleared(self, owner: Optimizer | Module) -> None:
        """See `ClearListener`."""

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        self.optimizers.discard(optimizer)
        self.known = True
