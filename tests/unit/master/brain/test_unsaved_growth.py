"""Scripts with a session whose loop saves nothing: nobody loses steps so that others may come in, unless told so."""

from __future__ import annotations

import pytest

from dalsegno.master.brain.growing import GROW_WAIT_SECONDS
from dalsegno.master.brain.state import Phase
from tests.support.jobs.masters import Driven, Node, settings


def begun(job: Driven, step: int = 5) -> tuple[Node, Node]:
    """One that trains without saving, and one that has joined it."""
    (a,) = job.start(1)
    a.step(step, saves_nothing=True)
    late = job.node()
    late.join()
    late.warm()
    return a, late


def train(job: Driven, node: Node, first: int, seconds: int) -> int:
    """A step every ten seconds, so that nobody takes it for stuck. Returns the last one."""
    step = first
    for step in range(first, first + seconds // 10):
        job.wait(10)
        node.step(step, saves_nothing=True)
    return step


@pytest.mark.slow
def test_a_newcomer_waits_for_the_first_checkpoint() -> None:
    """However long that takes; one line says so, and what helps. With the commit it comes in at once."""
    job = Driven(settings(grow_wait=-1))
    a, late = begun(job)
    last = train(job, a, 6, 1000)
    assert job.phase is Phase.RUNNING
    (line,) = [one for one in job.notices.splitlines() if "joined: taken in with" in one]
    assert (
        f"{late.name} joined: taken in with the first checkpoint, because before that all steps would be lost" in line
    )
    assert "--grow-wait=SECONDS" in line
    assert "neither a state nor save=" in line
    a.save(last)
    assert job.phase is Phase.DRAINING


def test_a_set_time_counts() -> None:
    """Told so, it loses them."""
    job = Driven(settings(grow_wait=20))
    a, _ = begun(job)
    job.wait(15)
    a.step(6, saves_nothing=True)
    assert job.phase is Phase.RUNNING
    assert "or in 20 s from step 0 (--grow-wait)" in job.notices
    job.wait(10)
    assert job.phase is Phase.DRAINING


def test_where_something_could_be_resumed_the_next_checkpoint_is_waited_for() -> None:
    """As long as one may take."""
    job = Driven(settings(grow_wait=-1))
    (a,) = job.start(1)
    a.step(5, saves_nothing=True)
    a.save(5)
    job.wait(1)
    late = job.node()
    late.join()
    late.warm()
    train(job, a, 8, int(GROW_WAIT_SECONDS) - 10)
    assert job.phase is Phase.RUNNING
    assert f"with the next checkpoint, or in {GROW_WAIT_SECONDS:.0f} s from that of step 5 (--grow-wait)" in job.notices
    job.wait(11)
    assert job.phase is Phase.DRAINING


def test_a_leave_waits_for_nothing() -> None:
    """There the node goes in any case."""
    job = Driven()
    a, b = job.start(2)
    for node in (a, b):
        node.step(5, saves_nothing=True)
    b.leave()
    assert job.phase is Phase.DRAINING


def test_a_script_that_saves_takes_newcomers_in_at_once() -> None:
    job = Driven()
    (a,) = job.start(1)
    a.step(5)
    late = job.node()
    late.join()
    late.warm()
    assert job.phase is Phase.DRAINING
