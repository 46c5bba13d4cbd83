"""What a Trainer gathers for its logs comes from slices that differ by a sample."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dalsegno.swift_plugin.hf import uneven


def of_ranks(*tensors: Tensor) -> Any:
    """What Accelerate's gather is on the first of these ranks; the others do what it does."""
    told: list[Tensor] = []

    def gather(own: Tensor) -> Tensor:
        told.append(own)
        if own.dtype == torch.int64:  # their counts
            return torch.tensor([len(one) for one in tensors])
        most = max(len(one) for one in tensors) if len({len(one) for one in tensors}) > 1 else len(own)
        others = [torch.cat([one, one.new_zeros(most - len(one), *one.shape[1:])]) for one in tensors[1:]]
        assert all(one.shape == own.shape for one in others), "as gloo: every rank sends as much"
        return torch.cat([own, *others])

    return gather


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("counts", [(2, 3, 3), (3, 2, 1), (2, 2)])
def test_rows_of_all_ranks_come_in_their_order(counts: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Not one of padding among them."""
    tensors = [torch.rand(count, *shape) + 1 for count in counts]
    assert torch.equal(uneven.rows(tensors[0], of_ranks(*tensors)), torch.cat(tensors))


def test_a_scalar_needs_no_counts() -> None:
    """One collective, as before."""
    asked: list[Tensor] = []
    uneven.rows(torch.tensor(1.0), lambda tensor: asked.append(tensor) or tensor)  # type: ignore[func-returns-value]
    assert len(asked) == 1


def test_accelerators_own_gather_is_back_afterwards() -> None:
    """Evaluations gather as ever; one process alone gathers nothing else."""

    class Accelerator:
        num_processes = 2

        def gather(self, data: Any) -> Any:
            return data

    one = Accelerator()
    with uneven.gathered(one):
        assert "gather" in vars(one)
    assert "gather" not in vars(one)
    alone = SimpleNamespace(num_processes=1, gather=len)
    with uneven.gathered(alone):
        assert alone.gather is len
