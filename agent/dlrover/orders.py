"""What a worker has asked the saver for, in plain values: so that one that follows a dead saver can be made alike.

The library's own form of it is an object that may hold others, such as a strategy for deleting checkpoints. The agent
keeps these values and gives them back; it looks at nothing in them.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["objects_of", "plain_of"]

_CLASS = "class"
_STATE = "state"


def plain_of(value: Any) -> Any:
    """The value as JSON can hold it: objects by their class and their attributes.

    Raises:
        TypeError: it holds something that has no attributes of its own, such as a lock or a function.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain_of(one) for one in value]
    if isinstance(value, dict):
        return {str(name): plain_of(one) for name, one in value.items()}
    found = type(value)
    if isinstance(value, type) or not hasattr(value, "__dict__") or "<" in found.__qualname__ or callable(value):
        raise TypeError(f"{found.__name__} cannot be told")
    return {_CLASS: [found.__module__, found.__qualname__], _STATE: plain_of(vars(value))}


def objects_of(plain: Any) -> Any:
    """The value that `plain_of` has told. Tuples are lists then."""
    if isinstance(plain, list):
        return [objects_of(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if set(plain) != {_CLASS, _STATE}:
        return {name: objects_of(one) for name, one in plain.items()}
    module, name = plain[_CLASS]
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    made = found.__new__(found)
    vars(made).update(objects_of(plain[_STATE]))
    return made
