"""An optimizer that the saved state does not have is remarked on once, if something of it would be lost."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dalsegno.elastic.training.left_out import OptimizerWatch


class State:
    def __init__(self, **parts: Any) -> None:
        self.parts = parts


class Wrapper:
    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner


def step(model: nn.Module, *optimizers: Optimizer, times: int = 5) -> None:
    for _ in range(times):
        model(torch.ones(1, 2)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def watched(state: State, model: nn.Module) -> list[str]:
    said: list[str] = []
    OptimizerWatch(state, model, lambda text, *values: said.append(text % values))
    return said


def test_an_optimizer_that_takes_the_place_of_another_is_named_once() -> None:
    model = nn.Linear(2, 2)
    first = Adam(model.parameters())
    state, other = State(optimizer=first), State(optimizer=first)
    said, by_another = watched(state, model), watched(other, model)
    step(model, first)
    assert not said
    step(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert len(said) == 1
    assert said[0].startswith("SGD steps parameters of the model and is not in the state that is saved")
    assert "unless what you give as save= writes it by itself" in said[0]
    step(model, Adam(model.parameters()))
    assert len(said) == len(by_another) == 1


OTHERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "keeps nothing": lambda model: SGD(model.parameters(), lr=0.1),
    "of another model": lambda model: Adam([nn.Parameter(torch.ones(2))]),
}


@pytest.mark.parametrize("other", OTHERS)
def test_others_are_not(other: str) -> None:
    model = nn.Linear(2, 2)
    state = State()
    said = watched(state, model)
    step(model, OTHERS[other](model))
    assert not said


def test_what_is_inside_of_a_part_is_listed() -> None:
    model = nn.Linear(2, 2)
    optimizer = Adam(model.parameters())
    state = State(optimizer=Wrapper(optimizer), other=SimpleNamespace(), slots=object())
    said = watched(state, model)
    step(model, optimizer)
    assert not said


@pytest.mark.parametrize("inner", [False, True])
def test_one_beside_long_lists_is_listed(inner: bool) -> None:
    """What a script keeps of its losses and buckets does not hide it."""
    model = nn.Linear(2, 2)
    optimizer = Adam(model.parameters())
    part = SimpleNamespace(losses=list(range(1000)), more=[*range(900)], optimizer=optimizer)
    state = State(part=SimpleNamespace(part=part) if inner else part)
    said = watched(state, model)
    step(model, optimizer)
    assert not said


def test_what_is_gone_inside_of_a_part_ends_no_training() -> None:
    model = nn.Linear(2, 2)
    gone = weakref.proxy(State())
    state = State(part=SimpleNamespace(trainer=SimpleNamespace(model=gone)))
    said = watched(state, model)
    step(model, Adam(model.parameters()))
    assert len(said) == 1


def test_the_state_may_go_while_an_optimizer_steps() -> None:
    """The garbage collector picks its moment itself: torch may be going through the hooks just then."""
    model = nn.Linear(2, 2)
    states = [State()]
    handle = register_optimizer_step_post_hook(lambda *_: states.clear())
    said = watched(states[0], model)
    step(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    handle.remove()
    assert not states
    assert not said
