"""What belongs together is made and dropped whole: nothing of a drain, a world, a run is there after it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.master.brain.invariants import InvariantBroken, check
from dalsegno.master.brain.live import Missing, RunLife
from dalsegno.master.brain.state import NextWorld, Phase
from tests.support.jobs.masters import Driven, Node, all_join, settings


def growing(**changes: object) -> tuple[Driven, list[Node]]:
    """Two nodes drain for a third."""
    job = Driven(settings(min_nodes=2, **changes))
    a, b = job.start(2)
    for node in (a, b):
        node.step(1)
    c = job.node()
    c.join()
    c.warm()
    assert job.phase is Phase.DRAINING
    return job, [a, b, c]


def test_a_growth_that_ended_with_the_job_is_over() -> None:
    """Nobody was left to form its world: the first one of the job that is taken up again has not grown."""
    job, (a, b, c) = growing(wait_for_nodes=30)
    saved = a.save(2)
    for node in (a, b):
        node.drained(2, digest=saved.ref.digest)
    assert job.job.grown
    for node in (a, b):
        node.hang_up()
    job.wait(60.0)
    assert (job.phase, job.job.next) == (Phase.FAILED, NextWorld())
    c.hang_up()
    others = [job.node() for _ in range(2)]
    all_join(others)
    job.wait(3.0)
    assert job.members == [node.name for node in others]
    assert job.job.world is not None
    assert not job.job.world.grown


def test_a_drain_goes_with_its_phase() -> None:
    """However that ends: the drain, and what this process knows of it."""
    job, (a, b, c) = growing()
    assert job.job.drain is not None
    assert job.state.live.epoch.drain is not None
    b.failed()
    assert (job.phase, job.job.drain, job.state.live.epoch.drain) == (Phase.FORMING, None, None)
    job, (a, b, c) = growing()
    c.hang_up()
    job.wait(2.0)
    assert (job.phase, job.job.drain, job.state.live.epoch.drain) == (Phase.RUNNING, None, None)
    job, (a, b, c) = growing()
    for node in (a, b):
        node.finished(2)
    assert (job.phase, job.job.drain, job.state.live.epoch.drain) == (Phase.SUCCEEDED, None, None)


def test_that_a_growth_was_put_off_is_forgotten_with_its_epoch() -> None:
    """In that one it is tried again with the next commit. A node that comes to the next one waits for a step alone."""
    job, (a, b, c) = growing()
    assert a.save_failed(2).code == "OK"
    for node in (a, b):
        node.step(3)
    assert job.phase is Phase.RUNNING, "put off until the next commit"
    b.failed()
    all_join([a, b, c])
    job.wait(2.0)
    assert (job.phase, len(job.members)) == (Phase.RUNNING, 3)
    d = job.node()
    d.join()
    d.warm()
    assert job.phase is Phase.RUNNING
    for node in (a, b, c):
        node.step(1)
    assert job.phase is Phase.DRAINING


def test_a_drain_has_its_deadline_under_the_next_master_too() -> None:
    """From then on, as every deadline."""
    job, _ = growing()
    job.restart()
    life = job.state.live.epoch.drain
    assert life is not None
    assert life.deadline == job.now + job.settings.drain_timeout


def test_an_event_that_is_set_aside_leaves_a_drain_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job goes back to before the event, and what this process knows of its drain fits."""
    job, (a, _, _) = growing()
    job.expects_faults = True
    with monkeypatch.context() as patch:
        patch.setattr("dalsegno.master.brain.brain.check", lambda state: 1 / 0)
        assert a.failed().code == "INTERNAL"
    assert job.phase is Phase.DRAINING
    assert job.job.drain is not None
    assert job.state.live.epoch.drain is not None
    job.wait(2.0)
    assert len(job.state.faults) == 1


def test_a_drain_without_its_life_is_no_state() -> None:
    """Nor is a life without a drain: one of them was forgotten."""
    job, _ = growing()
    check(job.state)
    life, job.state.live.epoch.drain = job.state.live.epoch.drain, None
    with pytest.raises(InvariantBroken, match="a drain without its life"):
        check(job.state)
    job.state.live.epoch.drain = life
    job.job.phase, job.job.drain = Phase.RUNNING, None
    with pytest.raises(InvariantBroken, match="a drain without its life"):
        check(job.state)


def test_a_hold_that_is_over_is_no_reason_any_more() -> None:
    """A spare is told why it is one now."""
    job = Driven(settings(max_nodes=2))
    for node in job.start(2):
        node.step(1)
    spare = job.node()
    spare.join()
    job.job.holds[spare.name], job.state.live.held_until[spare.name] = 30.0, job.now + 30.0
    job.wait(29.0)
    assert "lost too often lately" in spare.directive.wait.reason
    job.wait(2.0)
    assert spare.directive.wait.reason == f"{spare.name} is a spare: the world has 2 nodes"
    assert (job.job.holds, job.state.live.held_until) == ({}, {})


def test_what_waiting_lacks_is_told_while_it_waits() -> None:
    """And no longer."""
    job = Driven(settings(min_nodes=2))
    a = job.node()
    assert "2 needed" in job.state.live.missing.text
    b = job.node()
    all_join([a, b])
    job.wait(2.0)
    assert job.state.live.missing == Missing()


def test_the_next_run_knows_nothing_of_the_last_one() -> None:
    """Of the job's counters only those go on that name things."""
    job, (a, b, c) = growing()
    for node in (a, b):
        node.finished(2)
    for node in (a, b, c):
        node.hang_up()
    job.node(new_run=True)
    run = job.job.run
    assert run == replace(type(run)(), number=2, begun_anew=True)
    assert (job.job.opened, job.job.history, len(job.job.checkpoints)) == (None, (), 0)
    assert job.job.next.quiet
    assert job.state.live.run == RunLife()
