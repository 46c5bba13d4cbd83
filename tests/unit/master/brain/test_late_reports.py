"""Reports that an outage held back say of which drain they speak: the next one is not theirs."""

from __future__ import annotations

import pytest

from dalsegno.master.brain.state import Phase
from tests.support.jobs.masters import Driven, Node, settings


def drained_for_a_newcomer(job: Driven) -> tuple[Node, Node, Node]:
    """Two members at step 4 and a warm newcomer, for whom they are to save and stop."""
    a, b = job.start(2)
    late = job.node()
    late.join()
    late.warm()
    for node in (a, b):
        node.step(4)
    assert job.phase is Phase.DRAINING
    return a, b, late


def test_a_late_report_of_a_failed_save_does_not_withdraw_the_next_growth() -> None:
    """Another node's report of the same boundary has withdrawn the one that it speaks of."""
    job = Driven()
    a, b, _ = drained_for_a_newcomer(job)
    a.save_failed(5)
    assert job.phase is Phase.RUNNING
    a.save(8)
    assert job.phase is Phase.DRAINING
    b.save_failed(5)
    assert job.phase is Phase.DRAINING
    b.save_failed(9)
    assert job.phase is Phase.RUNNING


def test_a_failed_boundary_is_a_step_that_was_made() -> None:
    """A commit of an earlier step, as late as the report, begins the next growth: the boundary is behind that too."""
    job = Driven()
    a, b, _ = drained_for_a_newcomer(job)
    earlier = job.seal(3)
    a.save_failed(6)
    b.commit(earlier)
    assert job.phase is Phase.DRAINING
    b.save_failed(6)
    assert job.phase is Phase.DRAINING


def test_reports_over_an_outage_of_the_master_find_their_drain() -> None:
    """The record says after which step the drain began; the next one's master knows the last commit by it."""
    job = Driven()
    a, b, late = drained_for_a_newcomer(job)
    job.restart()
    for node in (a, b, late):
        node.beat()
    b.save_failed(3)
    assert job.phase is Phase.DRAINING
    a.save_failed(7)
    assert job.phase is Phase.RUNNING
    job.restart()
    for node in (a, b, late):
        node.beat()
    a.save(9)
    assert job.phase is Phase.RUNNING
    b.step(6)
    assert job.phase is Phase.DRAINING
    b.save_failed(7)
    assert job.phase is Phase.DRAINING


def test_a_late_word_that_the_ranks_have_agreed_does_not_bind_the_next_growth() -> None:
    """Otherwise one that they never hear of would end as a loss of steps instead of being put off."""
    job = Driven(settings(drain_timeout=5))
    a, _, _ = drained_for_a_newcomer(job)
    a.save_failed(5)
    a.save(8)
    assert job.phase is Phase.DRAINING
    a.step(5, draining=True)
    job.wait(6)
    assert job.phase is Phase.RUNNING


@pytest.mark.parametrize("step", [0, 9], ids=["an agent of an older version", "present"])
def test_a_report_of_the_present_drain_withdraws_it(step: int) -> None:
    """Older agents do not say the boundary."""
    job = Driven()
    a, _, _ = drained_for_a_newcomer(job)
    a.save_failed(step)
    assert job.phase is Phase.RUNNING


def test_a_failed_save_at_the_resume_point_makes_no_step() -> None:
    """What an older agent leaves out does not move the world's steps back below where it began."""
    job = Driven()
    a, b = job.start(2)
    a.save(4)
    a.failed()
    for node in (a, b):
        node.join()
    assert job.epoch == 2
    b.leave()
    b.save_failed()
    b.step(4)
    assert job.state.live.epoch.first_step_at is None
