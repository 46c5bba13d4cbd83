"""Weights that stage 0 saved, in a model that calls itself, or parts of itself, something else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

from dalsegno.elastic.deepspeed.copies import load_whole_model
from dalsegno.elastic.deepspeed.engine import _module_loader


def model(value: float, *, frozen: bool = False) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    made[0].requires_grad_(not frozen)
    for parameter in made.parameters():
        nn.init.constant_(parameter, value)
    return made


def saved(directory: Path, weights: object) -> Path:
    torch.save({"module": weights}, directory / "mp_rank_00_model_states.pt")
    return directory


@pytest.mark.parametrize("before", ["", "_orig_mod.", "module."])
@pytest.mark.parametrize("now", [False, True])
def test_a_wrapper_is_no_other_model(tmp_path: Path, before: str, now: bool) -> None:
    """Compiled then or now, the weights are the same."""
    weights = {before + name: value for name, value in model(1).state_dict().items()}
    here = model(2)
    load_whole_model(SimpleNamespace(module=torch.compile(here) if now else here), saved(tmp_path, weights))
    assert all(bool(value.eq(1).all()) for value in here.state_dict().values())


def test_frozen_ones_may_be_left_out(tmp_path: Path) -> None:
    """They stay as they are, unless all must be there. What is trained must be."""
    trained = {name: value for name, value in model(1).state_dict().items() if name.startswith("1.")}
    directory, here = saved(tmp_path, trained), model(2, frozen=True)
    load_whole_model(SimpleNamespace(module=here), directory)
    assert [bool(value.eq(1).all()) for value in here.state_dict().values()] == [False, False, True, True]
    with pytest.raises(ValueError, match="only in the model"):
        load_whole_model(SimpleNamespace(module=model(2, frozen=True)), directory, strict=True)
    with pytest.raises(ValueError, match=r"another model: 0\.bias, 0\.weight only in the model"):
        load_whole_model(SimpleNamespace(module=model(2)), directory)


@pytest.mark.parametrize("strict", [False, True])
def test_experts_lie_elsewhere(tmp_path: Path, strict: bool) -> None:
    """DeepSpeed keeps them in files of their own."""
    weights = {name: value for name, value in model(1).state_dict().items() if name.startswith("1.")}
    here = model(2)
    for parameter in here[0].parameters():
        parameter.allreduce = False  # type: ignore[attr-defined]
    load_whole_model(SimpleNamespace(module=here), saved(tmp_path, weights), strict=strict)
    assert [bool(value.eq(1).all()) for value in here.state_dict().values()] == [False, False, True, True]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_load_that_leaves_frozen_ones_out_takes_no_other_model(stage: int) -> None:
    """A trainer that saves no frozen weights asks for that; torch would load what has the same name, or nothing."""
    engine = SimpleNamespace(zero_optimization_stage=lambda: stage)
    load = _module_loader(engine, strict=False)
    assert load is not None
    trained = {name: value for name, value in model(1).state_dict().items() if name.startswith("1.")}
    here = model(2, frozen=True)
    load(src=trained, dst=here)
    assert [bool(value.eq(1).all()) for value in here.state_dict().values()] == [False, False, True, True]
    with pytest.raises(ValueError, match="none of its 2 names"):
        load(src={f"model.{name}": value for name, value in trained.items()}, dst=here)
    with pytest.raises(ValueError, match="only in the model"):
        load(src=trained, dst=model(2))


def test_another_models_are_refused(tmp_path: Path) -> None:
    """By its names, and by its shapes."""
    names = {f"base_model.model.{name}": value for name, value in model(1).state_dict().items()}
    with pytest.raises(ValueError, match="none of its 4 names"):
        load_whole_model(SimpleNamespace(module=model(2)), saved(tmp_path, names))
    shapes = {name: torch.zeros(3, *value.shape[1:]) for name, value in model(1).state_dict().items()}
    with pytest.raises(ValueError, match="size mismatch"):
        load_whole_model(SimpleNamespace(module=model(2)), saved(tmp_path, shapes))


def test_experts_that_follow_the_number_of_ranks_are_named(tmp_path: Path) -> None:
    """The model is the same: each rank of the new world has fewer of its experts."""

    def layer(experts: int) -> nn.Module:
        of_a_rank = nn.ModuleDict({"deepspeed_experts": nn.ModuleList([nn.Linear(2, 2) for _ in range(experts)])})
        return nn.ModuleDict({"gate": nn.Linear(2, 2), "experts": of_a_rank})

    directory = saved(tmp_path, layer(2).state_dict())
    with pytest.raises(ValueError, match="has other experts on each rank than this world"):
        load_whole_model(SimpleNamespace(module=layer(1)), directory)
    load_whole_model(SimpleNamespace(module=layer(2)), directory)
    with pytest.raises(ValueError, match="of another model"):
        load_whole_model(SimpleNamespace(module=nn.ModuleDict({"other": nn.Linear(2, 2)})), directory)
