"""No wait of the master is silent for more than some seconds: what it waits for is said, and until when."""

from __future__ import annotations

import pytest

from dalsegno.master.brain.state import Phase
from dalsegno.master.brain.waits import SAID_AFTER_SECONDS
from tests.support.jobs.masters import Driven, Node, all_join, settings

SOON = SAID_AFTER_SECONDS + 1


def grown(**changes: float) -> tuple[Driven, Node, Node]:
    """One node trained, and another has joined it."""
    job = Driven(settings(**{"stall_timeout": 10_000.0, **changes}))
    (a,) = job.start(1)
    a.step(1)
    b = job.node()
    b.join()
    b.warm()
    assert job.phase is Phase.DRAINING
    a.drained(2)
    all_join([a, b])
    return job, a, b


def said(job: Driven, words: str) -> list[str]:
    return [line for line in job.notices.splitlines() if words in line]


@pytest.mark.parametrize("auto", [True, False])
def test_the_grow_interval_is_said_at_the_join(auto: bool) -> None:
    """How long it still lasts, and which flag sets it."""
    job, a, b = grown(grow_interval=-1.0 if auto else 50.0)
    job.wait(3.0)
    a.step(3)
    late = job.node()
    late.join()
    late.warm()
    (line,) = said(job, f"{late.name} joined: taken in when the last growth is long enough ago; at most")
    assert ("--grow-interval auto)" if auto else "at most 50 s (--grow-interval)") in line
    since = job.now
    while job.phase is Phase.RUNNING and job.now < since + 70:
        job.wait(1.0)
        a.step(int(job.now))
        b.step(int(job.now))
    assert job.phase is Phase.DRAINING


def test_a_newcomer_before_the_first_step_is_told_what_it_waits_for() -> None:
    """The others start, which may take long; each time that has doubled it is said again."""
    job = Driven(settings(stall_timeout=10_000.0))
    (a,) = job.start(1)
    a.step(0)
    late = job.node()
    late.join()
    assert not said(job, "taken in")
    job.wait(SOON)
    (line,) = said(job, f"{late.name} joined: taken in after the first step of epoch 1")
    job.wait(40)
    assert len(said(job, line)) == 4


def test_a_growth_that_was_put_off_says_when_it_is_tried_again() -> None:
    """With the next commit; and the newcomer is not left without a word."""
    job = Driven(settings(stall_timeout=10_000.0, drain_timeout=3.0))
    (a,) = job.start(1)
    a.step(1)
    late = job.node()
    late.join()
    late.warm()
    assert job.phase is Phase.DRAINING
    a.save_failed(2)
    assert job.phase is Phase.RUNNING
    (line,) = said(job, "growing is put off")
    assert "it is tried again with the next commit" in line
    job.wait(SOON)
    assert said(job, f"{late.name} joined: taken in with the next commit")


def test_a_long_quiet_time_is_said_at_once() -> None:
    """Who is here, who may come, and when the run starts without them."""
    job = Driven(settings(quiet_time=30.0))
    job.node().join()
    job.wait(0.5)
    (line,) = said(job, "1 node of at most 4 here: starting unless others come")
    assert "(--quiet-time)" in line
    job.wait(31)
    assert job.phase is Phase.RUNNING
    quick = Driven()
    quick.start(1)
    assert not said(quick, "--quiet-time")


def test_a_wait_for_nodes_that_ends_says_when() -> None:
    """Each agent hears what is missing, and that this does not go on for ever."""
    job = Driven(settings(min_nodes=2, wait_for_nodes=30.0))
    a = job.node()
    a.join()
    job.wait(1)
    assert "the job ends after 30 s of that (--wait-for-nodes)" in a.directive.gather.missing


def test_a_join_that_does_not_come_is_named() -> None:
    """Its agent is still stopping workers, perhaps."""
    job = Driven(settings(join_timeout=60.0))
    a, b = job.start(2)
    a.step(1)
    a.failed()
    a.join()
    job.wait(SOON)
    (line,) = said(job, f"waiting for {b.name} to stop workers and join")
    assert "more (--join-timeout)" in line


