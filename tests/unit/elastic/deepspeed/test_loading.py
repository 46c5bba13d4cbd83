"""States that are filled by their parameters' values: what lies between them is zero, whatever was in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("deepspeed")

from dalsegno.elastic.deepspeed import loading, weights


class Values:
    """Of a parameter with one state."""

    def states(self, name: str) -> frozenset[str]:
        return frozenset({"fp32", "moment"})

    def dtype(self, name: str, state: str) -> torch.dtype:
        return torch.float32


def at(start: int, numel: int) -> Any:
    address = SimpleNamespace(start=start, numel=numel)
    return SimpleNamespace(_hp_mapping=SimpleNamespace(get_hp_fragment_address=lambda: address))


@pytest.mark.parametrize(
    ("places", "zeros"),
    [
        ([(0, 8)], []),
        ([(0, 3), (3, 5)], []),
        ([(4, 2), (0, 3)], [3, 6, 7]),
        ([(1, 2)], [0, 3, 4, 5, 6, 7]),
        ([], [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
@pytest.mark.parametrize("made", [False, True], ids=["new", "made"])
def test_what_no_parameter_fills_is_zero(
    monkeypatch: pytest.MonkeyPatch, places: list[tuple[int, int]], zeros: list[int], made: bool
) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda flat, dtype: torch.full_like(flat, torch.nan, dtype=dtype))
    flat = torch.ones(8)
    state: dict[str, Any] = {"moment": torch.full((8,), torch.nan)} if made else {}
    gaps = loading._gaps(flat, [at(*place) for place in places])
    loading._make_states(Values(), "w", flat, state, {}, gaps)  # type: ignore[arg-type]
    assert state["moment"].eq(0).nonzero().flatten().tolist() == zeros
    assert int(state["moment"].isnan().sum()) == 8 - len(zeros)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_compared(dtype: torch.dtype) -> None:
    """Zero is not minus zero, although they are equal."""
    one = torch.tensor([1.0, 0.0, torch.inf], dtype=dtype)

    def like(other: list[float]) -> Tensor:
        return torch.tensor(other, requires_grad=True)

    assert weights._same_bits(one, like([1.0, 0.0, torch.inf]))
    assert not weights._same_bits(one, like([1.0, -0.0, torch.inf]))
    assert not weights._same_bits(one, like([1.5, 0.0, torch.inf]))
