"""Hooks on torch's objects that are there no longer than the one who needs them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["until_gone", "weakly"]


class _Handle(Protocol):
    def remove(self) -> None: ...


# Those whose owner has gone.
_left: list[_Handle] = []


def until_gone(owner: object, handle: _Handle) -> None:
    """Removes a hook some time after its owner has gone: as the next one comes.

    An owner can go at any moment, for the garbage collector picks its own, and torch fails if a hook is removed while
    it goes through them. So the hook must do nothing without its owner.

    Args:
        owner: Can have weak references. The hook refers to it by such a one.
        handle: What torch gave for the hook.
    """
    while _left:
        _left.pop().remove()
    weakref.finalize(owner, _left.append, handle)


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that calls a method as long as its owner lives, and does not keep it alive.

    Args:
        method: A bound one.
    """
    kept = weakref.WeakMethod(method)

    def call(*given: Any) -> None:
        if (living := kept()) is not None:
            living(*given)

    return call
