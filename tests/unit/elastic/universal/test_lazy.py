"""A rank of another world opens the files that have its ranges, and rank 0's: no others need be there."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("deepspeed")

from dalsegno.elastic.universal import ConversionError, SourceBad
from dalsegno.elastic.universal.forms import Form
from dalsegno.elastic.universal.pieces import GROUP_ALIGNMENT
from dalsegno.elastic.universal.source import ShardedSource, open_source
from dalsegno.elastic.universal.values import ShardedValues
from dalsegno.protos.reads import Reads, ranks_read, reads_of
from tests.support.checkpoints.shards import STATES, write_shards

# Dealt out in turn: a group of 24 and one of 36 values, with parameters that fewer ranks have than there are.
SHAPES = {"tiny": (1,), "even": (8, 3), "odd": (7, 3), "pair": (2,), "last": (2,), "some": (5, 2)}
WORLDS = [(4, 3), (3, 4), (5, 2)]
OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
Range = tuple[str, int, int]


def ranges(stage: int, world: int, rank: int) -> Iterator[Range]:
    """What a rank loads: of each parameter a first element, and how many."""
    names = list(SHAPES)
    for group in (names[0::2], names[1::2]):
        whole = sum(math.prod(SHAPES[name]) for name in group)
        offset = 0
        for name in group:
            numel = math.prod(SHAPES[name])
            if stage == 3:
                size = -(-numel // world)
                low, high = min(rank * size, numel), min((rank + 1) * size, numel)
            else:
                size = 2 * -(-whole // (2 * world))
                low = min(max(rank * size - offset, 0), numel)
                high = min(max((rank + 1) * size - offset, 0), numel)
                offset += numel
            if low < high:
                yield name, low, high - low


def owners(stage: int, old: int, wanted: list[Range]) -> set[int]:
    """The old ranks that have some of it."""
    return {
        rank
        for rank in range(old)
        for name, start, count in ranges(stage, old, rank)
        for other, low, many in wanted
        if name == other and start < low + many and low < start + count
    }


def load(directory: Path, wanted: list[Range]) -> dict[tuple[str, str], Tensor]:
    with open_source(directory, ours=True, lazy=True) as source:
        values, found = ShardedValues(Form(source, source.stage)), {}
        for name, start, count in wanted:
            for state in STATES:
                target = torch.full((count,), torch.nan)
                values.read(name, state, start, target)
                found[name, state] = target
    return found


def lengths(stage: int) -> Reads:
    """What is cut: each parameter by itself, or a group's in a row."""
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    found = reads_of(sizes) if stage == 3 else reads_of([sum(sizes[0::2]), sum(sizes[1::2])], GROUP_ALIGNMENT)
    assert found is not None
    return found


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("old", "new"), WORLDS)
def test_only_the_files_that_have_a_ranks_ranges_are_needed(tmp_path: Path, stage: int, old: int, new: int) -> None:
    """Bit for bit what all files give; and each of them is needed."""
    spared = 0
    for rank in range(new):
        directory = tmp_path / str(rank)
        saved = write_shards(directory, SHAPES, stage=stage, world=old, groups=2)
        wanted = list(ranges(stage, new, rank))
        full = load(directory, wanted)
        needed = owners(stage, old, wanted)
        for other in set(range(old)) - needed - {0}:
            (directory / OPTIMIZER.format(other)).unlink()
            spared += 1
            if stage == 3:
                (directory / f"zero_pp_rank_{other}_mp_rank_00_model_states.pt").unlink()
        assert needed == ranks_read(lengths(stage), old, new, rank, rank + 1)
        found = load(directory, wanted)
        for (name, state), values in found.items():
            start, count = next((start, count) for other, start, count in wanted if other == name)
            assert torch.equal(values, full[name, state])
            assert torch.equal(values, saved[name][state][start : start + count])
        for one in needed - {0}:
            gone = directory / OPTIMIZER.format(one)
            content = gone.read_bytes()
            gone.unlink()
            with pytest.raises(SourceBad, match=rf"{old} ranks saved, .* and rank {one}'s is needed"):
                load(directory, wanted)
            gone.write_bytes(content)
    # Of a parameter with as many rows as ranks, each new rank wants its own.
    assert spared >= new


