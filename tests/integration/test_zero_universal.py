"""ZeRO checkpoints change the world size through universal files, with nothing lost: real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.elastic.universal import convert
from tests.support.zero_runs import STATES, Held, read_held, run_worker, seal_sharded

STEPS, MORE = 3, 4
GROUPS = [(0.01, 0.1), (0.02, 0.0), (0.03, 0.0)]
DIAGONAL = [(1, 2, 3), (1, 4, 1), (2, 3, 2), (2, 1, 4), (3, 2, 3), (3, 4, 1)]
FULL = [(stage, old, new) for stage in (1, 2, 3) for old in (1, 2, 3, 4) for new in (1, 2, 3, 4)]

pytestmark = pytest.mark.timeout(300)


class Sources:
    """Sealed checkpoints after ``STEPS`` steps, one for each (stage, world size), made when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[tuple[int, int], tuple[Path, Held]] = {}

    def get(self, stage: int, world: int) -> tuple[Path, Held]:
        if (stage, world) not in self._made:
            directory = self._root / f"zero{stage}-world{world}"
            path = directory / f"step-{STEPS}.e1.0"
            run_worker(world, {"stage": stage, "steps": STEPS, "save": str(path), "out": str(directory)})
            seal_sharded(path, stage=stage, world=world, step=STEPS)
            self._made[stage, world] = path, read_held(directory, "saved", world)
        return self._made[stage, world]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(tmp_path_factory.mktemp("sources"))


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
        for state in STATES:
            assert torch.equal(loaded.states[name][state], states[state]), f"{name}/{state}"
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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_same_world_resumes_without_converting(
    sources: Sources, undisturbed: list[float], tmp_path: Path, stage: int
) -> None:
    source, saved = sources.get(stage, 2)
    loaded, losses = resumed(tmp_path / "out", 2, stage, load=str(source), form="sharded")
    assert_same(loaded, saved)
    assert losses == pytest.approx(undisturbed[STEPS:], rel=1e-5)
