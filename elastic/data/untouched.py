"""Leaves a data set and a collate function as they were before a look ran them: the training begins with them."""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from .prints import print_of

# How deep things are searched, how many items of one container, and how many things in all.
_DEPTH, _ITEMS, _THINGS = 6, 64, 20_000
# How deep attributes are put back: those of a collate function, of one within it, of its tokenizer. Others may be
# changed by a thread at the same time, and what is global may be a registry that an import has filled.
_SHALLOW = 3
# Packages whose classes are not searched for global variables.
_NOBODYS = ("builtins", "torch", "numpy", "functools", "collections", "dalsegno")


@contextmanager
def kept(*things: Any) -> Iterator[None]:
    """Restores generators that these things hold, and the card's."""
    states = [_state_of(found) for thing in things for found in generators(thing)]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append((torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
    try:
        yield
    finally:
        for put_back, state in states:
            put_back(state)


@contextmanager
def kept_whole(thing: Any) -> Iterator[None]:
    """Restores also the attributes and containers that a thing holds, because some keep rows or counts for later."""
    held = list(_held(thing, _SHALLOW, everywhere=False))
    attributes = [(vars(one), dict(vars(one))) for one in held if _has_attributes(one)]
    containers = [(one, one.copy()) for one in held if type(one) in (list, dict, set, deque)]
    with kept(thing):
        try:
            yield
        finally:
            for now, before in [*attributes, *containers]:
                _put_back(now, before)


def _has_attributes(thing: Any) -> bool:
    return type(getattr(thing, "__dict__", None)) is dict


def _put_back(now: Any, before: Any) -> None:
    pairs = zip(_flat(now), _flat(before), strict=False)
    if len(now) == len(before) and all(one is other for one, other in pairs):
        return
    now.clear()
    now.update(before) if isinstance(now, dict | set) else now.extend(before)


def _flat(container: Any) -> Iterator[Any]:
    for one in container:
        yield one
        if isinstance(container, dict):
            yield container[one]


def generators(thing: Any) -> Iterator[Any]:
    """Random generators that a thing holds, itself or in its parts: another data set, a transform, a closure."""
    kinds = _kinds()
    return (one for one in _held(thing) if isinstance(one, kinds) and type(one) is not random.SystemRandom)


def states_of(thing: Any) -> str:
    """A text of the states of all generators that a thing holds."""
    states = [_state_of(found)[1] for found in generators(thing)]
    return print_of([state.numpy().tobytes() if isinstance(state, torch.Tensor) else state for state in states])


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    return kinds if numpy is None else (*kinds, numpy.random.Generator, numpy.random.RandomState)


def _state_of(generator: Any) -> tuple[Callable[[Any], Any], Any]:
    if isinstance(generator, torch.Generator):
        return generator.set_state, generator.get_state()
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    if bits is None:
        return generator.set_state, generator.get_state()

    def put_back(state: Any) -> None:
        bits.state = state

    return put_back, bits.state


def _held(thing: Any, deepest: int = _DEPTH, *, everywhere: bool = True) -> Iterator[Any]:
    """A thing and its parts, each once; ``everywhere``: also what its functions know as global variables."""
    known, kinds = set[int](), _kinds()
    to_see: deque[tuple[Any, int]] = deque([(thing, 0)])
    while to_see and len(known) < _THINGS:
        one, depth = to_see.popleft()
        if id(one) in known or isinstance(one, torch.Tensor | str | bytes | int | float | type | ModuleType | None):
            continue
        known.add(id(one))
        if type(one).__module__.startswith("dalsegno."):  # a session works in threads
            continue
        yield one
        if depth < deepest and not isinstance(one, kinds):
            to_see.extend((part, depth + 1) for part in [*_parts_of(one), *(_globals_of(one) if everywhere else ())])


def _parts_of(thing: Any) -> list[Any]:
    if isinstance(thing, Mapping | list | tuple):
        items = thing.values() if isinstance(thing, Mapping) else thing
        return [item for item, _ in zip(items, range(_ITEMS), strict=False)]
    parts = list(getattr(thing, "__dict__", {}).values())
    if isinstance(thing, functools.partial):
        parts += [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, MethodType):
        parts += [thing.__self__, thing.__func__]
    elif isinstance(thing, FunctionType):
        parts += [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
        for cell in thing.__closure__ or ():
            try:
                parts.append(cell.cell_contents)
            except ValueError:  # nothing is in it yet
                continue
    return parts


def _globals_of(thing: Any) -> Iterator[Any]:
    """What the code of a function, or of the methods of an object, names."""
    functions = [thing] if isinstance(thing, FunctionType) else []
    if not isinstance(thing, FunctionType | MethodType | Mapping | list | tuple):
        own = [kind for kind in type(thing).__mro__ if kind.__module__.partition(".")[0] not in _NOBODYS]
        functions += [value for kind in own for value in vars(kind).values() if isinstance(value, FunctionType)]
    for function in functions:
        for name in function.__code__.co_names:
            if name in function.__globals__:
                yield function.__globals__[name]
