"""What people are told of a run's steps: what was heard, counted, or can at least be."""

from __future__ import annotations

import math

import pytest

from dalsegno.agent.commands.status import status_lines
from dalsegno.master.brain.announcements import SESSION_WITHIN_SECONDS
from dalsegno.master.brain.shown import status
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings


def shown(job: Driven) -> list[str]:
    """What `dalsegno status` prints."""
    return status_lines(status(job.state, job.now))


def crashed(job: Driven) -> list[Node]:
    """Two nodes have told of step 7, with step 4 committed, when a worker of the second one ends."""
    a, b = job.start(2)
    for step in (4, 7):
        a.step(step)
        b.step(step)
        if step == 4:
            a.save(4)
    b.failed(step=7)
    return [a, b]


def begun_anew(job: Driven) -> Node:
    """All nodes are gone, and another one goes on."""
    job.wait(8)
    new = job.node()
    for _ in range(10):
        if new.order in ("gather", "wait"):
            new.join()
        if new.lease:
            new.convert()
        job.wait(2)
    assert new.order == "run"
    return new


@pytest.mark.parametrize("counted", [True, False])
def test_a_world_that_makes_no_step_is_part_of_the_pause(counted: bool) -> None:
    """It ended before its first one: what the change cost is all since the last step, and all steps since the start."""
    job = Driven()
    a, b = crashed(job)
    a.made = b.made = (1, 7) if counted else None
    all_join([a, b])
    assert job.epoch == 2
    job.wait(5)
    b.failed()
    a.made = b.made = (2, 4)
    all_join([a, b])
    job.wait(3)  # The script has failed twice in a row.
    assert job.epoch == 3
    a.step(5)
    assert f"resumed at step 4, paused 8.0 s, lost {'' if counted else 'at least '}3 steps" in job.notices


# ---- steps that a change has cost -----------------------------------------------------------------------------------


def test_steps_that_were_counted_behind_the_end_are_exact() -> None:
    """Steps of milliseconds are told of now and then only: the Joins have the last ones, of any node."""
    job = Driven()
    a, b = crashed(job)
    a.made = (1, 31)
    all_join([a, b])
    a.step(5)
    assert "resumed at step 4, paused 0.0 s, lost 27 steps" in job.notices
    assert "lost 27 steps" in shown(job)[-1]


def test_where_nobody_has_counted_they_are_the_least_that_it_can_be() -> None:
    """All nodes were killed at once: nobody is left who could tell."""
    job = Driven()
    crashed(job)
    for node in job.nodes:
        node.hang_up()
    begun_anew(job).step(5)
    assert "lost at least 3 steps" in job.notices
    assert "lost at least 3 steps" in shown(job)[-1]


def test_not_even_that_may_be_known() -> None:
    """The last that was heard is what was saved."""
    job = Driven()
    (a,) = job.start(1)
    a.step(4)
    a.save(4)
    a.hang_up()
    begun_anew(job).step(5)
    assert "lost an unknown number of steps" in job.notices


def test_a_boundary_that_an_earlier_master_heard_of_is_no_count() -> None:
    """It was neither recorded nor held, and who could tell is gone."""
    job = Driven()
    a, b = job.start(2)
    a.step(4)
    a.save(4)
    a.step(7)
    b.leave()
    b.drained(7)
    b.goodbye()
    job.restart()
    a.hang_up()
    begun_anew(job).step(5)
    assert "lost an unknown number of steps" in job.notices


def test_a_boundary_is_exact_without_a_count() -> None:
    """A planned change: what the ranks drained at is what they made."""
    job = Driven()
    a, b = job.start(2)
    a.step(1)
    b.leave()
    a.step(2, draining=True)
    a.save(2)
    for node in (a, b):
        node.made = None
        node.drained(2)
    b.hang_up()
    a.join()
    if a.lease:
        a.convert()
    a.step(3)
    assert "lost 0 steps" in job.notices


def test_a_late_count_of_another_epoch_is_not_the_last_worlds() -> None:
    """Its ranks ended before."""
    job = Driven()
    a, b = crashed(job)
    request = a.joining(epoch=0)
    request.last_step = 99
    job.call(request)
    assert not job.state.live.gathering.counted
    b.join()
    a.step(5)
    assert "lost 3 steps" in job.notices


# ---- the status -----------------------------------------------------------------------------------------------------


def test_the_status_of_a_script_that_nobody_hears_has_no_numbers() -> None:
    """Neither steps nor a loss, nor what its beginning cost."""
    job = Driven(settings(max_restarts=3))
    (a,) = job.start(1)
    assert "epoch 1, no steps heard" in shown(job)[0]
    job.wait(SESSION_WITHIN_SECONDS + 1)
    first, _, last = shown(job)
    assert first.endswith("epoch 1, no steps heard")
    assert last.endswith("1 node, no steps heard")
    a.save(12)
    a.failed("out of memory")
    a.join()
    assert "epoch 2, resumed at step 12, no steps heard since" in shown(job)[0]
    assert "loss" not in shown(job)[0]


def test_what_is_heard_is_shown() -> None:
    """With its loss, where the script tells one."""
    job = Driven()
    (a,) = job.start(1)
    a.step(1)
    job.note(control_pb2.ProgressRequest(caller=a.caller(number=0), step=2, loss=0.5, has_session=True))
    assert shown(job)[0].endswith("epoch 1, step 2, loss 0.5000")
    assert shown(job)[-1].endswith("steps 1 to now, paused 0.0 s, lost 0 steps")
    job.note(control_pb2.ProgressRequest(caller=a.caller(number=0), step=3, loss=math.nan, has_session=True))
    assert shown(job)[0].endswith("epoch 1, step 3")


@pytest.mark.parametrize("restarted", [False, True])
def test_a_loss_is_not_made_up(restarted: bool) -> None:
    """A new master has heard of none yet."""
    job = Driven()
    (a,) = job.start(1)
    job.note(control_pb2.ProgressRequest(caller=a.caller(number=0), step=2, loss=0.5, has_session=True))
    if restarted:
        job.restart()
    assert ("loss 0.5000" in shown(job)[0]) is not restarted
    assert "loss 0.0000" not in shown(job)[0]
