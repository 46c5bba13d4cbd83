"""Steps that are counted where the agent finds them: exact, whatever became of the process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from dalsegno.agent.workers.step_counts import take_step_count
from dalsegno.elastic.rank.exchange import Boundary
from dalsegno.elastic.rank.identity import Identity
from dalsegno.elastic.rank.reports import Reports
from dalsegno.elastic.rank.step_count import StepCount, count_steps
from dalsegno.protos.contract import step_count_name
from tests.support.workers.fake_link import FakeLink

pytestmark = pytest.mark.timeout(60)


def test_every_step_is_counted_however_few_are_told(tmp_path: Path) -> None:
    """Of a hundred quick ones the agent hears of a few, and finds the last."""
    agent = FakeLink()
    reports = Reports(agent, StepCount(str(tmp_path / "agent.sock"), 3, 1, 20))  # type: ignore[arg-type]
    for step in range(21, 121):
        reports.step(Boundary(step), 0.001)
    assert len(agent.said) < 100
    assert take_step_count(tmp_path, 3, 1) == 120
    assert take_step_count(tmp_path, 3, 1) is None


def test_it_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    """Nothing has to be written at the end."""
    child = os.fork()
    if child == 0:
        count = StepCount(str(tmp_path / "agent.sock"), 1, 0, 0)
        for step in range(1, 12):
            count.set(step)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert take_step_count(tmp_path, 1, 0) == 11


def test_a_rank_that_made_no_step_has_counted_that(tmp_path: Path) -> None:
    """It stands where it began."""
    count_steps(Identity(rank=2, epoch=4, socket=str(tmp_path / "agent.sock")), 7)
    assert take_step_count(tmp_path, 4, 2) == 7


def test_without_an_agent_nothing_is_counted() -> None:
    """Nobody would look."""
    assert count_steps(Identity(), 7) is None


def test_where_it_cannot_be_counted_training_goes_on(tmp_path: Path) -> None:
    """The directory is gone, or full."""
    StepCount(str(tmp_path / "nothing" / "agent.sock"), 1, 0, 0).set(1)
    assert take_step_count(tmp_path / "nothing", 1, 0) is None


@pytest.mark.parametrize("content", [b"", b"1234567", b"123456789", b"\xff" * 8])
def test_nonsense_is_no_count(tmp_path: Path, content: bytes) -> None:
    """A script can write what it likes there."""
    (tmp_path / step_count_name(1, 0)).write_bytes(content)
    assert take_step_count(tmp_path, 1, 0) is None


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """Only a file of the worker's counts."""
    (tmp_path / "else").write_bytes(bytes(8))
    (tmp_path / step_count_name(1, 0)).symlink_to(tmp_path / "else")
    assert take_step_count(tmp_path, 1, 0) is None


def test_a_count_costs_next_to_nothing(tmp_path: Path) -> None:
    """No system call: far below what a step takes, also on a busy machine."""
    count, began = StepCount(str(tmp_path / "agent.sock"), 1, 0, 0), time.perf_counter()
    for step in range(10_000):
        count.set(step)
    assert time.perf_counter() - began < 1.0
