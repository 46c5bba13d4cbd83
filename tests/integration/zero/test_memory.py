"""The converter's memory follows its setting, and neither the model nor its largest parameter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.checkpoints.shards import write_shards
from tests.support.workers.ranks import Rank
from tests.support.workers.zero_runs import worker_environment

MEASURED = Path(__file__).parents[2] / "support" / "checkpoints" / "measured_converter.py"
MIB = 1 << 20
# What Python, torch and the journal need besides: pickles, paths, threads' stacks.
SLACK = 24 * MIB

pytestmark = pytest.mark.timeout(180)


def growth(source: Path, target: Path, memory: int, *more: str) -> int:
    """Bytes of the process's memory at its peak that it did not have before it began, mapped files included."""
    flags = ["--anywhere", "--threads", "2", "--memory", str(memory), *more]
    command = [str(MEASURED), "--source", str(source), "--target", str(target), *flags]
    converter = Rank(command, worker_environment())
    try:
        code, output = converter.wait(120)
    finally:
        converter.close()
    assert code == 0, output
    found = re.search(r"grew by (-?\d+)", output)
    assert found is not None, output
    return int(found[1])


@pytest.mark.parametrize(
    ("stage", "layers"),
    [(2, 1), pytest.param(2, 32, marks=pytest.mark.full), pytest.param(3, 1, marks=pytest.mark.full)],
)
def test_memory_does_not_follow_the_model(tmp_path: Path, stage: int, layers: int) -> None:
    """A quarter of a gigabyte in one parameter or in many: each file of it alone is larger than what may be taken."""
    numel = 20 * MIB // layers
    write_shards(tmp_path / "source", {f"layer{number}": (numel,) for number in range(layers)}, stage=stage)
    assert sum(path.stat().st_size for path in (tmp_path / "source").iterdir()) > 240 * MIB
    assert growth(tmp_path / "source", tmp_path / "target", 4 * MIB) < 4 * MIB + SLACK


@pytest.mark.full
def test_memory_follows_the_setting(tmp_path: Path) -> None:
    """What is given is used, so the setting is one."""
    write_shards(tmp_path / "source", {"large": (16 * MIB,)})
    little, much = (growth(tmp_path / "source", tmp_path / str(m), m * MIB, "--no-latest") for m in (1, 16))
    assert little + 8 * MIB < much < 16 * MIB + SLACK
