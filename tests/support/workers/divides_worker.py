"""A plain script as nanoGPT is one: no session, steps of its own, and an assertion that the world divides something.

Knows nothing of the agent. Saves `own.pt` beside `--out`, goes on from it, and ends when that directory has `stop`.
With `--fails-first` its very first start fails.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

ACCUMULATION = 4


def main() -> None:
    """Steps until it is stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fails-first", action="store_true")
    options, _ = parser.parse_known_args()
    if options.fails_first and not (options.out / "tried").exists():
        (options.out / "tried").touch()
        raise SystemExit("no room on the card")
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    assert ACCUMULATION % world == 0, f"{ACCUMULATION} micro-batches on {world} ranks"
    own = options.out / "own.pt"
    step = torch.load(own) if own.exists() else 0
    print(f"training on {world} from {step}", flush=True)
    stop = torch.zeros(1)
    while not stop.item():
        time.sleep(0.05)
        stop.fill_((options.out / "stop").exists())
        dist.all_reduce(stop)
        step += 1
        if rank == 0 and step % 5 == 0:
            torch.save(step, own.with_suffix(".new"))
            os.replace(own.with_suffix(".new"), own)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
