"""Sums and counts over batches and ranks, and only then ratios: never a mean of means.

    counts = Counts(device)
    for batch in shard:                                  # this rank's batches, of any size, perhaps none
        counts.add({"loss": (losses.sum(), len(losses)), "hits": (output == wanted).sum()})
    metrics = counts.reduce().metrics()

Everything is added up in float64 on the device, without waiting for the device. Counts are exact below 2**53. The one
read at the end is the only synchronisation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Value = Tensor | float
Measured = Mapping[str, "Value | tuple[Value, Value]"]
_RATIO, _COUNT = "ratio", "count"


class _Entry(NamedTuple):
    """Layout of one name's numbers: a ratio has two, a count has the shape that was added."""

    kind: str
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return 2 if self.kind == _RATIO else torch.Size(self.shape).numel()


class Totals:
    """Sums over all batches and ranks, on the CPU; empty if nothing was added.

    Attributes:
        ratios: Name -> (total, count).
        counts: Name -> a float64 tensor of the shape that was added.
    """

    def __init__(self, ratios: Mapping[str, tuple[float, float]], counts: Mapping[str, Tensor]) -> None:
        self.ratios, self.counts = dict(ratios), dict(counts)

    def metrics(self) -> dict[str, float]:
        """Ratios as total / count, and counts that are one number as they are. A ratio over nothing is left out."""
        found = {name: total / count for name, (total, count) in self.ratios.items() if count}
        found.update({name: float(value.item()) for name, value in self.counts.items() if value.numel() == 1})
        return found


class Counts:
    """Adds up what is measured of batches.

    Args:
        device: Where tensors are added up, and reduced if the group works there. It is not guessed from what is added,
            because a rank may add only plain numbers, or nothing.
        group: The group over whose ranks `reduce` sums; None: the default group, if there is one.
    """

    def __init__(self, device: torch.device | str = "cpu", group: Any = None) -> None:
        self._device, self._group = torch.device(device), group
        self._entries: dict[str, _Entry] = {}
        self._sums: dict[str, Tensor] = {}

    def add(self, measured: Measured) -> None:
        """Adds one batch.

        Args:
            measured: Name -> ``(total, count)`` for a ratio. Both are numbers, or tensors whose elements are all
                summed, so ``(losses, mask)`` is one. Or name -> a count: a number, or a tensor of the same shape each
                time (hits per class, a confusion matrix). Give totals, not means: a mean over the batch would make
                small batches count as much as large ones.

        Raises:
            ValueError: A name was added as another kind or shape before.
            TypeError: A value is neither a number nor a real tensor.
        """
        for name, value in measured.items():
            entry, parts = _read(name, value)
            known = self._entries.setdefault(name, entry)
            if known != entry:
                raise ValueError(f"{_describe(name, known)} before, and now {_describe(name, entry)}")
            if name not in self._sums:
                self._sums[name] = torch.zeros(entry.numbers, dtype=torch.float64, device=self._device)
            for number, part in enumerate(parts):
                into = self._sums[name][number : number + 1] if entry.kind == _RATIO else self._sums[name]
                into += self._float64(part, whole=entry.kind == _RATIO)

    def reduce(self) -> Totals:
        """Sums over the ranks. Collective: all ranks must call it, even a rank that has added nothing.

        Raises:
            ValueError: Ranks have added different things under one name. Raised on all ranks.
        """
        entries = self._agree()
        names = sorted(entries)
        zeros = {name: torch.zeros(entries[name].numbers, dtype=torch.float64, device=self._device) for name in names}
        if not names:
            return Totals({}, {})
        vector = torch.cat([self._sums.get(name, zeros[name]) for name in names])
        if world_size_of(self._group) > 1:
            vector = vector.to(collective_device(self._device, self._group))
            dist.all_reduce(vector, group=self._group)
        summed = vector.cpu()
        ratios: dict[str, tuple[float, float]] = {}
        counts: dict[str, Tensor] = {}
        parts = torch.split(summed, [entries[name].numbers for name in names])
        for name, part in zip(names, parts, strict=True):
            if entries[name].kind == _RATIO:
                ratios[name] = (float(part[0]), float(part[1]))
            else:
                counts[name] = part.reshape(entries[name].shape)
        return Totals(ratios, counts)

    def _float64(self, value: Value, *, whole: bool) -> Tensor | float:
        if not isinstance(value, Tensor):
            return float(value)
        # A copy to the CPU that does not wait would return memory that is not filled yet.
        value = value.detach().to(self._device, non_blocking=self._device.type != "cpu")
        return value.sum(dtype=torch.float64) if whole else value.flatten().to(torch.float64)

    def _agree(self) -> dict[str, _Entry]:
        """The names of all ranks, also of those that this rank lacks: two gathers of host values."""
        mine = [[name, entry.kind, list(entry.shape)] for name, entry in self._entries.items()]
        agreed: dict[str, _Entry] = {}
        for rank, theirs in enumerate(gather_over_ranks(mine, self._device, self._group)):
            for name, kind, shape in theirs:
                entry = _Entry(kind, tuple(shape))
                known = agreed.setdefault(name, entry)
                if known != entry:
                    raise ValueError(
                        f"ranks disagree: {_describe(name, entry)} on rank {rank}, and {_describe(name, known)} before"
                    )
        return agreed


