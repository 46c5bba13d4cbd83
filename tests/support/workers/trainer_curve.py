"""A `Trainer` with all that it takes, that writes a step log; flags as the examples have them, and

--stay         its processes stay through planned changes
--forgets      its callback keeps no state, which rank 0's might have more of
--holds        the script keeps the wrapper of its first world
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset

from dalsegno.elastic import Batch, Callback, Evaluator, Tracked, Trainer

# `hooked.py` has put it there already, to lengthen steps.
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import common  # type: ignore[import-not-found]


def losses(model: nn.Module, blocks: Tensor) -> Tensor:
    """(batch, length + 1) -> (batch, length)"""
    return cross_entropy(model(blocks[:, :-1]).transpose(1, 2), blocks[:, 1:], reduction="none")


def measure(model: nn.Module, blocks: Tensor) -> dict[str, Any]:
    found = losses(model, blocks)
    return {"loss": (found, found.numel())}


class Written(Callback):
    """Writes each step, and paces it. Counts the steps, which a checkpoint has to keep."""

    def __init__(self, directory: str, seconds: float, *, forgets: bool) -> None:
        self._directory, self._clock, self._forgets = directory, common.StepClock(seconds), forgets
        self._values: Mapping[str, float] = {}
        self._steps = self._begun = 0

    def on_fit_begin(self, trainer: Trainer) -> None:
        self._begun += 1
        assert self._begun == 1, "told twice that the training begins"
        assert self._forgets or self._steps == trainer.step, f"{self._steps} steps counted, and {trainer.step} done"
        epoch = int(os.environ.get("DALSEGNO_EPOCH", 0))
        self._log = common.StepLog(self._directory, rank=trainer.rank, world_size=trainer.world_size, epoch=epoch)

    def on_log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        self._values = values

    def on_step(self, trainer: Trainer, batch: Batch[Any]) -> None:
        self._steps += 1
        self._log.write(
            step=batch.step,
            data_epoch=batch.position.data_epoch,
            sample_ids=batch.sample_ids,
            loss=self._values["loss"],
            grad_norm=self._values["grad_norm"],
        )
        self._clock.wait()

    def on_fit_end(self, trainer: Trainer) -> None:
        self._begun -= 1
        assert self._begun == 0, "told twice that the training ends"
        self._log.close()

    def state_dict(self) -> dict[str, Any]:
        return {} if self._forgets else {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]


def main() -> None:
    parser = common.parser("A Trainer.")
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--forgets", action="store_true")
    parser.add_argument("--holds", action="store_true")
    flags = parser.parse_args()
    torch.manual_seed(flags.seed)
    model = nn.Sequential(nn.Embedding(common.VOCABULARY, 32), nn.GELU(), nn.Linear(32, common.VOCABULARY))
    kept: list[Any] = []

    def loss(called: Any, blocks: Tensor) -> Tensor:
        if flags.holds and not kept:
            kept.append(called)
        return losses(called, blocks).mean()

    text = common.StdlibText()
    Trainer(
        model,
        Subset(text, range(200, len(text))),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=flags.learning_rate),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999),
        loss=loss,
        global_batch_size=flags.global_batch_size,
        max_micro_batch_size=flags.max_micro_batch_size,
        max_steps=flags.steps,
        max_grad_norm=1.0,
        seed=flags.seed,
        save_every=flags.save_every,
        memory_every=flags.memory_every,
        checkpoint_dir=flags.checkpoint_dir,
        stay=flags.stay,
        evaluator=Evaluator(Subset(text, range(200)), measure),
        evaluate_every=15,
        track=Tracked("loss"),
        callbacks=[Written(flags.step_log, flags.step_time, forgets=flags.forgets)],
        log_every=1,
        progress=False,
    ).fit()


if __name__ == "__main__":
    main()
