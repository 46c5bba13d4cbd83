"""An ordinary DeepSpeed script, which knows nothing of us: it saves below `--save-dir`, and loads what `latest` names.

Its one concession to elasticity is DLRover's: with `--universal-checkpoint` it loads universal files. Its position in
the data follows from DeepSpeed's count of steps, and the number of ranks must divide the global batch. Alone it runs
with plain `python`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import nn

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SAMPLES = 640
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
# Where the test says that it needs no more time.
HOLDS = Path(os.environ.get("DALSEGNO_TEST_HOLDS", "."))


def main() -> None:
    flags = argparse.ArgumentParser()
    for name in ("steps", "save-every", "global-batch-size", "seed"):
        flags.add_argument(f"--{name}", type=int)
    flags.add_argument("--step-time", type=float, default=0.0)
    flags.add_argument("--zero-stage", type=int, default=1)
    flags.add_argument("--step-log")
    flags.add_argument("--checkpoint-dir")
    flags.add_argument("--save-dir")
    flags.add_argument("--universal-checkpoint", action="store_true")
    options = flags.parse_args()
    sys.path[:0] = [str(EXAMPLES), str(EXAMPLES.parent)]
    from tests.support.workers.standing import die_where_told

    die_where_told(HOLDS)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    data = torch.randn(SAMPLES, 16)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    share = options.global_batch_size // world
    config = {
        "train_micro_batch_size_per_gpu": share,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": options.zero_stage},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": options.universal_checkpoint},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if options.save_dir and (Path(options.save_dir) / "latest").exists():
        loaded, _ = engine.load_checkpoint(options.save_dir)
        assert loaded is not None
    from common import StepLog

    log = StepLog(options.step_log, rank=rank, world_size=world, epoch=int(os.environ.get("DALSEGNO_EPOCH", 0)))
    while engine.global_steps < options.steps:
        first = engine.global_steps * options.global_batch_size + rank * share
        samples = [number % SAMPLES for number in range(first, first + share)]
        batch = data[samples]
        loss = (engine(batch) - batch.roll(1, dims=1)).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double().reshape(1)
        dist.all_reduce(mean)
        step = engine.global_steps
        log.write(step=step, data_epoch=first // SAMPLES, sample_ids=samples, loss=mean.item() / world, grad_norm=0.0)
        if options.save_dir and step % options.save_every == 0:
            engine.save_checkpoint(options.save_dir)
        if not (HOLDS / "hurry").exists():
            time.sleep(options.step_time)
    dist.barrier()
    os._exit(0)  # DeepSpeed's threads sometimes abort in the interpreter's own end


if __name__ == "__main__":
    main()
