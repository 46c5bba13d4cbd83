"""What each rank runs for `benchmarks.flash`: DDP that saves each step to memory by DLRover's Flash Checkpoint.

Under every launcher it is the same. It notes each step as the examples do, and rank 0 how long each save held it up,
in seconds, in `stalls` beside the step log.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from torch.nn.parallel import DistributedDataParallel

from examples.common import StepLog

WIDTH = 512


@contextlib.contextmanager
def _turn(file: Path | None) -> Iterator[None]:
    """Alone with the file, if there is one. Ranks of one job would wait for each other in the save, and here."""
    if file is None:
        yield
        return
    with open(file, "ab") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Trains until it is killed."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--step-log", type=Path, required=True)
    flags.add_argument("--checkpoint-dir")
    flags.add_argument("--megabytes", type=float, default=1.0, help="of weights (%(default)s)")
    flags.add_argument("--turn", type=Path, help="saves of all who name this file come one by one; of one rank each")
    flags.add_argument("--step-time", type=float, default=0.1)
    options = flags.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    # Worlds are told apart by when they began; not every launcher numbers them.
    began = torch.tensor([time.time_ns() // 1_000_000])
    dist.broadcast(began, 0)
    layers = max(1, round(options.megabytes * 1e6 / (4 * WIDTH * WIDTH)))
    plain = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    checkpointer = DdpCheckpointer(str(options.step_log.parent / "flash"))
    state = checkpointer.load_checkpoint()
    if state:
        plain.load_state_dict(state["model"])
    step = int(state.get("step", 0))
    log = StepLog(options.step_log, rank=rank, world_size=size, epoch=int(began))
    with open(options.step_log.parent / "stalls", "a", encoding="ascii") as stalls:
        while True:
            step += 1
            model(torch.ones(1, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            with _turn(options.turn):
                before = time.perf_counter()
                checkpointer.save_checkpoint(
                    step, {"model": plain.state_dict(), "step": step}, storage_type=StorageType.MEMORY
                )
                took = time.perf_counter() - before
            if rank == 0:
                print(took, file=stalls, flush=True)
            log.write(step=step, data_epoch=0, sample_ids=(), loss=0.0, grad_norm=0.0)
            time.sleep(options.step_time)


if __name__ == "__main__":
    main()
