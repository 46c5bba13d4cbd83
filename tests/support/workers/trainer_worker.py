"""A worker for tests of the trainer and the evaluator: runs cases one after the other, each with a session of its own.

``--cases`` is a JSON list; ``--out`` gets one ``result-<rank>.json``. Under an agent there is one case and one session.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset

from dalsegno import elastic
from dalsegno.elastic import (
    Accumulation,
    Batches,
    BatchPlan,
    Callback,
    Counts,
    ElasticSampler,
    Evaluator,
    Tracked,
    Trainer,
    TrainingState,
    background,
)
from dalsegno.elastic.data import counts
from dalsegno.elastic.trainer.deepspeed_strategy import DeepSpeed
from dalsegno.elastic.trainer.fsdp import FSDP
from dalsegno.elastic.trainer.strategies import DDP, Strategy
from tests.support.workers import cases

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


OTHER_OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "one group": lambda model: torch.optim.AdamW(model.parameters()),
    "another kind": lambda model: torch.optim.Adam(make_optimizer(model).param_groups),
}


def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def make_strategy(name: str) -> Strategy:
    if name.startswith("zero"):
        return DeepSpeed({"zero_optimization": {"stage": int(name[-1])}})
    return FSDP(blocks=(Block,)) if name == "fsdp" else DDP()


def make_scaler(case: Mapping[str, Any]) -> torch.amp.grad_scaler.GradScaler | None:
    """A small scale that grows every second step, on request."""
    if not case.get("scaled"):
        return None
    return torch.amp.grad_scaler.GradScaler("cpu", init_scale=256.0, growth_interval=2)


def scaled_losses(model: Any, data: tuple[Tensor, Tensor], case: Mapping[str, Any], step: int, rank: int) -> Tensor:
    """(batch,), in fp16 on request. At the steps ``overflows`` the last rank's gradient gets too large, in one row of
    one matrix: of sharded gradients one rank has that row."""

    def overflow(gradient: Tensor) -> Tensor:
        factor = torch.ones_like(gradient)
        factor[:, 0] = 60000.0 if case.get("fp16") else float("inf")
        return gradient * factor * factor

    world, hooks = dist.get_world_size() if dist.is_initialized() else 1, []
    if step in case.get("overflows", ()) and rank == world - 1 and torch.is_grad_enabled():
        first: nn.Module = getattr(model, "module", model).first
        hooks.append(first.register_forward_hook(lambda *called: called[2].register_hook(overflow) and None))
    with torch.autocast("cpu", torch.float16, enabled=bool(case.get("fp16"))):
        output = model(data[0])
    for hook in hooks:
        hook.remove()
    return (output.to(data[1].dtype) - data[1]).square().flatten(1).mean(1)


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


def count_engines_that_send(sent: list[Any]) -> None:
    """Notes each engine that sends its weights from rank 0 to the others as it is made."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    theirs: Any = DeepSpeedEngine._broadcast_model

    def send(engine: Any) -> None:
        sent.append(engine)
        theirs(engine)

    DeepSpeedEngine._broadcast_model = send


