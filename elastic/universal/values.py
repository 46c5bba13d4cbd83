"""Ranges of parameters' values, wherever they lie: in universal files, or still in the shards of the saving ranks."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .forms import PARAM, Form
from .loading import load
from .records import Extent, Frame, frame
from .shards import FP32

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
        # Frames by the size of files, and which one a file has; None: none of them.
        self._frames: dict[int, list[_Framed]] = {}
        self._framed = cache(self._look)
        # These are asked for every state of a parameter; at stage 3, for one state of all parameters after the other.
        self.states, self._layout = cache(self._list), cache(self._describe)

    def size(self, name: str) -> int:
        return self._layout(name)[0]

    def dtype(self, name: str, state: str) -> torch.dtype:
        framed = self._framed(name, state)
        return self._flat(name, state).dtype if framed is None else framed.dtype

    def read(self, name: str, state: str, start: int, target: Tensor) -> None:
        framed = self._framed(name, state)
        if framed is None:
            target.copy_(self._flat(name, state)[start : start + target.numel()])
            return
        with _Open(self._directory / name / f"{state}.pt") as file:
            fill(target, (Extent(file, len(framed.frame.head), framed.frame.nbytes),), start, framed.dtype)

    def step(self, name: str) -> Any:
        return load(self._directory / name / f"{STEP}.pt")

    def expert(self, name: str) -> bool:
        return self._layout(name)[1]

    def _list(self, name: str) -> frozenset[str]:
        try:
            there = os.listdir(self._directory / name)
        except (FileNotFoundError, NotADirectoryError):
            there = []
        found = frozenset(file.removesuffix(".pt") for file in there if file.endswith(".pt"))
        if not found:
            raise RuntimeError(f"{self._directory / name} is missing: the model has a parameter that was not saved")
        return found

    def _describe(self, name: str) -> tuple[int, bool]:
        """Number of elements, and whether the parameter is divided among experts."""
        framed = self._framed(name, FP32)
        if framed is not None:
            return framed.frame.nbytes // framed.dtype.itemsize, False
        content = self._content(name, FP32)
        return self._flat(name, FP32).numel(), isinstance(content, Mapping) and bool(content.get(_EXPERT))

    def _look(self, name: str, state: str) -> _Framed | None:
        """What surrounds the values in a file, byte by byte as ``torch.save`` writes it, so that they can just be read.

        Each shape is learnt from a file that torch loads: a model has few of them, and many files.
        """
        try:
            with _Open(self._directory / name / f"{state}.pt") as file:
                size = os.fstat(file.descriptor).st_size
                known = self._frames.setdefault(size, [])
                found = next((one for one in known if file.has(one.frame)), None)
                if found is None and (new := _frame_of(self._content(name, state))) is not None and file.has(new.frame):
                    known.append(found := new)
                return found
        except FileNotFoundError:
            return None  # said by whoever asks for what is in it

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


class _Framed(NamedTuple):
    """What surrounds contiguous values in a file, and their dtype."""

    frame: Frame
    dtype: torch.dtype


def _frame_of(content: Any) -> _Framed | None:
    """The frame of a bare tensor, or of what DeepSpeed has around one; None: there is more to know of it."""
    value, about = content, {}
    if isinstance(content, Mapping):
        value, about = content.get(PARAM), {key: item for key, item in content.items() if key != PARAM}
    if type(value) is not Tensor or not value.is_contiguous() or value.numel() == 0 or about.keys() - {"cat_dim"}:
        return None
    key = PARAM if isinstance(content, Mapping) else None
    return _Framed(frame(tuple(value.shape), value.dtype, key=key, cat_dim=about.get("cat_dim")), value.dtype)


class _Open:
    """A file, open while the context lasts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> _Open:
        self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def has(self, around: Frame) -> bool:
        """Whether it is that, and values."""
        head, tail = around.head, around.tail
        size = os.fstat(self.descriptor).st_size
        return (
            size == len(head) + around.nbytes + len(tail)
            and os.pread(self.descriptor, len(head), 0) == head
            and os.pread(self.descriptor, len(tail), size - len(tail)) == tail
        )


class ShardedValues:
    """Values that no conversion has touched: each is read from where the ranks of the saving world have left it.

    Args:
        form: The universal form that would be made. Its source stays open as long as this object is used.
    """

    def __init__(self, form: Form) -> None:
        self._form, self._source = form, form.source

    @property
    def names(self) -> Collection[str]:
        """All parameters that the optimizer knew."""
        return self._source.parameters.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a parameter."""
        return self._source.parameters[name].shape

    def states(self, name: str) -> frozenset[str]:
        if name not in self._source.parameters:
            raise RuntimeError(f"{name} is not in the checkpoint: the model has a parameter that was not saved")
        return frozenset(self._source.states) | ({STEP} if name in self._form.steps else frozenset())

    def size(self, name: str) -> int:
        return self._source.parameters[name].numel

    def dtype(self, name: str, state: str) -> torch.dtype:
        flat = self._source.first.flat[self._source.parameters[name].group]
        return flat[state if state in flat else FP32].dtype

    def read(self, name: str, state: str, start: int, target: Tensor) -> None:
        extents = self._source.extents(self._source.parameters[name], state, start, start + target.numel())
        if extents is None:
            target.zero_()
        else:
            fill(target, extents, 0, self.dtype(name, state))

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
