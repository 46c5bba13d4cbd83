"""Another number of ranks loads the shards as they lie: bit by bit what was saved, and no conversion."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from dalsegno.elastic.universal import EnvironmentFailed, convert_directory
from dalsegno.elastic.universal.source import OPTIMIZER_NOTE, open_source
from dalsegno.protos.reads import Reads, ranks_read
from tests.support.workers.zero_runs import STEPS, Held, Sources, read_held, run_worker, seal_sharded

from .test_restore import CHANGES, across, assert_all
from .test_world_changes import MORE, assert_same, resumed, undisturbed

__all__ = ["undisturbed"]

pytestmark = pytest.mark.timeout(300)

DEFAULT = ("names", "names-zero3", "outside", "zero1-bf16-gradients-in-fp32", "zero3-sub-groups")
SHARDS = {"form": "sharded", "reshard": True}


def load(out: Path, world: int, stage: int, source: Path, **task: Any) -> Held:
    """What a fresh world of ``world`` ranks holds after it has loaded the shards."""
    resume = {"load": str(source), "step": STEPS, **SHARDS}
    run_worker(world, {"stage": stage, "steps": 1, "out": str(out), **resume, **task})
    return read_held(out, "loaded", world)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in DEFAULT else pytest.mark.full) for case in CHANGES]
)
def test_everything_comes_back_at_another_world_size(sources: Sources, tmp_path: Path, case: str) -> None:
    """Bitwise, in every precision, with odd names, other optimizers, offload, and parameters outside the optimizer."""
    task, world = CHANGES[case]
    source, saved = sources.get(**task)
    more = {key: value for key, value in task.items() if key not in ("stage", "world")}
    before = sorted(path.name for path in source.iterdir())
    assert_all(load(tmp_path / "out", world, task["stage"], source, **more), saved)
    assert sorted(path.name for path in source.iterdir()) == before, "nothing is written there"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in DEFAULT else pytest.mark.full) for case in CHANGES]
)
def test_the_formula_says_where_values_lie(sources: Sources, case: str) -> None:
    """A rank opens only the files that have its ranges: it knows them before it has read what they say.

    Not with pads between parameters.
    """
    task, _ = CHANGES[case]
    source, _ = sources.get(**task)
    opened = list(range(task["world"])) if case == "zero2-aligned" else [0]
    with open_source(source, ours=True) as eager, open_source(source, ours=True, lazy=True) as lazy:
        assert list(lazy.shards.held) == opened
        assert lazy.parameters == eager.parameters
        assert len(lazy.shards.all()) == task["world"]


ALL_TRAINED = {
    "trained": ({"stage": 2, "world": 4, "model": "trained"}, 3),
    "trained-zero3": ({"stage": 3, "world": 4, "model": "trained"}, 3),
    "trained-zero3-more": ({"stage": 3, "world": 3, "model": "trained", "optimizer": "nadam"}, 4),
}
# What of these a rank reads is not known: each may read everything.
UNSAID = {
    case for case, (task, _) in CHANGES.items() if task["stage"] == 3 or case == "zero2-aligned"
}  # Stage 3 has a frozen parameter.


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in (*DEFAULT, *ALL_TRAINED) else pytest.mark.full)
        for case in {**CHANGES, **ALL_TRAINED}
    ],
)
def test_what_a_save_says_is_enough(sources: Sources, tmp_path: Path, case: str) -> None:
    """Each rank loads with nothing but the files of the ranks that the save and the numbers of ranks name."""
    task, world = {**CHANGES, **ALL_TRAINED}[case]
    source, saved = sources.get(**task)
    said = json.loads((source.parent / "result-0.json").read_text())["reads"]
    assert (said is None) == (case in UNSAID)
    if said is None:
        return
    reads = Reads(tuple(said["lengths"]), said["alignment"])
    spared = 0
    for rank in range(world):
        shutil.copytree(source, tmp_path / f"{rank}" / source.name)
        for other in set(range(task["world"])) - ranks_read(reads, task["world"], world, rank, rank + 1) - {0}:
            for file in (tmp_path / f"{rank}" / source.name).glob(f"*zero_pp_rank_{other}_*"):
                file.unlink()
                spared += 1
    assert spared > 0 or task["world"] < 3
    more = {key: value for key, value in task.items() if key not in ("stage", "world")}
    assert_all(load(tmp_path / "out", world, task["stage"], tmp_path / "{rank}" / source.name, **more), saved)


@pytest.mark.parametrize("case", ["names", "names-zero3", *ALL_TRAINED])
def test_what_lies_in_a_ranks_place_is_enough_if_a_save_says_so(sources: Sources, tmp_path: Path, case: str) -> None:
    """As many ranks as saved load their own files and the first rank's. Not where ZeRO-3 has cut what nobody trains."""
    task, _ = {**CHANGES, **ALL_TRAINED}[case]
    source, saved = sources.get(**task)
    said = json.loads((source.parent / "result-0.json").read_text())["by_place"]
    assert said == (case != "names-zero3")
    if not said:
        return
    for rank in range(task["world"]):
        shutil.copytree(source, tmp_path / f"{rank}" / source.name)
        for other in set(range(task["world"])) - {0, rank}:
            for file in (tmp_path / f"{rank}" / source.name).glob(f"*zero_pp_rank_{other}_*"):
                file.unlink()
    more = {key: value for key, value in task.items() if key not in ("stage", "world")} | {"reshard": False}
    loaded = load(tmp_path / "out", task["world"], task["stage"], tmp_path / "{rank}" / source.name, **more)
    assert_all(loaded, saved)


