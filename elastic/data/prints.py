"""Prints of samples: short texts that tell two readings of one sample from readings of two samples.

Words, whole numbers and shapes must be equal. Other numbers are represented by a few sums, because their bits are not
the same everywhere: processors round differently, and so do versions of a decoder.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from ..rank.tensor_bytes import bytes_of

_VERSION = "1"
# The most numbers of an array, and the most arrays of a sample, that are summed up.
_NUMBERS, _ARRAYS = 1 << 16, 8
_SUMS = 4
# Differences relative to the root mean square: up to the first it is rounding; from the second on, another sample.
_ROUNDING, _ANOTHER = 1e-3, 0.05
_DEEPEST = 16
# Types of whole numbers that decoders make: pixels, sound.
_DECODED = (torch.uint8, torch.int8, torch.int16)


class Likeness(enum.IntEnum):
    """How alike two prints are."""

    SAME = 0
    CLOSE = 1
    OTHER = 2


def print_of(sample: Any) -> str:
    """The print of a sample: of lists, dictionaries, arrays, plain values, images; of other things only their kind."""
    exact, sums = xxhash.xxh3_64(), list[str]()
    for value in _leaves(sample, 0):
        if not isinstance(value, Tensor):
            exact.update(value)
        elif value.is_floating_point() or value.is_complex() or value.dtype in _DECODED:
            if len(sums) < _ARRAYS:
                sums.append(",".join(f"{number:.6g}" for number in _sums(value)))
        else:
            exact.update(bytes_of(value))
    return " ".join([_VERSION, exact.hexdigest(), *sums])


def likeness(one: str, other: str) -> Likeness:
    """Whether two prints may be of one sample. Prints of an unknown version always may."""
    if one == other or not all(text.startswith(f"{_VERSION} ") for text in (one, other)):
        return Likeness.SAME
    ours, theirs = one.split(" ")[1:], other.split(" ")[1:]
    if ours[0] != theirs[0] or len(ours) != len(theirs):
        return Likeness.OTHER
    return max((_likeness(*pair) for pair in zip(ours[1:], theirs[1:], strict=True)), default=Likeness.SAME)


def _likeness(one: str, other: str) -> Likeness:
    ours, theirs = ([float(number) for number in text.split(",")] for text in (one, other))
    size = max(ours[0], theirs[0])
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    if apart <= _ROUNDING * size:
        return Likeness.SAME
    return Likeness.CLOSE if apart <= _ANOTHER * size else Likeness.OTHER


def _sums(value: Tensor) -> list[float]:
    """Root mean square, and sums of the same size with signs that look random."""
    flat = torch.view_as_real(value).reshape(-1) if value.is_complex() else value.reshape(-1)
    flat = flat[:: len(flat) // _NUMBERS + 1].to(torch.float64).nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)
    number = max(1, len(flat))
    mixed = torch.arange(len(flat), dtype=torch.int64) * 2654435761 & 0xFFFFFFFF
    mixed = ((mixed ^ mixed >> 15) * 73244475) & 0xFFFFFFFF
    mixed = ((mixed ^ mixed >> 13) * 73244475) & 0xFFFFFFFF
    signs = [((mixed >> bit) & 1) * 2.0 - 1.0 for bit in range(8, 8 + _SUMS)]
    rms = float((flat.square().sum() / number).sqrt())
    return [rms, *(float((flat * sign.to(flat.dtype)).sum()) / number**0.5 for sign in signs)]


def _leaves(value: Any, depth: int) -> Iterator[Tensor | bytes]:
    """Arrays as tensors on the CPU, the rest as bytes, in an order that is the same everywhere."""
    if depth > _DEEPEST:
        return
    array = _array(value)
    if array is not None:
        yield f"{array.dtype} {list(array.shape)}".encode()
        yield array
    elif isinstance(value, Mapping):
        yield f"mapping of {len(value)}".encode()
        for name in sorted(value, key=repr):
            yield repr(name).encode()
            yield from _leaves(value[name], depth + 1)
    elif isinstance(value, list | tuple):
        yield f"list of {len(value)}".encode()
        for item in value:
            yield from _leaves(item, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _leaves({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, depth + 1)
    else:
        yield _plain(value)


def _array(value: Any) -> Tensor | None:
    """A tensor, a NumPy array, an image, a float or a list of numbers, as a tensor; None: it is none of these."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided and not value.is_quantized and value.device.type != "meta"
        return value.detach().cpu() if plain else None
    if type(value) is float:
        return torch.tensor(value, dtype=torch.float64)
    if type(value) is list and value and all(type(item) is int or type(item) is float for item in value):
        try:
            return torch.tensor(value)
        except (RuntimeError, OverflowError):  # numbers too large for it
            return None
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufc":
        try:
            return torch.from_numpy(numpy.array(value))
        except TypeError:  # a type that torch does not have
            return None
    if all(hasattr(value, name) for name in ("tobytes", "mode", "size")):  # Pillow's
        return torch.frombuffer(bytearray(value.tobytes()) or bytearray(1), dtype=torch.uint8)
    return None


def _plain(value: Any) -> bytes:
    if isinstance(value, str):
        # The same file may lie elsewhere on another machine.
        path = os.path.isabs(value) and not any(map(str.isspace, value))
        return b"str " + (os.path.basename(value) if path else value).encode(errors="surrogatepass")
    if isinstance(value, bytes | int | bool | None):
        return repr(value).encode()
    return f"a {type(value).__name__}".encode()  # the text of other things may contain their address in memory
