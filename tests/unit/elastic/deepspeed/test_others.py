"""A second engine that steps and is in no checkpoint is remarked on once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

pytest.importorskip("deepspeed")

from deepspeed.runtime.engine import DeepSpeedEngine

from dalsegno.elastic.deepspeed import others
from dalsegno.elastic.deepspeed.others import EngineWatch


class Owner:
    pass


class Zero:
    """As ZeRO's optimizer around a script's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


class Critic(nn.Linear):
    pass


def engine(optimizer: Any) -> Any:
    """A DeepSpeed engine with nothing but this; no method of its class is called."""
    made = DeepSpeedEngine.__new__(DeepSpeedEngine)
    nn.Module.__init__(made)
    made.module = Critic(1, 1)
    made.__dict__.update(optimizer=optimizer, basic_optimizer=None)
    return made


def optimizer(kind: type[Optimizer] = Adam) -> Optimizer:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return kind([parameter], lr=0.1)  # type: ignore[call-arg]


def test_an_engine_that_steps_beside_the_one_that_is_saved() -> None:
    said: list[str] = []
    ours, theirs, plain = optimizer(), optimizer(SGD), optimizer()
    owner, first, second = Owner(), engine(Zero(ours)), engine(Zero(theirs))
    EngineWatch(owner, first, lambda text, *values: said.append(text % values))
    for one in (ours, plain) * 3:
        one.step()
    assert said == []
    for _ in range(3):
        theirs.step()
    (line,) = said
    assert line.startswith("a second DeepSpeed engine, of a Critic, steps with SGD and is in no checkpoint")
    third = optimizer()
    fourth = engine(third)
    third.step()
    assert len(said) == 1
    del second, fourth


def test_nothing_is_said_behind_the_end_of_the_owner() -> None:
    said: list[str] = []
    owner, first, others = Owner(), engine(optimizer()), optimizer()
    second = engine(others)
    EngineWatch(owner, first, lambda text, *values: said.append(text % values))
    del owner
    others.step()
    assert said == []
    del second


def test_a_script_that_makes_an_optimizer_for_each_batch_pays_for_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """All objects of the process are walked through for one that nobody knows."""
    walks: list[None] = []
    owner, first = Owner(), engine(Zero(optimizer()))
    EngineWatch(owner, first, lambda *_: None)
    monkeypatch.setattr(others.gc, "get_objects", lambda: walks.append(None) or [])
    for _ in range(50):
        optimizer().step()
    assert len(walks) == others.MOST_WALKS
