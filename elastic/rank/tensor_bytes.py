"""A tensor's values as bytes."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor

__all__ = ["as_it_lies", "bytes_of"]


def bytes_of(tensor: Tensor) -> Any:
    """The values of a tensor on a CPU, one behind the other, as an array of bytes; to be read.

    Nothing is copied where they lie side by side. Bytes, because numpy knows no bfloat16. And not by `Tensor.numpy()`:
    nobody may resize a storage any more of which there was such an array, and FSDP frees its gathered parameters so.
    """
    # A conjugate or a negative that torch has not written down yet has no bytes of its own.
    written = tensor.detach().resolve_conj().resolve_neg()
    return numpy.from_dlpack(written.contiguous().reshape(-1).view(torch.uint8))


def as_it_lies(tensor: Tensor) -> Tensor:
    """The values of a tensor that lie side by side, in one row as they lie in memory. Nothing is copied."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
