"""ZeRO checkpoints change the world size through universal files, with nothing lost: real processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.elastic.universal import convert
from tests.support.workers.zero_runs import STEPS, Held, Sources, read_held, run_worker, seal_sharded

MORE = 4
GROUPS = [(0.01, 0.1), (0.02, 0.0), (0.03, 0.0)]
DIAGONAL = [(1, 2, 3), (2, 1, 4), (3, 2, 3), (3, 4, 1)]
FULL = [(stage, old, new) for stage in (1, 2, 3) for old in (1, 2, 3, 4) for new in (1, 2, 3, 4)]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run that nobody disturbed."""
    out = tmp_path_factory.mktemp("undisturbed")
    losses: list[float] = run_worker(1, {"stage": 1, "steps": STEPS + MORE, "out": str(out)})[0]["losses"]
    return losses


def resumed(out: Path, world: int, stage: int, **resume: Any) -> tuple[Held, list[float]]:
    task = {"stage": stage, "steps": MORE, "out": str(out), "step": STEPS, **resume}
    results = run_worker(world, task)
    return read_held(out, "loaded", world), results[0]["losses"]


def assert_same(loaded: Held, saved: Held) -> None:
    """Bitwise: weights, moments, buffers, frozen parameters; and every group's own hyperparameters and step."""
    for name, states in saved.states.items():
        assert set(loaded.states[name]) == set(states), name
        for state, value in states.items():
            assert torch.equal(loaded.states[name][state], value), f"{name}/{state}"
    reference = saved.ranks[0]
    for rank in loaded.ranks:
        for name, value in reference["module"].items():
            assert torch.equal(rank["module"][name], value), name
        for name, value in reference["buffers"].items():
            assert torch.equal(rank["buffers"][name], value), name
        assert [(group["lr"], group["weight_decay"]) for group in rank["hyper"]] == GROUPS
        assert set(rank["steps"]) == {float(STEPS)}
        assert rank["distinct_steps"], "parameter groups share one step"
        assert rank["global_steps"] == STEPS


def check_change(sources: Sources, undisturbed: list[float], tmp_path: Path, stage: int, old: int, new: int) -> None:
    source, saved = sources.get(stage, old)
    target = tmp_path / f"{source.name}.universal.1"
    convert(source, target)
    loaded, losses = resumed(tmp_path / "out", new, stage, load=str(source), form="universal", universal=str(target))
    assert_same(loaded, saved)
    assert losses == pytest.approx(undisturbed[STEPS:], rel=1e-5)


@pytest.mark.parametrize(("stage", "old", "new"), DIAGONAL)
def test_world_changes_through_universal_files(
    sources: Sources, undisturbed: list[float], tmp_path: Path, stage: int, old: int, new: int
) -> None:
    check_change(sources, undisturbed, tmp_path, stage, old, new)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "old", "new"), FULL)
def test_world_changes_through_universal_files_everywhere(
    sources: Sources, undisturbed: list[float], tmp_path: Path, stage: int, old: int, new: int
) -> None:
    check_change(sources, undisturbed, tmp_path, stage, old, new)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3])
def test_same_world_resumes_without_converting(
    sources: Sources, undisturbed: list[float], tmp_path: Path, stage: int
) -> None:
    source, saved = sources.get(stage, 2)
    loaded, losses = resumed(tmp_path / "out", 2, stage, load=str(source), form="sharded")
    assert_same(loaded, saved)
    assert losses == pytest.approx(undisturbed[STEPS:], rel=1e-5)


@pytest.mark.parametrize(("stage", "old", "new"), [pytest.param(1, 1, 2, marks=pytest.mark.full), (3, 2, 1)])
def test_world_changes_before_the_first_step(
    undisturbed: list[float], tmp_path: Path, stage: int, old: int, new: int
) -> None:
    """DeepSpeed's own converter fails here with KeyError at stage 3."""
    source = tmp_path / "step-0.e1.0"
    run_worker(old, {"stage": stage, "steps": 0, "save": str(source), "out": str(tmp_path)})
    seal_sharded(source, stage=stage, world=old, step=0)
    target = tmp_path / f"{source.name}.universal.1"
    convert(source, target)
    task = {"stage": stage, "steps": MORE, "out": str(tmp_path / "out"), "step": 0}
    results = run_worker(new, {**task, "load": str(source), "form": "universal", "universal": str(target)})
    assert results[0]["losses"] == pytest.approx(undisturbed[:MORE], rel=1e-5)


def test_stage_0_loads_at_another_world_size_as_it_is(undisturbed: list[float], tmp_path: Path) -> None:
    source = tmp_path / f"step-{STEPS}.e1.0"
    run_worker(2, {"stage": 0, "steps": STEPS, "save": str(source), "out": str(tmp_path)})
    task = {"stage": 0, "steps": MORE, "out": str(tmp_path / "out"), "step": STEPS}
    results = run_worker(1, {**task, "load": str(source), "form": "sharded"})
    assert results[0]["losses"] == pytest.approx(undisturbed[STEPS:], rel=1e-5)


def test_path_with_special_characters(sources: Sources, undisturbed: list[float], tmp_path: Path) -> None:
    """DeepSpeed's converter and its loader both trip over them: ``[`` hides files, ``+`` raises."""
    made, saved = sources.get(1, 2)
    parent = tmp_path / "job [a]+b*"
    source = parent / made.name
    shutil.copytree(made, source)
    target = parent / f"{source.name}.universal.1"
    convert(source, target)
    loaded, losses = resumed(tmp_path / "out", 1, 1, load=str(source), form="universal", universal=str(target))
    assert_same(loaded, saved)
    assert losses == pytest.approx(undisturbed[STEPS:], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_cannot_write_fails_alone_and_nobody_hangs(tmp_path: Path, stage: int) -> None:
    """The error comes out of ``write`` on that rank, after DeepSpeed's barriers; the others return."""
    task = {"stage": stage, "steps": 1, "save": str(tmp_path / "step-1.e1.0"), "out": str(tmp_path), "fail_rank": 1}
    results = run_worker(2, task)
    assert results[0]["save_error"] is None
    assert "no space" in results[1]["save_error"].lower()
