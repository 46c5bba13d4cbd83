"""Whether a function of a script may be called out of turn: it changes nothing that a later call could see.

A learning rate's function may count its calls, or draw random numbers. So it is read before it is called: what its code
writes, and what it calls. Where that cannot be told, the answer is no.
"""

from __future__ import annotations

import argparse
import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

# Of Python's own: they change nothing, unless they are given something that does.
_CALLED: tuple[Any, ...] = (
    *(
        abs,
        all,
        any,
        bool,
        dict,
        divmod,
        enumerate,
        filter,
        float,
        frozenset,
        int,
        isinstance,
        len,
        list,
        map,
        max,
        min,
    ),
    *(pow, range, reversed, round, set, sorted, str, sum, tuple, zip),
    *(ArithmeticError, Exception, IndexError, KeyError, ValueError, ZeroDivisionError),
)
_BUILTINS = {one.__name__: one for one in _CALLED}
_MODULES = frozenset(("bisect", "_bisect", "cmath", "math", "numpy"))
_CHANGING = ("insort",)  # how those of their functions begin that change what they are given
# Methods of Python's containers that change nothing.
_READING = frozenset(("count", "get", "index", "items", "keys", "values"))
# What a class may define itself: nobody calls it who only asks an object for its attributes.
_UNCALLED = (
    *(
        "__init__",
        "__new__",
        "__repr__",
        "__str__",
        "__eq__",
        "__hash__",
        "__post_init__",
        "__setattr__",
        "__delattr__",
    ),
    *("__getstate__", "__setstate__", "__reduce__", "__replace__", "__annotate_func__", "__call__"),
)
# Before Python 3.11 each has an instruction of its own.
_ADDING = (
    *("+=", "-=", "|=", "&=", "^="),
    *("INPLACE_ADD", "INPLACE_SUBTRACT", "INPLACE_OR", "INPLACE_AND", "INPLACE_XOR"),
)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, set, frozenset)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_DEPTH, _OBJECTS, _ITEMS = 8, 64, 10_000
_SUSPENDS = 0x20 | 0x80 | 0x200  # generators and coroutines, as `inspect` has it
_CLASS_OF_PYTHON = 1 << 9  # a class that is made at run time
# Functions that are being looked at, with what they are given.
_Seen = set[tuple[Any, ...]]


def is_memoryless(function: Any) -> bool:
    """Whether calls of it leave no trace, as far as its code says. It is not called."""
    try:
        return _leaves_no_trace(function, set())
    except Exception:  # of an object that fails where it is looked at
        return False


def _leaves_no_trace(function: Any, seen: _Seen) -> bool:
    if any(function is one for one in _BUILTINS.values()):
        return True
    if type(function) is functools.partial:
        given = (*function.args, *function.keywords.values())
        return _leaves_no_trace(function.func, seen) and all(map(_is_plain, given))
    if type(function) is types.BuiltinFunctionType:
        module = function.__self__
        known = type(module) is types.ModuleType and module.__name__ in _MODULES
        return known and not function.__name__.startswith(_CHANGING)
    if type(function) is types.MethodType:
        return _only_reads(function.__func__, [function.__self__], seen)
    if type(function) is types.FunctionType:
        return _only_reads(function, [], seen)
    return _only_reads(_in_class(function, "__call__"), [function], seen)


