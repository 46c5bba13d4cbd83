"""Callbacks of somebody's own that may count something and save none of it: a line names them."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import suppress
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

# What every rank counts alike; a callback of somebody's own may count on rank 0 alone.
COUNTED_ALIKE = ("transformers", "swift", "dalsegno")
# Callbacks of trl that show or push something: what they have of their own is of this process.
_SHOWING = frozenset({"RichProgressCallback", "WinRateCallback", "LogCompletionsCallback", "MergeModelCallback"})
# What grows, by its looks.
_COUNTS = (int, float, list, dict, set, deque, torch.Tensor)


def forgetful(trainer: Any) -> tuple[str, ...]:
    """Their classes, as far as they show it by something that may grow."""
    found = [
        type(one) for one in trainer.callback_handler.callbacks if not isinstance(one, ExportableState) and _counts(one)
    ]
    return tuple(dict.fromkeys(kind.__name__ for kind in found if not _is_known(kind, trainer)))


def _is_known(kind: type, trainer: Any) -> bool:
    """Whether it keeps nothing that matters, or a checkpoint has that."""
    known = kind.__module__.partition(".")[0] in COUNTED_ALIKE
    return known or kind.__name__ in _SHOWING or kind.__name__ in trainer.counting


def _counts(callback: Any) -> bool:
    """Whether it has something that may grow."""
    numpy = sys.modules.get("numpy")
    kinds = _COUNTS if numpy is None else (*_COUNTS, numpy.ndarray, numpy.number)
    # Somebody's own object may fail when it is looked at, and has no attributes if it has slots.
    with suppress(Exception):
        return any(isinstance(value, kinds) and not isinstance(value, bool) for value in vars(callback).values())
    return False
