"""Which optimizers are known to treat every weight by itself, whatever is wrapped around them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from dalsegno.elastic.saving.optimizers import ELEMENTWISE, check_sharded, is_elementwise, source_of_step


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))]


class WithAnotherName(torch.optim.AdamW):
    """As people make them, for other defaults."""


class WithAnotherStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "known"),
    [
        (torch.optim.AdamW, True),
        (lambda p: torch.optim.Adam(p, foreach=True), True),
        (lambda p: torch.optim.SGD(p, fused=True), True),
        (WithAnotherName, True),
        (WithAnotherStep, False),
        (torch.optim.Adafactor, False),
        pytest.param(
            lambda p: torch.optim.Muon(p[:1]),
            False,
            marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has none"),
        ),
        (torch.optim.LBFGS, False),
    ],
)
def test_the_class_of_the_step_decides(make: Any, known: bool) -> None:
    optimizer = make(parameters())
    assert is_elementwise(optimizer) == known
    StepLR(optimizer, 1)  # which wraps the step of this one
    assert is_elementwise(optimizer) == known


@pytest.mark.parametrize("name", sorted(name for name in ELEMENTWISE if name.startswith("torch.")))
def test_the_list_names_what_is_there(name: str) -> None:
    """A misspelt name would never be found."""
    module, _, kind = name.rpartition(".")
    found = getattr(importlib.import_module(module), kind)
    assert source_of_step(found(parameters(), lr=0.1)) in ELEMENTWISE


def test_the_list_names_deepspeeds() -> None:
    pytest.importorskip("deepspeed")
    for name in sorted(name for name in ELEMENTWISE if name.startswith("deepspeed.")):
        module, _, kind = name.rpartition(".")
        assert f"{module}.{kind}" == name
        assert hasattr(importlib.import_module(module), kind)


def test_a_part_of_each_weight_is_trained_as_the_whole() -> None:
    """What the list promises: halves of a tensor, given apart, end where the whole one does, bit by bit."""
    for name in sorted(name for name in ELEMENTWISE if name.startswith("torch.")):
        module, _, kind = name.rpartition(".")
        make = getattr(importlib.import_module(module), kind)
        torch.manual_seed(1)
        whole = nn.Parameter(torch.randn(64))
        halves = [nn.Parameter(whole.detach()[:24].clone()), nn.Parameter(whole.detach()[24:].clone())]
        one, other = make([whole], lr=0.1), make(halves, lr=0.1)
        for _ in range(4):
            gradient = torch.randn(64)
            whole.grad, halves[0].grad, halves[1].grad = gradient, gradient[:24].clone(), gradient[24:].clone()
            one.step()
            other.step()
        assert torch.equal(whole.detach(), torch.cat([half.detach() for half in halves])), name


def test_what_fails_on_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="Adafactor cannot train the sharded parameters of FSDP"):
        check_sharded(torch.optim.Adafactor(parameters()))
    check_sharded(torch.optim.AdamW(parameters()))
