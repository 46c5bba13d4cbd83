"""What ZeRO 1 and 2 make flat on CPUs: where it lies in a row already, no memory is new. Measured with 0.19.8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch._utils
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

__all__ = ["flatten", "flatten_in_place"]

_theirs: Any = torch._utils._flatten_dense_tensors


def flatten_in_place(engine: Any) -> None:
    """Has an engine's optimizer of stage 1 or 2 copy no gradients that lie in a row already, see `flatten`.

    DeepSpeed copies the gradients of a step twice: the ranks' slices of one bucket before they are summed up, and the
    parts of its own slice before the optimizer's step. It does not need the parts for themselves: a single one it has
    always got back as it lies. What a script has put in the method's place stays, and so does ZenFlow's, which turns.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and vars(optimizer).get("flatten") is _theirs:
        optimizer.flatten = flatten


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All of them in one dimension: a view if each begins where the one before it ends, else a copy.

    Args:
        tensors: Of any shapes and one dtype.
    """
    made = _in_a_row(tensors)
    if made is None:
        made = _theirs(tensors)
    return made


def _in_a_row(tensors: Sequence[Tensor]) -> Tensor | None:
    # Those without an element lie nowhere.
    first = next((one for one in tensors if one.numel()), tensors[0])
    dtype, end = first.dtype, first.data_ptr()
    for one in tensors:
        plain = one.is_cpu and one.dtype == dtype and one.is_contiguous() and not one.requires_grad
        if not plain or (one.numel() and one.data_ptr() != end):
            return None
        end += one.nbytes
    storage = first.untyped_storage()
    # Others may begin where this one ends, and may then be gone before it is.
    if end > storage.data_ptr() + storage.nbytes():
        return None
    count = sum(one.numel() for one in tensors)
    return torch.as_strided(first, (count,), (1,), first.storage_offset())
