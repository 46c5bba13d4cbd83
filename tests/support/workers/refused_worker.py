"""A `Trainer` that can be told something wrong; `dlrover-run` runs it. One JSON object in ``argv[1]``.

Attributes of it: ``starts``, a file that gets a line from each rank that starts; ``steps``; ``crash``: the step after
which rank 0 breaks; ``pace``: seconds of a step; ``until``: steps are made without end until that file is there;
``strategy``: see `Odd`. ``WRONG`` in the environment makes this node's script a wrong one: ``optimizer``, ``seed``,
``batch``. ``plain``: a loop of its own.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dalsegno.elastic import (
    DDP,
    Accumulation,
    Batch,
    Batches,
    BatchPlan,
    Callback,
    ElasticSampler,
    Trainer,
    TrainingState,
    session,
)


class Odd(DDP):
    """Says that as many ranks must load what it saves, and that it is nobody's framework."""

    any_world_size = False

    @property
    def name(self) -> str:
        return "odd"


class Paced(Callback):
    """Slow steps, a crash, an end when it is wanted."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told

    def on_step(self, trainer: Trainer, batch: Batch[Any]) -> None:
        if trainer.step == self._told.get("crash"):
            raise RuntimeError("as it was told")
        threading.Event().wait(self._told.get("pace", 0.0))

    def on_log(self, trainer: Trainer, values: Any) -> None:
        if os.path.exists(self._told.get("until", "/nowhere")):
            trainer.stop()

    def state_dict(self) -> dict[str, Any]:
        return {}


def plain(told: dict[str, Any], wrong: str, rows: Tensor, loss: Callable[[Any, Tensor], Tensor]) -> None:
    """The same as a loop of the script's own: what does not fit the checkpoint is refused where `Batches` are made."""
    s = session()
    dist.init_process_group("gloo")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = TrainingState(s, model=model, optimizer=optimizer)
    state.load()
    wrapped = DistributedDataParallel(model)
    size = 4 if wrong == "batch" else 8
    sampler = ElasticSampler(len(rows), size, seed=int(wrong == "seed"))
    batches = Batches(rows, sampler, BatchPlan(size, s.world_size, 8), s.rank, resume=s.resume)
    accumulate = Accumulation(wrapped, optimizer)
    for batch in s.steps(batches, max_steps=told["steps"], save=state.write, save_every=2):
        for micro in accumulate(batch):
            micro.scale(loss(wrapped, micro.data)).backward()
        optimizer.step()
        optimizer.zero_grad()
        threading.Event().wait(told.get("pace", 0.0))
        if batch.step == told.get("crash"):
            raise RuntimeError("as it was told")
        if s.sum(float(os.path.exists(told.get("until", "/nowhere")))):
            break
    s.finish()


def main() -> None:
    told: dict[str, Any] = json.loads(sys.argv[1])
    wrong = os.environ.get("WRONG", "")
    if "only" in told and os.environ["RANK"] != told["only"]:
        wrong = ""
    with Path(told["starts"]).open("a") as file:
        file.write(f"{os.environ['RANK']}\n")
    torch.manual_seed(3)
    rows = torch.randn(64, 5)

    def loss(model: Any, data: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(data[:, :4]), data[:, 4:])

    if told.get("plain"):
        plain(told, wrong, rows, loss)
        return
    kind = torch.optim.SGD if wrong == "optimizer" else torch.optim.AdamW
    Trainer(
        nn.Linear(4, 1),
        rows,
        optimizer=lambda model: kind(model.parameters(), lr=0.01),
        loss=loss,
        global_batch_size=8,
        max_micro_batch_size=8,
        max_steps=told["steps"],
        strategy=Odd() if told.get("strategy") == "odd" else "ddp",
        seed=int(wrong == "seed"),
        save_every=2,
        callbacks=[Paced(told)],
        progress=False,
        log_every=1,
    ).fit()


if __name__ == "__main__":
    main()
