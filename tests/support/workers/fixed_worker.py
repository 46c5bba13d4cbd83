"""A script as DLRover's users write it: its sampler, its loader and its trainer with a fixed total batch size.

Rank 0 notes each world, and after each step of the optimizer its number and the sum of the weights, in
`DIRECTORY/notes`. Every rank notes the samples that it has trained on, with their step, in `DIRECTORY/samples-<rank>`.
A process of its own reads the data ahead. The rate falls with each step of the scheduler.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler
from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from tests.support.workers.standing import stand_while_told

# 4 nodes of 5 make a global batch of 20; the last one of a data epoch has 1.
LENGTH, MICRO_BATCH, SEED, LR = 101, 5, 3, 0.05


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    """Random rows, with their numbers."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index


def main() -> None:
    """Trains to the end of a data epoch in which `DIRECTORY/over` is there, or of the last one."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--directory", type=Path)
    flags.add_argument("--step-time", type=float, default=0.0)
    flags.add_argument("--data-epochs", type=int, default=1_000_000)
    flags.add_argument("--zero-first", action="store_true")
    options = flags.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    data = Numbers()
    sampler = ElasticDistributedSampler(data, seed=SEED)
    loader = ElasticDataLoader(data, batch_size=MICRO_BATCH, sampler=sampler, num_workers=1)
    plain = torch.nn.Linear(8, 8)
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    checkpointer = DdpCheckpointer(str(options.directory))
    state = checkpointer.load_checkpoint()
    if state:
        plain.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        sampler.load_state_dict(state["sampler"])
    step = int(state.get("step", 0))
    trainer = ElasticTrainer(model, dataloader=loader)
    fixed_optimizer, fixed_scheduler = trainer.prepare(optimizer, scheduler)

    def note(name: str, text: str) -> None:
        with open(options.directory / name, "a", encoding="ascii") as file:
            print(text, file=file)

    (options.directory / f"rank-{rank}").write_text(str(os.getpid()), encoding="ascii")
    if rank == 0:
        note("notes", f"world {step} {size} {os.environ['NODE_NUM']} {os.environ['WORKER_NUM']}")
    for epoch in range(sampler.epoch, options.data_epochs):
        trainer.reset()
        sampler.set_epoch(epoch)
        for rows, numbers in loader:
            with trainer.step(fix_total_batch_size=True):
                if options.zero_first:
                    fixed_optimizer.zero_grad()
                model(rows).square().mean().backward()
                note(f"samples-{rank}", f"{step + 1} {epoch} {' '.join(map(str, numbers.tolist()))}")
                fixed_optimizer.step()
                fixed_scheduler.step()
                if not options.zero_first:
                    fixed_optimizer.zero_grad()
            if not trainer.gradient_state.sync_gradients:
                continue
            step += 1
            state = {
                "model": plain.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "sampler": sampler.state_dict(trainer.num_steps, loader.batch_size),
                "step": step,
            }
            checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY)
            if rank == 0:
                total = sum(float(value.double().sum()) for value in plain.parameters())
                note("notes", f"step {step} {total:.6f} {epoch}")
            time.sleep(options.step_time)
            stand_while_told(options.directory, rank)
        over = torch.tensor([float((options.directory / "over").exists())])
        dist.all_reduce(over, dist.ReduceOp.MAX)
        if over:
            break
    if rank == 0:
        note("notes", f"over {step}")


if __name__ == "__main__":
    main()
