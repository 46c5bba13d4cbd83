"""Beyond data parallelism: DeepSpeed's own converter behind the same call, with its traps guarded. Real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.elastic.universal import EnvironmentFailed, convert, convert_directory
from tests.support.checkpoints.conversions import target_of
from tests.support.workers import zero_runs

pytestmark = pytest.mark.timeout(300)
WORKER = Path(zero_runs.__file__).with_name("parallel_worker.py")
STEPS, MORE = 2, 2


def run(world: int, task: dict[str, Any]) -> list[float]:
    losses: list[float] = zero_runs.run_worker(world, task, worker=WORKER)[0]["losses"]
    return losses


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one rank that nobody disturbed."""
    return run(1, {"kind": "data", "stage": 1, "steps": STEPS + MORE, "out": str(tmp_path_factory.mktemp("one"))})


def saved(tmp_path: Path, world: int, kind: str, stage: int) -> Path:
    source = tmp_path / f"step-{STEPS}.e1.0"
    run(world, {"kind": kind, "stage": stage, "steps": STEPS, "save": str(source), "out": str(tmp_path)})
    zero_runs.seal_sharded(source, stage=stage, world=world, step=STEPS)
    return source


CHANGES = [
    pytest.param("tensor", 1, 2, "data", 1, id="tensor"),
    pytest.param("tensor", 2, 4, "tensor", 2, id="tensor-4-2", marks=pytest.mark.full),
    pytest.param("tensor", 1, 2, "tensor", 4, id="tensor-2-4", marks=pytest.mark.full),
    pytest.param("tensor", 3, 2, "tensor", 2, id="tensor-zero3", marks=pytest.mark.full),
    pytest.param("pipeline", 1, 2, "pipeline", 4, id="pipeline", marks=pytest.mark.full),
    pytest.param("sequence", 2, 2, "data", 3, id="sequence", marks=pytest.mark.full),
    pytest.param("sequence", 3, 2, "sequence", 4, id="sequence-zero3", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("kind", "stage", "world", "then", "new"), CHANGES)
def test_the_curve_goes_on(
    undisturbed: list[float], tmp_path: Path, kind: str, stage: int, world: int, then: str, new: int
) -> None:
    """Through the same call as ever, into another number of ranks or another kind of parallelism."""
    source = saved(tmp_path, world, kind, stage)
    convert(source, target_of(source))
    resume = {"load": str(source), "universal": str(target_of(source)), "step": STEPS}
    losses = run(new, {"kind": then, "stage": stage, "steps": MORE, "out": str(tmp_path / "out"), **resume})
    if kind == "pipeline":  # which initialises its layers in an order of its own
        undisturbed = run(2, {"kind": kind, "stage": stage, "steps": STEPS + MORE, "out": str(tmp_path / "whole")})
    assert losses == pytest.approx(undisturbed[STEPS:], rel=1e-5)


@pytest.mark.full
def test_tensor_parallelism_that_nobody_described(tmp_path: Path) -> None:
    """DeepSpeed's converter glues the ranks' copies of one parameter together and says Done."""
    source = saved(tmp_path, 2, "tensor", 1)
    (source / "MANIFEST.json").unlink()
    for path in source.glob("*_model_states.pt"):
        content = torch.load(path, weights_only=False)
        content["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.4}
        torch.save(content, path)
    with pytest.raises(EnvironmentFailed, match="without a description of it"):
        convert_directory(source, tmp_path / "universal")
