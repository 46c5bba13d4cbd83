"""Optimizers that step the model and are in no part of what is saved: what they keep is lost at each change."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..rank.hooks import until_gone
from ..rank.remarks import remark
from ..saving.replicas import tensors

log = logging.getLogger(__name__)

__all__ = ["HasParts", "OptimizerWatch", "is_listed", "steps"]

# An optimizer that keeps nothing after so many steps is not looked at any more.
_LOOKS = 3
# How deep in a part, and at how many things on each level, is looked; and how long a container may be.
_LEVELS, _MOST = 2, 1000


class HasParts(Protocol):
    """What is saved."""

    @property
    def parts(self) -> Mapping[str, Any]:
        """What it consists of beside the model, by name."""
        ...


class OptimizerWatch:
    """As long as ``state`` lives, remarks once on an optimizer that steps the model, keeps something and is no part.

    Plain SGD keeps nothing, and so loses nothing.

    Args:
        state: What is saved.
        model: Whose parameters count.
        say: For tests.
    """

    def __init__(self, state: HasParts, model: nn.Module, say: Callable[..., None] = remark) -> None:
        self._state, self._model, self._say = weakref.ref(state), weakref.ref(model), say
        # How often each was looked at; those that are not to be looked at any more have had all of it.
        self._looks: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._said = False
        until_gone(state, register_optimizer_step_post_hook(self._stepped))

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        looks = self._looks.get(optimizer, 0)
        if self._said or looks >= _LOOKS:
            return
        state, model = self._state(), self._model()
        if state is None or model is None or is_listed(optimizer, state.parts) or not steps(optimizer, model):
            self._looks[optimizer] = _LOOKS
            return
        self._looks[optimizer] = looks + 1
        if not any(True for _ in tensors([*optimizer.state.values()])):
            return
        # The hook stays: torch goes through all of them just now.
        self._said = True
        self._say(
            "%s steps parameters of the model and is not in the state that is saved: what it keeps (momentum) is lost"
            " at each change of the world, unless what you give as save= writes it by itself. Make it at the start, and"
            " give it to TrainingState(..., %s=...), too",
            type(optimizer).__name__,
            type(optimizer).__name__.lower(),
        )


def is_listed(one: Any, parts: Mapping[str, Any]) -> bool:
    """Whether it is a part, or inside of one, two levels deep at most."""
    held = list(parts.values())
    return any(one is part for part in held) or any(one is other for part in held for other in _inside(part))


def _inside(part: Any) -> Iterator[Any]:
    level = [part]
    for _ in range(_LEVELS):
        attributes = [value for holder in level[:_MOST] for value in _attributes(holder)]
        yield from attributes
        # A script's data set may be among them.
        contents = list(islice((one for value in attributes for one in _contents(value)), _MOST))
        yield from contents
        level = [*attributes, *contents]


def _attributes(holder: Any) -> list[Any]:
    try:
        return list(vars(holder).values())
    except Exception:  # it has none, or is a proxy of something that is gone
        return []


def _contents(value: Any) -> list[Any]:
    """What is in a short container."""
    try:
        if isinstance(value, dict | list | tuple) and len(value) <= _MOST:
            return list(value.values() if isinstance(value, dict) else value)
    except Exception as error:  # such a proxy, or another thread changes it
        log.debug("a container could not be looked at", exc_info=error)
    return []


def steps(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether some of its parameters are the model's."""
    own: set[Tensor] = set(model.parameters())
    return any(parameter in own for group in optimizer.param_groups for parameter in group["params"])
