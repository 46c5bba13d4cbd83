"""A script of Lightning's, as its users write them: it knows nothing of us, and resumes from its own `last.ckpt`.

Its data begin where its step says, and the number of ranks must divide the global batch. Alone it runs with plain
`python`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SAMPLES = 640
# Where the test says that it needs no more time.
HOLDS = Path(os.environ.get("DALSEGNO_TEST_HOLDS", "."))
sys.path.insert(0, str(EXAMPLES))


class Rows(IterableDataset):  # type: ignore[type-arg]
    """This rank's share of each global batch, from the trainer's step on."""

    def __init__(self, trainer: L.Trainer, share: int) -> None:
        self._trainer, self._share = trainer, share
        self._data = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(0))

    def __iter__(self) -> Iterator[tuple[Tensor, list[int]]]:
        step, ranks = self._trainer.global_step, self._trainer.world_size
        while True:
            first = step * self._share * ranks + self._trainer.global_rank * self._share
            samples = [number % SAMPLES for number in range(first, first + self._share)]
            yield self._data[samples], [first // SAMPLES, *samples]
            step += 1


class Model(L.LightningModule):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self._options = options
        self._net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        share = self._options.global_batch_size // self.trainer.world_size
        return DataLoader(Rows(self.trainer, share), batch_size=None)

    def training_step(self, batch: Any, number: int) -> Tensor:
        rows, _ = batch
        return (self._net(rows) - rows.roll(1, dims=1)).square().mean()

    def on_train_start(self) -> None:
        from common import StepLog

        rank, world = self.trainer.global_rank, self.trainer.world_size
        self._log = StepLog(self._options.step_log, rank=rank, world_size=world, epoch=_epoch())

    def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
        mean = outputs["loss"].detach().double().reshape(1)
        if dist.is_initialized():
            dist.all_reduce(mean)
        data_epoch, *samples = batch[1]
        self._log.write(
            step=self.trainer.global_step,
            data_epoch=data_epoch,
            sample_ids=samples,
            loss=mean.item() / self.trainer.world_size,
            grad_norm=0.0,
        )
        if not (HOLDS / "hurry").exists():
            time.sleep(self._options.step_time)


def _epoch() -> int:
    return int(os.environ.get("DALSEGNO_EPOCH", 0))


def main() -> None:
    flags = argparse.ArgumentParser()
    for name in ("steps", "save-every", "global-batch-size", "seed"):
        flags.add_argument(f"--{name}", type=int)
    flags.add_argument("--step-time", type=float, default=0.0)
    flags.add_argument("--step-log")
    flags.add_argument("--checkpoint-dir")
    flags.add_argument("--save-dir")
    options = flags.parse_args()
    L.seed_everything(options.seed)
    callbacks = []
    if options.save_dir:
        callbacks.append(
            ModelCheckpoint(dirpath=options.save_dir, save_last=True, every_n_train_steps=options.save_every)
        )
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp" if "RANK" in os.environ else "auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        max_steps=options.steps,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Model(options), ckpt_path="last" if options.save_dir else None)


if __name__ == "__main__":
    main()
