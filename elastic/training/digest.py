"""A few letters for each tensor, with which ranks compare tensors without sending them; and how far two are apart.

On CPUs the letters are a checksum of the bytes, elsewhere they are a number. That is a weighted sum of all values in
double precision, with a different weight for each value. Equal tensors have equal numbers on every kind of device, up
to rounding in double precision. The distance of two numbers says how far the tensors are apart. (The weights have
random signs, so scattered differences of rounding do not add up.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from ..rank.tensor_bytes import bytes_of

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


def digests(tensors: Sequence[Tensor]) -> list[str]:
    """Letters for each plain tensor, in order: equal tensors on devices of one kind have the same ones.

    Tensors on CPUs whose letters differ may be equal as numbers are (0.0 and -0.0): `numbers` has the last word.
    """
    elsewhere = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    found = iter(numbers(elsewhere) if elsewhere else [])
    return [_checksum(tensor) if tensor.device.type == "cpu" else repr(next(found)) for tensor in tensors]


def _checksum(tensor: Tensor) -> str:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return xxh3_64_hexdigest(bytes_of(torch.view_as_real(plain) if plain.is_complex() else plain))


def numbers(tensors: Sequence[Tensor]) -> list[float]:
    """The digest of each plain tensor, in order. Waits for each device once.

    Tensors of one size are computed together: a model has many that are alike, and each by itself costs more than its
    values.
    """
    columns = {device: _weights(0, _COLUMNS, _zero(device)) for device in {tensor.device for tensor in tensors}}
    values = [0.0] * len(tensors)
    found: dict[torch.device, list[tuple[list[int], Tensor]]] = {}
    for indexes in _alike(tensors):
        some = [tensors[index].detach() for index in indexes]
        device = some[0].device
        number = _numbers(some, columns[device]) if len(some) > 1 else _number(some[0], columns[device]).reshape(1)
        found.setdefault(device, []).append((indexes, number))
    for parts in found.values():
        order = [index for indexes, _ in parts for index in indexes]
        for index, value in zip(order, torch.cat([number for _, number in parts]).tolist(), strict=True):
            values[index] = value
    return values


def norms(tensors: Sequence[Tensor]) -> list[float]:
    """The Euclidean norm of each."""
    return _read([sum((part.square().sum() for part in _parts(t.detach())), _zero(t.device)) for t in tensors])


def rounding(dtype: torch.dtype) -> float:
    """How far apart, relative to their norm, two tensors may be that differ only in the order of sums."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    epsilon = torch.finfo(dtype).eps
    return epsilon * (64 if epsilon < 1e-5 else 4)


def short(texts: Iterable[str]) -> str:
    """A few letters that stand for all the texts."""
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=6).hexdigest()


def _alike(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Places of tensors of one size, dtype and device, some at a time; large ones come alone."""
    heaps: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        key = tensor.numel(), tensor.dtype, tensor.device
        heaps.setdefault(key, []).append(index)
    for (numel, dtype, device), places in heaps.items():
        most = _values(device) // max(1, numel)
        count = 1 if dtype.is_complex or numel == 0 else max(1, most)
        for first in range(0, len(places), count):
            yield places[first : first + count]


def _numbers(tensors: Sequence[Tensor], columns: Tensor) -> Tensor:
    """Those of tensors of one size, which is not 0: what `_number` computes, up to rounding."""
    flat = torch.stack([tensor.reshape(-1) for tensor in tensors]).to(columns.dtype)
    rows = -(-flat.shape[1] // _COLUMNS)
    weights = torch.outer(_weights(0, rows, flat), columns).reshape(-1)[: flat.shape[1]]
    # No product with a matrix, which may sum one row in another order than the next.
    return flat.mul_(weights).sum(1)


def _number(tensor: Tensor, columns: Tensor) -> Tensor:
    found, row = _zero(tensor.device), 0
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
    size, kind = _values(tensor.device), _zero(tensor.device).dtype
    for part in tensor.reshape(-1).split(size):  # type: ignore[no-untyped-call]
        yield part.to(kind)


def _weights(begin: int, end: int, like: Tensor) -> Tensor:
    """The weights of a range of places: between 0.5 and 1.5, with either sign."""
    places = torch.arange(begin + 1, end + 1, dtype=like.dtype, device=like.device)
    return (0.5 + (places * _GOLDEN).frac()).copysign((places * _SILVER).frac() - 0.5)


def _weight(place: int) -> float:
    return math.copysign(0.5 + (place + 1) * _GOLDEN % 1.0, (place + 1) * _SILVER % 1.0 - 0.5)


def _values(device: torch.device) -> int:
    return _CPU_VALUES if device.type == "cpu" else _CARD_VALUES


def _zero(device: torch.device) -> Tensor:
    precise = torch.float32 if device.type in _WITHOUT_DOUBLE else torch.float64
    return torch.zeros((), dtype=precise, device=device)


def _read(found: Sequence[Tensor]) -> list[float]:
    values = [0.0] * len(found)
    for device in {one.device for one in found}:
        here = [index for index, one in enumerate(found) if one.device == device]
        together = torch.stack([found[index] for index in here])
        for index, value in zip(here, together.sqrt().tolist(), strict=True):
            values[index] = value
    return values
