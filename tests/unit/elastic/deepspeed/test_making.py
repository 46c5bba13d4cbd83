"""What DeepSpeed is spared as it makes an engine: the same findings in one pass, and weights that all load next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

from deepspeed.runtime.engine import DeepSpeedEngine

from dalsegno.elastic.deepspeed import making

THEIRS: Any = DeepSpeedEngine._check_for_duplicates


def said(check: Any, groups: list[list[Any]], module: nn.Module) -> str:
    optimizer = SimpleNamespace(param_groups=[{"params": group} for group in groups])
    try:
        check(SimpleNamespace(module=module), optimizer)
    except AssertionError as error:
        return str(error)
    return ""


def test_ours_says_what_theirs_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice in a group, in two groups, not at all, and of another model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    one, two, *_ = every = list(model.parameters())
    other = nn.Parameter(torch.ones(1))
    cases = [[every], [[one, one]], [[one], [two, one]], [[other, other], every], [[]], []]
    answers = [said(making._check_for_duplicates, groups, model) for groups in cases]
    assert answers == [said(THEIRS, groups, model) for groups in cases]
    assert [bool(answer) for answer in answers] == [False, True, True, False, False, False]
    monkeypatch.setattr(DeepSpeedEngine, "_check_for_duplicates", THEIRS)
    making.count_duplicates()
    assert DeepSpeedEngine._check_for_duplicates is making._check_for_duplicates


def test_weights_that_all_load_next_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, of the engine with this very configuration; experts, and whatever else is made, are sent as ever."""
    sent: list[Any] = []
    monkeypatch.setattr(DeepSpeedEngine, "_broadcast_model", sent.append)
    monkeypatch.setattr(making, "_loaded_next", [])

    def made(config: Any, *, experts: bool = False) -> bool:
        before = len(sent)
        send: Any = DeepSpeedEngine._broadcast_model
        send(SimpleNamespace(config=config, has_moe_layers=experts))
        return len(sent) > before

    config, other = {"a": 1}, {"a": 1}
    assert made(config)
    making.send_nothing(config)
    assert not made(config)
    assert made(config)
    making.send_nothing(config)
    assert made(other)
    assert made(config)
    making.send_nothing(config)
    making.send_nothing(other)
    assert not made(other)
    making.send_nothing(other)
    assert made(other, experts=True)