def collective_device(device: torch.device, group: Any = None) -> torch.device:
    """Where a tensor must be for the group's collectives: on the CPU if the group works there, else on ``device``.

    If the group works on neither (NCCL, and ``device`` is the CPU), it is the current device of the group's kind.
    """
    kinds = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return device if device.type in kinds else torch.device(kinds[0])


def world_size_of(group: Any = None) -> int:
    """Ranks of the group; 1 if there is none. None: the default group."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def gather_over_ranks(message: Any, device: torch.device, group: Any = None) -> list[Any]:
    """Every rank's ``message`` (plain JSON values), in rank order. Collective: two gathers; none if there is one rank.

    Args:
        message: This rank's.
        device: As of `Counts`.
        group: Over whose ranks; None: the default group, if there is one.
    """
    world_size = world_size_of(group)
    if world_size == 1:
        return [message]
    where = collective_device(device, group)

    def all_gather(tensor: Tensor) -> list[Tensor]:
        tensor = tensor.to(where)
        parts = [torch.empty_like(tensor) for _ in range(world_size)]
        dist.all_gather(parts, tensor, group=group)
        return [part.cpu() for part in parts]

    data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    sizes = all_gather(torch.tensor([len(data)], dtype=torch.int64, device="cpu"))
    lengths = [int(size.item()) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: len(data)] = data
    return [json.loads(part[:n].numpy().tobytes()) for part, n in zip(all_gather(padded), lengths, strict=True)]


def max_over_ranks(values: Sequence[int], device: torch.device) -> list[int]:
    """The largest of each number over the default group's ranks. Collective: one reduction; none if there is one rank.

    Args:
        values: As many on every rank; each fits into 64 bits.
        device: As of `Counts`.
    """
    if world_size_of() == 1:
        return list(values)
    vector = torch.tensor(list(values), dtype=torch.int64, device=collective_device(device))
    dist.all_reduce(vector, op=dist.ReduceOp.MAX)
    found: list[int] = vector.tolist()
    return found


def sum_over_ranks(values: Sequence[Tensor | float], device: torch.device) -> list[float]:
    """Numbers summed in float64 over the default group's ranks, if there is one. Collective; one synchronisation."""
    parts = [v.detach().to(torch.float64) if isinstance(v, Tensor) else v for v in values]
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [float(part) for part in parts]
    where = collective_device(device)
    vector = torch.stack([torch.as_tensor(part, dtype=torch.float64, device=where).reshape(()) for part in parts])
    dist.all_reduce(vector)
    found: list[float] = vector.tolist()
    return found


def _read(name: str, value: Any) -> tuple[_Entry, tuple[Value, ...]]:
    parts: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    if len(parts) != (2 if isinstance(value, tuple) else 1) or not all(map(_is_number, parts)):
        raise TypeError(f"{name!r} must be a number, a real tensor, or a pair (total, count) of them, not {value!r}")
    if isinstance(value, tuple):
        return _Entry(_RATIO, ()), parts
    return _Entry(_COUNT, tuple(value.shape) if isinstance(value, Tensor) else ()), parts


def _is_number(value: Any) -> bool:
    return not value.is_complex() if isinstance(value, Tensor) else isinstance(value, int | float)


def _describe(name: str, entry: _Entry) -> str:
    return f"{name!r} is a ratio" if entry.kind == _RATIO else f"{name!r} is a count of shape {list(entry.shape)}"


Finish = Callable[[Totals], Mapping[str, float]]
