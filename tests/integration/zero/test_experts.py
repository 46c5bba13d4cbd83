"""A mixture of experts of DeepSpeed's by `s.engine`: what it saves it goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers.zero_runs import run_world

pytestmark = pytest.mark.timeout(300)
WORKER = Path(__file__).resolve().parents[2] / "support" / "workers" / "experts_worker.py"


def run(directory: Path, stage: int, steps: int, name: str) -> Any:
    out = directory / f"{name}-{steps}.json"
    words = [str(WORKER), str(stage), str(steps), str(directory / name), str(out)]
    (done,) = run_world(1, words)
    code, output = done
    assert code == 0, output
    return json.loads(out.read_text())


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_goes_on_from_what_it_saved(tmp_path: Path, stage: int) -> None:
    """Its weights are those of a run that was never interrupted."""
    assert run(tmp_path, stage, 3, "twice")["step"] == 3
    again, once = run(tmp_path, stage, 6, "twice"), run(tmp_path, stage, 6, "once")
    assert again["step"] == once["step"] == 6
    assert again["weights"] == pytest.approx(once["weights"], rel=1e-5)
