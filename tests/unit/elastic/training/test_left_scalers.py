"""A loss scale that the saved state does not have is remarked on once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam

from dalsegno.elastic.trainer.loss_scale import LossScale
from dalsegno.elastic.training.left_scalers import ScalerWatch
from tests.unit.elastic.training.test_left_out import State


def made(**options: Any) -> GradScaler:
    return GradScaler("cpu", init_scale=8.0, **options)


def watched(state: State, model: nn.Module) -> list[str]:
    said: list[str] = []
    ScalerWatch(state, model, lambda text, *values: said.append(text % values))
    return said


def step(model: nn.Module, scaler: GradScaler, *, times: int = 3) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(times):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()


def test_one_that_is_not_saved_is_named_once() -> None:
    model, state = nn.Linear(2, 2), State(optimizer=Adam([nn.Parameter(torch.ones(1))]), scaler=made())
    said = watched(state, model)
    step(model, made())
    (line,) = said
    assert line.startswith("GradScaler steps SGD and is not in the state that is saved: unless what you give as save=")
    assert "writes it by itself, its loss scale begins anew" in line
    step(model, made())
    assert len(said) == 1


LISTED: dict[str, Callable[[GradScaler], Any]] = {
    "itself": lambda scaler: scaler,
    "a Trainer's": LossScale,
    "within a part": lambda scaler: SimpleNamespace(inner=scaler),
    "within what a part has": lambda scaler: SimpleNamespace(inner=SimpleNamespace(scaler=scaler)),
    "among others of a part": lambda scaler: SimpleNamespace(scalers={"g": made(), "d": scaler}),
}


@pytest.mark.parametrize("part", LISTED)
def test_one_that_is_saved_is_not(part: str) -> None:
    model, scaler = nn.Linear(2, 2), made()
    state = State(slots=object(), scaler=LISTED[part](scaler))
    said = watched(state, model)
    step(model, scaler)
    assert not said


def test_one_that_another_state_has_is_not() -> None:
    """Two models, each with a state, and one scaler for both."""
    model, other, scaler = nn.Linear(2, 2), nn.Linear(2, 2), made()
    states = State(), State(scaler=scaler)
    said = watched(states[0], model), watched(states[1], other)
    step(model, scaler)
    step(other, scaler)
    assert said == ([], [])


def test_those_that_lose_nothing_here_are_not() -> None:
    """Not enabled; of a model that is not saved; and where nobody listens any more."""
    model, state = nn.Linear(2, 2), State()
    said = watched(state, model)
    step(model, made(enabled=False))
    step(nn.Linear(2, 2), made())
    gone = weakref.ref(state)
    del state
    gc.collect()
    assert gone() is None
    step(model, made())
    assert not said


class Parts(State):
    """Counts how often it is asked for its parts."""

    asked = 0

    @property
    def parts(self) -> Any:  # type: ignore[override]
        self.asked += 1
        return self.held

    @parts.setter
    def parts(self, parts: Any) -> None:
        self.held = parts


class Long(list[Any]):
    """As a data set's samples in a part: nobody goes through it."""

    def __iter__(self) -> Any:
        raise AssertionError("it was gone through")


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_a_scaler_is_looked_at_three_times_at_most(*, listed: bool, other: bool) -> None:
    """Whether it is listed or not, and whether it steps the model or another one. A step costs nothing then."""
    model, scaler = nn.Linear(2, 2), made()
    state = Parts(data=SimpleNamespace(samples=Long([0] * 2000), inner=scaler if listed else None))
    said = watched(state, model)
    step(nn.Linear(2, 2) if other else model, scaler, times=10)
    assert state.asked <= 3
    assert len(said) == (not listed and not other)


def test_a_further_state_looks_anew() -> None:
    """A scaler that the one before had."""
    model, scaler = nn.Linear(2, 2), made()
    state = State(scaler=scaler)
    assert watched(state, model) == []
    step(model, scaler)
    del state
    gc.collect()
    state = State()
    said = watched(state, model)
    step(model, scaler)
    assert len(said) == 1


def test_what_a_strange_object_raises_ends_no_training() -> None:
    class Strange(State):
        @property
        def parts(self) -> Any:  # type: ignore[override]
            raise ReferenceError("weakly-referenced object no longer exists")

        @parts.setter
        def parts(self, parts: Any) -> None: ...

    state, model = Strange(), nn.Linear(2, 2)
    said = watched(state, model)
    step(model, made())
    assert not said
