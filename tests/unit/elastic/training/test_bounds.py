"""A run that is already beyond the end that the script gives it: it is refused, and not called finished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic import Batches, BatchPlan, ElasticSampler
from dalsegno.elastic.rank.agreement import Refusal
from dalsegno.elastic.training.session import BareSession
from tests.unit.elastic.checkpoint.test_best import start

LENGTH, SIZE = 10, 4


def batches(session: BareSession, data_epochs: int | None = None, *, drop_last: bool = False) -> Batches[Any]:
    sampler, plan = ElasticSampler(LENGTH, SIZE, drop_last=drop_last), BatchPlan(SIZE, 1, SIZE)
    return Batches(list(range(LENGTH)), sampler, plan, 0, resume=session.resume, data_epochs=data_epochs)


def train(directory: Path, max_steps: int | None, data_epochs: int | None = None, **options: Any) -> tuple[int, int]:
    """Trains to the end. Returns the steps that were made now, and where the run stands."""
    with start(directory) as session:
        before = session.step
        for batch in session.steps(
            batches(session, data_epochs, **options), max_steps=max_steps, save=lambda path: None, save_every=1
        ):
            list(batch.micro_batches)
        return session.step - before, session.step


def finished_at(directory: Path) -> int:
    return int(json.loads((directory / "FINISHED.json").read_text())["step"])


def test_a_run_beyond_the_scripts_last_step_is_refused(tmp_path: Path) -> None:
    """A typo in the number of steps called it finished, and under a master nothing could go on with it."""
    assert train(tmp_path, 5) == (5, 5)
    line = r"^the run is at step 5, and the script wants 2 steps: give at least 5, or "
    with start(tmp_path) as session:
        with pytest.raises(Refusal, match=line):
            session.steps(batches(session), max_steps=2, save=lambda path: None)
        assert not session.meetings.over
    with pytest.raises(Refusal, match=line):
        train(tmp_path, 2)
    assert finished_at(tmp_path) == 5
    assert train(tmp_path, 5) == (0, 5), "as many are the end"
    assert train(tmp_path, 0) == (0, 5), "it is only evaluated"
    assert train(tmp_path, 7) == (2, 7)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_run_beyond_the_scripts_last_data_epoch_is_refused(tmp_path: Path, drop_last: bool) -> None:
    """In the middle of one or at its end; the end of the last one that is wanted is the end."""
    (steps, _) = train(tmp_path, None, 1, drop_last=drop_last)
    assert steps == (2 if drop_last else 3)
    assert train(tmp_path, None, 1, drop_last=drop_last) == (0, steps)
    assert train(tmp_path, steps + 1, drop_last=drop_last) == (1, steps + 1)
    line = rf"^the run is at step {steps + 1}, in data epoch 2, and data_epochs is 1: give at least 2, or "
    with pytest.raises(Refusal, match=line):
        train(tmp_path, None, 1, drop_last=drop_last)
    assert train(tmp_path, None, 2, drop_last=drop_last) == (steps - 1, 2 * steps)
    with pytest.raises(Refusal, match=r"another checkpoint_dir$"):
        train(tmp_path, None, 1, drop_last=drop_last)
