"""Callbacks of somebody's own that count something and save none of it: a line names them.

Some show it at once, by a number or a list. What else a callback may keep, such as an average of the weights or a best
value that nobody has seen yet, shows only once it has changed: at the first save.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

# What every rank counts alike; a callback of somebody's own may count on rank 0 alone.
COUNTED_ALIKE = ("transformers", "swift", "dalsegno")
# Callbacks of trl that show or push something: what they have of their own is of this process.
_SHOWING = frozenset({"RichProgressCallback", "WinRateCallback", "LogCompletionsCallback", "MergeModelCallback"})
# What grows, by its looks.
_COUNTS = (int, float, list, dict, set, deque, torch.Tensor)
# What a callback may refer to: that is saved, or does not change.
_REFERENCES = (Trainer, TrainingArguments, TrainerCallback, torch.utils.data.Dataset)
# Of a module so many tensors are looked at.
_MOST_TENSORS = 8


class Forgetful:
    """Which callbacks of a Trainer begin anew at each start.

    Args:
        trainer: It is about to train.

    Attributes:
        names: Their classes, as far as they show it now.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._kept = {id(one): (one, dict(_prints(trainer, one))) for one in self._callbacks()}
        self.names = _names(one for one in self._callbacks() if _shows(one))

    def others(self) -> tuple[str, ...]:
        """Those that show it only now, because what they keep has changed."""
        found = [one for one in self._callbacks() if _shows(one) or self._has_changed(one)]
        return tuple(name for name in _names(iter(found)) if name not in self.names)

    def _callbacks(self) -> list[Any]:
        return [
            one
            for one in self._trainer.callback_handler.callbacks
            if not isinstance(one, ExportableState) and not _is_known(type(one), self._trainer)
        ]

    def _has_changed(self, callback: Any) -> bool:
        _, before = self._kept.get(id(callback), (None, {}))
        return any(before.get(name) != seen for name, seen in _prints(self._trainer, callback))


def _names(callbacks: Iterator[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(type(one).__name__ for one in callbacks))


def lost_arguments(trainer: Any) -> tuple[str, ...]:
    """What callbacks with a state count in an argument that is no attribute of theirs, as ``Class.argument``."""
    return tuple(
        f"{type(one).__name__}.{name}"
        for one, given in trainer.given
        if one is not trainer.control
        for name, value in one.state().get("args", {}).items()
        if not hasattr(one, name) and given.get(name, value) != value
    )


def _is_known(kind: type, trainer: Any) -> bool:
    """Whether it keeps nothing that matters, or a checkpoint has that."""
    known = kind.__module__.partition(".")[0] in COUNTED_ALIKE
    return known or kind.__name__ in _SHOWING or kind.__name__ in trainer.counting


def _is_count(value: Any) -> bool:
    return (isinstance(value, _COUNTS) and not isinstance(value, bool)) or _is_array(value)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.number))


def _shows(callback: Any) -> bool:
    """Whether it has something that may grow."""
    return any(_is_count(value) for value in vars(callback).values())


def _prints(trainer: Any, callback: Any) -> Iterator[tuple[str, Any]]:
    """Its modules and objects that are not the Trainer's or a library's, each with what differs once it changes."""
    trained = {id(one) for one in trainer.model.parameters()}
    for name, value in vars(callback).items():
        with suppress(Exception):  # whatever somebody's own object does when it is looked at
            if isinstance(value, nn.Module):
                if trained.isdisjoint(id(one) for one in value.parameters()):
                    yield name, _print_of_tensors(value.state_dict())
            elif not isinstance(value, _REFERENCES) and _is_own(type(value)):
                counts = {inner: str(one) for inner, one in vars(value).items() if _is_count(one)}
                if counts:
                    yield name, counts


def _print_of_tensors(tensors: Mapping[str, torch.Tensor]) -> list[float]:
    floats = [one for one in tensors.values() if torch.is_floating_point(one)]
    chosen = floats[:: max(1, len(floats) // _MOST_TENSORS)]
    return [float(one.detach().double().sum()) for one in chosen]


def _is_own(kind: type) -> bool:
    """Whether this class is the script's, and in no package that is installed."""
    top = kind.__module__.partition(".")[0]
    file = str(getattr(sys.modules.get(kind.__module__), "__file__", "") or "")
    installed = any(part in file for part in ("site-packages", "dist-packages"))
    return not (installed or top in sys.stdlib_module_names or top in COUNTED_ALIKE)
