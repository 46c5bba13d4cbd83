"""A factor on what a script's own `backward()` computes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dalsegno.elastic.dlrover import weights


@pytest.fixture(autouse=True)
def applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is as it was afterwards."""
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    weights.apply()


def gradient(*, factor: float | None, checkpointed: bool = False, given: float | None = None) -> float:
    """Of `3 * x`, as a script computes it."""
    x, ran = torch.tensor(2.0, requires_grad=True), list[int]()

    def compute(value: torch.Tensor) -> torch.Tensor:
        return value * 3

    def backward() -> None:
        loss = checkpoint(compute, x, use_reentrant=True) if checkpointed else compute(x)
        loss.backward(None if given is None else torch.tensor(given))

    if factor is None:
        backward()
    else:
        with weights.weighted(factor, lambda: ran.append(1)):
            backward()
        assert ran == [1]
    assert x.grad is not None
    return float(x.grad)


def test_it_multiplies() -> None:
    """Also a gradient that the script gives, and outside nothing."""
    assert gradient(factor=None) == 3.0
    assert gradient(factor=0.5) == 1.5
    assert gradient(factor=0.5, given=4.0) == 6.0
    assert gradient(factor=None) == 3.0


def test_a_backward_pass_within_another_has_it_already() -> None:
    """A checkpointed block runs one."""
    assert gradient(factor=0.5, checkpointed=True) == 1.5


def test_a_loss_that_is_no_scalar_is_refused_by_torch() -> None:
    """With its own words."""
    rows = torch.ones(3, requires_grad=True)
    with weights.weighted(0.5, lambda: None), pytest.raises(RuntimeError, match="scalar outputs"):
        rows.mul(2).backward()
