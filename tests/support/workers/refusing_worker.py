"""A worker for `test_mistakes_refusals`: mistakes of one rank alone, and those that show late, one after the other.

``argv[1]`` is a JSON list of cases, each with a session of its own; ``argv[2]`` gets one ``result-<rank>.json``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dalsegno import elastic
from dalsegno.elastic import Batch, Batches, BatchPlan, Callback, ElasticSampler, Trainer, TrainingState
from dalsegno.elastic.trainer.deepspeed_strategy import DeepSpeed
from tests.support.workers import cases

STEPS, LATE = 6, 3
Case = dict[str, Any]


class Lines(logging.Handler):
    """What our loggers said."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Late(Callback):
    """Keeps something that can be saved, and from a step on does not."""

    def __init__(self, case: Case) -> None:
        self.case, self.steps = case, list[int]()

    def on_step(self, trainer: Trainer, batch: Batch[Any]) -> None:
        self.steps.append(trainer.step)
        if self.case.get("adds") and trainer.step == LATE:
            trainer._strategy.optimizer.add_param_group({"params": list(trainer.model[2].parameters())})

    def state_dict(self) -> dict[str, Any]:
        late = self.case.get("late") if len(self.steps) >= LATE else None
        if late == "key":
            return {"best": {}["accuracy"]}
        return {"kept": (lambda: 1) if late == "lambda" else 1}


class Part:
    """The same as a part of a `TrainingState`."""

    def __init__(self, case: Case) -> None:
        self.case, self.calls = case, 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        if self.case.get("late") and self.calls > LATE:
            return {"best": {}["accuracy"]}
        return {}

    def load_state_dict(self, state: Any) -> None:
        return None


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(4)
    last = nn.LazyLinear(1) if case.get("lazy") else nn.Linear(6, 1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), last)


def mine(case: Case, what: str) -> bool:
    """Whether this rank is the one with the mistake; where none is named, all are."""
    return bool(case.get(what)) and case.get("only", os.environ["RANK"]) == os.environ["RANK"]


def optimizer_of(case: Case, model: Any) -> torch.optim.Optimizer:
    if mine(case, "other"):
        return torch.optim.SGD(model.parameters(), lr=0.01)
    if mine(case, "stranger"):
        return torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.01)
    groups = [list(model[0].parameters())] if case.get("adds") else [list(model[n].parameters()) for n in (0, 2)]
    return torch.optim.AdamW([{"params": group} for group in (groups[::-1] if case.get("turned") else groups)], lr=0.01)


def loss_of(model: Any, data: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(data[:, :4]), data[:, 4:])


def rows() -> Tensor:
    return torch.randn(48, 5, generator=torch.Generator().manual_seed(1))


def directory(case: Case) -> str:
    return case["directory"] + (f"-{os.environ['RANK']}" if case.get("apart") else "")


def trainer(case: Case) -> list[int]:
    late = Late(case)
    strategy = case.get("strategy", "ddp")
    made = Trainer(
        model_of(case),
        rows(),
        optimizer=lambda model: optimizer_of(case, model),
        loss=loss_of,
        global_batch_size=6,
        max_micro_batch_size=3,
        max_steps=case.get("steps", STEPS),
        strategy=DeepSpeed({"zero_optimization": {"stage": 0}}) if strategy == "zero0" else strategy,
        checkpoint_dir=directory(case),
        save_every=1,
        save_in_background=case.get("background", False),
        callbacks=[late],
        progress=False,
        log_every=1,
    )
    try:
        made.fit()
    finally:
        case["made"] = late.steps
    return late.steps


def loop(case: Case) -> list[int]:
    s = elastic.session(directory(case))
    model = model_of(case)
    state = TrainingState(s, model=model, optimizer=optimizer_of(case, model), average=Part(case))
    state.load()
    plan = BatchPlan(6, s.world_size, 3)
    batches = Batches(rows(), ElasticSampler(48, 6), plan, s.rank, resume=s.resume)
    case["made"] = []
    for batch in s.steps(batches, max_steps=case.get("steps", STEPS), save=state.write, save_every=1):
        for micro in batch.micro_batches:
            micro.scale(loss_of(model, micro.data)).backward()
        model.zero_grad()  # Saves would wait for an optimizer's step.
        case["made"].append(batch.step)
    return list(case["made"])


KINDS: dict[str, Callable[[Case], list[int]]] = {"trainer": trainer, "loop": loop}


def run(case: Case) -> dict[str, Any]:
    lines, refused = Lines(), ""
    logging.getLogger("dalsegno").addHandler(lines)
    try:
        KINDS[case["kind"]](case)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger("dalsegno").removeHandler(lines)
    return {"refused": refused, "steps": case.get("made", []), "said": lines.lines}


if __name__ == "__main__":
    cases.run_all(run)
