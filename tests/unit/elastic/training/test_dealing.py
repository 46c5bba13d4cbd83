"""Which ranks compute a sample together: those of tensor parallelism, and none that FSDP or DDP average over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from dalsegno.elastic.rank.agreement import Refusal
from dalsegno.elastic.rank.together import together
from dalsegno.elastic.training.dealing import check_dealt


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Eight ranks, of which this process is the first; what the others send nobody receives."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def split(mesh: dist.DeviceMesh, made: nn.Module) -> nn.Module:
    return parallelize_module(made, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def sharded() -> nn.Module:
    made = model()
    fully_shard(made[0])
    fully_shard(made)
    return made


def hybrid() -> nn.Module:
    made = model()
    fully_shard(made, mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard")))
    return made


def part_of_a_mesh() -> nn.Module:
    made = model()
    fully_shard(made, mesh=init_device_mesh("cpu", (8, 1), mesh_dim_names=("dp", "tp"))["dp"])
    return made


def experts() -> nn.Module:
    """Sharded over half of the ranks that average the rest, and then over the others."""
    made, mesh = model(), init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "ep"))
    parallelize_module(made[0], mesh["ep"], ColwiseParallel())
    fully_shard(made[0], mesh=mesh["dp"])
    fully_shard(made)
    return made


def copies() -> nn.Module:
    made, mesh = model(), init_device_mesh("cpu", (8,))
    for module in (made[0], made[2]):
        module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh, [Replicate()]))
    return made


def averaged() -> nn.Module:
    """As DistributedDataParallel."""
    made = nn.Sequential(split(init_device_mesh("cpu", (8,)), model()))
    made.parameters_to_ignore = ()  # type: ignore[assignment]
    made.process_group = dist.group.WORLD  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("make", [model, sharded, hybrid, part_of_a_mesh, experts, copies, averaged])
def test_ranks_with_samples_of_their_own(make: Callable[[], nn.Module]) -> None:
    made = make()
    assert together(made) == []
    check_dealt(made, 8, 3)


def test_tensor_parallelism() -> None:
    """Alone, and beneath FSDP and its hybrid form."""
    whole = split(init_device_mesh("cpu", (8,)), model())
    (found,) = together(whole)
    assert (found.ranks, found.names, found.split) == (tuple(range(8)), ["0.weight", "0.bias", "2.weight"], True)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    for dims in ("shard", ("replicate", "shard")):
        made = split(mesh["tp"], model())
        fully_shard(made[0], mesh=mesh[dims])  # type: ignore[index]
        fully_shard(made, mesh=mesh[dims])
        (found,) = together(made)
        assert (found.ranks, found.split) == ((0, 1), True)


def test_what_was_sharded_by_hand_is_not_known() -> None:
    made = model()
    made[0].weight = nn.Parameter(distribute_tensor(made[0].weight.data, init_device_mesh("cpu", (8,)), [Shard(0)]))
    (found,) = together(made)
    assert (found.names, found.split) == (["0.weight"], False)


def dealt(monkeypatch: pytest.MonkeyPatch, made: nn.Module, *parts: int) -> None:
    """Rank 0's check where the ranks of a group have these parts."""

    def reduce(ends: torch.Tensor, *_: object, group: object) -> None:
        ends.copy_(torch.tensor([max(parts), max(-part for part in parts)]))

    monkeypatch.setattr(dist, "all_reduce", reduce)
    check_dealt(made, 8, parts[0])


def test_other_samples_are_refused_or_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    whole = split(init_device_mesh("cpu", (8,)), model())
    dealt(monkeypatch, whole, 1, 1)
    line = r"^tensor parallelism: 0\.weight, .* are sharded over ranks 0, 1, .*BatchPlan\(G, mesh\['dp'\]\.size\(\), m"
    with pytest.raises(Refusal, match=line):
        dealt(monkeypatch, whole, 0, 1)
    by_hand = model()
    weight = distribute_tensor(by_hand[0].weight.data, init_device_mesh("cpu", (8,)), [Shard(0)])
    by_hand[0].weight = nn.Parameter(weight)
    assert not caplog.messages
    dealt(monkeypatch, by_hand, 0, 1)
    (said,) = caplog.messages
    assert said.startswith("0.weight is sharded over ranks")


def test_an_engine_of_groups() -> None:
    engine = nn.Linear(1, 1)
    engine.zero_optimization_stage, engine.dp_world_size = int, 4  # type: ignore[assignment]
    check_dealt(engine, 4, 0)
    with pytest.raises(Refusal, match="of 8 ranks there are 4 groups"):
        check_dealt(engine, 8, 0)


def test_torch_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be known there is not refused."""
    made = sharded()
    for module in made.modules():
        monkeypatch.setattr(type(module), "_get_fsdp_state", lambda _: SimpleNamespace(), raising=False)
    assert together(made) == []
