"""A schedule that nobody is known to save is remarked on once, in a loop with a ``save=`` of the script's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

from dalsegno.elastic import Accumulation, background
from dalsegno.elastic.training.left_schedules import ScheduleWatch, optimizers_of
from tests.unit.elastic.training.test_accumulation import make


class Session:
    def __init__(self, step: int = 0, rank: int = 0, *, can_save: bool = True) -> None:
        self.step, self.rank, self.can_save = step, rank, can_save
        self.resume = SimpleNamespace(step=step) if step else None


class Owner:
    """Knows its parts, as `TrainingState` does."""

    def rehearse(self) -> None:
        pass

    def write(self, path: Path) -> None:
        pass


def nothing(path: Path) -> None:
    """Writes nothing that is known."""


def made(steps: int = 0) -> tuple[Optimizer, StepLR]:
    optimizer = SGD(nn.Linear(2, 1).parameters(), lr=1.0)
    schedule = StepLR(optimizer, 1, gamma=0.5)
    for _ in range(steps):
        optimizer.step()
        schedule.step()
    return optimizer, schedule


def resumed(*, load: bool) -> tuple[Optimizer, StepLR]:
    """The optimizer of a run after three steps, and a schedule that was loaded, or not."""
    before, after = made(3), made()
    after[0].load_state_dict(before[0].state_dict())
    if load:
        after[1].load_state_dict(before[1].state_dict())
    return after


def said(session: Any, save: Any, optimizer: Optimizer) -> list[str]:
    lines: list[str] = []
    watch = ScheduleWatch(session, save, lambda text, *values: lines.append(text % values))
    accumulate = Accumulation(nn.Linear(2, 1), optimizer)
    for batch in make(6):
        for _ in accumulate(watch.begins(batch)):
            pass
        if batch.step == 2:
            break
    return lines


def test_one_of_which_nothing_is_seen_in_save_is_said_once() -> None:
    optimizer, schedule = made()
    (line,) = said(Session(), nothing, optimizer)
    assert line.startswith("StepLR sets the learning rate of SGD and is not known to be saved")
    assert said(Session(), lambda path: schedule.state_dict(), optimizer) == []
    assert said(Session(), background(lambda: {"a": schedule.state_dict()}), optimizer) == []


@pytest.mark.parametrize("save", [Owner().write, Owner(), None])
def test_who_knows_what_is_saved_looks_by_itself(save: Any) -> None:
    optimizer, _schedule = made()
    assert said(Session(), save, optimizer) == []


def test_nothing_is_said_on_other_ranks_or_where_nothing_is_saved() -> None:
    optimizer, _schedule = made()
    assert said(Session(rank=1), nothing, optimizer) == []
    assert said(Session(can_save=False), nothing, optimizer) == []
    assert said(Session(), nothing, SGD(nn.Linear(2, 1).parameters(), lr=1.0)) == []


def test_where_a_run_resumes_it_matters_where_the_schedule_stands() -> None:
    optimizer, schedule = resumed(load=False)
    (line,) = said(Session(3), nothing, optimizer)
    assert "is not known to be saved" in line
    (line,) = said(Session(3), lambda path: schedule, optimizer)
    assert line.startswith("StepLR, which sets the learning rate of SGD, stands elsewhere than the optimizer")
    optimizer, schedule = resumed(load=True)
    assert said(Session(3), nothing, optimizer) == []
    assert said(Session(3), lambda path: schedule, optimizer) == []


def test_the_optimizers_of_an_engine() -> None:
    """The one inside, what is around it, and the script's; each once. A loop has none before its first step."""
    basic = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    zero = SimpleNamespace(optimizer=basic)
    engine = SimpleNamespace(zero_optimization_stage=int, optimizer=zero, basic_optimizer=basic)
    assert list(optimizers_of(engine)) == [zero, basic]
    plain = SimpleNamespace(zero_optimization_stage=int, optimizer=basic, basic_optimizer=basic)
    assert list(optimizers_of(plain)) == [basic]
    assert list(optimizers_of(nn.Linear(1, 1))) == []
