"""A factor on what a script's own `backward()` computes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dalsegno.elastic.dlrover import trainers, weights


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


def test_another_batch_than_the_largest_worlds_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, by one rank, and where people see it: what workers print as errors goes to a file."""
    monkeypatch.setattr(trainers, "_said", set())
    monkeypatch.setattr(trainers, "largest_world", lambda: 4)
    monkeypatch.setattr(trainers.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(trainers.dist, "get_world_size", lambda: 3)
    for rank in (1, 0, 0):
        monkeypatch.setattr(trainers.dist, "get_rank", lambda rank=rank: rank)
        trainers._say_once(2)
    assert capsys.readouterr().out.count("6 micro-batches make a global batch on 3 ranks, and 4 on 4") == 1
