"""A loop of one's own on this rank's card, with `s.state(wrap=...)`; with ``--stay`` its processes stay."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import common  # type: ignore[import-not-found]  # an example's
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dalsegno.elastic import session
from dalsegno.elastic.trainer.strategies import own_device


def main() -> None:
    parser = common.parser("A loop of one's own where there is a card.")
    parser.add_argument("--stay", action="store_true")
    flags = parser.parse_args()
    s = session(checkpoint_dir=flags.checkpoint_dir)
    device = own_device(s.local_rank)
    torch.manual_seed(flags.seed)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.GELU(), torch.nn.Linear(64, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.learning_rate)
    state = s.state(model, optimizer, wrap=DistributedDataParallel)
    data = s.data(
        common.StdlibText(32),
        global_batch=flags.global_batch_size,
        micro_batch=flags.max_micro_batch_size,
        seed=flags.seed,
    )
    log = common.StepLog(flags.step_log, rank=s.rank, world_size=s.world_size, epoch=s.epoch)
    clock = common.StepClock(flags.step_time)
    steps = s.steps(
        data,
        state,
        max_steps=flags.steps,
        save_every=flags.save_every,
        memory_every=flags.memory_every,
        stay=flags.stay,
    )
    for batch in steps:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for micro in batch:
            blocks = micro.data.to(device)
            loss = cross_entropy(state.model(blocks[:, :-1]).flatten(0, 1), blocks[:, 1:].flatten())
            micro.scale(loss).backward()
            total += loss.detach() * micro.n
        norm = common.gradient_norm(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        mean = common.global_mean(total, batch.n)
        clock.wait()
        s.report(mean)
        log.follow(s)
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
