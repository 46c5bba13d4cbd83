"""A script as DLRover's users write it: Flash Checkpoint to memory at every step, to the disk now and then.

Rank 0 notes what each world resumes from, and each step with the sum of its weights, in `DIRECTORY/notes`. Each rank
leaves its process number in `DIRECTORY/rank-<its rank>`. Its last step is made when `DIRECTORY/over` is there. Where
`DIRECTORY/die-in-<name>` is there, who has just opened the file of this name for writing removes that and kills itself.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from tests.support.workers.standing import die_where_told, stand_while_told

ROWS = 12


class Ddp:
    """DDP: every node has all of a checkpoint."""

    def __init__(self, directory: str) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self._checkpointer = DdpCheckpointer(directory)
        state = self._checkpointer.load_checkpoint()
        if state:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.first = int(state.get("step", 0))
        self.wrapped = DistributedDataParallel(self.model)

    def learn(self, rows: torch.Tensor) -> None:
        self.wrapped(rows).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, step: int, kind: Any) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}
        self._checkpointer.save_checkpoint(step, state, storage_type=kind)

    def sum(self) -> float:
        return float(sum(value.sum() for value in self.model.parameters()))


class Fsdp(Ddp):
    """FSDP: every rank has a part."""

    def __init__(self, directory: str) -> None:
        self.wrapped = FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))
        self.optimizer = torch.optim.Adam(self.wrapped.parameters(), lr=1e-2)
        self._checkpointer = FsdpShardCheckpointer(directory)
        self.first = int(self._checkpointer.load_checkpoint(self.wrapped, self.optimizer).get("step", 0))

    def save(self, step: int, kind: Any) -> None:
        self._checkpointer.save_checkpoint(step, self.wrapped, self.optimizer, {"step": step}, storage_type=kind)

    def sum(self) -> float:
        total = sum(value.detach().sum() for value in self.wrapped.parameters())
        dist.all_reduce(total)
        return float(total)


class Zero(Ddp):
    """DeepSpeed's ZeRO, in the manner of DLRover's `ds_train.py`: every rank has a part of the optimizer's state."""

    def __init__(self, directory: str) -> None:
        import deepspeed
        import deepspeed.ops
        from dlrover.trainer.torch.flash_checkpoint.deepspeed import DeepSpeedCheckpointer

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        config = {
            "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        }
        self.wrapped, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=config)
        self._directory, self._checkpointer = directory, DeepSpeedCheckpointer(self.wrapped, directory)
        self._checkpointer.load_checkpoint(directory)
        self.first = int(self.wrapped.global_steps)

    def learn(self, rows: torch.Tensor) -> None:
        self.wrapped.backward(self.wrapped(rows).square().mean())
        self.wrapped.step()

    def save(self, step: int, kind: Any) -> None:
        self._checkpointer.save_checkpoint(self._directory, tag=step, storage_type=kind)

    def sum(self) -> float:
        return float(sum(value.detach().double().sum() for value in self.wrapped.parameters()))


def main() -> None:
    """Trains until it is told to end."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--directory", type=Path)
    flags.add_argument("--checkpoints", help="where Flash Checkpoint writes; default: the directory")
    flags.add_argument("--fsdp", action="store_true")
    flags.add_argument("--zero", action="store_true")
    flags.add_argument("--disk-every", type=int, default=1_000_000)
    flags.add_argument("--step-time", type=float, default=0.05)
    options = flags.parse_args()
    die_where_told(options.directory)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    kind = Fsdp if options.fsdp else Zero if options.zero else Ddp
    training = kind(options.checkpoints or str(options.directory))
    trainer = ElasticTrainer(training.wrapped)
    trainer.prepare(training.optimizer)

    def note(text: str) -> None:
        if rank == 0:
            with open(options.directory / "notes", "a", encoding="ascii") as file:
                print(text, file=file)

    (options.directory / f"rank-{rank}").write_text(str(os.getpid()), encoding="ascii")
    note(f"world {training.first} {size} {os.environ['NODE_NUM']} {os.environ['WORKER_NUM']}")
    step, over = training.first, torch.zeros(1)
    while not over:
        step += 1
        with trainer.step():
            rows = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))
            # The mean over all ranks is the mean over all rows, at any world size that divides them.
            training.learn(rows[rank::size])
        over[0] = (options.directory / "over").exists()
        dist.all_reduce(over, dist.ReduceOp.MAX)
        training.save(step, StorageType.DISK if over or step % options.disk_every == 0 else StorageType.MEMORY)
        total = training.sum()
        note(f"step {step} {total:.6f}")
        time.sleep(options.step_time)
        stand_while_told(options.directory, rank)
    dist.barrier()
    note(f"over {step}")
    if options.zero:
        sys.stdout.flush()
        os._exit(0)  # DeepSpeed's threads sometimes abort in the interpreter's own end


if __name__ == "__main__":
    main()
