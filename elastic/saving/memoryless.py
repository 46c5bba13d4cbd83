"""Whether a function of a script may be called out of turn: it changes nothing that a later call could see.

A learning rate's function may count its calls, or draw random numbers. So it is read before it is called: what its code
writes, and what it calls. Where that cannot be told, the answer is no.
"""

from __future__ import annotations

import argparse
import cmath
import collections
import dataclasses
import dis
import functools
import itertools
import math
import sys
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
# Functions of modules that change nothing. Of numpy a list: others write files, draw numbers or change what they get.
_OF_NUMPY = frozenset(
    (
        *("abs", "absolute", "all", "any", "arange", "arccos", "arcsin", "arctan", "arctan2", "around", "array"),
        *("asarray", "cbrt", "ceil", "clip", "cos", "cosh", "cumprod", "cumsum", "deg2rad", "diff", "divide", "dot"),
        *("e", "exp", "exp2", "expm1", "fabs", "float32", "float64", "floor", "floor_divide", "fmod", "full"),
        *(
            "geomspace",
            "heaviside",
            "hypot",
            "inf",
            "int32",
            "int64",
            "interp",
            "isclose",
            "isfinite",
            "isnan",
            "linspace",
        ),
        *("log", "log10", "log1p", "log2", "logspace", "max", "maximum", "mean", "min", "minimum", "mod", "multiply"),
        *("nan", "negative", "ones", "pi", "polyval", "power", "prod", "rad2deg", "reciprocal", "remainder", "rint"),
        *("round", "searchsorted", "sign", "sin", "sinc", "sinh", "sqrt", "square", "subtract", "sum", "tan", "tanh"),
        *("true_divide", "trunc", "where", "zeros"),
    )
)
_OF_BISECT = frozenset(("bisect", "bisect_left", "bisect_right"))
_MODULES = {
    **{name: frozenset(vars(module)) for name, module in (("math", math), ("cmath", cmath))},
    **{"bisect": _OF_BISECT, "_bisect": _OF_BISECT, "numpy": _OF_NUMPY},
}
# Methods of Python's containers that change nothing.
_READING = frozenset(("count", "get", "index", "items", "keys", "values"))
# Names of what changes a container, or an array, or leads to one. An own method of that name is not told apart.
_CHANGING = frozenset(
    (
        *(set(dir(list)) | set(dir(dict)) | set(dir(set)) | set(dir(bytearray)) | set(dir(collections.deque)))
        - (set(dir(tuple)) | set(dir(frozenset)) | set(dir(bytes)) | _READING),
        *("byteswap", "dump", "fill", "itemset", "keywords", "partition", "put", "resize", "setfield", "setflags"),
        "tofile",
    )
)
# What a class may define itself: nobody calls it who only asks an object for its attributes.
_UNCALLED = (
    *(
        "__init__",
        "__new__",
        "__post_init__",
        "__setattr__",
        "__delattr__",
    ),
    *("__getstate__", "__setstate__", "__reduce__", "__replace__", "__annotate_func__", "__call__"),
)
# Those that operators and formats call: allowed as a dataclass makes them.
_GENERATED = ("__eq__", "__repr__", "__hash__")
_DATACLASS = ("<string>", dataclasses.__file__)
_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_NUMBERS = (bool, int, float, complex)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_MUTABLE = (list, set, dict)
_DEPTH, _OBJECTS, _ITEMS = 8, 64, 10_000
_SUSPENDS = 0x20 | 0x80 | 0x200  # generators and coroutines, as `inspect` has it
_CLASS_OF_PYTHON = 1 << 9  # a class that is made at run time


def is_memoryless(function: Any) -> bool:
    """Whether calls of it leave no trace, as far as its code says. It is not called."""
    try:
        return callable(function) and _Question(function).answer()
    except Exception:  # of an object that fails where it is looked at
        return False


