"""Tensors that share a piece of memory, and nothing else."""

from __future__ import annotations

import gc
import io
import weakref

import torch

from dalsegno.elastic.rank.new_memory import tensors_like

LIKE = [
    torch.ones(3),
    torch.ones(2, 5, dtype=torch.bfloat16),
    torch.ones((), dtype=torch.int64),
    torch.ones(0, 4),
    torch.ones(100, 100, dtype=torch.float64),
]


def test_they_are_like_the_others_and_apart() -> None:
    made = tensors_like(LIKE)
    assert [(one.shape, one.dtype, one.stride()) for one in made] == [(t.shape, t.dtype, t.stride()) for t in LIKE]
    for number, one in enumerate(made):
        one.fill_(number)
    assert [one.eq(number).all().item() for number, one in enumerate(made)] == [True] * len(LIKE)
    assert all(one.data_ptr() % 64 == 0 for one in made if one.numel())
    assert tensors_like([]) == []


def test_one_is_saved_without_the_others() -> None:
    made = tensors_like(LIKE)
    for one in made:
        one.fill_(2)
    file = io.BytesIO()
    torch.save(made[0], file)
    assert len(file.getvalue()) < 10_000
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), torch.full((3,), 2.0))
    assert made[0].untyped_storage().nbytes() == 12


def test_one_outlives_the_others() -> None:
    """And the memory goes with the last of them."""
    made = tensors_like([torch.ones(1000), torch.ones(1000)])
    last = made[1].fill_(3)
    gone = weakref.ref(made[0])
    del made
    gc.collect()
    assert gone() is None
    assert last.eq(3).all()
    copy = last.clone()
    assert last.share_memory_().is_shared()
    assert torch.equal(last, copy)
