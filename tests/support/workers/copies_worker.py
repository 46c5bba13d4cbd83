"""Trainings whose ranks do not have, or do not keep, the same copies: cases for `unlike_worker`, and run as it is.

Steps of a case are lists of the samples that this rank trained; what ended it, and what was warned of, are beside them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, LinearLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dalsegno.elastic import (
    DDP,
    Accumulation,
    Batch,
    Batches,
    BatchPlan,
    Callback,
    DeepSpeed,
    ElasticSampler,
    Trainer,
    TrainingState,
)
from dalsegno.elastic.training.session import BareSession
from tests.support.workers import unlike_worker
from tests.support.workers.unlike_worker import GLOBAL_BATCH, LENGTH, Case

ROWS = torch.randn(LENGTH, 5, generator=torch.Generator().manual_seed(1))


def model_of(case: Case) -> nn.Sequential:
    torch.manual_seed(case.here("model_seed", 1))
    kinds: dict[str, Any] = {
        "plain": nn.Tanh,
        "statistics": lambda: nn.BatchNorm1d(8),
        "dropout": lambda: nn.Dropout(0.5),
    }
    model = nn.Sequential(nn.Linear(4, 8), kinds[case.here("layer", "plain")](), nn.Linear(8, 1))
    if case.here("frozen"):
        model[0].requires_grad_(False)
    return model


def loss_of(model: Any, rows: Tensor) -> Tensor:
    loss: Tensor = (model(rows[:, :4].to(next(model.parameters()).dtype)) - rows[:, 4:]).square().mean()
    return loss


def other_loss(model: Any, rows: Tensor) -> Tensor:
    loss: Tensor = (model(rows[:, :4]) - rows[:, 4:]).abs().mean()
    return loss


def optimizer_of(case: Case, model: nn.Module, *more: Any) -> torch.optim.Optimizer:
    made = getattr(torch.optim, case.here("optimizer", "AdamW"))
    return made([*model.parameters(), *more], lr=case.here("rate", 0.01))  # type: ignore[no-any-return]


def scheduler_of(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    if case.here("scheduler") == "warmup":  # the first step moves nothing
        return LambdaLR(optimizer, lambda step: min(1.0, step / 2))
    return LinearLR(optimizer, 1.0, case.here("end", 0.1), 10)


class Around:
    """What scripts put around `Batches`."""

    def __init__(self, batches: Batches[Any]) -> None:
        self.generator = (batch for batch in batches)

    def __iter__(self) -> Iterator[Any]:
        return self.generator


def unreadable(_: Any) -> Any:
    raise RuntimeError("a file is gone")


AROUND: dict[str, Any] = {
    "nothing": lambda batches: batches,
    "generator": Around,
    "enumerate": enumerate,
    "zip": lambda batches: zip(count(), batches, strict=False),
    "failing": lambda batches: map(unreadable, batches),
}


def looped(case: Case) -> None:
    """A loop of the script's own, and what it does wrong."""
    s = case.open()
    if not dist.is_initialized() and case.world > 1:
        dist.init_process_group("gloo")
    model = model_of(case)
    extra = nn.Parameter(torch.ones(1, dtype=torch.float32))
    strange = case.here("strange")
    optimizer = optimizer_of(case, model, *([extra] if strange else []))
    scheduler = scheduler_of(case, optimizer)
    wrapped: Any = model
    if case.world > 1 and case.here("wrap", "ddp") == "ddp":
        wrapped = DistributedDataParallel(model)
    called = model if case.here("call") == "inside" else wrapped
    save = case.write
    if case.here("state", True):
        beside = {"extra": nn.ParameterList([extra])} if strange == "kept" else {}
        state = TrainingState(s, model=model, optimizer=optimizer, scheduler=scheduler, **beside)
        state.load()
        save = state.write
    batches = batches_of(case, s)
    accumulate = Accumulation(wrapped, optimizer)
    around = AROUND[case.here("around", "nothing")](batches)

    def train(batch: Batch[Any]) -> None:
        for micro in accumulate(batch) if case.here("accumulate", True) else batch.micro_batches:
            if case.here("swallow") and len(case.steps) == 1 and not micro.is_last:
                continue  # as behind an `except` that catches all
            loss = loss_of(called, micro.data) + (float(case.rank) * extra.sum() if strange else 0.0)
            (micro.scale(loss) if case.here("scale", True) else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        case.steps.append(list(batch.sample_ids))

    def loop(ends: int | None, around: Any) -> None:
        cadence = {"save_every": case.here("save_every", 2)}
        for given in s.steps(around, max_steps=case.here("max_steps", 4), save=save, **cadence):
            train(given[1] if isinstance(given, tuple) else given)
            if case.here("unfreeze") == s.step + 1:
                model.requires_grad_(True)
            if s.step + 1 == ends:
                if case.here("finish") == "within":
                    s.finish()
                break
        if case.here("finish") == "behind":
            s.finish()

    loop(case.here("leave"), around)
    if case.here("leave") and not case.here("finish"):
        if not s.step == batches.position.samples // GLOBAL_BATCH == len(case.steps):
            raise RuntimeError(f"{len(case.steps)} steps were made, the session counts {s.step}")
        loop(None, around if case.here("again") == "the same" else batches)


def listed(case: Case) -> None:
    """A loop over a list, which is left behind a step, and a second one."""
    s = case.open()
    for leave in (case.here("leave"), None):
        for row in s.steps(list(range(LENGTH)), max_steps=case.here("max_steps", 4), save=case.write):
            case.steps.append([row])
            if s.step + 1 == leave:
                if case.here("finish"):
                    s.finish()
                break
        if s.meetings.over:
            break


def in_loops(case: Case) -> None:
    """A loop for every two steps, as for each epoch; behind the step ``quit`` this process is gone."""
    s = case.open()
    if not dist.is_initialized() and case.world > 1:
        dist.init_process_group("gloo")
    model = model_of(case)
    optimizer = optimizer_of(case, model)
    wrapped = DistributedDataParallel(model)
    state = TrainingState(s, model=model, optimizer=optimizer)
    state.load()
    batches, accumulate, last = batches_of(case, s), Accumulation(wrapped, optimizer), case.here("max_steps", 6)
    for ends in range(2, last + 1, 2):
        if s.step >= ends:
            continue
        for batch in s.steps(batches, max_steps=last, save=state.write, save_every=1, seed=case.here("draws")):
            if batch.step - 1 == case.here("quit"):
                return
            for micro in accumulate(batch):
                loss = loss_of(wrapped, micro.data)
                micro.scale(loss).backward()
                case.losses.append(loss.item().hex())
            optimizer.step()
            optimizer.zero_grad()
            case.steps.append(list(batch.sample_ids))
            if batch.step == ends < last:
                break


def batches_of(case: Case, s: BareSession) -> Batches[Any]:
    sampler = ElasticSampler(LENGTH, GLOBAL_BATCH, seed=case.here("seed", 3))
    plan = BatchPlan(GLOBAL_BATCH, s.world_size, case.here("micro", 3))
    return Batches(ROWS, sampler, plan, case.here("rank", s.rank), resume=s.resume)


class Average(Callback):
    """An average of the weights, of which each rank has its own."""

    def on_fit_begin(self, trainer: Trainer) -> None:
        self.model = AveragedModel(trainer.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]

    def on_step(self, trainer: Trainer, batch: Batch[Any]) -> None:
        self.model.update_parameters(trainer.model)


class Unfreeze(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, batch: Batch[Any]) -> None:
        if trainer.step == self.step:
            trainer.model.requires_grad_(True)


class Steps(Callback):
    def __init__(self, case: Case) -> None:
        self.case = case

    def on_step(self, trainer: Trainer, batch: Batch[Any]) -> None:
        self.case.steps.append(list(batch.sample_ids))


def fitted(case: Case) -> None:
    """A `Trainer`."""
    strategies: dict[str, Any] = {
        "local": lambda: DDP(broadcast_buffers=False),
        **{f"zero{stage}": lambda stage=stage: zero(case, stage) for stage in range(4)},
    }
    chosen = case.here("strategy", "ddp")
    model = model_of(case)
    kind = case.here("dtype")
    if kind == "bf16" and not chosen.startswith("zero"):
        model = model.to(torch.bfloat16)
    strange = case.here("strange")
    extra = nn.Parameter(torch.ones(1))
    hooks: list[Callback] = [Steps(case)]
    hooks += [Unfreeze(case.here("unfreeze"))] if case.here("unfreeze") else []
    hooks += [Average()] if case.here("average") else []
    Trainer(
        torch.compile(model, backend="eager") if case.here("compiled") else model,  # type: ignore[arg-type]
        ROWS,
        optimizer=lambda model: optimizer_of(case, model, *([extra] if strange else [])),
        scheduler=(lambda optimizer: scheduler_of(case, optimizer)) if case.here("scheduler") else None,
        strategy=strategies[chosen]() if chosen in strategies else chosen,
        loss=other_loss if case.here("loss") == "other" else loss_of,
        grad_scaler=torch.amp.GradScaler("cpu", init_scale=2.0**127) if kind == "fp16" else None,
        global_batch_size=GLOBAL_BATCH,
        max_micro_batch_size=3,
        max_steps=case.here("max_steps", 4),
        checkpoint_dir=case.directory if case.here("directory", True) else None,
        save_every=2,
        max_grad_norm=1.0,
        callbacks=hooks,
        progress=False,
    ).fit()


def zero(case: Case, stage: int) -> DeepSpeed:
    half: Mapping[str, Any] = {"bf16": {"enabled": True}} if case.here("dtype") == "bf16" else {}
    return DeepSpeed({"zero_optimization": {"stage": stage}, **half})


unlike_worker.CASES.update({one.__name__: one for one in (looped, listed, in_loops, fitted)})

if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    unlike_worker.main()
