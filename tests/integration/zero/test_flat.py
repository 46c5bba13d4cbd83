"""ZeRO without copies of what lies in a row, and what it trains bit by bit: real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.workers.zero_runs import STEPS, Sources, run_worker

from .test_reshard import SHARDS

pytestmark = pytest.mark.timeout(300)
CASES = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero1-odd-names": {"stage": 1, "model": "names"},
    "zero2-clipped": {"stage": 2, "config": {"gradient_clipping": 0.01}},
    "zero1-even": {"stage": 1, "model": "even"},
}
DEFAULT = ("zero1", "zero2")


def trained(out: Path, world: int, source: Path, task: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank holds three steps behind the load."""
    resume = {"load": str(source), "step": STEPS, **SHARDS}
    save = str(out / "step-6.e1.0")
    run_worker(world, {"steps": 3, "out": str(out), "save": save, **resume, **task})
    return [torch.load(out / f"saved-{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in DEFAULT else pytest.mark.full) for case in CASES]
)
def test_the_same_bits_with_and_without_copies(sources: Sources, tmp_path: Path, case: str, world: int) -> None:
    """Weights and moments of each rank, with sizes that no number of ranks divides."""
    task: dict[str, Any] = CASES[case]
    source, _ = sources.get(**{**task, "world": 3 - world})
    spared = trained(tmp_path / "spared", world, source, task)
    copied = trained(tmp_path / "copied", world, source, {**task, "copies": True})
    for one, other in zip(spared, copied, strict=True):
        assert one["parameters"].keys() == other["parameters"].keys()
        for name, states in other["parameters"].items():
            for state, (start, values) in states.items():
                assert one["parameters"][name][state][0] == start
                assert torch.equal(one["parameters"][name][state][1], values), f"{name}/{state}"
        for name, whole in other["module"].items():
            assert torch.equal(one["module"][name], whole), name