def test_a_step_boundary_that_does_not_come_is_said() -> None:
    """One step takes long, and a node wants to leave."""
    job = Driven(settings(drain_timeout=30.0))
    a, b = job.start(2)
    a.step(1)
    b.leave(notice=30.0)
    job.wait(SOON)
    (line,) = said(job, f"the drain ({b.name} leaves) waits for a step boundary of all ranks; at most 25 s more")
    assert "--drain-timeout" in line


def test_a_last_save_that_fails_again_and_again_is_what_is_waited_for() -> None:
    """All steps are made: no boundary comes. Of one failure nobody knows that, as the ranks may train on behind it."""
    job = Driven(settings(drain_timeout=30.0))
    a, b = job.start(2)
    a.step(20)
    a.save(10)
    a.save_failed(20, regular=True)
    b.leave(notice=30.0)
    job.wait(SOON)
    assert said(job, f"the drain ({b.name} leaves) waits for a step boundary of all ranks")
    a.save_failed(20, regular=True)
    job.wait(2 * SOON)
    waits = f"the drain ({b.name} leaves) waits for the save of step 20, the last one, which is tried again (disk full)"
    (line,) = said(job, waits)
    assert "s more (--drain-timeout)" in line
    assert len(said(job, "a step boundary")) == 1


@pytest.mark.parametrize("then", ["a step", "a commit", "another save"])
def test_a_save_that_is_not_the_last_one_is_not_waited_for(then: str) -> None:
    """The ranks have trained on, or it has come to something."""
    job = Driven(settings(drain_timeout=30.0))
    a, b = job.start(2)
    a.step(20)
    a.save_failed(20, regular=True)
    if then != "another save":
        a.save_failed(20, regular=True)
    match then:
        case "a step":
            a.step(21)
        case "a commit":
            a.save(20)
        case _:
            a.step(21)
            a.save_failed(21, regular=True)
    b.leave(notice=30.0)
    job.wait(SOON)
    assert said(job, f"the drain ({b.name} leaves) waits for a step boundary of all ranks")


def test_who_is_silent_while_all_are_waited_for_is_named() -> None:
    """Its agent is stopped, perhaps (Ctrl-Z)."""
    job = Driven(settings(drain_timeout=60.0, node_timeout=60.0))
    a, b = job.start(2)
    a.step(1)
    b.leave(notice=60.0)
    job.silent.add(a.incarnation)
    job.wait(SOON)
    (line,) = said(job, f"the drain ({b.name} leaves) waits for a step boundary of all ranks")
    assert f" (nothing was heard of {a.name} for " in line


def test_the_last_at_work_are_named() -> None:
    """Others have finished, and stay until all have."""
    job = Driven(settings(stall_timeout=1000.0))
    a, b = job.start(2)
    a.step(1)
    a.finished(1)
    job.wait(SOON)
    assert said(job, f"{a.name} finished: waiting for {b.name} to finish, too")


def test_a_wait_that_is_over_is_forgotten() -> None:
    """The next one of its kind begins anew; a master that comes back begins all of them."""
    job = Driven(settings(drain_timeout=300.0))
    a, b = job.start(2)
    a.step(1)
    b.leave(notice=300.0)
    job.wait(SAID_AFTER_SECONDS - 1)
    job.restart()
    for node in (a, b):
        node.beat()
    job.wait(SAID_AFTER_SECONDS - 1)
    assert not said(job, "waits for a step boundary")
    job.wait(2)
    assert said(job, "waits for a step boundary")
    for node in (a, b):
        node.drained(2)
    assert "boundary" not in job.state.live.waits.known


@pytest.mark.parametrize("heard", [True, False])
def test_why_a_world_has_begun_is_said_before_its_first_step(heard: bool) -> None:
    """That may be long in coming: a model is loaded, or nobody hears of steps."""
    job = Driven(settings(stall_timeout=10_000.0))
    a, b = job.start(2)
    if heard:
        a.step(7)
    job.wait(3)
    b.hang_up()
    job.wait(2)
    a.join()
    assert job.phase is Phase.RUNNING
    if heard:
        a.step(0)  # its hello
    assert not said(job, "was lost")
    job.wait(SOON)
    (line,) = said(job, f"{b.name} was lost (its connection closed): 1 node began, no step is heard yet")
    job.wait(8)
    assert len(said(job, line)) == 2, "and again when that wait has doubled"
    a.step(1)
    job.wait(30)
    assert len(said(job, line)) == 2
