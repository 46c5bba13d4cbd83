"""A rank of another world maps the files that have its rows, and rank 0's: no others need be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dalsegno.elastic.rank.meetings import is_mistake
from dalsegno.elastic.saving.resuming import ResumePoint
from dalsegno.elastic.saving.writing import write_files
from dalsegno.elastic.trainer import fsdp
from dalsegno.elastic.training.reading_state import read_tensors
from dalsegno.protos.reads import Reads, ranks_read
from tests.unit.elastic.saving.test_resuming import point

fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
FakeStore = pytest.importorskip("torch.testing._internal.distributed.fake_pg").FakeStore

WORLDS = [(4, 3), (3, 4), (5, 2)]


@contextmanager
def world(rank: int, size: int) -> Iterator[None]:
    """As one of so many ranks; nobody else is there, and nothing collective is done."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Parameters of 16, 7, 2 and 1 rows in two groups of an optimizer, which has made a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 16), nn.Linear(16, 7), nn.Linear(7, 2), nn.Linear(2, 1))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    groups = [{"params": list(model[:2].parameters()), "lr": 0.1}, {"params": list(model[2:].parameters()), "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return model, optimizer


def save(directory: Path, size: int) -> dict[str, Tensor]:
    """Writes what a world's ranks do; all rows of each tensor."""
    rows: dict[str, list[Tensor]] = {}
    for rank in range(size):
        with world(rank, size):
            content = fsdp.files(*made(1))
            write_files(directory, content)
            for key, one in content[f"{fsdp.DIRECTORY}/rank-{rank}.pt"].items():
                rows.setdefault(key, []).append(one["value"].clone())
    return {key: torch.cat(values) for key, values in rows.items()}


def load(resume: ResumePoint) -> dict[str, tuple[int, Tensor]]:
    """What this rank has then: by name, the first row and all rows."""
    model, optimizer = made(2)
    fsdp.load(resume, model, optimizer)
    found = {}
    for name, parameter in model.named_parameters():
        found[f"model/{name}"] = fsdp._place(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer/{name}/{key}"] = fsdp._place(optimizer.state[parameter][key])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    return {key: (start, local.detach().clone()) for key, (start, local) in found.items()}


def owners(old: int, whole: dict[str, Tensor], found: dict[str, tuple[int, Tensor]]) -> set[int]:
    """The old ranks that have some of the rows."""
    return {
        rank
        for key, (start, local) in found.items()
        for rank, part in enumerate(torch.arange(len(whole[key])).chunk(old))
        if set(part.tolist()) & set(range(start, start + len(local)))
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (made := tmp_path / "step-4.e2.1").mkdir()
    return made


@pytest.mark.parametrize(("old", "new"), WORLDS)
def test_only_the_files_that_have_a_ranks_rows_are_needed(directory: Path, old: int, new: int) -> None:
    """Bit for bit what all files give; and each of them is needed. One that a rank does not see another start may."""
    whole = save(directory, old)
    resume = point(directory)
    spared = 0
    for rank in range(new):
        with world(rank, new):
            full = load(resume)
            needed = owners(old, whole, full)
            assert needed == ranks_read(Reads((1, 2, 7, 16)), old, new, rank, rank + 1)
            files = {other: directory / fsdp.DIRECTORY / f"rank-{other}.pt" for other in range(old)}
            kept = {other: file.read_bytes() for other, file in files.items()}
            for other in set(files) - needed - {0}:
                files[other].unlink()
                spared += 1
            for key, (start, local) in load(resume).items():
                assert torch.equal(local, full[key][1])
                assert torch.equal(local, whole[key][start : start + len(local)])
            for one in needed - {0}:
                files[one].unlink()
                with pytest.raises(OSError, match=rf"shards/rank-{one}\.pt is not here, although .* manifest lists it"):
                    load(resume)
                with pytest.raises(ValueError, match=rf"has not all rows of .*: shards/rank-{one}\.pt is missing"):
                    load(point(directory))
                files[one].write_bytes(kept[one])
            for other, content in kept.items():
                files[other].write_bytes(content)
    assert spared >= new


def test_a_save_says_what_is_cut() -> None:
    """Not what a class of the script's own writes besides."""

    class More(fsdp.FSDP):
        def files(self, state: Any) -> dict[str, Any]:
            return {**super().files(state), "more.pt": {}}

    with world(1, 3):
        for strategy in (fsdp.FSDP(), More()):
            strategy.model, _ = made(1)
            assert strategy.reads == (Reads((1, 2, 7, 16)) if type(strategy) is fsdp.FSDP else None)


@pytest.mark.parametrize("name", [fsdp.SHARED_FILE, f"{fsdp.DIRECTORY}/rank-0.pt"])
def test_what_a_node_does_not_see_is_no_fault_of_the_checkpoint(directory: Path, name: str) -> None:
    """The manifest lists it: a network file system may show it at the next start."""
    save(directory, 2)
    resume = point(directory)
    (directory / name).unlink()
    with world(0, 2):
        with pytest.raises(OSError, match=rf"{name} is not here, although the checkpoint's manifest lists it") as found:
            load(resume)
        assert not is_mistake(found.value)
        with pytest.raises(ValueError, match=r"step-4\.e2\.1 has no"):
            load(point(directory))


def test_a_rank_of_as_many_needs_its_own(directory: Path) -> None:
    """And rank 0's, as a node that comes has them."""
    whole = save(directory, 4)
    resume = point(directory)
    for other in (1, 3):
        (directory / fsdp.DIRECTORY / f"rank-{other}.pt").unlink()
    with world(2, 4):
        for key, (start, local) in load(resume).items():
            assert torch.equal(local, whole[key][start : start + len(local)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.update(start=rows["start"] + 1), r"rank-1\.pt has 4 from row 5 on, .* 4 to 8"),
        (lambda rows: rows.update(value=rows["value"][1:].clone()), r"rank-1\.pt has 3 from row 4 on, .* 4 to 8"),
        (lambda rows: rows.clear(), r"rank-1\.pt has none"),
    ],
)
def test_rows_that_are_not_where_they_belong_are_refused(directory: Path, change: Any, message: str) -> None:
    """The others' would be taken for this rank's."""
    save(directory, 4)
    file = directory / fsdp.DIRECTORY / "rank-1.pt"
    rows = {key: dict(one) for key, one in read_tensors(file).items()}
    change(rows["model/0.weight"])
    torch.save({key: one for key, one in rows.items() if one}, file)
    with world(0, 2), pytest.raises(ValueError, match=rf"has not all rows of model/0\.weight: shards/{message}"):
        load(point(directory))
