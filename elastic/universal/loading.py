"""Reading DeepSpeed's files without running what is in them.

``torch.load(weights_only=True)`` with a closed list of classes. Measured for DeepSpeed 0.19: optimizer files need the
classes below, model states and parameter files need none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

SAFE_CLASSES: tuple[type, ...] = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)


def load(path: Path, *, mmap: bool = False) -> Any:
    """Loads a checkpoint file onto the CPU.

    Args:
        path: A file that ``torch.save`` wrote.
        mmap: Leave tensors on the disk until they are read.

    Raises:
        OSError: It cannot be read.
        pickle.UnpicklingError: It holds a class that is not on the closed list.
        RuntimeError: It is not a whole file of ``torch.save``.
    """
    with torch.serialization.safe_globals(list(SAFE_CLASSES)):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
