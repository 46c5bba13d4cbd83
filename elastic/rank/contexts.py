"""Which cards a process uses. A script may train on another one than that which is current in its process."""

from __future__ import annotations

import torch

__all__ = ["cards_in_use"]


def cards_in_use() -> list[int]:
    """The numbers of the cards on which this process has a context; none if CUDA is not in use.

    To ask a card for anything else may make a context there, of some 500 MB.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None:  # It is none of what torch promises.
        return [torch.cuda.current_device()]
    return [number for number in range(torch.cuda.device_count()) if has_context(number)]
