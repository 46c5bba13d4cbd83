"""States that are filled by their parameters' values: what lies between them is zero, whatever was in memory."""

from __future__ import annotations

from pathlib import Path
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


@pytest.mark.parametrize("others", [0, 1], ids=["others cannot", "others can"])
@pytest.mark.parametrize("own", [True, False, OSError("away")], ids=["can", "cannot", "fails"])
def test_a_rank_that_cannot_read_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: bool | OSError, others: int
) -> None:
    """The others wait for its word: an error of it must not keep it back."""

    def fill(*_: Any) -> bool:
        if isinstance(own, OSError):
            raise own
        return own

    asked: list[int] = []

    def reduced(told: Tensor, operation: Any, group: Any) -> None:
        asked.append(int(told))
        told.copy_(torch.minimum(told, torch.tensor(others)))

    monkeypatch.setattr(weights, "_fill_weights", fill)
    monkeypatch.setattr(weights.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(weights.dist, "all_reduce", reduced)
    engine = SimpleNamespace(device="cpu", optimizer=SimpleNamespace(dp_process_group=None))
    assert weights.filled_everywhere(engine, tmp_path) == (own is True and others == 1)
    assert asked == [int(own is True)]


def test_what_a_script_has_put_there_is_there_again(tmp_path: Path) -> None:
    """Its own way to make weights of the optimizer's, on one engine."""
    engine: Any = SimpleNamespace(
        optimizer=SimpleNamespace(
            mpu=None, update_lp_params="the script's", load_hp_checkpoint_state_from_checkpoint_dir=1
        ),
        module=torch.nn.Linear(1, 1),
        zero_optimization_stage=lambda: 2,
    )
    with loading.own_loading(engine, Values(), tmp_path):  # type: ignore[arg-type]
        assert callable(engine.optimizer.update_lp_params)
    assert engine.optimizer.update_lp_params == "the script's"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_compared(dtype: torch.dtype) -> None:
    """Zero is not minus zero, although they are equal."""
    one = torch.tensor([1.0, 0.0, torch.inf], dtype=dtype)

    def like(other: list[float]) -> Tensor:
        return torch.tensor(other, requires_grad=True)

    assert weights._same_bits(one, like([1.0, 0.0, torch.inf]))
    assert not weights._same_bits(one, like([1.0, -0.0, torch.inf]))
    assert not weights._same_bits(one, like([1.5, 0.0, torch.inf]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bits_of_plain_memory_are_compared_in_place(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Whatever they stand for; what does not lie in a row, or is of another kind, is compared by torch."""
    compared: list[int] = []
    known = weights._memcmp

    def compare(one: int, other: int, count: int) -> int:
        compared.append(count)
        return known(one, other, count)

    monkeypatch.setattr(weights, "_memcmp", compare)

    def same(one: Tensor, other: Tensor) -> tuple[bool, int]:
        compared.clear()
        return weights._same_bits(one, other), sum(compared)

    one = torch.tensor([[torch.nan, -0.0], [2.0, 3.0]], dtype=dtype)
    other = one.clone()
    assert same(one, other) == (True, one.nbytes)
    other[1, 1] = 4.0
    assert same(one, other) == (False, one.nbytes)
    assert same(one[:1], other[:1]) == (True, one.nbytes // 2)
    assert same(one.T, one.clone().T) == (True, 0)
    assert same(one, one.T.contiguous().T) == (True, 0)
    assert same(one[:0], other[:0]) == (True, 0)
    assert same(one, other[:1]) == (False, 0)
    finite = torch.ones(3, dtype=dtype)
    assert same(finite, finite.to(torch.float64 if dtype != torch.float64 else torch.float32)) == (True, 0)