def test_other_ranks_model_states_are_read_for_frozen_parameters(sources: Sources, tmp_path: Path) -> None:
    """ZeRO-3 cuts these up, too: a missing part is said. Without them, the first rank's model states say all."""
    made, saved = sources.get(3, 3)
    source = tmp_path / made.name
    shutil.copytree(made, source)
    first, *others = sorted(source.glob("*_model_states.pt"))
    others[0].unlink()
    with pytest.raises(AssertionError, match=f"frozen: 2 of 5 values are there, {others[0].name} is missing"):
        load(tmp_path / "out", 2, 3, source)
    others[1].unlink()
    content = torch.load(first, weights_only=False)
    content["frozen_param_shapes"] = content["frozen_param_fragments"] = None
    torch.save(content, first)
    loaded = load(tmp_path / "whole", 2, 3, source)
    for name, states in saved.states.items():
        for state, values in states.items():
            assert torch.equal(loaded.states[name][state], values), f"{name}/{state}"


@across
def test_the_stage_changes_too(
    sources: Sources, tmp_path: Path, old: int, new: int, ranks: int, others: int, config: dict[str, Any]
) -> None:
    source, saved = sources.get(old, ranks, config=config)
    assert_all(load(tmp_path / "out", others, new, source, config=config), saved)


DIAGONAL = [(2, 3, 1), (3, 1, 3)]
EVERYWHERE = [
    (stage, old, new)
    for stage in (1, 2, 3)
    for old in (1, 2, 3, 4)
    for new in (1, 2, 3, 4)
    if old != new and (stage, old, new) not in DIAGONAL
]


@pytest.mark.parametrize(
    ("stage", "old", "new"), [*DIAGONAL, *(pytest.param(*cell, marks=pytest.mark.full) for cell in EVERYWHERE)]
)
def test_the_run_goes_on(
    sources: Sources, undisturbed: list[float], tmp_path: Path, stage: int, old: int, new: int
) -> None:
    source, saved = sources.get(stage, old)
    loaded, losses = resumed(tmp_path / "out", new, stage, load=str(source), **SHARDS)
    assert_same(loaded, saved)
    assert losses == pytest.approx(undisturbed[STEPS:], rel=1e-5)


@pytest.mark.parametrize(("stage", "old", "new"), [pytest.param(1, 1, 2, marks=pytest.mark.full), (3, 2, 1)])
def test_before_the_first_step(undisturbed: list[float], tmp_path: Path, stage: int, old: int, new: int) -> None:
    source = tmp_path / "step-0.e1.0"
    run_worker(old, {"stage": stage, "steps": 0, "save": str(source), "out": str(tmp_path)})
    seal_sharded(source, stage=stage, world=old, step=0)
    task = {"stage": stage, "steps": MORE, "out": str(tmp_path / "out"), "step": 0}
    results = run_worker(new, {**task, "load": str(source), **SHARDS})
    assert results[0]["losses"] == pytest.approx(undisturbed[:MORE], rel=1e-5)


def test_path_with_special_characters(sources: Sources, tmp_path: Path) -> None:
    """DeepSpeed sees a temporary directory of links, whose name has none."""
    made, saved = sources.get(1, 2)
    source = tmp_path / "job [a]+b*" / made.name
    shutil.copytree(made, source)
    assert_all(load(tmp_path / "out", 1, 1, source), saved)


OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def rewritten(made: Path, tmp_path: Path, **more: Any) -> Path:
    """A copy in which rank 1's file says more, or says it in another way."""
    source = tmp_path / made.name
    shutil.copytree(made, source)
    content = torch.load(source / OPTIMIZER, weights_only=False)
    content["optimizer_state_dict"].update(more)
    torch.save(content, source / OPTIMIZER)
    return source


class ByName:
    """Pickled, it is a member of DeepSpeed's stages as CPython 3.11.0 to 3.11.4 write one."""

    def __init__(self, stage: ZeroStageEnum) -> None:
        self.stage = stage

    def __reduce__(self) -> tuple[Any, tuple[Any, str]]:
        return getattr, (ZeroStageEnum, self.stage.name)