class _Question:
    """All that a function may reach: each value is looked at by itself, however the function comes to it.

    Which attribute is read of which value is mostly not known. So each name is looked up in each object.
    """

    def __init__(self, function: Any) -> None:
        self._reached = [function]
        self._objects: dict[int, Any] = {}
        self._values: dict[int, Any] = {}  # the plain ones
        self._attributes, self._found = set[str](), set[str](_READING)
        self._has_mutable, self._adds = False, False
        self._items = _ITEMS  # that may still be looked at, in all: a data set is not read through

    def answer(self) -> bool:
        """Whether only plain values are read, and only functions without a trace are called."""
        while self._reached:
            while self._reached:
                if not self._may_be_used(self._reached.pop()):
                    return False
            for value in self._objects.values():
                own = _attributes_of(value, self._attributes)
                if own is None:
                    return False
                self._found |= own.keys()
                self._reached += [one for one in own.values() if not self._is_known(one)]
        # What `+=` changes may be any list in reach, also that of another function, which gave it to this one.
        return self._attributes <= self._found and not (self._adds and self._has_mutable)

    def _is_known(self, value: Any) -> bool:
        return id(value) in self._objects or id(value) in self._values

    def _may_be_used(self, value: Any) -> bool:
        if self._is_known(value):
            return True
        if self._is_plain(value):
            self._values[id(value)] = value
            return True
        self._objects[id(value)] = value
        if len(self._objects) > _OBJECTS:
            return False
        if isinstance(value, types.ModuleType) or _may_be_called(value):
            return True
        if type(value) is types.FunctionType:
            return self._may_run(value)
        if type(value) is types.MethodType:
            self._reached += [value.__func__, value.__self__]
            return True
        if type(value) is functools.partial:
            self._reached += [value.func, *value.args, *value.keywords.values()]
            return True
        if type(value) in (argparse.Namespace, types.SimpleNamespace):
            return True
        call = _in_class(type(value), "__call__")
        if call is not None:
            self._reached.append(call)
        return _is_simple(type(value)) and (call is None or type(call) is types.FunctionType)

    def _may_run(self, function: types.FunctionType) -> bool:
        """Whether a function sets only variables of its own. What it reaches is looked at later."""
        if function.__code__.co_flags & _SUSPENDS:
            return False
        self._reached += [cell.cell_contents for cell in function.__closure__ or ()]
        self._reached += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for part in _codes(function.__code__):
            read = list(dis.get_instructions(part))
            if any(_may_set(one, part) for one in read) or not self._may_read(read, function.__globals__):
                return False
            self._adds = self._adds or _adds_to_others(read, part)
        return True

    def _may_read(self, instructions: list[dis.Instruction], variables: dict[str, Any]) -> bool:
        taken = False
        for one, after in itertools.pairwise([*instructions, None]):
            direct = taken
            taken = False
            if one is None or direct:
                continue
            if one.opname == "LOAD_GLOBAL":
                if one.argval not in variables:
                    if one.argval not in _BUILTINS:
                        return False
                    continue
                value = variables[one.argval]
                # A jump to the attribute's instruction may come with another object.
                if after is not None and after.opname in _LOADS and not after.is_jump_target:
                    taken = type(value) in (types.ModuleType, type)
                if not taken:
                    self._reached.append(value)
                elif after is None or not self._may_take(value, after.argval):
                    return False
            elif one.opname in _LOADS:
                if one.argval in _CHANGING or one.argval.startswith("__"):
                    return False
                self._attributes.add(one.argval)
        return True

    def _may_take(self, module: types.ModuleType | type, name: str) -> bool:
        """Whether an attribute of a module may be read, as the code does, or one of a class that has settings."""
        if isinstance(module, type):
            value = _in_class(module, name)
            # No function, property or the like. Without a metaclass nothing else is asked.
            return value is not None and self._is_plain(value)
        if module.__name__ in _MODULES:
            return name in _MODULES[module.__name__]
        if name not in vars(module):
            return False
        self._reached.append(vars(module)[name])
        return True

    def _is_plain(self, value: Any, depth: int = 0) -> bool:
        """Whether it is a number or a text, or consists of these."""
        if type(value) in _PLAIN or _is_number_of_numpy(value):
            return True
        if depth == _DEPTH or type(value) not in _CONTAINERS:
            return False
        self._items -= len(value)
        if self._items < 0:
            return False
        self._has_mutable = self._has_mutable or type(value) in _MUTABLE
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return all(self._is_plain(item, depth + 1) for item in items)


