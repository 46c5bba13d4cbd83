"""Ranks of which one is lost in a step; run by ``test_survivors_ranks``. One JSON object behind ``--log``.

Attributes of it: ``steps``; in step ``step`` at ``place`` (``forward``; ``gradients``: behind the forward pass;
``stepped``: behind the optimizer's step, ``ended``) rank ``who`` kills itself (with ``hangs`` it stops itself, and its
connections stay open), or with ``stands`` all ranks wait until the file of that name is there. Rank 0 makes ``change``
just before. Each boundary's state is written beside the log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dalsegno.elastic import (
    Accumulation,
    Batches,
    BatchPlan,
    Callback,
    ElasticSampler,
    Trainer,
    TrainingState,
    background,
    session,
)
from dalsegno.elastic.rank import rng
from tests.support.workers.session_worker import Samples


class Average(nn.Module):
    """An average of the weights, which torch sees to change, or not."""

    def __init__(self, model: nn.Module, *, unseen: bool) -> None:
        super().__init__()
        self.unseen = unseen
        self.register_buffer("kept", next(model.parameters()).detach().clone())

    def update(self, model: nn.Module) -> None:
        kept: Any = self.kept
        with torch.no_grad():
            (kept.data if self.unseen else kept).mul_(0.5).add_(next(model.parameters()), alpha=0.5)


def change(what: str, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Something that no rank may do before the optimizer's step if the boundary is to be saved."""
    first = next(model.parameters())
    done: dict[str, Callable[[], object]] = {
        "": lambda: None,
        "weight": lambda: first.detach().mul_(2),
        "moment": lambda: optimizer.state[first]["exp_avg"].mul_(2),
        "optimizer": optimizer.step,
        "schedule": scheduler.step,
        "error": lambda: {}["missing"],
    }
    done[what]()


class Counter(Callback):
    """Keeps a state."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, trainer: Trainer, batch: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]


def by_trainer(log: Path, told: dict[str, Any]) -> None:
    """The same with a `Trainer`; rank ``who`` is killed in the loss."""
    torch.manual_seed(1)
    out = open(log / f"rank-0-epoch-{os.environ['DALSEGNO_EPOCH']}-{os.getpid()}.jsonl", "w")  # noqa: SIM115

    def loss(model: Any, rows: Tensor) -> Tensor:
        if told.get("place") and trainer.step + 1 == told["step"] and trainer.rank == told["who"]:
            os.kill(os.getpid(), signal.SIGKILL)
        mean: Tensor = (model(rows[:, :8]) - rows[:, 8:]).square().mean()
        return mean

    def write(step: int, values: Any) -> None:
        if "loss" in values:
            print(json.dumps({"step": step, "loss": values["loss"], "ids": []}), file=out, flush=True)

    trainer = Trainer(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
        Samples(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        grad_scaler=torch.amp.grad_scaler.GradScaler("cpu", init_scale=8.0, growth_interval=3),
        loss=loss,
        global_batch_size=16,
        max_micro_batch_size=3,
        max_steps=told["steps"],
        memory_every=1000,
        save_in_background=bool(told.get("background")),
        callbacks=[Counter()] if told.get("counts") else [],
        loggers=[write],
        log_every=1,
        progress=False,
    )
    trainer.fit()


def main() -> None:
    log, told = Path(sys.argv[2]), json.loads(sys.argv[3])
    if told.get("trainer"):
        by_trainer(log, told)
        return
    s = session()
    if s.world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    norm: list[nn.Module] = [nn.BatchNorm1d(16)] if told.get("norm") else []
    model = nn.Sequential(nn.Linear(8, 16), *norm, nn.Tanh(), nn.Dropout(told.get("dropout", 0.0)), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=bool(told.get("fused")))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    more = {"average": Average(model, unseen=told["average"] == "unseen")} if told.get("average") else {}
    state = TrainingState(s, model=model, optimizer=optimizer, scheduler=scheduler, **more)
    state.load()
    wrapped = DistributedDataParallel(model) if s.world_size > 1 else model
    plan = BatchPlan(16, s.world_size, 8 if norm else 3)
    batches: Batches[Tensor] = Batches(Samples(), ElasticSampler(100, 16, seed=3), plan, s.rank, resume=s.resume)
    accumulate = Accumulation(wrapped, optimizer)

    def at(place: str, step: int) -> None:
        if place != told.get("place") or step != told["step"]:
            return
        if s.rank == 0:
            change(told.get("change", ""), model, optimizer, scheduler)
        if told.get("stands"):
            (log / f"standing-{s.rank}").touch()
            while not (log / told["stands"]).exists():
                time.sleep(0.01)  # another process makes the file
        elif s.rank == told["who"]:
            (log / f"hangs-{s.rank}").touch()
            os.kill(os.getpid(), signal.SIGSTOP if told.get("hangs") else signal.SIGKILL)

    save: Any = background(state.files) if told.get("background") else state.write
    out = open(log / f"rank-{s.rank}-epoch-{s.epoch}-{os.getpid()}.jsonl", "w")  # noqa: SIM115
    for batch in s.steps(batches, max_steps=told["steps"], save=save, memory_every=told.get("every", 1000), seed=3):
        boundary = {"state": {name: part.state_dict() for name, part in {"model": model, **state.parts}.items()}}
        torch.save({**boundary, "rng": rng.capture()}, log / f"boundary-{s.rank}-{s.epoch}-{s.step}.pt")
        if told.get("average") and not told.get("late"):
            more["average"].update(model)
        total = 0.0
        for micro in accumulate(batch):
            at("forward", batch.step)
            loss = (wrapped(micro.data[:, :8]) - micro.data[:, 8:]).square().mean()
            if micro.is_last:
                at("gradients", batch.step)
            micro.scale(loss).backward()
            total += float(loss.detach()) * micro.n
        optimizer.step()
        at("stepped", batch.step)
        scheduler.step()
        optimizer.zero_grad()
        if told.get("average") and told.get("late"):
            more["average"].update(model)
        mean = s.sum(total) / batch.n
        print(json.dumps({"step": batch.step, "loss": mean, "ids": list(batch.sample_ids)}), file=out, flush=True)
        at("ended", batch.step)


if __name__ == "__main__":
    main()