def _only_reads(function: Any, given: list[Any], seen: _Seen) -> bool:
    """Whether a function sets only variables of its own, and may be let at all that it reaches.

    Args:
        given: What it is called with beside plain values.
    """
    if type(function) is not types.FunctionType:
        return False
    if (key := (function, *map(id, given))) in seen:
        return True
    seen.add(key)
    code = function.__code__
    reached = [*given, *(cell.cell_contents for cell in function.__closure__ or ())]
    reached += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    names, attributes, adds = set[str](), set[str](), False
    for part in _codes(code):
        for one in dis.get_instructions(part):
            if one.opname == "LOAD_GLOBAL":
                names.add(one.argval)
            elif one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                attributes.add(one.argval)
            elif _may_set(one, part):
                return False
            adds = adds or one.opname in _ADDING or (one.opname == "BINARY_OP" and one.argrepr in _ADDING)
    variables = function.__globals__
    if code.co_flags & _SUSPENDS or any(name not in variables and name not in _BUILTINS for name in names):
        return False
    reached += [variables[name] for name in names if name in variables]
    return _may_be_reached(reached, attributes, seen, adds=adds)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of what is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _may_set(instruction: dis.Instruction, code: types.CodeType) -> bool:
    """Whether it may set something else than a local variable, or reaches things in a way that is not looked at."""
    kind = instruction.opname
    if kind in ("STORE_DEREF", "DELETE_DEREF"):
        return instruction.argval in code.co_freevars
    if kind.startswith(("STORE_FAST", "DELETE_FAST")):
        return False
    return kind.startswith(("STORE_", "DELETE_", "IMPORT_", "LOAD_SUPER", "LOAD_NAME", "LOAD_FROM", "LOAD_BUILD"))


def _may_be_reached(reached: list[Any], attributes: set[str], seen: _Seen, *, adds: bool) -> bool:
    """Whether only plain values are read of all that is reached, and only functions without a trace are called.

    Args:
        adds: ``+=`` or its like is used, which changes a list.
    """
    found = set[str](_READING)
    objects: dict[int, Any] = {}
    for value in reached:  # it gets longer
        if _is_plain(value):
            if adds and isinstance(value, list | dict | set):
                return False
        elif id(value) not in objects:
            objects[id(value)] = value
            own = _attributes(value, attributes, seen)
            if own is None or len(objects) > _OBJECTS:
                return False
            found |= own.keys()
            reached += own.values()
    return attributes <= found


def _attributes(value: Any, names: set[str], seen: _Seen) -> dict[str, Any] | None:
    """Those of a module or an object that are to be looked at, too; None: it is not safe to use."""
    if isinstance(value, types.ModuleType):
        own = {name: vars(value)[name] for name in names & vars(value).keys()}
        if value.__name__ not in _MODULES:
            return own
        odd = any(name.startswith(_CHANGING) or isinstance(item, types.ModuleType) for name, item in own.items())
        return None if odd else dict.fromkeys(own)
    if type(value) in _FUNCTIONS or any(value is one for one in _BUILTINS.values()):
        return {} if _leaves_no_trace(value, seen) else None
    if type(value) in (argparse.Namespace, types.SimpleNamespace):
        return {name: vars(value)[name] for name in names & vars(value).keys()}
    if not _is_simple(type(value)):
        return None
    if _in_class(value, "__call__") is not None and not _leaves_no_trace(value, seen):
        return None
    held = getattr(value, "__dict__", {})
    own = {name: held.get(name, _in_class(value, name)) for name in names}
    return {
        # A method is given the object.
        name: types.MethodType(item, value) if name not in held and isinstance(item, types.FunctionType) else item
        for name, item in own.items()
        if item is not None or name in held
    }


def _is_simple(kind: type) -> bool:
    """Whether its objects only hold attributes: whatever else is done with them would fail."""
    return all(
        base is object
        or (
            base.__flags__ & _CLASS_OF_PYTHON
            and not any(
                name.startswith("__") and name.endswith("__") and callable(item) and name not in _UNCALLED
                for name, item in vars(base).items()
            )
        )
        for base in kind.__mro__
    )


def _in_class(value: Any, name: str) -> Any:
    """What its class has under this name, as it is written there; None: nothing."""
    return next((vars(base)[name] for base in type(value).__mro__ if name in vars(base) and base is not object), None)


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether it is a number or a text, or consists of these."""
    if type(value) in _PLAIN:
        return True
    if depth == _DEPTH or type(value) not in (*_CONTAINERS, dict) or len(value) > _ITEMS:
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(_is_plain(item, depth + 1) for item in items)