@pytest.mark.parametrize("stage", [1, 2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("world", [2, 3])
def test_stages_by_name_are_loaded(sources: Sources, tmp_path: Path, stage: int, world: int) -> None:
    """What was saved with such a Python: by the same number of ranks, by another one, and by the converter."""
    made, saved = sources.get(stage, 2)
    source = rewritten(made, tmp_path, zero_stage=ByName(ZeroStageEnum(stage)))
    assert b"getattr" in (source / OPTIMIZER).read_bytes()
    assert_all(load(tmp_path / "out", world, stage, source, reshard=world != 2), saved)
    (source / "MANIFEST.json").unlink()  # its checksum is that of the file before
    convert_directory(source, tmp_path / "universal")


@pytest.mark.parametrize("stage", [1, 2])
def test_what_the_optimizer_has_counts(sources: Sources, tmp_path: Path, stage: int) -> None:
    """The file of the model's weights has another bit than the optimizer: no rank trains with the file's."""
    made, saved = sources.get(stage, 2)
    source = tmp_path / made.name
    shutil.copytree(made, source)
    (path,) = source.glob("*_model_states.pt")
    content = torch.load(path, weights_only=False)
    weight = next(iter(content["module"].values()))
    bits = weight.detach().view(-1).view(torch.int32)
    bits[0] ^= 1
    torch.save(content, path)
    assert_all(load(tmp_path / "out", 3, stage, source), saved)


def test_a_layout_that_is_not_known_is_refused(sources: Sources, tmp_path: Path) -> None:
    """Half of the values are not where they are said to be: nobody trains with what happens to lie there."""
    made, _ = sources.get(2, 2)
    source = rewritten(made, tmp_path, param_slice_mappings=[{}, {}, {}])
    with pytest.raises(AssertionError, match=r"cannot be loaded by another number of ranks .* must be converted"):
        load(tmp_path / "out", 1, 2, source)


def test_one_that_was_saved_without_the_note(sources: Sources, tmp_path: Path) -> None:
    """By an earlier version of ours: whoever re-shards is ours, whatever a converter may know."""
    made, saved = sources.get(3, 2, optimizer="sgd")
    source = tmp_path / made.name
    shutil.copytree(made, source)
    for path in source.glob("*_model_states.pt"):
        content = torch.load(path, weights_only=False)
        del content[OPTIMIZER_NOTE]
        torch.save(content, path)
    assert_all(load(tmp_path / "out", 3, 3, source, optimizer="sgd"), saved)
    with pytest.raises(EnvironmentFailed, match="knows only Adam's moments; use ZeRO-2, or save and load with"):
        open_source(source)


def in_8_bits(group: int, state: dict[str, Any]) -> None:
    state["absmax1"] = torch.ones(1)


def of_other_names(group: int, state: dict[str, Any]) -> None:
    state["state1"], state["state2"] = state.pop("exp_avg"), state.pop("exp_avg_sq")


def of_two_kinds(group: int, state: dict[str, Any]) -> None:
    if group == 1:
        state["momentum_buffer"] = state.pop("exp_avg")
        del state["exp_avg_sq"]


def with_a_number(group: int, state: dict[str, Any]) -> None:
    state["mu_product"] = torch.tensor(0.9)  # NAdam's


def with_a_number_of_its_rank(rank: int, state: dict[str, Any]) -> None:
    state["mu_product"] = 0.5 + rank


def without_one(group: int, state: dict[str, Any]) -> None:
    del state["exp_avg_sq"]


@pytest.mark.parametrize(
    ("change", "ours", "message"),
    [
        (with_a_number, False, "counts mu_product besides its step"),
        (with_a_number_of_its_rank, True, "mu_product is another number on rank 1 than on rank 0"),
        (in_8_bits, True, "absmax1 is not one value for each weight"),
        (of_other_names, False, "gathers state1, state2, not Adam's moments"),
        (of_two_kinds, True, "gathers other states for group 1"),
        (without_one, True, "gathers exp_avg, not Adam's moments"),
    ],
)
def test_what_other_optimizers_gather_is_no_damage(
    sources: Sources, tmp_path: Path, change: Callable[[int, dict[str, Any]], None], ours: bool, message: str
) -> None:
    """Nobody can deal it out, and the checkpoint is kept for as many ranks as saved it.

    What our own loader would take, a script that does not have it cannot: its checkpoints lack our note.
    """
    made, _ = sources.get(2, 2)
    source = tmp_path / made.name
    shutil.copytree(made, source)
    for path in source.glob("*_optim_states.pt"):
        content = torch.load(path, weights_only=False)
        for group, state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].items():
            change(int(path.name.split("_rank_")[1][0]) if change is with_a_number_of_its_rank else group, state)
        torch.save(content, path)
    if not ours:
        model = next(source.glob("*_model_states.pt"))
        content = torch.load(model, weights_only=False)
        del content[OPTIMIZER_NOTE]
        torch.save(content, model)
    with pytest.raises(EnvironmentFailed, match=message):
        open_source(source)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_another_model_is_refused(sources: Sources, tmp_path: Path, stage: int) -> None:
    """With a parameter that was not saved, and without one that was: DeepSpeed's ZeRO-3 takes no notice of that."""
    (plain, _), (more, _) = sources.get(stage, 2), sources.get(stage, 2, model="names")
    with pytest.raises(AssertionError, match="the model has a parameter that was not saved"):
        load(tmp_path / "out", 1, stage, plain, model="names")
    with pytest.raises(AssertionError, match=r"another model's: this one has no|Unexpected key"):
        load(tmp_path / "out", 1, stage, more)
