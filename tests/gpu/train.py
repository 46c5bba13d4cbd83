"""A plain DDP loop on this rank's card, for scenes in which the world changes; flags as the examples have them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import common  # type: ignore[import-not-found]  # an example's
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dalsegno.elastic import Accumulation, Batches, BatchPlan, ElasticSampler, TrainingState, background, session
from dalsegno.elastic.rank.process_group import init_process_group
from dalsegno.elastic.trainer.strategies import own_device


def main() -> None:
    flags = common.parser("Plain DDP where there is a card.").parse_args()
    s = session(checkpoint_dir=flags.checkpoint_dir)
    device = own_device(s.local_rank)
    if s.world_size > 1:
        init_process_group(device)
    torch.manual_seed(flags.seed)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.GELU(), torch.nn.Linear(64, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.learning_rate)
    state = TrainingState(s, model=model, optimizer=optimizer)
    state.load()
    wrapped: Any = DistributedDataParallel(model) if s.world_size > 1 else model
    data = common.StdlibText(32)
    sampler = ElasticSampler(len(data), flags.global_batch_size, seed=flags.seed)
    plan = BatchPlan(flags.global_batch_size, s.world_size, flags.max_micro_batch_size)
    options = {"pin_memory": device.type == "cuda"}
    batches: Batches[Tensor] = Batches(data, sampler, plan, s.rank, resume=s.resume, loader_options=options)
    accumulate = Accumulation(wrapped, optimizer)
    log = common.StepLog(flags.step_log, rank=s.rank, world_size=s.world_size, epoch=s.epoch)
    clock = common.StepClock(flags.step_time)
    save = background(state.files)
    for batch in s.steps(batches, max_steps=flags.steps, save=save, save_every=flags.save_every, seed=flags.seed):
        total = torch.zeros((), dtype=torch.float64, device=device)
        for micro in accumulate(batch):
            blocks = micro.data.to(device, non_blocking=True)
            loss = cross_entropy(wrapped(blocks[:, :-1]).flatten(0, 1), blocks[:, 1:].flatten())
            micro.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() * micro.n
        norm = common.gradient_norm(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        mean = common.global_mean(total, batch.n)
        clock.wait()
        s.report(mean)
        log.write(
            step=batch.step,
            data_epoch=batch.position.data_epoch,
            sample_ids=batch.sample_ids,
            loss=mean,
            grad_norm=norm,
        )
    log.close()


if __name__ == "__main__":
    main()
