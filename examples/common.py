"""What the examples share: real text that exists on every machine, their flags, and the step log.

The text is the source code of Python's own standard library, read as bytes: 256 tokens, no tokenizer, no download.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from dalsegno.elastic import Session

VOCABULARY = 256


class StdlibText(Dataset[Tensor]):
    """Blocks of the standard library's source text.

    Item ``i`` is a ``LongTensor`` of shape ``(block_size + 1,)``: inputs are ``[:-1]``, targets ``[1:]``. Blocks do not
    overlap in what they predict. The order of files is their sorted names, so that every process of one Python
    installation sees the same data set.

    Args:
        block_size: Tokens (bytes) that a sample predicts.
        max_samples: Upper bound of the length.

    Raises:
        RuntimeError: The standard library's sources are missing (some frozen builds ship none).
    """

    def __init__(self, block_size: int = 128, max_samples: int = 8192) -> None:
        wanted = block_size * max_samples + 1
        text = bytearray()
        for path in sorted(Path(os.__file__).parent.glob("*.py")):
            text += path.read_bytes()
            if len(text) >= wanted:
                break
        if len(text) <= block_size:
            raise RuntimeError("found no source text of the standard library; use a Python that ships its .py files")
        self.block_size = block_size
        self._text = torch.frombuffer(text[:wanted], dtype=torch.uint8)
        self._length = (len(self._text) - 1) // block_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self._length:
            raise IndexError(index)
        start = index * self.block_size
        return self._text[start : start + self.block_size + 1].long()


class StepLog:
    """One JSON line per optimizer step and rank, handed to the system as soon as the step is done.

    The file is ``<directory>/rank-<rank>-epoch-<epoch>.jsonl``; lines are appended. With ``directory=None`` nothing is
    written.
    """

    def __init__(self, directory: str | Path | None, *, rank: int, world_size: int, epoch: int) -> None:
        self._directory = None if directory is None else Path(directory)
        self._file: TextIO | None = None
        self._open(rank, world_size, epoch)

    def follow(self, s: Session) -> None:
        """Writes for the world that the session is in now: a process may stay for the next one."""
        if s.epoch != self._epoch:
            self.close()
            self._open(s.rank, s.world_size, s.epoch)

    def _open(self, rank: int, world_size: int, epoch: int) -> None:
        self._rank, self._world_size, self._epoch = rank, world_size, epoch
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = open(self._directory / f"rank-{rank}-epoch-{epoch}.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def write(self, *, step: int, data_epoch: int, sample_ids: Sequence[int], loss: float, grad_norm: float) -> None:
        """Appends the line of one step.

        Args:
            step: The optimizer step just done, counted from 1.
            data_epoch: The data epoch of its samples.
            sample_ids: The real samples that this rank computed.
            loss: Mean over the step's real samples of all ranks.
            grad_norm: Norm of the whole gradient, before any clipping.
        """
        if self._file is None:
            return
        line = {
            "epoch": self._epoch,
            "step": step,
            "rank": self._rank,
            "world_size": self._world_size,
            "data_epoch": data_epoch,
            "sample_ids": [int(sample) for sample in sample_ids],
            "loss": loss,
            "grad_norm": grad_norm,
            "time": time.time(),
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def parser(description: str, *, without: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The flags that examples take, but for those that one of them would not read (`step_log`, …)."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--global-batch-size", type=_positive, default=16, help="samples per optimizer step")
    flags.add_argument("--max-micro-batch-size", type=_positive, default=4, help="samples one rank computes at once")
    flags.add_argument("--steps", type=_positive, default=100, help="optimizer steps of the whole run")
    flags.add_argument("--save-every", type=int, default=20, help="steps between checkpoints; 0: only at the end")
    flags.add_argument(
        "--memory-every",
        type=_cadence,
        default=0,
        metavar="STEPS",
        help="the same in memory, or auto (dlrover-run --memory-replicas)",
    )
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--learning-rate", type=float, default=3e-4)
    some: dict[str, dict[str, Any]] = {
        "step_log": {"metavar": "DIR", "help": "append one JSON line per step and rank to files here"},
        "checkpoint_dir": {"metavar": "DIR", "help": "where to save outside dlrover-run"},
        "step_time": {
            "type": float,
            "default": 0.0,
            "metavar": "SECONDS",
            "help": "let a step last this long at least",
        },
    }
    for name, known in some.items():
        if name not in without:
            flags.add_argument(f"--{name.replace('_', '-')}", **known)
    return flags


def global_mean(total: float | Tensor, count: int) -> float:
    """Sums ``total`` over the ranks (if there are several) and divides by the step's real samples, ``count``."""
    value = torch.as_tensor(total, dtype=torch.float64).detach().clone().cpu().reshape(1)
    if dist.is_initialized() and dist.get_world_size() > 1:
        # NCCL works only on cards.
        value = value.cuda() if dist.get_backend() == "nccl" else value
        dist.all_reduce(value)
    return float(value.item() / count)


def gradient_norm(parameters: Any) -> float:
    """Euclidean norm over all gradients of plain (not partitioned) parameters."""
    squares = [float(p.grad.detach().double().square().sum()) for p in parameters if p.grad is not None]
    return math.sqrt(sum(squares))


class StepClock:
    """Stretches steps to a minimum duration, so that a demonstration has something to watch."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last = seconds, time.monotonic()

    def wait(self) -> None:
        """Returns when ``seconds`` have passed since the last return."""
        rest = self._last + self._seconds - time.monotonic()
        if rest > 0:
            time.sleep(rest)
        self._last = time.monotonic()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _cadence(text: str) -> int | str:
    return text if text == "auto" else int(text)
