"""What FSDP's ranks write, and how it is read again: in a world of one rank."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dalsegno.elastic.saving.writing import write_files
from dalsegno.elastic.trainer import fsdp
from tests.unit.elastic.saving.test_resuming import point

LAYERS = 40


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(seed: int, *, trained: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(LAYERS)), nn.BatchNorm1d(3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if trained:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return model, optimizer


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    found: list[Any] = [*model.state_dict().values()]
    found += [value for each in optimizer.state.values() for _, value in sorted(each.items())]
    return [getattr(value, "_local_tensor", value).flatten().tolist() for value in found]


@pytest.mark.parametrize("form", ["ours", "of earlier versions"])
def test_what_was_written_is_read_again(tmp_path: Path, form: str) -> None:
    (directory := tmp_path / "step-4.e2.1").mkdir()
    model, optimizer = made(1, trained=True)
    content = fsdp.files(model, optimizer)
    if form == "ours":
        write_files(directory, content)
    else:
        (directory / fsdp.DIRECTORY).mkdir()
        for name, file in content.items():
            torch.save({**file}, directory / name)
    other = made(2, trained=False)
    assert fsdp.load(point(directory), *other)["frozen"] == []
    assert values(*other) == values(model, optimizer)
    # Thousands of tensors one by one cost more than their bytes.
    pieces = [len(zipfile.ZipFile(directory / name).namelist()) for name in content]
    assert all((count < LAYERS) is (form == "ours") for count in pieces)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("m/avg", lambda p: torch.zeros_like(p), "under a key that is not a word"),
        (0, lambda p: torch.zeros_like(p), "under a key that is not a word"),
        ("rows", lambda p: torch.zeros_like(p[:, :1]), "with the shape [3, 1], where the parameter has [3, 3]"),
        ("whole", lambda p: torch.ones(3), "as a plain tensor of shape [3]"),
        ("history", lambda p: [torch.ones(3)], "in a list or a dictionary"),
        ("history", lambda p: {"a": torch.zeros_like(p)}, "in a list or a dictionary"),
    ],
)
def test_what_could_not_be_loaded_in_another_world_is_refused(key: Any, value: Any, reason: str) -> None:
    model, optimizer = made(1, trained=True)
    parameter = next(model.parameters())
    optimizer.state[parameter][key] = value(parameter.detach())
    with pytest.raises(TypeError) as caught:
        fsdp.files(model, optimizer)
    assert f"keeps {key!r} of 0.weight {reason}, and FSDP saves" in str(caught.value)


def test_what_belongs_to_no_parameter_is_refused() -> None:
    model, optimizer = made(1, trained=True)
    optimizer.state["calls"] = 1  # type: ignore[index]
    with pytest.raises(TypeError, match="AdamW keeps 'calls', and FSDP saves"):
        fsdp.files(model, optimizer)


def test_what_a_module_keeps_of_its_own_state_is_no_part_of_the_file(tmp_path: Path) -> None:
    """It may stay long after the file is gone, or is written over."""

    class Keeps(nn.Linear):
        kept: Any = None

        def get_extra_state(self) -> Any:
            return {"table": torch.ones(4)}

        def set_extra_state(self, state: Any) -> None:
            self.kept = state["table"]

    model = nn.Sequential(Keeps(3, 3))
    pytest.importorskip("torch.distributed.fsdp").fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters())
    (directory := tmp_path / "step-4.e2.1").mkdir()
    write_files(directory, fsdp.files(model, optimizer))
    fsdp.load(point(directory), model, optimizer)
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in mapped
    assert model[0].kept.tolist() == [1, 1, 1, 1]
