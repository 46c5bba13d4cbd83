"""What an engine saves, when somebody else writes it: in the background, from a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.elastic import background
from dalsegno.elastic.saving.background_save import in_background
from tests.support.workers.zero_runs import STEPS, run_worker

pytestmark = pytest.mark.timeout(120)

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
OFFLOAD = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}
# A record begins at a multiple of 64 bytes, and its name is not the same in both files.
ALIGNMENT = 64
KINDS: list[Any] = [
    (1, {}),
    (3, {}),
    *(pytest.param(*kind, marks=pytest.mark.full) for kind in ((0, {}), (2, BF16), (2, FP16), (3, BF16), (3, OFFLOAD))),
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, in the order of its indices; numpy knows no bfloat16."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same(one: Any, other: Any) -> bool:
    """Bit by bit, and of the same types in the same order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        return alike and torch.equal(bits(one), bits(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or vars(one) == vars(other)


@pytest.mark.parametrize(("stage", "config"), KINDS)
def test_the_files_are_those_that_the_engine_writes(tmp_path: Path, stage: int, config: dict[str, Any]) -> None:
    """As of the step at which they were copied, though the engine has made another one before they were written."""
    engines, beside = tmp_path / "engines", tmp_path / "beside"
    beside.mkdir()
    task = {"stage": stage, "steps": STEPS, "config": config, "out": str(tmp_path)}
    results = run_worker(2, {**task, "save": str(engines), "beside": str(beside)})
    assert [result["waits"] for result in results] == [[], []]  # no rank stands still for another one
    names = sorted(path.name for path in engines.iterdir())
    assert sorted(path.name for path in beside.iterdir()) == names
    assert len(names) >= (1 if stage == 0 else 3)
    for name in names:
        one, other = (torch.load(path / name, weights_only=False) for path in (engines, beside))
        assert same(one, other), name
        # Empty tensors share a record.
        assert (beside / name).stat().st_size <= (engines / name).stat().st_size + ALIGNMENT


class Writes:
    """A save whose framework writes by itself."""

    why_no_files = "its framework writes by itself"

    def __call__(self, path: Path) -> None:
        """Writes."""

    def files(self) -> dict[str, Any]:
        raise AssertionError("nobody asks for them")


def test_who_writes_by_itself_is_not_asked_for_files() -> None:
    """One line where the script wants it in the background; in memory it is called as on the disk."""
    with pytest.raises(ValueError, match="not in the background: its framework writes by itself"):
        background(Writes())
    writes = Writes()
    assert in_background(writes) is writes
