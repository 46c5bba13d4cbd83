"""`s.engine` with parts of the script's own, and with weights that go on under another optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers.zero_runs import run_world

pytestmark = pytest.mark.timeout(300)
WORKER = Path(__file__).resolve().parents[2] / "support" / "workers" / "beside_worker.py"


class Runs:
    """Starts of one run, one after the other."""

    def __init__(self, directory: Path, stage: int, *, half: bool = False) -> None:
        self._directory, self._stage, self._half = directory, stage, half
        self._starts = 0

    def start(self, ranks: int, optimizer: str, steps: int, *, alone: bool = False) -> dict[str, Any]:
        """What rank 0 found; the others found the same."""
        code, output, out = self.attempt(ranks, optimizer, steps, alone=alone)
        assert code == 0, output
        found = [json.loads((out / f"result-{rank}.json").read_text()) for rank in range(ranks)]
        assert all(one == found[0] for one in found)
        return {**found[0], "output": output}

    def attempt(self, ranks: int, optimizer: str, steps: int, *, alone: bool = False) -> tuple[int, str, Path]:
        self._starts += 1
        out = self._directory / f"out-{self._starts}"
        out.mkdir()
        words = [self._stage, optimizer, steps, int(alone), int(self._half), self._directory / "checkpoints", out]
        done = run_world(ranks, [str(WORKER), *map(str, words)])
        return max(abs(code) for code, _ in done), "\n".join(output for _, output in done), out


def assert_goes_on(before: dict[str, Any], after: dict[str, Any], *, step: int) -> None:
    """Weights and parts are those with which the run had ended."""
    assert after["began"] == {**before["ended"], "step": step}


@pytest.mark.parametrize(
    ("stage", "half"),
    [
        (1, False),
        *(pytest.param(stage, half, marks=pytest.mark.full) for stage in (0, 1, 2, 3) for half in (False, True)),
    ],
)
def test_another_optimizer_takes_the_weights_along(tmp_path: Path, stage: int, half: bool) -> None:
    """Exactly, in a world of another size; its own states are loaded from then on, although the flag is still there."""
    runs = Runs(tmp_path, stage, half=half)
    first = runs.start(2, "adamw", 4)
    second = runs.start(3, "sgd", 6, alone=True)
    assert second["began"]["weights"] == first["ended"]["weights"]
    assert second["began"]["step"] == 4
    assert second["began"]["average"] == [0.0, 0.0], "the parts begin anew"
    assert "only the weights are loaded" in second["output"]
    third = runs.start(2, "sgd", 8, alone=True)
    assert_goes_on(second, third, step=6)
    assert "only the weights are loaded" not in third["output"]
    whole = Runs(tmp_path / "whole", stage, half=half)
    (tmp_path / "whole").mkdir()
    whole.start(2, "adamw", 4)
    undisturbed = whole.start(2, "sgd", 8, alone=True)
    tolerance = 0.02 if half else 1e-5
    assert [*second["losses"], *third["losses"]] == pytest.approx(undisturbed["losses"], rel=tolerance)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_parts_follow_the_engine(tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 saves them, and every rank of any world loads them; a run with other parts is refused."""
    runs = Runs(tmp_path, stage)
    first = runs.start(2, "adamw", 4)
    assert first["ended"]["average"][1] == pytest.approx(1 - 0.9**4)
    second = runs.start(2, "adamw", 6)
    assert_goes_on(first, second, step=4)
    third = runs.start(3, "adamw", 8)
    assert_goes_on(second, third, step=6)
    with monkeypatch.context() as patch:
        patch.setenv("BESIDE_NAME", "ema")
        code, output, _ = runs.attempt(2, "adamw", 10)
        assert code != 0
        assert "was saved with average Average, this training has ema Average" in output
    whole = Runs(tmp_path / "whole", stage)
    (tmp_path / "whole").mkdir()
    undisturbed = whole.start(2, "adamw", 8)["losses"]
    assert [*first["losses"], *second["losses"], *third["losses"]] == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "before", "after"),
    [
        (1, "", "frozen"),
        (3, "", "frozen"),
        *(
            pytest.param(stage, before, after, marks=pytest.mark.full)
            for stage in (0, 1, 2, 3)
            for before, after in (("", "frozen"), ("frozen", ""), ("", "left"))
            if (stage, after) not in ((1, "frozen"), (3, "frozen"))
        ),
    ],
)
def test_weights_go_on_whichever_are_trained_now(
    tmp_path: Path, stage: int, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a layer that is frozen from now on, or trained from now on, or no optimizer's."""
    runs = Runs(tmp_path, stage)
    monkeypatch.setenv("BESIDE_FIRST", before)
    first = runs.start(2, "adamw", 4)
    monkeypatch.setenv("BESIDE_FIRST", after)
    monkeypatch.setenv("BESIDE_SEED", "4")
    second = runs.start(3, "sgd", 4 if after == "left" else 6, alone=True)
    assert second["began"]["weights"] == first["ended"]["weights"]


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_weights_of_another_model_are_refused(tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with another name would keep the script's first values, and one of another shape shuffled ones."""
    runs = Runs(tmp_path, stage)
    runs.start(2, "adamw", 4)
    turned = "0.weight was saved with shape (5, 7), the model's has (7, 5)" if stage else "is of another model: "
    renamed = "the checkpoint is of another model: none of its 4 names (0.bias, 0.weight"
    grown = "the checkpoint is of another model: 3.bias, 3.weight only in the model"
    for first, words in (("renamed", renamed), ("turned", turned), ("grown", grown)):
        monkeypatch.setenv("BESIDE_FIRST", first)
        code, output, _ = runs.attempt(2, "sgd", 6, alone=True)
        assert code != 0
        assert words in output
