"""A script as DLRover's users write it: Flash Checkpoint to memory at every step, to the disk now and then.

    flash_worker.py DIRECTORY STEPS DISK_EVERY STEP_SECONDS [CRASH_AT]

Rank 0 notes what it resumes from, and each step, in `DIRECTORY/steps`. At step CRASH_AT its last rank ends, once.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if "dlrover" not in sys.modules:  # as a script would write it: import dlrover...
    checkpoint = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")


def main() -> None:
    """Trains a small model to its last step."""
    directory, steps, disk_every, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    crash_at = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    checkpointer = checkpoint.DdpCheckpointer(directory)
    state = checkpointer.load_checkpoint()
    first = state["step"] if state else 0
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    wrapped = DistributedDataParallel(model)

    def note(text: str) -> None:
        if rank == 0:
            with open(f"{directory}/steps", "a", encoding="ascii") as file:
                print(text, file=file)

    note(f"from {first} of {size}")
    for step in range(first + 1, steps + 1):
        rows = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        loss = wrapped(rows[rank::size]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        kind = checkpoint.StorageType.DISK if step % disk_every == 0 else checkpoint.StorageType.MEMORY
        checkpointer.save_checkpoint(
            step,
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
            storage_type=kind,
        )
        with torch.no_grad():
            note(f"step {step} {float(sum(value.sum() for value in model.parameters())):.6f}")
        if step == crash_at and rank == size - 1 and not os.path.exists(f"{directory}/crashed"):
            with open(f"{directory}/crashed", "x", encoding="ascii"):
                os._exit(7)
        time.sleep(seconds)
    dist.barrier()
    note("done")


if __name__ == "__main__":
    main()
