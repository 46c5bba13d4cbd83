"""Hooks go with their owner, but never while torch goes through them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from dalsegno.elastic.rank.hooks import until_gone


class Owner:
    pass


def optimizer_that_steps() -> SGD:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    return SGD(model.parameters(), lr=0.1)


def hooked(owner: Owner, called: list[str]) -> None:
    until_gone(owner, register_optimizer_step_post_hook(lambda *_: called.append("hook")))


@pytest.fixture
def owners() -> Iterator[list[Any]]:
    """They are dropped in the midst of torch's hooks, as the garbage collector may do at any moment."""
    owners: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *_: owners.clear())
    yield owners
    handle.remove()


def test_an_owner_may_go_while_an_optimizer_steps(owners: list[Any]) -> None:
    called: list[str] = []
    owners.append(Owner())
    hooked(owners[0], called)
    optimizer_that_steps().step()
    assert called == ["hook"]


def test_what_is_left_goes_with_the_next_hook() -> None:
    called: list[str] = []
    gc.collect()
    owner = Owner()
    hooked(owner, called)
    count = len(_global_optimizer_post_hooks)
    for _ in range(3):
        owner = Owner()
        hooked(owner, called)
        # The one before is taken off as the next comes, or, if it was still held then, one later.
        assert len(_global_optimizer_post_hooks) <= count + 1
    del owner
    hooked(Owner(), called)
    optimizer_that_steps().step()
    assert called == ["hook"]
