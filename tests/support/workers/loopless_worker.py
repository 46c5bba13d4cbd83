"""`Trainer(...).fit()` as `examples/trainer.py` has it, with a step log and at the examples' pace."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dalsegno.elastic import Callback, Trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import common
import trainer as example


class Steps(Callback):
    """Writes down each step, and stretches it."""

    def __init__(self, directory: str | None, seconds: float) -> None:
        self._directory, self._clock = directory, common.StepClock(seconds)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def on_fit_begin(self, trainer: Trainer) -> None:
        epoch = int(os.environ.get("DALSEGNO_EPOCH", 0))
        world = int(os.environ.get("WORLD_SIZE", 1))
        self._log = common.StepLog(self._directory, rank=trainer.rank, world_size=world, epoch=epoch)

    def on_log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        self._loss = values["loss"]

    def on_step(self, trainer: Trainer, batch: Any) -> None:
        self._log.write(
            step=trainer.step,
            data_epoch=batch.position.data_epoch,
            sample_ids=batch.sample_ids,
            loss=self._loss,
            grad_norm=0.0,
        )
        self._clock.wait()


def main() -> None:
    parser = common.parser("A Trainer.")
    parser.add_argument("--strategy", default="ddp")
    flags = parser.parse_args()
    torch.manual_seed(flags.seed)
    Trainer(
        nn.Sequential(nn.Embedding(common.VOCABULARY, 16), nn.GELU(), nn.Linear(16, common.VOCABULARY)),
        common.StdlibText(max_samples=640),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=flags.learning_rate),
        loss=lambda model, blocks: example.losses(model, blocks).mean(),
        global_batch_size=flags.global_batch_size,
        max_micro_batch_size=flags.max_micro_batch_size,
        max_steps=flags.steps,
        strategy=flags.strategy,
        seed=flags.seed,
        save_every=flags.save_every,
        memory_every=flags.memory_every,
        checkpoint_dir=flags.checkpoint_dir,
        callbacks=[Steps(flags.step_log, flags.step_time)],
        log_every=1,
        progress=False,
    ).fit()


if __name__ == "__main__":
    main()
