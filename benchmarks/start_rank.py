"""A rank of `benchmarks.start`: one step of DDP, then a note of when it was made. ``start_rank.py FILE``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    began = time.monotonic()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(f"{began} {time.monotonic()}", encoding="ascii")
    dist.destroy_process_group()
