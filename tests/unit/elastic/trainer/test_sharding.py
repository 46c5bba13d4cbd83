"""A model is made real, filled and sharded block by block; what shards is a stand-in that cuts every parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dalsegno.elastic.trainer.sharding import shard

CPU = torch.device("cpu")


class Row(nn.Parameter):
    """What a rank keeps of a parameter; looks as sharded as a DTensor."""

    def to_local(self) -> Tensor:
        return self


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        self.scale.fill_(2.0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last.weight = self.first.weight


class Filled(Model):
    """Fills all of itself, as in torch's recipe."""

    def reset_parameters(self) -> None:
        for number, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, mean=10.0 * number)
        for block in self.blocks:
            block.scale.fill_(3.0)


def on_meta(kind: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return kind()


def run(model: nn.Module, init: Any = None, **how: Any) -> list[dict[str, Tensor]]:
    """What each block had when it was sharded, the rest last."""
    seen: list[dict[str, Tensor]] = []
    whole: list[weakref.ref[Tensor]] = []

    def apply(unit: nn.Module, ignored: set[Tensor]) -> None:
        assert not [one() for one in whole if one() is not None], "a whole parameter outlived its sharding"
        seen.append({n: t.detach().clone() for n, t in unit.named_parameters() if not isinstance(t, Row)})
        became: dict[int, Row] = {}
        for module in unit.modules():
            for name, tensor in module._parameters.items():
                if tensor is None or isinstance(tensor, Row) or tensor in ignored:
                    continue
                if id(tensor) not in became:
                    whole.append(weakref.ref(tensor))
                    became[id(tensor)] = Row(tensor.detach()[:1].clone())
                module._parameters[name] = became[id(tensor)]

    shard(model, (Block,), apply, CPU, init=init, same=False, **how)
    return seen


def test_blocks_become_real_one_after_the_other_and_ties_hold() -> None:
    """Every one is filled by its own reset, with values of its own; no whole parameter outlives its sharding."""
    torch.manual_seed(1)
    model = on_meta(Model)
    one, other, rest = run(model)
    assert [sorted(found) for found in (one, other)] == [["linear.bias", "linear.weight"]] * 2
    assert sorted(rest) == ["first.bias", "first.weight", "last.bias"]
    assert not torch.equal(one["linear.weight"], other["linear.weight"])
    assert model.last.weight is model.first.weight
    assert model.blocks[1].scale.tolist() == [2, 2, 2]
    assert not any(tensor.isnan().any() for found in (one, other, rest) for tensor in found.values())


@pytest.mark.parametrize("init", [None, lambda model: model.reset_parameters()])
def test_a_model_that_fills_itself_is_called_for_each_block(init: Any) -> None:
    """And writes into that block only: what is sharded already stays as it was."""
    model = on_meta(Filled)
    before: list[Any] = []

    def counted(whole: Any) -> None:
        before.append([tensor.device.type for tensor in whole.parameters()].count("cpu"))
        whole.reset_parameters()

    one, other, rest = run(model, counted if init else None)
    means = [round(float(found[name].mean()) / 10) for found in (one, other) for name in found]
    assert means == [3, 4, 5, 6]
    assert [round(float(tensor.mean()) / 10) for tensor in rest.values()] == [0, 1, 2]
    assert before in ([2, 2, 3], [])
    assert model.blocks[0].scale.tolist() == [3, 3, 3]


def test_what_was_real_before_is_not_filled_again() -> None:
    """A trained trunk with a new head: only what had no values gets some."""
    model = Filled()
    model.blocks[1] = on_meta(Block)
    first = model.first.weight.detach().clone()
    trained = model.blocks[0].linear.weight.detach().clone()
    one, other, rest = run(model)
    assert torch.equal(one["linear.weight"], trained)
    assert torch.equal(rest["first.weight"], first)
    assert float(other["linear.weight"].mean()) > 40


def test_what_nothing_fills_is_refused() -> None:
    """Whatever was in memory would be the training's beginning."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    class Own(Model):
        def init_weights(self) -> None:
            raise AssertionError("nobody knows what it takes")

    with pytest.raises(ValueError, match=r"weight was made on the meta device, and nothing .* FSDP\(init=\.\.\.\)"):
        run(on_meta(Bare))
    with pytest.raises(ValueError, match=r"Own has init_weights\(\): .* FSDP\(init=lambda model: model\.init_weights"):
        run(on_meta(Own))
    assert len(run(on_meta(Own), lambda model: [nn.init.ones_(tensor) for tensor in _tensors(model)])) == 3


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("make", [Model, lambda: on_meta(Model)])
def test_one_parameter_in_two_blocks_is_refused(make: Callable[[], Any]) -> None:
    """Each block would get one of its own, and they would drift apart."""
    model = make()
    model.blocks[1].linear.weight = model.blocks[0].linear.weight
    with pytest.raises(ValueError, match=r"blocks\.0\.linear\.weight and blocks\.1\.linear\.weight are one parameter"):
        run(model)


def test_parameters_that_stay_whole_are_named_as_they_became() -> None:
    """`ignored_params` are given before they are real."""
    model = on_meta(Model)
    model.first.bias.requires_grad_(False)
    run(model, ignored=[model.first.bias])
    assert not isinstance(model.first.bias, Row)
    assert isinstance(model.last.bias, Row)
    assert model.first.bias.device == CPU


@pytest.mark.parametrize("make", [Model, lambda: on_meta(Model)])
def test_what_is_ignored_and_trained_is_refused(make: Callable[[], Any]) -> None:
    """Each rank would train its own: nobody averages its gradients."""
    model = make()
    with pytest.raises(ValueError, match=r"ignored_params has first\.bias and 1 more, which is trained"):
        run(model, ignored=[model.first.bias, model.last.bias])
    assert not any(isinstance(one, Row) for one in model.parameters())
