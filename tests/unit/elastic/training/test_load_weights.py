"""Weights that go to their places by name: what torch would put there, and torch's own way wherever it might differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from dalsegno.elastic.training.reading_state import load_part, load_weights


class Counts(nn.Module):
    """Has buffers that are saved and one that is not, and a parameter by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.layer.weight
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("own", torch.zeros(3), persistent=False)


class Doubles(nn.Linear):
    """Takes twice what is given."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict({n: 2 * v for n, v in state_dict.items()}, prefix, *arguments)


class Extra(nn.Linear):
    """Has a state besides its tensors."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.more = 1

    def get_extra_state(self) -> Any:
        return {"more": self.more}

    def set_extra_state(self, state: Any) -> None:
        self.more = state["more"]


def hooked() -> nn.Module:
    """Takes twice what is given, by a hook."""
    model = nn.Linear(3, 3)

    def twice(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state["weight"] = 2 * state["weight"]

    model.register_load_state_dict_pre_hook(twice)
    return model


def shown_otherwise() -> nn.Module:
    """Shows its bias as it is not."""
    model = nn.Linear(3, 3)
    model.register_state_dict_post_hook(lambda m, state, prefix, meta: state.update(bias=state["bias"] + 1))
    return model


def replaced() -> nn.Module:
    """One object's own method."""
    model = nn.Linear(3, 3)
    before = model.load_state_dict
    model.load_state_dict = lambda state: before({n: 2 * v for n, v in state.items()})  # type: ignore
    return model


MODELS: Mapping[str, tuple[Callable[[], nn.Module], bool]] = {
    "plain": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4)), True),
    "buffers and ties": (Counts, True),
    "parametrized": (lambda: weight_norm(nn.Linear(3, 3)), False),
    "half": (lambda: nn.Linear(3, 3).bfloat16(), True),
    "own way": (lambda: nn.Sequential(Doubles(3, 3)), False),
    "extra state": (Extra, False),
    "hook": (hooked, False),
    "shown otherwise": (shown_otherwise, False),
    "own method": (replaced, False),
}


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all that it holds."""
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_what_torch_would_load(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And torch itself is asked only where it might do something else."""
    make, by_name = MODELS[name]
    torch.manual_seed(1)
    saved = {key: value + 1 if isinstance(value, Tensor) else {"more": 7} for key, value in make().state_dict().items()}
    theirs, ours = make(), make()
    theirs.load_state_dict(saved)
    if by_name:
        monkeypatch.setattr(nn.Module, "load_state_dict", lambda *_: pytest.fail("torch was asked"))
        monkeypatch.setattr(type(ours), "load_state_dict", nn.Module.load_state_dict)
    load_weights(ours, saved, ours.state_dict())
    one, other = values_of(theirs), values_of(ours)
    assert all(torch.equal(one[key], other[key]) or "own" in key for key in one)
    assert getattr(ours, "more", 7) == 7


def test_what_is_loaded_shares_nothing_with_the_file() -> None:
    """What is mapped goes away."""
    model, saved = nn.Linear(2, 2), nn.Linear(2, 2).state_dict()
    load_weights(model, saved, model.state_dict())
    before = model.weight.detach().clone()
    saved["weight"].zero_()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("layout", [Tensor.to_sparse, Tensor.to_sparse_csr], ids=["coo", "csr"])
def test_a_buffer_of_another_layout(layout: Callable[[Tensor], Tensor]) -> None:
    """It has no values side by side, and torch loads it."""
    models = [nn.Linear(2, 2) for _ in range(2)]
    for number, model in enumerate(models):
        model.register_buffer("graph", layout((1.0 + number) * torch.eye(3)))
    load_weights(models[0], models[1].state_dict(), models[0].state_dict())
    assert torch.equal(models[0].graph.to_dense(), 2 * torch.eye(3))  # type: ignore[operator]
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize("view", [Tensor.conj, lambda one: one.conj().imag], ids=["conjugate", "negative"])
def test_a_buffer_that_torch_computes_as_it_is_read(view: Callable[[Tensor], Tensor]) -> None:
    """Torch loads it: nobody may copy many at once to such a place."""
    models = [nn.Linear(2, 2) for _ in range(3)]
    for number, model in enumerate(models):
        values = torch.tensor([1 + 2j, 3 - 1j]) * (1 + number)
        model.register_buffer("turned", values if number == 2 else view(values))
    wanted = view(torch.tensor([2 + 4j, 6 - 2j]))
    load_weights(models[0], models[1].state_dict(), models[0].state_dict())
    assert torch.equal(models[0].turned, wanted)  # type: ignore[arg-type]
    assert torch.equal(models[0].weight, models[1].weight)
    if wanted.is_complex():
        # Saved as a view, and not made as one; and the other way round.
        load_weights(models[2], models[1].state_dict(), models[2].state_dict())
        assert torch.equal(models[2].turned, wanted)  # type: ignore[arg-type]
        load_weights(models[0], models[2].state_dict(), models[0].state_dict())
        assert torch.equal(models[0].turned, wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", [lambda w: w[:1], lambda w: w.double(), lambda w: w.expand(1, 3, 3)], ids=["shape", "dtype", "dimensions"]
)
def test_what_does_not_fit_is_left_to_torch(change: Callable[[Tensor], Tensor]) -> None:
    """It says why, or converts."""
    theirs, ours = nn.Linear(3, 3), nn.Linear(3, 3)
    saved = {**nn.Linear(3, 3).state_dict()}
    saved["weight"] = change(saved["weight"])
    said = []
    for load in (theirs.load_state_dict, lambda state: load_weights(ours, state, ours.state_dict())):
        try:
            load(saved)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    assert said[0] == said[1]
    assert said[0] or torch.equal(theirs.weight, ours.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("own", [False, True], ids=["torch's way", "its own way"])
def test_whole_numbers_of_an_optimizer_stay_whole(dtype: torch.dtype, own: bool) -> None:
    """Codes of 8 bits, and counts: torch converts all that an optimizer keeps to its parameters' dtype."""
    made = [torch.optim.SGD([nn.Parameter(torch.ones(3, dtype=dtype))]) for _ in range(2)]
    if own:
        made[1].register_load_state_dict_post_hook(lambda optimizer: None)
    state = {"codes": torch.arange(3, dtype=torch.uint8), "big": torch.tensor([2**24 + 1, 2**53 + 1])}
    made[0].state[made[0].param_groups[0]["params"][0]] = state
    load_part(made[1], made[0].state_dict())
    found = made[1].state[made[1].param_groups[0]["params"][0]]
    assert {key: value.dtype for key, value in found.items()} == {"codes": torch.uint8, "big": torch.int64}
    assert all(torch.equal(found[key], value) for key, value in state.items())
