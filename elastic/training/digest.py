"""A number for each tensor, with which ranks compare tensors without sending them.

The number is a weighted sum of all values in double precision, with a different weight for each value. Equal tensors
have equal numbers on every kind of device, up to rounding in double precision. The distance of two numbers says how far
the tensors are apart. (The weights have random signs, so scattered differences of rounding do not add up.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

_COLUMNS = 1024
# How many values are handled at a time, and so the memory that it takes: what fits a CPU's cache, or one call on a
# card.
_CPU_VALUES, _CARD_VALUES = 1 << 18, 1 << 22
# The fractional parts of multiples of such a number are spread evenly over 0 to 1.
_GOLDEN, _SILVER = 0.6180339887498949, 0.4142135623730951
_WITHOUT_DOUBLE = ("mps", "xpu")


def is_plain(value: object) -> bool:
    """Whether it is a tensor that lies here as a whole and plainly: not sharded, packed, or without values."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and isinstance(value, Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and value.device.type != "meta"
    )


def numbers(tensors: Sequence[Tensor]) -> list[float]:
    """The digest of each plain tensor, in order. Waits for each device once."""
    columns = {zero.device: _weights(0, _COLUMNS, zero) for zero in map(_zero, tensors)}
    return _read([_number(tensor.detach(), columns[tensor.device]) for tensor in tensors])


def norms(tensors: Sequence[Tensor]) -> list[float]:
    """The Euclidean norm of each tensor."""
    return _read([sum((part.square().sum() for part in _parts(t.detach())), _zero(t)) for t in tensors], root=True)


def rounding(dtype: torch.dtype) -> float:
    """How far apart, relative to their norm, two tensors may be that differ only in the order of sums."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    epsilon = torch.finfo(dtype).eps
    return epsilon * (64 if epsilon < 1e-5 else 4)


def short(texts: Iterable[str]) -> str:
    """A few letters that stand for all the texts."""
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=6).hexdigest()


def _number(tensor: Tensor, columns: Tensor) -> Tensor:
    found, row = _zero(tensor), 0
    for part in _parts(tensor):
        whole = len(part) - len(part) % _COLUMNS
        if whole:
            rows = part[:whole].view(-1, _COLUMNS) @ columns
            found = found + torch.dot(rows, _weights(row, row + len(rows), part))
            row += len(rows)
        if whole < len(part):  # at the end
            found = found + torch.dot(part[whole:], columns[: len(part) - whole]) * _weight(row)
    return found


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    """All values in order, as doubles, a limited number at a time."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    size = _CPU_VALUES if tensor.device.type == "cpu" else _CARD_VALUES
    kind = _zero(tensor).dtype
    for part in tensor.reshape(-1).split(size):  # type: ignore[no-untyped-call]
        yield part.to(kind)


def _weights(begin: int, end: int, like: Tensor) -> Tensor:
    """The weights of a range of places: between 0.5 and 1.5, with either sign."""
    places = torch.arange(begin + 1, end + 1, dtype=like.dtype, device=like.device)
    return (0.5 + (places * _GOLDEN).frac()).copysign((places * _SILVER).frac() - 0.5)


def _weight(place: int) -> float:
    return math.copysign(0.5 + (place + 1) * _GOLDEN % 1.0, (place + 1) * _SILVER % 1.0 - 0.5)


def _zero(tensor: Tensor) -> Tensor:
    precise = torch.float32 if tensor.device.type in _WITHOUT_DOUBLE else torch.float64
    return torch.zeros((), dtype=precise, device=tensor.device)


def _read(found: Sequence[Tensor], *, root: bool = False) -> list[float]:
    values = [0.0] * len(found)
    for device in {one.device for one in found}:
        here = [index for index, one in enumerate(found) if one.device == device]
        together = torch.stack([found[index] for index in here])
        for index, value in zip(here, (together.sqrt() if root else together).tolist(), strict=True):
            values[index] = value
    return values
