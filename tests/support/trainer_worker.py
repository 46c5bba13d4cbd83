"""A worker for tests of the trainer and the evaluator: runs cases one after the other, each with a session of its own.

``--cases`` is a JSON list; ``--out`` gets one ``result-<rank>.json``. Under an agent there is one case and one session.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from dalsegno.elastic import Callback, Counts, Evaluator, Tracked, Trainer, counts, worker_session
from dalsegno.elastic.deepspeed_strategy import DeepSpeed
from dalsegno.elastic.fsdp import FSDP
from dalsegno.elastic.strategies import DDP, Strategy

LENGTH, GLOBAL_BATCH, MICRO = 50, 13, 3


class Points(Dataset[tuple[Tensor, Tensor]]):
    """8 numbers and what to make of them."""

    def __init__(self, length: int = LENGTH, dtype: torch.dtype = torch.float32, first: int = 0) -> None:
        self.length, self.dtype, self.first = length, dtype, first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(9, generator=torch.Generator().manual_seed(self.first + index), dtype=torch.float64)
        return values[:8].to(self.dtype), values[8:].sign().to(self.dtype)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same, without a length."""

    def __init__(self, points: Points) -> None:
        self.points = points

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.points[index] for index in range(len(self.points)))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(7), nn.Linear(7, 7), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Model(nn.Module):
    """(batch, 8) -> (batch, 1). Seven rows in its matrices, which no world but one and seven divides."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 7), nn.Linear(7, 1)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


def losses(model: Any, data: tuple[Tensor, Tensor]) -> Tensor:
    """(batch,)"""
    return (model(data[0]) - data[1]).square().flatten(1).mean(1)


def measure(model: Any, data: tuple[Tensor, Tensor]) -> dict[str, Any]:
    output = model(data[0])
    signs = (output.sign().flatten() > 0).long(), (data[1].flatten() > 0).long()
    confusion = torch.zeros(2, 2, dtype=torch.long).index_put_(signs, torch.ones_like(signs[0]), accumulate=True)
    return {
        "loss": ((output - data[1]).double().square(), len(output)),
        "accuracy": ((output.sign() == data[1]).sum(), len(output)),
        "confusion": confusion,
        "samples": len(output),
    }


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = dict(model.named_parameters())
    matrices = [p for name, p in parameters.items() if name.endswith("weight") and "norm" not in name]
    others = [p for name, p in parameters.items() if not (name.endswith("weight") and "norm" not in name)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.02)


def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def make_strategy(name: str) -> Strategy:
    if name.startswith("zero"):
        return DeepSpeed({"zero_optimization": {"stage": int(name[-1])}})
    return FSDP(blocks=(Block,)) if name == "fsdp" else DDP()


class Notes(Callback):
    """Writes down all that it is told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.logs: list[dict[str, float]] = []
        self.evaluations: list[Any] = []

    def on_step(self, trainer: Trainer, batch: Any) -> None:
        self.steps.append(trainer.step)

    def on_log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        self.logs.append(dict(values))

    def on_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self.evaluations.append([trainer.step, dict(metrics)])


def train(case: dict[str, Any]) -> dict[str, Any]:
    """One training; all that was logged."""
    dtype = torch.float64 if case.get("double") else torch.float32
    torch.manual_seed(5)
    model = Model(case.get("dropout", 0.0)).to(dtype)
    notes = Notes()

    def slow_measure(model: Any, data: Any) -> dict[str, Any]:
        Path(case["marker"]).touch()
        time.sleep(case["slow"])  # why: an evaluation that takes longer than a leaver has
        return measure(model, data)

    trainer = Trainer(
        model,
        Points(dtype=dtype),
        optimizer=make_optimizer,
        loss=lambda model, data: losses(model, data).mean(),
        global_batch_size=GLOBAL_BATCH,
        max_micro_batch_size=MICRO,
        max_steps=case["steps"],
        scheduler=make_scheduler,
        strategy=make_strategy(case["strategy"]),
        max_grad_norm=0.5,
        seed=3,
        checkpoint_dir=case.get("directory"),
        save_every=case.get("save_every", 0),
        save_in_background=case.get("in_background", False),
        evaluator=Evaluator(
            Points(case.get("held_out", 5), dtype, first=1000),
            slow_measure if case.get("slow") else measure,
            batch_size=case.get("batch", 2),
            interrupt_every=1,
        ),
        evaluate_every=case.get("evaluate_every", 3),
        track=Tracked("loss"),
        callbacks=[notes],
        log_every=1,
        progress=False,
    )
    fitted = trainer.fit()
    return {
        "steps": notes.steps,
        "logs": notes.logs,
        "evaluations": notes.evaluations,
        "best": None if fitted.best is None else fitted.best.name,
    }


def evaluate(case: dict[str, Any]) -> dict[str, Any]:
    """One evaluation without a trainer; its metrics, and the collectives that it made."""
    torch.manual_seed(5)
    model = Model(0.5).double()
    points = Points(case["length"], torch.float64)
    dataset: Any = Stream(points) if case.get("stream") else points
    calls: list[str] = []
    real = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "broadcast", "barrier")}

    def counted(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return real[name](*arguments, **options)

        return call

    for name in real:
        setattr(counts.dist, name, counted(name))
    try:
        if case.get("own_shards"):
            metrics = own_shards()
        else:
            metrics = Evaluator(dataset, measure, batch_size=case["batch"]).run(model)
    finally:
        for name, function in real.items():
            setattr(counts.dist, name, function)
    return {"metrics": metrics, "calls": calls}


def own_shards() -> dict[str, float]:
    """Ranks with different things to say: plain numbers only, nothing at all, tensors."""
    rank, held = dist.get_rank(), Counts()
    if rank == 0:
        held.add({"loss": (3, 2), "errors": 1})
    if rank == 2:
        held.add({"loss": (torch.tensor([1.0, 2.0]), torch.tensor(2)), "late": (5.0, 10)})
        held.add({"loss": (torch.tensor(4.0), torch.tensor([True, True])), "errors": torch.tensor(2)})
    return held.reduce().metrics()


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--cases", type=json.loads, required=True)
    flags.add_argument("--out", type=Path)
    flags.add_argument("--log", type=Path)
    arguments = flags.parse_args()
    rank, results = int(os.environ.get("RANK", "0")), []
    for case in arguments.cases:
        if "port" in case:
            # A session is one per process, and its group needs a store that nobody used before.
            os.environ["MASTER_PORT"] = str(case["port"])
            while worker_session._sessions:
                worker_session._sessions.pop().close()
        if case.get("kind") == "evaluate":
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            results.append(evaluate(case))
        else:
            results.append(train(case))
    (arguments.out / f"result-{rank}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # A gloo thread may still let go of a tensor while the interpreter ends.
    os._exit(0)


if __name__ == "__main__":
    main()
