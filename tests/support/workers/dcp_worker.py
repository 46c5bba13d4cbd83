"""FSDP2 with torch's distributed checkpoint in a loop of the script's own, as `docs/dcp.md` has it, with a step log."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from dalsegno.elastic import Accumulation, Batches, BatchPlan, ElasticSampler, session
from dalsegno.elastic.checkpoint import Reads

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import common

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


class Training:
    """Model and optimizer as DCP wants them: their names do not depend on the number of ranks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self._model, self._optimizer)
        return {"model": weights, "optimizer": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


def main() -> None:
    parser = common.parser("FSDP2 and DCP.")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--mistaken", action="store_true", help="say that ranks load by place, and load all")
    flags = parser.parse_args()
    s = session(checkpoint_dir=flags.checkpoint_dir)
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    torch.manual_seed(flags.seed)
    rows = torch.randn(640, 9)
    sizes = [8, *[flags.width] * 3]
    layers = (nn.Sequential(nn.Linear(*shape), nn.Tanh()) for shape in itertools.pairwise(sizes))
    model = nn.Sequential(*layers, nn.Linear(flags.width, 1))
    for block in model[:-1]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.08 / flags.width)
    training = Training(model, optimizer)
    if s.resume is not None:
        for entry in s.resume.manifest.files if flags.mistaken else ():
            (s.resume.path / entry.path).read_bytes()
        dcp.load({"training": training}, checkpoint_id=s.resume.path)

    plan = BatchPlan(flags.global_batch_size, s.world_size, flags.max_micro_batch_size)
    sampler = ElasticSampler(len(rows), flags.global_batch_size, seed=flags.seed)
    batches = Batches(rows, sampler, plan, s.rank, resume=s.resume)
    accumulate = Accumulation(model, optimizer)
    log = common.StepLog(flags.step_log, rank=s.rank, world_size=s.world_size, epoch=s.epoch)
    clock = common.StepClock(flags.step_time)

    def save(path: Path) -> None:
        dcp.save({"training": training}, checkpoint_id=path)

    save.by_place = flags.mistaken  # type: ignore[attr-defined]
    save.reads = Reads() if flags.mistaken else None  # type: ignore[attr-defined]
    steps = s.steps(
        batches,
        max_steps=flags.steps,
        save=save,
        save_every=flags.save_every,
        memory_every=flags.memory_every,
        strategy="fsdp-dcp",
        any_world_size=True,
    )
    for batch in steps:
        total = 0.0
        for micro in accumulate(batch):
            loss = (model(micro.data[:, :8]) - micro.data[:, 8:]).square().mean()
            micro.scale(loss).backward()
            total += float(loss.detach()) * micro.n
        optimizer.step()
        optimizer.zero_grad()
        mean = s.sum(total) / batch.n
        clock.wait()
        s.report(mean)
        log.write(
            step=batch.step,
            data_epoch=batch.position.data_epoch,
            sample_ids=batch.sample_ids,
            loss=mean,
            grad_norm=0.0,
        )


if __name__ == "__main__":
    main()
