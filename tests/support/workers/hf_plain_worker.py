"""A script of Hugging Face's `Trainer`, as its users write them: it knows nothing of us.

It resumes by the flag that the `Trainer`'s own arguments have for that.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SAMPLES, BATCH_PER_DEVICE = 640, 4
# Where the test says that it needs no more time.
HOLDS = Path(os.environ.get("DALSEGNO_TEST_HOLDS", "."))
sys.path.insert(0, str(EXAMPLES))


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of random numbers, the same in each process."""

    def __init__(self) -> None:
        self._data = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"rows": self._data[index]}


class Model(nn.Module):
    """Learns to shift its input by one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(rows) - rows.roll(1, dims=1)).square().mean()}


class Noted(TrainerCallback):
    """Notes each step for the test, and takes the time that it is told to."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        from common import StepLog

        epoch = int(os.environ.get("DALSEGNO_EPOCH", 0))
        self._log = StepLog(self._options.step_log, rank=args.process_index, world_size=args.world_size, epoch=epoch)
        print(f"{args.world_size} ranks with {state.train_batch_size} samples each", flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._log.write(step=state.global_step, data_epoch=0, sample_ids=(), loss=0.0, grad_norm=0.0)
        if not (HOLDS / "hurry").exists():
            time.sleep(self._options.step_time)


def main() -> None:
    flags = argparse.ArgumentParser()
    for name in ("steps", "save-every", "global-batch-size", "seed"):
        flags.add_argument(f"--{name}", type=int)
    flags.add_argument("--step-time", type=float, default=0.0)
    flags.add_argument("--step-log")
    flags.add_argument("--checkpoint-dir")
    flags.add_argument("--output_dir", required=True)
    flags.add_argument("--resume_from_checkpoint")
    options = flags.parse_args()
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        per_device_train_batch_size=BATCH_PER_DEVICE,
        max_steps=options.steps,
        save_steps=options.save_every,
        save_total_limit=2,
        report_to=[],
        seed=options.seed,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(Model(), arguments, train_dataset=Rows(), callbacks=[Noted(options)])
    trainer.train(resume_from_checkpoint=options.resume_from_checkpoint)


if __name__ == "__main__":
    main()
