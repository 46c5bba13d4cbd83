"""The training of `pause_rank` by a Hugging Face ``Trainer``, with DDP: elastic, or as it is under torchrun."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.pause_steps import note_step, number_of_start
from dalsegno.protos.contract import Variable
from dalsegno.protos.trace import mark
from dalsegno.swift_plugin import hf


class Model(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        found = self.layers(rows)
        return {"loss": (found - rows.flip(-1)).square().mean()}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The rows of another data set, by the name of the model's argument."""

    def __init__(self, rows: torch.utils.data.Dataset[Tensor]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"rows": self._rows[index]}


class Paced(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Writes each step, and paces it."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._directory, self._clock = flags.step_log, common.StepClock(flags.step_time)
        self._own = flags.own is not None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._own:
            os.environ[Variable.EPOCH] = str(number_of_start(args.device))
        epoch = int(os.environ[Variable.EPOCH])
        self._log = common.StepLog(self._directory, rank=args.process_index, world_size=args.world_size, epoch=epoch)
        mark("ready" if self._own else "engine built")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock.wait()
        note_step(self._log, state.global_step, 0.0)
        if self._own:
            mark("step", step=state.global_step)


def train(flags: argparse.Namespace, layers: nn.Module, rows: Any, batch: int, seed: int, directory: Path) -> None:
    """Trains.

    Args:
        flags: Those of `pause_rank`.
        layers: The model.
        rows: What it is trained on.
        batch: Samples of each step, of all ranks.
        seed: Of the order.
        directory: Where checkpoints, or links to them, are put.
    """
    own = flags.own is not None
    world_size = int(os.environ["WORLD_SIZE"]) if own else 1
    args = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=batch // world_size,
        max_steps=flags.steps,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        save_steps=flags.save_every,
        save_total_limit=3,
        logging_steps=flags.steps,
        seed=seed,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ignore_data_skip=own,
    )
    trainer = Trainer(model=Model(layers), args=args, train_dataset=Rows(rows), callbacks=[Paced(flags)])
    mark("model built")
    if own:
        newest = get_last_checkpoint(str(directory)) if directory.exists() else None
        trainer.train(resume_from_checkpoint=newest)
    else:
        hf.elastic(trainer, global_batch_size=batch, memory_every=flags.memory_every, stay=flags.stay)
        trainer.train()
