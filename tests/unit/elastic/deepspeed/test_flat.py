"""What lies in a row is flat without a copy; all else is what DeepSpeed makes of it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("deepspeed", reason="needs the extra deepspeed")

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch._utils import _flatten_dense_tensors

from dalsegno.elastic.deepspeed import flat


def pieces(whole: Tensor, *shapes: tuple[int, ...], start: int = 0) -> list[Tensor]:
    """Views of a flat tensor, one behind the other."""
    made = []
    for shape in shapes:
        made.append(whole.narrow(0, start, math.prod(shape)).view(shape))
        start += math.prod(shape)
    return made


def other_storage() -> list[Tensor]:
    """Two that lie in a row, each in a storage of its own."""
    memory = torch.arange(6.0).untyped_storage()
    return [torch.empty(0).set_(memory[a:b], 0, (3,), (1,)) for a, b in ((0, 12), (12, 24))]  # type: ignore[misc]


WHOLE = torch.arange(24.0)
IN_A_ROW = {
    "all": pieces(WHOLE, (4, 4), (3,), (5,)),
    "behind the first": pieces(WHOLE, (2,), (3, 3), start=7),
    "with nothing between": pieces(WHOLE, (2,), (0, 3), (4,)),
    "with nothing first": pieces(WHOLE, (0,), (2,), (4,), start=3),
    "one": pieces(WHOLE, (3, 2), start=1),
    "bf16": pieces(WHOLE.bfloat16(), (3,), (4,)),
}
NOT = {
    "a gap": [WHOLE[:3], WHOLE[4:6]],
    "another order": [WHOLE[3:6], WHOLE[:3]],
    "twice": [WHOLE[:3], WHOLE[:3]],
    "over each other": [WHOLE[:3], WHOLE[2:6]],
    "another dtype": [WHOLE[:2], WHOLE.view(torch.int32)[2:4].view(torch.float16)],
    "turned": [WHOLE[:6].view(2, 3).T, WHOLE[6:8]],
    "with steps": [WHOLE[:6:2], WHOLE[3:4]],
    "learned": [WHOLE[:2], WHOLE[2:4].clone().requires_grad_()],
    "other memory": [torch.ones(3), torch.ones(3)],
    "other storages": other_storage(),
    "nothing": [torch.ones(0), torch.ones(0, 2)],
    "on no device": [torch.ones(3, device="meta"), torch.ones(3, device="meta")],
}


def _first(tensors: list[Tensor]) -> int:
    return next(one.data_ptr() for one in tensors if one.numel())


@pytest.mark.parametrize("case", IN_A_ROW)
def test_what_lies_in_a_row_is_not_copied(case: str) -> None:
    tensors = IN_A_ROW[case]
    made, known = flat.flatten(tensors), _flatten_dense_tensors(tensors)
    assert torch.equal(made, known)
    assert (made.data_ptr(), made.dtype, made.shape) == (_first(tensors), known.dtype, known.shape)


@pytest.mark.parametrize("case", NOT)
def test_all_else_is_copied(case: str) -> None:
    tensors = NOT[case]
    made, known = flat.flatten(tensors), _flatten_dense_tensors(tensors)
    assert made.is_meta or torch.equal(made, known)
    assert (made.dtype, made.shape, made.device) == (known.dtype, known.shape, known.device)
    assert (
        made.is_meta or not made.numel() or made.untyped_storage().data_ptr() != tensors[0].untyped_storage().data_ptr()
    )


def test_the_memory_lives_as_long_as_the_view() -> None:
    tensors = pieces(torch.arange(5.0), (2,), (3,))
    made = flat.flatten(tensors)
    del tensors
    assert made.tolist() == [0, 1, 2, 3, 4]


def zero(made: Any) -> Any:
    optimizer = object.__new__(DeepSpeedZeroOptimizer)
    optimizer.flatten = made
    return optimizer


def test_only_deepspeeds_own_way_is_replaced() -> None:
    """ZenFlow turns what it makes flat; other optimizers have an attribute of this name for other things."""
    optimizer = zero(_flatten_dense_tensors)
    flat.flatten_in_place(SimpleNamespace(optimizer=optimizer))
    assert optimizer.flatten is flat.flatten
    other: Any = SimpleNamespace(flatten=_flatten_dense_tensors)
    for kept in (zero(len), other):
        before = kept.flatten
        flat.flatten_in_place(SimpleNamespace(optimizer=kept))
        assert kept.flatten is before
    flat.flatten_in_place(SimpleNamespace(optimizer=None))