def train(case: dict[str, Any]) -> dict[str, Any]:
    """One training; all that was logged."""
    dtype = torch.float64 if case.get("double") else torch.float32
    torch.manual_seed(5)
    model: nn.Module = Model(case.get("dropout", 0.0))
    if case.get("model") == "wide":
        model.last = nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 1))
    elif case.get("model") == "other":
        model = nn.Sequential(model)
    model.to(dtype)
    notes, sent = Notes(), list[Any]()
    if case["strategy"].startswith("zero"):
        count_engines_that_send(sent)

    def slow_measure(model: Any, data: Any) -> dict[str, Any]:
        Path(case["marker"]).touch()
        time.sleep(case["slow"])  # why: an evaluation that takes longer than a leaver has
        return measure(model, data)

    trainer = Trainer(
        model,
        Points(case.get("length", LENGTH), dtype),
        optimizer=OTHER_OPTIMIZERS.get(case.get("optimizer", ""), make_optimizer),
        loss=lambda model, data: scaled_losses(model, data, case, trainer.step + 1, trainer.rank).mean(),
        global_batch_size=case.get("global_batch", GLOBAL_BATCH),
        max_micro_batch_size=MICRO,
        max_steps=case["steps"],
        scheduler=None if case.get("unscheduled") else make_scheduler,
        strategy=make_strategy(case["strategy"]),
        max_grad_norm=None if case.get("unclipped") else 0.5,
        grad_scaler=make_scaler(case),
        seed=case.get("seed", 3),
        checkpoint_dir=case.get("directory"),
        save_every=case.get("save_every", 0),
        memory_every=case.get("memory_every", 0),
        save_in_background=case.get("in_background", False),
        evaluator=Evaluator(
            Points(case.get("held_out", 5), dtype, first=1000),
            slow_measure if case.get("slow") else measure,
            batch_size=case.get("batch", 2),
            interrupt_every=1,
        ),
        evaluate_every=case.get("evaluate_every", 3),
        track=Tracked("loss", case.get("best", "min")),
        callbacks=[notes],
        log_every=1,
        progress=False,
    )
    if case.get("refused"):
        try:
            trainer.fit()
        except (AttributeError, RuntimeError, ValueError) as error:
            return {"refused": f"{type(error).__name__}: {error}", "steps": notes.steps}
        return {"refused": "", "steps": notes.steps}
    fitted = trainer.fit()
    return {
        "steps": notes.steps,
        "logs": notes.logs,
        "evaluations": notes.evaluations,
        "best": None if fitted.best is None else fitted.best.name,
        "sent": len(sent),
    }


def by_hand(case: dict[str, Any]) -> dict[str, Any]:
    """The same training without a Trainer: DDP with a TrainingState, or FSDP1 with torch's scaler and no checkpoint."""
    dtype = torch.float32 if case["sharded"] else torch.float64
    session = elastic.session(case.get("directory"))
    torch.manual_seed(5)
    model: nn.Module = Model().to(dtype)
    wrapped, optimizer = model, make_optimizer(model)
    scheduler, scaler = make_scheduler(optimizer), make_scaler(case)
    assert scaler is not None
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if case["sharded"]:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = make_optimizer(wrapped)
        scheduler = make_scheduler(optimizer)
        scaler = ShardedGradScaler("cpu", init_scale=256.0, growth_interval=2)
    state = TrainingState(session, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    if not case["sharded"]:
        state.load()
        wrapped = DistributedDataParallel(model)
    sampler = ElasticSampler(LENGTH, GLOBAL_BATCH, seed=3)
    plan = BatchPlan(GLOBAL_BATCH, session.world_size, MICRO)
    batches: Batches[Any] = Batches(Points(dtype=dtype), sampler, plan, session.rank, resume=session.resume)
    accumulate = Accumulation(wrapped, optimizer)
    found: dict[str, Any] = {"loss": [], "loss_scale": [], "grad_norm": []}
    save = None if case["sharded"] else background(state.files)
    for batch in session.steps(batches, max_steps=case["steps"], save=save, seed=3):
        total = 0.0
        for micro in accumulate(batch):
            losses = scaled_losses(wrapped, micro.data, case, batch.step, session.rank).mean()
            scaler.scale(micro.scale(losses)).backward()  # type: ignore[no-untyped-call]
            total += float(losses.detach()) * micro.n
        scaler.unscale_(optimizer)
        clip: Any = wrapped.clip_grad_norm_ if case["sharded"] else None
        norm = clip(0.5) if clip else nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
        optimizer.zero_grad()
        found["loss"].append(session.sum(total) / batch.n)
        found["loss_scale"].append(scaler.get_scale())
        found["grad_norm"].append(float(norm))
    return found


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
    results = []
    for case in arguments.cases:
        if "port" in case:
            cases.begin(case["port"])
        if case.get("kind") == "evaluate":
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            results.append(evaluate(case))
        else:
            results.append(by_hand(case) if case.get("kind") == "by hand" else train(case))
    cases.end(results, arguments.out)


if __name__ == "__main__":
    main()
