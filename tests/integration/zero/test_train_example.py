"""``examples/train.py`` goes on at another world size as if nothing had happened: real processes, no agent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.workers.zero_runs import run_world, worker_environment

TRAIN = Path(__file__).parents[3] / "examples" / "train.py"
FIRST, ALL = 3, 6

pytestmark = [pytest.mark.timeout(300), pytest.mark.executed]


def train(world: int, directory: Path, stage: int, steps: int) -> list[dict[str, object]]:
    """Trains up to ``steps`` and returns rank 0's lines of the log, those of earlier calls included."""
    flags = ["--zero-stage", str(stage), "--steps", str(steps), "--save-every", "0", "--checkpoint-dir"]
    logs = directory / "log" / f"world-{world}"
    command = [str(TRAIN), *flags, str(directory / "checkpoints"), "--step-log", str(logs)]
    for rank, (code, output) in enumerate(run_world(world, command)):
        assert code == 0, f"rank {rank}: {code}\n{output}"
    return [json.loads(line) for line in (logs / "rank-0-epoch-0.jsonl").read_text().splitlines()]


def convert_newest(checkpoints: Path) -> None:
    source = checkpoints / json.loads((checkpoints / "latest.json").read_text())["name"]
    target = checkpoints / f"{source.name}.universal.1"
    command = [sys.executable, "-m", "dalsegno.elastic.universal", "--source", str(source), "--target", str(target)]
    subprocess.run(command, check=True, env=worker_environment(), timeout=120, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("stage", "old", "new"),
    [
        (1, 3, 2),
        pytest.param(0, 2, 3, marks=pytest.mark.full),
        pytest.param(2, 1, 3, marks=pytest.mark.full),
        pytest.param(3, 3, 1, marks=pytest.mark.full),
    ],
)
def test_losses_are_those_of_an_undisturbed_run(tmp_path: Path, stage: int, old: int, new: int) -> None:
    """A global batch of 16, which 3 does not divide; every sample in its step, and the same loss and gradient norm."""
    undisturbed = train(1, tmp_path / "undisturbed", 1, ALL)
    disturbed = tmp_path / "disturbed"
    lines = train(old, disturbed, stage, FIRST)
    if stage > 0:
        convert_newest(disturbed / "checkpoints")
    lines += train(new, disturbed, stage, ALL)
    assert [line["step"] for line in lines] == [line["step"] for line in undisturbed] == list(range(1, ALL + 1))
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in lines] == pytest.approx([line[key] for line in undisturbed], rel=1e-5)
    for world, first in ((old, 1), (new, FIRST + 1)):
        for line in undisturbed[first - 1 : FIRST if first == 1 else ALL]:
            assert samples(disturbed, world, line["step"]) == sorted(line["sample_ids"])  # type: ignore[call-overload]


def samples(directory: Path, world: int, step: object) -> list[int]:
    """What all ranks together consumed in a step."""
    found = []
    for path in (directory / "log" / f"world-{world}").glob("*.jsonl"):
        lines = map(json.loads, path.read_text().splitlines())
        found += [sample for line in lines if line["step"] == step for sample in line["sample_ids"]]
    return sorted(found)
