"""Parameters that an optimizer has twice: found in one pass, as DeepSpeed finds them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

from deepspeed.runtime.engine import DeepSpeedEngine

from dalsegno.elastic.deepspeed import loading

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
    answers = [said(loading._check_for_duplicates, groups, model) for groups in cases]
    assert answers == [said(THEIRS, groups, model) for groups in cases]
    assert [bool(answer) for answer in answers] == [False, True, True, False, False, False]
    monkeypatch.setattr(DeepSpeedEngine, "_check_for_duplicates", THEIRS)
    loading.count_duplicates()
    assert DeepSpeedEngine._check_for_duplicates is loading._check_for_duplicates
