"""As many ranks as saved them load the shards: bit by bit the run that was not interrupted, in every precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.workers.zero_runs import STEPS, Sources, read_held, run_worker

from .test_equality import BF16, CASES, FP16
from .test_restore import assert_values

pytestmark = pytest.mark.timeout(300)

MORE, WORLD = 3, 2
OTHER = "zero1-bf16-gradients-in-fp32"  # another optimizer of DeepSpeed's
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": BF16, "fp16": FP16, OTHER: CASES[OTHER]["config"]}
DEFAULT = [(3, "bf16"), (2, "fp16"), (1, OTHER)]
CELLS = [*DEFAULT, *((s, p) for s in (1, 2, 3) for p in ("fp32", "bf16", "fp16") if (s, p) not in DEFAULT)]


@pytest.mark.parametrize(
    ("stage", "precision"),
    [pytest.param(*cell, marks=() if cell in DEFAULT else pytest.mark.full) for cell in CELLS],
)
def test_same_world_goes_on_bit_for_bit(sources: Sources, tmp_path: Path, stage: int, precision: str) -> None:
    """Losses, weights, fp32 masters, moments, and the loss scale with what it counts."""
    config = PRECISIONS[precision]
    task = {"stage": stage, "config": config, "save": str(tmp_path / "end")}
    whole = run_worker(WORLD, {**task, "steps": STEPS + MORE, "out": str(tmp_path / "whole")})
    source, before = sources.get(stage, WORLD, config=config)
    resume = {"load": str(source), "form": "sharded", "step": STEPS}
    again = run_worker(WORLD, {**task, **resume, "steps": MORE, "out": str(tmp_path / "again")})
    assert again[0]["losses"] == whole[0]["losses"][STEPS:]
    loaded = read_held(tmp_path / "again", "loaded", WORLD)
    ours, others = (read_held(tmp_path / which, "saved", WORLD) for which in ("again", "whole"))
    assert_values(loaded, before)
    assert_values(ours, others)
    scales = [held.ranks[0]["loss_scale"] for held in (before, loaded, ours, others)]
    assert scales[1] == scales[0]
    assert scales[3] == scales[2]
    if precision == "fp16":
        assert scales[0]["cur_scale"] > 16.0, "it has grown before the checkpoint"
        assert scales[2]["cur_scale"] > scales[1]["cur_scale"], "and goes on growing after it"
