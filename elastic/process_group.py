"""The default process group, which the training's collectives use (the session has its own: ``collective``)."""

from __future__ import annotations

import os

import torch.distributed as dist


def init_process_group() -> None:
    """Initialises it, unless it is: torchrun's world, or one rank where there is no torchrun."""
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group()
    else:
        init_alone()


def init_alone(backend: str | None = None) -> None:
    """Of one rank: no port to choose and nobody to meet, the store is in this process.

    Args:
        backend: Of ``torch.distributed``; None: its default.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, though torch's __init__ does not list it
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
