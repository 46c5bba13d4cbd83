"""Loss scales that nobody saves: each start would begin them anew, and leave out steps until they fit again.

``GradScaler.step`` is wrapped once, when the first one asks: torch has no hook for that.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler

from ..rank.remarks import remark
from .left_out import HasParts, is_listed, steps

__all__ = ["ScalerWatch"]

log = logging.getLogger(__name__)


class ScalerWatch:
    """As long as ``state`` lives, remarks once on a scaler that steps the model's optimizer and is in no such state.

    One that is not enabled scales nothing, and so loses nothing.

    Args:
        state: What is saved.
        model: Whose parameters count.
        say: For tests.
    """

    def __init__(self, state: HasParts, model: nn.Module, say: Callable[..., None] = remark) -> None:
        self._model, self._say, self._said = weakref.ref(model), say, False
        # Those of another model are looked at once.
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        _watches[state] = self
        _looks.clear()
        _wrap()

    def stepped(self, scaler: GradScaler, optimizer: Any) -> None:
        """A scaler that is in no state steps an optimizer."""
        model = self._model()
        if self._said or model is None or optimizer in self._others:
            return
        if not steps(optimizer, model):
            self._others.add(optimizer)
            return
        self._said = True
        self._say(
            "%s steps %s and is not in the state that is saved: unless what you give as save= writes it by itself, its"
            " loss scale begins anew at each change of the world, and steps are left out until it fits again. Give it"
            " to s.state or TrainingState(..., scaler=...), too",
            type(scaler).__name__,
            type(optimizer).__name__,
        )


# By state, which none of them keeps alive.
_watches: weakref.WeakKeyDictionary[Any, ScalerWatch] = weakref.WeakKeyDictionary()
# How often each scaler was looked at; those that are not to be looked at any more have had all of it.
_looks: weakref.WeakKeyDictionary[GradScaler, int] = weakref.WeakKeyDictionary()
_LOOKS = 3
_wrapped = False


def _wrap() -> None:
    global _wrapped
    if not _wrapped:
        _wrapped = True
        GradScaler.step = _stepping(GradScaler.step)  # type: ignore[method-assign]


def _stepping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, optimizer, *args, **kwargs)
        try:
            _look(self, optimizer)
        # Objects of the script's own are looked at. It is advice, and ends no training.
        except Exception:
            log.debug("a scaler was not looked at", exc_info=True)
        return found

    return step


def _look(scaler: GradScaler, optimizer: Any) -> None:
    looks, watches = _looks.get(scaler, 0), list(_watches.items())
    if looks >= _LOOKS or not watches or not scaler.is_enabled():
        return
    _looks[scaler] = looks + 1
    # A scaler may be several models'.
    if any(is_listed(scaler, state.parts) for state, _ in watches):
        _looks[scaler] = _LOOKS
        return
    for _, watch in watches:
        watch.stepped(scaler, optimizer)
