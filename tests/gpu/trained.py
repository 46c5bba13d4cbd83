"""A `Trainer` on this rank's card, with any strategy and precision, for scenes in which the world changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import common  # type: ignore[import-not-found]  # an example's
import torch

from dalsegno.elastic import Callback, Trainer
from tests.gpu.worker import loss_of, make_strategy
from tests.support.workers.trainer_worker import Model, Points


class Lines(Callback):
    """One line for each step and rank, at the pace that is asked for."""

    def __init__(self, flags: Any) -> None:
        self._flags, self._clock = flags, common.StepClock(flags.step_time)
        self._values: Mapping[str, float] = {}

    def on_fit_begin(self, trainer: Trainer) -> None:
        epoch = int(os.environ.get("DALSEGNO_EPOCH", 0))
        place = {"rank": trainer.rank, "world_size": trainer.world_size, "epoch": epoch}
        self._log = common.StepLog(self._flags.step_log, **place)

    def on_step(self, trainer: Trainer, batch: Any) -> None:
        """Called behind `on_log` of the same step."""
        self._clock.wait()
        values = self._values
        self._log.write(
            step=trainer.step,
            data_epoch=batch.position.data_epoch,
            sample_ids=batch.sample_ids,
            loss=values["loss"],
            grad_norm=values["grad_norm"],
        )

    def on_log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        self._values = values


def main() -> None:
    parser = common.parser("A Trainer where there is a card.")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--universal-checkpoint", action="store_true", help="accepted: dlrover-run may add it")
    flags = parser.parse_args()
    case = {"strategy": flags.strategy, "precision": flags.precision}
    torch.manual_seed(5)
    trainer = Trainer(
        Model(),
        Points(),
        # With larger rates this model makes much of little: numbers of 16 bits would differ by more than errors do.
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss=loss_of(case),
        global_batch_size=flags.global_batch_size,
        max_micro_batch_size=flags.max_micro_batch_size,
        max_steps=flags.steps,
        strategy=make_strategy(case),
        max_grad_norm=0.5,
        seed=flags.seed,
        save_every=flags.save_every,
        checkpoint_dir=flags.checkpoint_dir,
        callbacks=[Lines(flags)],
        log_every=1,
        progress=False,
    )
    trainer.fit()


if __name__ == "__main__":
    main()
