"""NumPy's numbers and arrays in checkpoint files, made without anything of NumPy's that a file could misuse.

Scripts put them beside their model: a metric, or the state of a generator. ``torch.load(weights_only=True)`` makes
none, and NumPy's own functions check little of what they are given. So these stand in their place on torch's list: they
take numbers and text alone, and as many bytes as the shape says. While a file is read, what it gets in hand is no array
of NumPy's either: torch's list has functions that share an array's memory. `as_numpys` makes the arrays, behind that.
"""

from __future__ import annotations

import math
import re
from pickle import UnpicklingError
from typing import Any

import numpy

__all__ = ["NO_BYTES", "STAND_INS", "as_numpys"]

# Booleans, integers, floats, complex numbers, bytes and text. Objects, records and dates have states of their own.
_PLAIN = re.compile(r"[biufc]\d{1,2}|[SU]\d{1,9}")
_ORDERS = ("<", ">", "|", "=")
# As many as older versions of NumPy take.
_MOST_DIMENSIONS = 32


class _Kind:
    """Stands for ``numpy.dtype``: what kind of values an array has.

    Raises:
        pickle.UnpicklingError: It is not one of plain values.
    """

    # A file may make one without calling the class.
    dtype: numpy.dtype[Any] | None = None

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
        if not plain or self.dtype is None:
            raise _refused("numpy.dtype")
        self.dtype = self.dtype.newbyteorder(state[1])

    def __reduce__(self) -> tuple[Any, ...]:
        return numpy.dtype, (_dtype_of(self, "numpy.dtype").str,)


class _Array:
    """Stands for ``numpy.ndarray``, and has one once it has its state; is written as one.

    Raises:
        pickle.UnpicklingError: A file calls it, or gives it another state than an array of plain values has.
    """

    values: numpy.ndarray[Any, Any] | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        raise _refused("numpy.ndarray")

    def __setstate__(self, state: Any) -> None:
        # A second one would change what somebody has in hand.
        if type(state) is not tuple or len(state) != 5 or self.values is not None:
            raise _refused("numpy.ndarray")
        _, shape, kind, fortran, values = state
        sizes = type(shape) is tuple and all(type(size) is int and size >= 0 for size in shape)
        if not sizes or len(shape) > _MOST_DIMENSIONS or type(values) is not bytes:
            raise _refused("numpy.ndarray")
        self.values = _filled(shape, _dtype_of(kind, "numpy.ndarray"), "F" if fortran else "C", values)

    def __reduce__(self) -> Any:
        return _values_of(self).__reduce__()


def _filled(shape: tuple[int, ...], dtype: numpy.dtype[Any], order: Any, values: bytes) -> numpy.ndarray[Any, Any]:
    """An array with memory of its own."""
    count = math.prod(shape)
    if len(values) != count * dtype.itemsize or (count and not values):
        raise _refused("numpy.ndarray")
    try:
        if not count:
            return numpy.zeros(shape, dtype, order)
        return numpy.frombuffer(values, dtype).reshape(shape, order=order).copy(order)
    except (ValueError, TypeError, MemoryError, OverflowError) as error:
        raise _refused("numpy.ndarray") from error


def _reconstruct(*arguments: Any) -> _Array:
    """Stands for NumPy's function of this name: an array whose state follows."""
    if not arguments or arguments[0] is not _Array:
        raise _refused("numpy.core.multiarray._reconstruct")
    return object.__new__(_Array)


def _scalar(*arguments: Any) -> Any:
    """Stands for NumPy's function ``scalar``: one number, or one text."""
    name = "numpy.core.multiarray.scalar"
    kind, value = arguments if len(arguments) == 2 else (None, None)
    dtype = _dtype_of(kind, name)
    if type(value) is not bytes or len(value) != dtype.itemsize:
        raise _refused(name)
    try:
        return numpy.frombuffer(value, dtype)[0] if value else dtype.type()
    except (ValueError, TypeError, OverflowError, SystemError) as error:  # the last one: no character has that number
        raise _refused(name) from error


def _no_bytes(*arguments: Any) -> bytes:
    """Stands for ``bytes``, which a file calls for those of an empty array: it has all others as text."""
    if arguments:
        raise UnpicklingError("GLOBAL bytes of anything is not called")
    return b""


def _dtype_of(kind: Any, name: str) -> numpy.dtype[Any]:
    if type(kind) is not _Kind or kind.dtype is None:
        raise _refused(name)
    return kind.dtype


def _values_of(array: _Array) -> numpy.ndarray[Any, Any]:
    if array.values is None:
        raise _refused("numpy.ndarray")
    return array.values


def as_numpys(content: Any) -> Any:
    """The same, with NumPy's own in place of what stands for it.

    It looks into dictionaries, lists and tuples, and changes the first two in place.

    Raises:
        pickle.UnpicklingError: An array has no state, or the content is nested too deep.
    """
    try:
        return _as_numpys(content, set())
    except RecursionError as error:
        raise UnpicklingError("what it holds is nested too deep") from error


def _as_numpys(content: Any, seen: set[int]) -> Any:
    if type(content) in (_Array, _Kind):
        return _values_of(content) if type(content) is _Array else _dtype_of(content, "numpy.dtype")
    if isinstance(content, type):
        return _OWN.get(content, content)
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


def _refused(name: str) -> UnpicklingError:
    # `describe_refusal` finds the name.
    return UnpicklingError(f"GLOBAL {name} of anything but plain values is not read")


def _named(what: Any, module: str, name: str) -> Any:
    """torch's list knows a function by these. Its newer versions would take a name beside the function as well."""
    what.__module__, what.__name__, what.__qualname__ = module, name, name
    return what


def _again(function: Any) -> Any:
    return lambda *arguments: function(*arguments)


_OWN: dict[type, type] = {_Array: numpy.ndarray, _Kind: numpy.dtype}
_CORE = {"_reconstruct": _reconstruct, "scalar": _scalar}
STAND_INS: tuple[Any, ...] = (
    _named(_Kind, "numpy", "dtype"),
    _named(_Array, "numpy", "ndarray"),
    # NumPy 1 and 2.
    *(_named(_again(_CORE[name]), f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in _CORE),
)
"""For torch's list, all together or none of them."""
NO_BYTES = _named(_no_bytes, "builtins", "bytes")
"""For torch's list, too."""
