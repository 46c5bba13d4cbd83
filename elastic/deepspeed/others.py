"""A second DeepSpeed engine that a script steps, and that is in no checkpoint."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..rank.hooks import until_gone
from ..rank.remarks import remark
from ..training.left_schedules import optimizers_of

__all__ = ["EngineWatch"]

# Of optimizers that are not the engine's so many are looked at.
MOST_WALKS = 4


class EngineWatch:
    """As long as ``owner`` lives, remarks once on another engine that steps. One that only computes loses nothing.

    Args:
        owner: What saves ``engine``.
        engine: The one that is saved.
        say: For tests.
    """

    def __init__(self, owner: object, engine: Any, say: Callable[..., None] = remark) -> None:
        self._engine, self._say = weakref.ref(engine), say
        # Those that were looked at.
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._said, self._walks = False, 0
        self._owner = weakref.ref(owner)
        until_gone(owner, register_optimizer_step_post_hook(self._stepped))

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        engine = self._engine()
        if self._said or optimizer in self._known or engine is None or self._owner() is None:
            return
        self._known.add(optimizer)
        if _steps(engine, optimizer):
            return
        # A walk over all objects takes a moment, and some scripts make an optimizer for each batch.
        self._walks += 1
        if self._walks > MOST_WALKS:
            return
        others = [one for one in gc.get_objects() if issubclass(type(one), DeepSpeedEngine) and one is not engine]
        if not any(_steps(one, optimizer) for one in others):
            return
        self._said = True
        self._say(
            "a second DeepSpeed engine, of a %s, steps with %s and is in no checkpoint: its weights and its optimizer "
            "begin anew at each start. s.engine saves one: make one module of both models, and one engine of that",
            type(next(one for one in others if _steps(one, optimizer)).module).__name__,
            type(optimizer).__name__,
        )


def _steps(engine: Any, optimizer: Optimizer) -> bool:
    return any(one is optimizer for one in optimizers_of(engine))
