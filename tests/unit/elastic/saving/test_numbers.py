"""NumPy's numbers, as a schedule by `np.cos` puts them in an optimizer, are saved as Python's; others are named."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR

from dalsegno.elastic import session
from dalsegno.elastic.saving.bundles import Bundle
from dalsegno.elastic.saving.replicas import loadable, plainly


@pytest.mark.parametrize(
    ("value", "becomes"),
    [
        (np.float64(0.1), float),
        (np.int64(3), int),
        (np.bool_(True), bool),
        (np.str_("a"), str),
        (0.1, float),
    ],
)
def test_numbers_of_numpy_become_pythons(value: Any, becomes: type) -> None:
    for checked in (loadable, plainly):
        found = checked({"a": [value, (value,)], "b": OrderedDict(c=value)}, "it")
        assert found == {"a": [value, (value,)], "b": OrderedDict(c=value)}
        assert type(found["a"][0]) is type(found["a"][1][0]) is type(found["b"]["c"]) is becomes


def test_what_is_plain_is_given_back_as_it_is() -> None:
    state = Adam(nn.Linear(2, 2).parameters()).state_dict()
    assert plainly(state, "it") is state
    assert loadable(state, "it") is state


def test_a_modules_state_keeps_what_lies_beside_it() -> None:
    weights = nn.BatchNorm1d(2).state_dict()
    weights["odd"] = np.float64(1.0)
    found = loadable(weights, "it")
    assert found._metadata == weights._metadata
    assert type(found["odd"]) is float
    assert type(loadable(Bundle(a=np.float64(1.0)), "it")) is Bundle


@pytest.mark.parametrize("value", [np.float32(0.1), np.zeros(2), range(2)])
def test_others_are_named(value: Any) -> None:
    for checked in (loadable, plainly):
        with pytest.raises(TypeError, match=r"^the state of it has more than plain values and tensors"):
            checked({"a": value}, "the state of it")
    if isinstance(value, np.float32):
        with pytest.raises(TypeError, match=r"it holds a number of NumPy's: make it float\(…\) or int\(…\)"):
            loadable([value], "it")


class Counts(nn.Module):
    """Has a state of its own, which is NumPy's from its third batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(4, 1), 0.0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1 if self.seen < 3 else np.float64(self.seen + 1)
        found: torch.Tensor = self.inner(rows)
        return found

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def trained(folder: Path, steps: int, how: str) -> list[float]:
    """The loss of each step; the same call goes on where the last one ended."""
    torch.manual_seed(0)
    with session(folder) as s:
        model = Counts()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        parts = {}
        if how == "schedule":
            factor = lambda step: 1.0 if step < 3 else 0.5 * (1 + np.cos(0.1 * step))  # noqa: E731
            parts["scheduler"] = LambdaLR(optimizer, factor)
        state = s.state(model, optimizer, **parts)
        data = s.data(
            torch.randn(64, 4, generator=torch.Generator().manual_seed(1)), global_batch=4, micro_batch=4, seed=1
        )
        losses = []
        for batch in s.steps(data, state, max_steps=steps, save_every=2):
            if how == "by hand":
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 if batch.step < 3 else 0.05 * (1 + np.cos(0.1 * batch.step))
            for micro in batch:
                loss = (state.model(micro.data) - 1).square().mean()
                micro.scale(loss).backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            for schedule in parts.values():
                schedule.step()
    return losses


@pytest.mark.parametrize("how", ["by hand", "schedule"])
def test_a_schedule_by_numpy_is_saved_and_goes_on(tmp_path: Path, how: str) -> None:
    """From some step on only: what is refused before the first step never showed it."""
    whole = trained(tmp_path / "whole", 12, how)
    assert [*trained(tmp_path / "parts", 7, how), *trained(tmp_path / "parts", 12, how)] == whole