def changed(directory: Path, rank: int, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / OPTIMIZER.format(rank)
    content = torch.load(path, weights_only=False)
    change(content["optimizer_state_dict"])
    torch.save(content, path)


def shorter(state: dict[str, Any]) -> None:
    key = "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"
    state[key][1] = state[key][1][:-1].clone()


def moments(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state.get("base_optimizer_state", state.get("optimizer_state_dict"))["state"][1]
    return found


def fewer(state: dict[str, Any]) -> None:
    for key in ("fp32_flat_groups", "single_partition_of_fp32_groups", "param_slice_mappings"):
        state.get(key, [None]).pop()


def other_stage(state: dict[str, Any]) -> None:
    """What a save of another stage would have left there."""
    back = 1 if state["zero_stage"] == 3 else -1
    old, new = ("optimizer_state_dict", "base_optimizer_state")[::back]
    flat, other = ("fp32_flat_groups", "single_partition_of_fp32_groups")[::back]
    state[new], state[other], state["zero_stage"] = state.pop(old), state.pop(flat), 5 - int(state["zero_stage"])


DAMAGES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (shorter, "rank 2 has too few values of fp32"),
    (lambda state: moments(state).pop("exp_avg"), r"states \['exp_avg'\] are not there .*\(rank 2, group 1\)"),
    (lambda state: moments(state).update(step=torch.tensor(4.0)), "ranks 0 and 2 have made different numbers"),
    (lambda state: moments(state).update(mu=0.5), "optimizer's mu is another number on rank 2 than on rank 0"),
    (lambda state: moments(state).update(exp_avg=moments(state)["exp_avg"].double()), "float64 on rank 2"),
    (fewer, "another stage or number of groups"),
    (other_stage, "another stage or number of groups"),
]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_file_is_checked_when_it_is_opened(
    tmp_path: Path, stage: int, damage: Callable[[dict[str, Any]], Any], message: str
) -> None:
    """And not before: who needs nothing of it loads, every time that somebody does need it, it is refused."""
    saved = write_shards(tmp_path / "made", SHAPES, stage=stage, world=4, groups=2)
    changed(tmp_path / "made", 2, damage)
    assert torch.equal(load(tmp_path / "made", [("even", 0, 2)])["even", "exp_avg"], saved["even"]["exp_avg"][:2])
    with open_source(tmp_path / "made", ours=True, lazy=True) as source:
        for _ in range(2):
            with pytest.raises(ConversionError, match=message):
                source.extents(source.parameters["odd"], "exp_avg")


def test_a_file_whose_values_lie_elsewhere_is_refused(tmp_path: Path) -> None:
    """Half of a parameter would be another's."""
    write_shards(tmp_path / "made", SHAPES, stage=2, world=4, groups=2)
    changed(tmp_path / "made", 2, lambda state: state.update(param_slice_mappings=[{}, {}]))
    with open_source(tmp_path / "made", ours=True, lazy=True) as source, pytest.raises(SourceBad, match="do not lie"):
        source.extents(source.parameters["odd"], "fp32")


def padded(directory: Path, world: int, *, note: bool) -> None:
    """Rewrites a checkpoint as if pads lay between its parameters: one element before each but a group's first."""
    for rank in range(world):

        def shift(state: dict[str, Any]) -> None:
            if note:
                state["param_alignment_paddings"] = [[1, 1, 0], [1, 1, 0]]
            for group, mapping in enumerate(state["param_slice_mappings"]):
                for count, name in enumerate(mapping):
                    mapping[name].start += count
                flat = state["single_partition_of_fp32_groups"][group]
                for where, key in ((state["single_partition_of_fp32_groups"], group), *moment_places(state, group)):
                    parts, offset = [], 0
                    for address in mapping.values():
                        parts += [where[key][offset : offset + address.numel], torch.full((1,), 7.0)]
                        offset += address.numel
                    where[key] = torch.cat(parts) if parts else flat

        changed(directory, rank, shift)


def moment_places(state: dict[str, Any], group: int) -> list[tuple[dict[str, Any], Any]]:
    own = state["base_optimizer_state"]["state"][group]
    return [(own, key) for key in STATES[1:]]


@pytest.mark.parametrize("note", [False, True])
def test_a_layout_that_is_not_the_formulas_is_read_as_the_files_say(tmp_path: Path, note: bool) -> None:
    """Pads between parameters (`parameter_alignment`): all files together say what lies where, so all must be there."""
    saved = write_shards(tmp_path / "made", SHAPES, stage=2, world=3, groups=2)
    padded(tmp_path / "made", 3, note=note)
    whole = [(name, 0, math.prod(shape)) for name, shape in SHAPES.items()]
    for (name, state), values in load(tmp_path / "made", whole).items():
        assert torch.equal(values, saved[name][state])
    (tmp_path / "made" / OPTIMIZER.format(2)).unlink()
    with pytest.raises(SourceBad, match=r"3 ranks saved, optimizer files are there of ranks \[0, 1\]$"):
        open_source(tmp_path / "made", ours=True, lazy=True)


def test_pads_are_believed_where_rank_0_has_none(tmp_path: Path) -> None:
    """Its own pieces are where the formula puts them, the others' are not."""
    write_shards(tmp_path / "made", SHAPES, stage=2, world=3, groups=2)
    changed(tmp_path / "made", 0, lambda state: state.update(param_alignment_paddings=[[0, 0, 0], [0, 1, 0]]))
    (tmp_path / "made" / OPTIMIZER.format(2)).unlink()
    with pytest.raises(SourceBad, match=r"of ranks \[0, 1\]$"):
        open_source(tmp_path / "made", ours=True, lazy=True)


@pytest.mark.parametrize("name", [OPTIMIZER.format(0), "zero_pp_rank_0_mp_rank_00_model_states.pt"])
def test_rank_0_must_be_there(tmp_path: Path, name: str) -> None:
    """What is alike on all ranks is read in its files."""
    write_shards(tmp_path / "made", SHAPES, stage=3, world=3, groups=2)
    (tmp_path / "made" / name).unlink()
    with pytest.raises(SourceBad, match=r"ranks \[1, 2\]"):
        open_source(tmp_path / "made", ours=True, lazy=True)


def test_a_file_of_no_rank_is_refused(tmp_path: Path) -> None:
    """Another save's is among them: nobody knows whose the others are."""
    write_shards(tmp_path / "made", SHAPES, stage=3, world=3, groups=2)
    (tmp_path / "made" / OPTIMIZER.format(3)).write_bytes(b"")
    with pytest.raises(SourceBad, match=r"3 ranks saved, .* \[0, 1, 2, 3\]"):
        open_source(tmp_path / "made", ours=True, lazy=True)


def test_a_conversion_wants_all(tmp_path: Path) -> None:
    """As whoever does not say that it reads a part."""
    write_shards(tmp_path / "made", SHAPES, stage=2, world=3, groups=2)
    (tmp_path / "made" / OPTIMIZER.format(1)).unlink()
    with pytest.raises(SourceBad, match=r"3 ranks saved, optimizer files are there of ranks \[0, 2\]$"):
        open_source(tmp_path / "made")


def test_threads_open_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's share is read on several."""
    from dalsegno.elastic.universal import shards

    write_shards(tmp_path / "made", SHAPES, stage=3, world=3, groups=2)
    asked: list[Path] = []
    plain, together = shards.opened, threading.Barrier(8)

    def slow(path: Path) -> Any:
        asked.append(path)
        threading.Event().wait(0.05)  # a second thread would come now
        return plain(path)

    def read(source: ShardedSource) -> None:
        together.wait(10)
        source.extents(source.parameters["odd"], "fp32")

    with open_source(tmp_path / "made", ours=True, lazy=True) as source:
        monkeypatch.setattr(shards, "opened", slow)
        threads = [threading.Thread(target=read, args=(source,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert [path.name for path in asked] == [OPTIMIZER.format(1), OPTIMIZER.format(2)]
