"""What every script of `benchmarks.pause` tells of its steps."""

from __future__ import annotations

import time

import common
import torch
import torch.distributed as dist


def number_of_start(device: torch.device | str) -> int:
    """Under torchrun: a number that all ranks of a start have. It plays the part of an epoch under `dlrover-run`."""
    number = torch.tensor([int(time.monotonic() * 1000)], device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(number, 0)
    return int(number)


def note_step(log: common.StepLog, step: int, loss: float) -> None:
    """Nobody asks for the samples and the norm."""
    log.write(step=step, data_epoch=0, sample_ids=(), loss=loss, grad_norm=0.0)
