"""Schedules that nobody saves are remarked on where a run goes on, and refused where all that is trained is known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

from dalsegno.elastic import Accumulation
from dalsegno.elastic.training.left_schedules import LeftSchedules, ScheduleWatch, optimizers_of
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


def test_one_at_its_beginning_is_said_once_where_the_run_goes_on() -> None:
    optimizer, schedule = resumed(load=False)
    (line,) = said(Session(3), nothing, optimizer)
    assert line.startswith("StepLR sets the learning rate of SGD, which was loaded, and stands at its own beginning")
    schedule.last_epoch = 3  # as scripts do that count by themselves
    assert said(Session(3), nothing, optimizer) == []
    optimizer, _schedule = resumed(load=True)
    assert said(Session(3), nothing, optimizer) == []


def test_one_of_several_that_was_loaded_is_enough() -> None:
    """A warm-up that has ended has no rate of the optimizer's any more."""
    optimizer, _schedule = resumed(load=True)
    _other = StepLR(optimizer, 1, gamma=0.1)
    assert said(Session(3), nothing, optimizer) == []


@pytest.mark.parametrize("save", [Owner().write, Owner(), None])
def test_who_knows_what_is_saved_looks_by_itself(save: Any) -> None:
    optimizer, _schedule = resumed(load=False)
    assert said(Session(3), save, optimizer) == []


def test_nothing_is_said_at_the_start_or_on_other_ranks() -> None:
    optimizer, _schedule = resumed(load=False)
    assert said(Session(), nothing, optimizer) == []
    assert said(Session(3, rank=1), nothing, optimizer) == []
    assert said(Session(3), nothing, SGD(nn.Linear(2, 1).parameters(), lr=1.0)) == []


def test_what_a_strange_object_raises_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ReferenceError("weakly-referenced object no longer exists")

    monkeypatch.setattr("dalsegno.elastic.training.left_schedules.left_out", fails)
    optimizer, _schedule = resumed(load=False)
    assert said(Session(3), nothing, optimizer) == []


class Learned:
    def __init__(self) -> None:
        self.refused: list[bool] = []

    def learn_left_out(self, *_: str, refused: bool) -> None:
        self.refused.append(refused)


def looked(places: list[Any] | None, say: Any, *, at: int = 0) -> Any:
    """What is said of a schedule that was not loaded; the optimizer was."""
    optimizer, schedule = resumed(load=False)
    schedule.last_epoch = at
    learned: Any = Learned()
    one = LeftSchedules(learned, "is in nothing", "give it", say)
    one.resumes("the optimizer", optimizer, places)
    for _ in range(2):  # as it is looked at before and behind the first step
        one.look("the optimizer", [optimizer], [])
    return learned.refused


@pytest.mark.parametrize("places", [None, [["StepLR", 3]]])
def test_one_that_begins_anew_is_said_or_refused(places: list[Any] | None) -> None:
    lines: list[str] = []
    assert looked(places, lambda text, *values: lines.append(text % values)) == [False, False]
    assert [line.partition(":")[0] for line in lines] == [
        "StepLR sets the learning rate of the optimizer and is in nothing, so it begins anew, unless the script sets "
        "it by s.step"
    ]
    with pytest.raises(ValueError, match="so it begins anew: give it, or move it to session"):
        looked(places, None)


@pytest.mark.parametrize(("places", "at"), [([["StepLR", 0]], 0), ([["StepLR", 3]], 3)], ids=["idle", "moved"])
def test_one_that_stands_where_it_stood_is_not(places: list[Any], at: int) -> None:
    """One that nobody steps, or whose place the script has set: its next step sets the rate."""
    looked(places, lambda *_: pytest.fail("it was said"), at=at)


def test_the_optimizers_of_an_engine() -> None:
    """The one inside, what is around it, and the script's; each once. A loop has none before its first step."""
    basic = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    zero = SimpleNamespace(optimizer=basic)
    engine = SimpleNamespace(zero_optimization_stage=int, optimizer=zero, basic_optimizer=basic)
    assert list(optimizers_of(engine)) == [zero, basic]
    plain = SimpleNamespace(zero_optimization_stage=int, optimizer=basic, basic_optimizer=basic)
    assert list(optimizers_of(plain)) == [basic]
    assert list(optimizers_of(nn.Linear(1, 1))) == []
