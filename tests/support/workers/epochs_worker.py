"""A loop over a map-style data set that is another one in each data epoch, with loader workers or without.

The script tells its data set the next epoch where one ends, as loops over epochs are carried over.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, Subset

from dalsegno.elastic import session

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import common

LENGTH = 64


class Curriculum(Dataset[Tensor]):
    """Rows that grow with the data epoch."""

    def __init__(self) -> None:
        self.rows, self.epoch = torch.randn(LENGTH, 9, generator=torch.Generator().manual_seed(0)), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] * (1 + 0.3 * (self.epoch % 3))


def main() -> None:
    parser = common.parser("Data that know their epoch.")
    parser.add_argument("--stay", action="store_true")
    flags = parser.parse_args()
    s = session(checkpoint_dir=flags.checkpoint_dir)
    torch.manual_seed(flags.seed)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    state = s.state(model, optimizer, wrap=DistributedDataParallel)
    dataset = Curriculum()
    # The disturbed run has workers, or counts otherwise; the plain one, with which it is compared, does neither.
    workers, counts_from = int(os.environ.get("LOADER_WORKERS", "0")), int(os.environ.get("COUNTS_FROM", "0"))
    data = s.data(
        Subset(dataset, range(LENGTH)),
        global_batch=flags.global_batch_size,
        micro_batch=flags.max_micro_batch_size,
        seed=flags.seed,
        num_workers=workers,
    )
    log = common.StepLog(flags.step_log, rank=s.rank, world_size=s.world_size, epoch=s.epoch)
    clock = common.StepClock(flags.step_time)
    for batch in s.steps(data, state, max_steps=flags.steps, save_every=flags.save_every, stay=flags.stay):
        total = 0.0
        for micro in batch:
            loss = (state.model(micro.data[:, :8]) - micro.data[:, 8:]).square().mean()
            micro.scale(loss).backward()
            total += float(loss.detach()) * micro.n
        norm = common.gradient_norm(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        mean, place = common.global_mean(total, batch.n), batch.position.data_epoch
        if batch.ends_data_epoch:
            dataset.set_epoch(place + 1 + counts_from)
        clock.wait()
        log.follow(s)
        log.write(step=batch.step, data_epoch=place, sample_ids=batch.sample_ids, loss=mean, grad_norm=norm)
    log.close()


if __name__ == "__main__":
    main()
