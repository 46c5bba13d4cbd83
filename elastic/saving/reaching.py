"""Whether a function could get at a thing when it is called: by its closure, the globals it names, what those hold.

It is a guess that errs on one side: what is not reached is surely not written by that function, unless it looks it up
by a text.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["reaches"]

# Things that are looked at, a function that reaches more might reach anything; and items of one list.
_MOST, _ITEMS = 20_000, 256
_OF_A_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (Tensor, Optimizer, ModuleType, BuiltinFunctionType, str, bytes, int, float, complex, type(None))
# Their functions get at nothing of a script's that they are not given.
_LIBRARIES = frozenset({"torch", "deepspeed", "dalsegno", "transformers", "accelerate", "numpy", "builtins"})


def reaches(function: Any, thing: object) -> bool:
    """Whether ``function``, or any other object with methods, may get at ``thing``.

    Args:
        function: Anything that can be called, or has a method that is.
        thing: Is looked for by its identity.
    """
    waiting, known = deque([function]), {id(function)}
    while waiting:
        one = waiting.popleft()
        for inside in _within(one):
            if inside is thing:
                return True
            if id(inside) in known or isinstance(inside, _PLAIN):
                continue
            known.add(id(inside))
            waiting.append(inside)
        if len(known) > _MOST:
            return True
    return False


def _within(one: Any) -> Iterator[Any]:
    if isinstance(one, functools.partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif isinstance(one, MethodType):
        yield from (one.__self__, one.__func__)
    elif isinstance(one, FunctionType):
        if not _is_librarys(one):
            yield from _named_by(one)
    elif isinstance(one, type):
        if not _is_librarys(one):
            yield from (*vars(one).values(), *one.__mro__[1:])
    elif isinstance(one, staticmethod | classmethod):
        yield one.__func__
    elif isinstance(one, property):
        yield from (method for method in (one.fget, one.fset) if method is not None)
    elif isinstance(one, Mapping | list | tuple | set | frozenset | deque):
        yield from islice(list(one.values() if isinstance(one, Mapping) else one), _ITEMS)
    else:
        yield type(one)
        # Of a model only what hangs at it itself: its layers are many, and hold no schedules.
        layers = _OF_A_MODULE if isinstance(one, nn.Module) else ()
        yield from [value for name, value in _attributes(one).items() if name not in layers]
        yield from (getattr(one, slot, None) for slot in _slots(type(one)))


def _attributes(one: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = object.__getattribute__(one, "__dict__")
    except AttributeError:
        return {}
    return found


def _named_by(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if (inner := getattr(function, "__wrapped__", None)) is not None:
        yield inner
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield value
        # `train.scheduler`, of a module of the script's own.
        if isinstance(value, ModuleType) and not _is_librarys(value):
            yield from (vars(value)[other] for other in names & vars(value).keys())


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function looks up, and those inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _slots(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else tuple(slots)


def _is_librarys(thing: Any) -> bool:
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return str(name).partition(".")[0] in _LIBRARIES