def _may_be_called(value: Any) -> bool:
    """Whether it is a function of Python's or numpy's that leaves no trace."""
    if any(value is one for one in _BUILTINS.values()):
        return True
    if type(value) is types.BuiltinFunctionType and type(value.__self__) is types.ModuleType:
        return value.__name__ in _MODULES.get(value.__self__.__name__, ())
    numpy = sys.modules.get("numpy")
    return numpy is not None and any(value is vars(numpy).get(name) for name in _OF_NUMPY)


def _is_number_of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    # Not a class that a script derives from one.
    return numpy is not None and type(value).__module__ == "numpy" and isinstance(value, numpy.number | numpy.bool_)


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


def _adds_to_others(instructions: list[dis.Instruction], code: types.CodeType) -> bool:
    """Whether ``+=`` or its like is used, except with variables that only began as a number: it changes a list."""
    given = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x4) + bool(code.co_flags & 0x8)
    others, added = set(code.co_varnames[:given]), set[str]()
    for before, one in itertools.pairwise(instructions):
        adds = _is_adding(before)
        if not one.opname.startswith("STORE_FAST"):
            if adds:
                return True
            continue
        # Newer Pythons have instructions that store and load, or store two.
        first, *more = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        others.update(more)
        is_number = before.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and type(before.argval) in _NUMBERS
        if adds:
            added.add(first)
        elif not is_number or one.is_jump_target:
            others.add(first)
    return not others.isdisjoint(added)


def _is_adding(instruction: dis.Instruction) -> bool:
    # Before Python 3.11 each has an instruction of its own.
    kind = instruction.opname
    return kind.startswith("INPLACE_") or (kind == "BINARY_OP" and instruction.argrepr.endswith("="))


def _attributes_of(value: Any, names: set[str]) -> dict[str, Any] | None:
    """Those of a module or an object that are to be looked at, too; None: it is not safe to use."""
    if isinstance(value, types.ModuleType):
        own = {name: vars(value)[name] for name in names & vars(value).keys()}
        if value.__name__ not in _MODULES:
            return own
        return dict.fromkeys(own) if own.keys() <= _MODULES[value.__name__] else None
    if type(value) in (types.FunctionType, functools.partial, argparse.Namespace, types.SimpleNamespace):
        return {name: vars(value)[name] for name in names & vars(value).keys()}
    if type(value) is types.MethodType or _may_be_called(value):
        return {}
    held, own = getattr(value, "__dict__", {}), {}
    for name in names:
        item = _in_class(type(value), name)
        if name in held and not hasattr(type(item), "__set__"):
            item = held[name]
        if item is not None or name in held:
            own[name] = item
    return own


def _is_simple(kind: type) -> bool:
    """Whether its objects only hold attributes: whatever else is done with them would fail."""
    return all(
        base is object
        or (
            base.__flags__ & _CLASS_OF_PYTHON
            and not any(
                name.startswith("__") and name.endswith("__") and callable(item) and not _is_harmless(name, item)
                for name, item in vars(base).items()
            )
        )
        for base in kind.__mro__
    )


def _is_harmless(name: str, item: Any) -> bool:
    """Whether a class may define this name without anything being called that remembers."""
    code = getattr(item, "__code__", None)
    return name in _UNCALLED or (name in _GENERATED and code is not None and code.co_filename in _DATACLASS)


def _in_class(kind: type, name: str) -> Any:
    """What a class has under this name, as it is written there; None: nothing."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base) and base is not object), None)
