"""Whether a function may get at a thing: what it closes over, names, or is bound to."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dalsegno.elastic.saving.reaching import reaches


class Thing:
    pass


THING, OTHER = Thing(), Thing()


class Training:
    """Names it in a method only, as the script of docs/dcp.md does."""

    def state_dict(self) -> dict[str, Any]:
        return {"thing": THING}


class Holder:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def save(self, path: str) -> None:
        pass


def by_class(path: str) -> Training:
    return Training()


def by_name(path: str) -> Thing:
    return THING


def by_another(path: str) -> Thing:
    return by_name(path)


def by_nothing(path: str) -> Thing:
    return OTHER


def closing(thing: Any) -> Callable[[str], Any]:
    return lambda path: [one for one in (thing, path) if one]


def model_with(thing: Any) -> nn.Module:
    model = nn.Linear(1, 1)
    model.kept = SimpleNamespace(parts={"one": [thing]})  # type: ignore[assignment]
    return model


def of_its_module() -> Callable[[str], Any]:
    module = ModuleType("a_script")
    module.thing = THING  # type: ignore[attr-defined]
    names: dict[str, Any] = {"a_script": module}
    exec("def save(path): return a_script.thing", names)
    found: Callable[[str], Any] = names["save"]
    return found


WAYS: dict[str, Callable[[], Any]] = {
    "a global": lambda: by_name,
    "through another function": lambda: by_another,
    "a class": lambda: by_class,
    "a closure": lambda: closing(THING),
    "a default": lambda: lambda path, thing=THING: None,
    "a method": lambda: Holder(THING).save,
    "a partial": lambda: functools.partial(by_nothing, THING),
    "a model's attribute": lambda: closing(model_with(THING)),
    "a module's": of_its_module,
    "more than can be looked at": lambda: closing([[[] for _ in range(200)] for _ in range(200)]),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_function_may_get_at(way: str) -> None:
    assert reaches(WAYS[way](), THING)


def test_what_it_may_not() -> None:
    """Neither through libraries, nor through layers of a model, an optimizer, or a name without a value."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3000)))
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for save in (by_nothing, closing([model, optimizer, torch, sys]), Holder(OTHER).save, print):
        assert not reaches(save, THING)
        assert not reaches(save, schedule)
    if False:
        later = THING
    assert not reaches(lambda path: later, THING)
