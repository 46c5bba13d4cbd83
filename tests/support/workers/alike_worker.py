"""A Trainer with something random, or with statistics of a micro-batch, that is stopped and goes on in another world.

``argv[1]``: ``{"model", "fixed", "directory", "stop"}``, perhaps ``strategy``, and ``groups``: the layers whose
parameters the optimizer trains, in that order, a group each. It prints ``losses {step: loss}`` of rank 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dalsegno.elastic import Batch, Callback, Trainer

STEPS = 6
MODELS: dict[str, Any] = {"dropout": lambda: nn.Dropout(0.5), "statistics": lambda: nn.BatchNorm1d(16)}


class OwnDropout(nn.Module):
    """Draws from a generator of the script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x * (torch.rand(x.shape, generator=self.generator) < 0.5) if self.training else x


class Losses(Callback):
    """Keeps them, and leaves in the middle of the step after ``stop``."""

    def __init__(self, stop: int) -> None:
        self.stop, self.found = stop, dict[int, float]()

    def on_log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        self.found[trainer.step] = values["loss"]

    def on_step(self, trainer: Trainer, batch: Batch[Any]) -> None:
        if trainer.step == self.stop + 1:
            raise SystemExit(0)


def groups(model: nn.Module, layers: list[int]) -> Any:
    """All parameters, or those of some layers by themselves."""
    names = dict(model.named_parameters())
    groups = [[p for name, p in names.items() if f"{layer}." in name] for layer in layers]
    return [{"params": group, "lr": 0.05} for group in groups] or list(names.values())


def main() -> None:
    told = json.loads(sys.argv[1])
    torch.manual_seed(7)
    layer = {**MODELS, "own generator": OwnDropout}[told["model"]]
    model = nn.Sequential(nn.Linear(8, 16), layer(), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    data = [(row, row.sum(0, keepdim=True)) for row in x]
    losses = Losses(told["stop"])
    trainer = Trainer(
        model,
        data,
        optimizer=lambda model: torch.optim.SGD(groups(model, told.get("groups", [])), lr=0.05, momentum=0.9),
        strategy=told.get("strategy", "ddp"),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        global_batch_size=16,
        # As large as the world asks for, where it cuts.
        max_micro_batch_size=8 if told["fixed"] else 16,
        fixed_micro_batch=told["fixed"],
        max_steps=STEPS,
        checkpoint_dir=told["directory"],
        save_every=told["stop"],
        callbacks=[losses],
        log_every=1,
        progress=False,
        seed=5,
    )
    try:
        trainer.fit()
    finally:
        if trainer.rank == 0:
            print("losses", json.dumps(losses.found), flush=True)


if __name__ == "__main__":
    main()
