"""NumPy's numbers and arrays in checkpoint files, made without anything of NumPy's that a file could misuse.

Scripts put them beside their model: a metric, or the state of a generator. ``torch.load(weights_only=True)`` makes
none, and NumPy's own functions check little of what they are given. So these stand in their place on torch's list: they
take numbers and text alone, and as many bytes as the shape says.
"""

from __future__ import annotations

import math
import re
from pickle import UnpicklingError
from typing import Any

import numpy
import numpy.typing

__all__ = ["STAND_INS", "as_numpys"]

# Booleans, integers, floats, complex numbers, bytes and text. Objects, records and dates have states of their own.
_PLAIN = re.compile(r"[biufc]\d{1,2}|[SU]\d{1,9}")
_ORDERS = ("<", ">", "|", "=")


class _Kind:
    """Stands for ``numpy.dtype``: what kind of values an array has.

    Raises:
        pickle.UnpicklingError: It is not one of plain values.
    """

    def __init__(self, code: Any = None, align: Any = False, copy: Any = False) -> None:
        if type(code) is not str or not _PLAIN.fullmatch(code):
            raise _refused("numpy.dtype")
        try:
            self.dtype = numpy.dtype(code)
        except TypeError as error:
            raise _refused("numpy.dtype") from error

    def __setstate__(self, state: Any) -> None:
        # Version, byte order, and what only records, dates and other bases have; then sizes, which the code gives.
        plain = type(state) is tuple and len(state) == 8 and state[1] in _ORDERS and not any(state[2:5])
        if not plain:
            raise _refused("numpy.dtype")
        self.dtype = self.dtype.newbyteorder(state[1])

    def __reduce__(self) -> tuple[Any, ...]:
        return numpy.dtype, (self.dtype.str,)


class _Array(numpy.ndarray[Any, Any]):
    """Stands for ``numpy.ndarray``; is written as one.

    Raises:
        pickle.UnpicklingError: A file calls it, or gives it another state than an array of plain values has.
    """

    def __new__(cls, *arguments: Any, **named: Any) -> _Array:
        raise _refused("numpy.ndarray")

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) != 5:
            raise _refused("numpy.ndarray")
        _, shape, kind, fortran, values = state
        if type(shape) is not tuple or not all(type(size) is int and size >= 0 for size in shape):
            raise _refused("numpy.ndarray")
        if type(kind) is not _Kind or type(values) is not bytes or len(values) != _bytes_of(shape, kind):
            raise _refused("numpy.ndarray")
        # NumPy's own stub wants its own truth values, which it refuses.
        super().__setstate__((1, shape, kind.dtype, bool(fortran), values))  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return self.view(numpy.ndarray).__reduce__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.view(numpy.ndarray).__reduce_ex__(protocol)


def _reconstruct(*arguments: Any) -> _Array:
    """Stands for NumPy's function of this name: an empty array, whose state follows."""
    if not arguments or arguments[0] is not _Array:
        raise _refused("numpy.core.multiarray._reconstruct")
    return numpy.ndarray.__new__(_Array, (0,), numpy.int8)


def _scalar(*arguments: Any) -> Any:
    """Stands for NumPy's function ``scalar``: one number."""
    kind, value = arguments if len(arguments) == 2 else (None, None)
    if type(kind) is not _Kind or type(value) is not bytes or len(value) != kind.dtype.itemsize or not value:
        raise _refused("numpy.core.multiarray.scalar")
    return numpy.frombuffer(value, kind.dtype)[0]


def as_numpys(content: Any) -> Any:
    """The same, with NumPy's own arrays: of a class that derives from theirs, a sum is another thing than a number.

    It looks into dictionaries, lists and tuples, and changes the first two in place.
    """
    return _as_numpys(content, set())


def _as_numpys(content: Any, seen: set[int]) -> Any:
    if type(content) is _Array:
        return content.view(numpy.ndarray)
    if type(content) is tuple:
        found = tuple(_as_numpys(one, seen) for one in content)
        return found if any(new is not old for new, old in zip(found, content, strict=True)) else content
    if isinstance(content, (dict, list)) and id(content) not in seen:
        seen.add(id(content))
        for key, one in list(content.items() if isinstance(content, dict) else enumerate(content)):
            new = _as_numpys(one, seen)
            if new is not one:
                content[key] = new
    return content


def _bytes_of(shape: tuple[int, ...], kind: _Kind) -> int:
    return math.prod(shape) * kind.dtype.itemsize


def _refused(name: str) -> UnpicklingError:
    # `describe_refusal` finds the name.
    return UnpicklingError(f"GLOBAL {name} of anything but plain values is not read")


def _named(what: Any, module: str, name: str) -> Any:
    """torch's list knows a function by these. Its newer versions would take a name beside the function as well."""
    what.__module__, what.__name__, what.__qualname__ = module, name, name
    return what


def _again(function: Any) -> Any:
    return lambda *arguments: function(*arguments)


_CORE = {"_reconstruct": _reconstruct, "scalar": _scalar}
STAND_INS: tuple[Any, ...] = (
    _named(_Kind, "numpy", "dtype"),
    _named(_Array, "numpy", "ndarray"),
    # NumPy 1 and 2.
    *(_named(_again(_CORE[name]), f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in _CORE),
)
"""For torch's list, all together or none of them."""
