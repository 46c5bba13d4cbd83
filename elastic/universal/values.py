"""Ranges of parameters' values, wherever they lie: in universal files, or still in the shards of the saving ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .forms import PARAM, Form
from .loading import load
from .records import Extent
from .source import FP32

STEP = "step"
_EXPERT = "is_expert_param"
# How many files of values stay mapped at once.
_OPEN = 16


class Values(Protocol):
    """The source from which a rank of any world reads its own ranges. Names and states are those of universal files."""

    def states(self, name: str) -> frozenset[str]:
        """The states of a parameter: ``"fp32"``, the optimizer's states, and ``"step"`` if steps are kept by parameter.

        Raises:
            RuntimeError: It is not in the checkpoint.
        """

    def size(self, name: str) -> int:
        """Number of elements of a parameter."""

    def dtype(self, name: str, state: str) -> torch.dtype:
        """Dtype of one state, as saved."""

    def read(self, name: str, state: str, start: int, target: Tensor) -> None:
        """Fills ``target``, 1-D, with elements ``[start, start + len(target))``; converts to its dtype and device."""

    def step(self, name: str) -> Any:
        """The number of steps that the optimizer had made."""

    def expert(self, name: str) -> bool:
        """Whether the parameter is divided among experts, which only DeepSpeed's own loader can handle."""


class UniversalValues:
    """Values in universal files.

    Args:
        directory: The checkpoint's ``zero/``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._content = lru_cache(maxsize=_OPEN)(self._load)
        # These are asked for every state of a parameter; at stage 3, for one state of all parameters after the other.
        self.states, self._layout = cache(self._list), cache(self._describe)

    def size(self, name: str) -> int:
        return self._layout(name)[0]

    def dtype(self, name: str, state: str) -> torch.dtype:
        return self._flat(name, state).dtype

    def read(self, name: str, state: str, start: int, target: Tensor) -> None:
        target.copy_(self._flat(name, state)[start : start + target.numel()])

    def step(self, name: str) -> Any:
        return load(self._directory / name / f"{STEP}.pt")

    def expert(self, name: str) -> bool:
        return self._layout(name)[1]

    def _list(self, name: str) -> frozenset[str]:
        found = frozenset(path.stem for path in (self._directory / name).glob("*.pt"))
        if not found:
            raise RuntimeError(f"{self._directory / name} is missing: the model has a parameter that was not saved")
        return found

    def _describe(self, name: str) -> tuple[int, bool]:
        """Number of elements, and whether the parameter is divided among experts."""
        content = self._content(name, FP32)
        return self._flat(name, FP32).numel(), isinstance(content, Mapping) and bool(content.get(_EXPERT))

    def _flat(self, name: str, state: str) -> Tensor:
        """One state's values, 1-D. Stage 3's files are bare tensors, the others wrap them in a dictionary."""
        content = self._content(name, state)
        value: Tensor = content[PARAM] if isinstance(content, Mapping) else content
        return value.reshape(-1)

    def _load(self, name: str, state: str) -> Any:
        path = self._directory / name / f"{state}.pt"
        try:
            return load(path, mmap=True)
        except FileNotFoundError as error:
            raise RuntimeError(f"{path} is missing") from error


class ShardedValues:
    """Values that no conversion has touched: each is read from where the ranks of the saving world have left it.

    Args:
        form: The universal form that would be made. Its source stays open as long as this object is used.
    """

    def __init__(self, form: Form) -> None:
        self._form, self._source = form, form.source

    def states(self, name: str) -> frozenset[str]:
        if name not in self._source.parameters:
            raise RuntimeError(f"{name} is not in the checkpoint: the model has a parameter that was not saved")
        return frozenset(self._source.states) | ({STEP} if name in self._form.steps else frozenset())

    def size(self, name: str) -> int:
        return self._source.parameters[name].numel

    def dtype(self, name: str, state: str) -> torch.dtype:
        flat = self._source.flat[0][self._source.parameters[name].group]
        return flat[state if state in flat else FP32].dtype

    def read(self, name: str, state: str, start: int, target: Tensor) -> None:
        extents = self._source.extents(self._source.parameters[name], state)
        if extents is None:
            target.zero_()
        else:
            fill(target, extents, start, self.dtype(name, state))

    def step(self, name: str) -> Any:
        return self._form.steps[name]

    def expert(self, name: str) -> bool:
        return False


def fill(target: Tensor, extents: Iterable[Extent], start: int, dtype: torch.dtype) -> None:
    """Fills ``target`` with elements ``[start, start + len(target))`` of the values in ``extents``, taken in order."""
    if target.device.type != "cpu" or target.dtype != dtype or not target.is_contiguous():
        values = torch.empty(target.shape, dtype=dtype, device="cpu")
        fill(values, extents, start, dtype)
        target.copy_(values)
        return
    # Straight into its memory. A view of bytes, because numpy knows no bfloat16.
    view: Any = target.view(torch.uint8).numpy() if target.numel() else b""
    room = memoryview(view)
    low, before = start * dtype.itemsize, 0
    for extent in extents:
        first = max(low, before)
        last = min(low + len(room), before + extent.nbytes)
        if first < last:
            extent.read_into(room[first - low : last - low], first - before)
        before += extent.nbytes


__all__ = ("STEP", "ShardedValues", "UniversalValues", "Values", "fill")
