"""Growing, draining, liveness, stalls and the end of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.master.brain.events import StreamOpened
from dalsegno.master.brain.state import MemberState, Phase
from tests.support.jobs.masters import Driven, Node, all_join, settings


def grown(job: Driven, members: list[Node]) -> Node:
    """A warm newcomer beside a world that has made a step."""
    members[0].step(1)
    late = job.node()
    late.join()
    late.warm()
    return late


def train(job: Driven, node: Node, first: int, seconds: int) -> int:
    """One step each second. Returns the next step."""
    for step in range(first, first + seconds):
        node.step(step)
        job.wait(1)
    return first + seconds


# ---- growing --------------------------------------------------------------------------------------------------------


def test_a_join_drains_and_loses_nothing() -> None:
    """RUNNING, DRAINING, FORMING, RUNNING; the drain's save is the new resume point."""
    job = Driven()
    (a,) = job.start(1)
    late = grown(job, [a])
    assert (job.phase, a.order) == (Phase.DRAINING, "drain")
    a.step(2, draining=True)
    a.save(2)
    a.drained(2)
    assert job.phase is Phase.FORMING
    all_join([a, late])
    a.convert()
    assert job.members == [a.name, late.name]
    a.step(3)
    assert "lost 0 steps" in job.notices
    assert a.directive.run.resume.source.step == 2


def test_a_growth_waits_for_the_first_step_and_for_warm_newcomers() -> None:
    """Between two growths there is a step; newcomers that never get warm are taken after 750 s."""
    job = Driven()
    (a,) = job.start(1)
    late = job.node()
    late.join()
    late.warm()
    assert job.phase is Phase.RUNNING
    a.step(1)
    assert job.phase is Phase.DRAINING
    cold = Driven()
    (a,) = cold.start(1)
    a.step(1)
    cold.node().join()
    train(cold, a, 2, 745)
    assert cold.phase is Phase.RUNNING
    train(cold, a, 747, 6)
    assert cold.phase is Phase.DRAINING


def test_a_growth_waits_for_the_standby_workers_of_members_too() -> None:
    """Else everybody would wait for their start. It is said now and then; no other planned change waits for it."""
    job = Driven()
    a, b = job.start(2)
    a.step(1)
    b.step(1, cold=True)
    late = job.node()
    late.join()
    late.warm()
    assert job.phase is Phase.RUNNING
    for second in range(30):
        job.wait(1)
        a.step(2 + second)
        b.step(2 + second, cold=True)
    assert job.phase is Phase.RUNNING
    said = f"{late.name} joined: taken in as soon as the script has started on {b.name}; training goes on meanwhile"
    assert [line for line in job.notices.splitlines() if "training goes on meanwhile" in line] == [
        f"{said}; at most {left} s more" for left in (745, 740, 730)
    ]
    b.step(40)
    assert job.phase is Phase.DRAINING
    shrunk = Driven()
    a, b = shrunk.start(2)
    a.step(1, cold=True)
    b.step(1, cold=True)
    b.leave()
    assert shrunk.phase is Phase.DRAINING


def test_a_member_that_never_gets_warm_holds_off_a_growth_for_750_seconds() -> None:
    job = Driven()
    (a,) = job.start(1)
    a.step(1, cold=True)
    late = job.node()
    late.join()
    late.warm()
    for second in range(745):
        job.wait(1)
        a.step(2 + second, cold=True)
    assert job.phase is Phase.RUNNING
    for second in range(6):
        job.wait(1)
        a.step(800 + second, cold=True)
    assert job.phase is Phase.DRAINING


def test_growths_keep_the_grow_interval_after_the_last_growth() -> None:
    """The first growth does not wait for it."""
    job = Driven(settings(grow_interval=30, universal_checkpoint=True))
    (a,) = job.start(1)
    late = grown(job, [a])
    a.save(2)
    a.drained(2)
    all_join([a, late])
    a.convert()
    a.step(3)
    grown(job, [a])
    train(job, a, 4, 25)
    assert job.phase is Phase.RUNNING
    train(job, a, 29, 6)
    assert job.phase is Phase.DRAINING


@pytest.mark.parametrize(("cost", "interval"), [(0.5, 10.0), (2.0, 40.0), (5.0, 60.0)])
def test_the_interval_follows_from_what_the_last_growth_cost(cost: float, interval: float) -> None:
    """Auto: 20 times that, at most 60 s, from the first step after it; also over a master that was started anew."""
    for restarted in (False, True):
        job = Driven(settings(grow_interval=-1))
        (a,) = job.start(1)
        late = grown(job, [a])
        assert job.phase is Phase.DRAINING, "the first growth does not wait"
        a.save(2)
        a.drained(2)
        all_join([a, late])
        a.convert()
        job.wait(cost)
        a.step(3)
        assert f"paused {cost:.1f} s" in job.notices
        if restarted:
            job.restart()
        more = job.node()
        more.join()
        more.warm()
        last = train(job, a, 4, int(interval) - 1)
        assert job.phase is Phase.RUNNING
        train(job, a, last, 2)
        assert job.phase is Phase.DRAINING


def test_a_join_that_does_not_make_the_world_larger_drains_nothing() -> None:
    """A full world, and a unit that one newcomer does not fill."""
    full = Driven(settings(max_nodes=1))
    grown(full, full.start(1))
    half = Driven(settings(min_nodes=2, node_unit=2))
    grown(half, half.start(2))
    for job in (full, half):
        train(job, job.nodes[0], 2, 60)
        assert job.phase is Phase.RUNNING


def test_a_growth_is_withdrawn_when_its_newcomer_goes() -> None:
    """DRAINING goes back to RUNNING, the workers go on."""
    job = Driven()
    (a,) = job.start(1)
    late = grown(job, [a])
    late.hang_up()
    job.wait(2)
    assert (job.phase, a.order, job.epoch) == (Phase.RUNNING, "run", 1)


def test_a_growth_without_agreement_is_withdrawn_and_tried_again_at_the_next_commit() -> None:
    """Counted while no rank advances. Once agreed, see `test_brain_saves`."""
    job = Driven(settings(drain_timeout=10))
    (a,) = job.start(1)
    grown(job, [a])
    job.wait(6)
    a.step(2)
    job.wait(6)
    assert job.phase is Phase.DRAINING
    job.wait(6)
    assert job.phase is Phase.RUNNING
    a.step(3)
    assert job.phase is Phase.RUNNING
    a.save(3)
    assert job.phase is Phase.DRAINING


def test_a_growth_waits_for_the_boundary_of_steps_longer_than_a_notice() -> None:
    """Withdrawn before the ranks can answer, it would never be agreed."""
    job = Driven(settings(drain_timeout=10))
    (a,) = job.start(1)
    a.step(1, longest=40.0)
    grown(job, [a])
    job.wait(45)
    assert job.phase is Phase.DRAINING
    a.step(3, longest=40.0)
    job.wait(75)
    assert job.phase is Phase.DRAINING
    job.wait(10)
    assert (job.phase, "within 80 s" in job.notices) == (Phase.RUNNING, True)


def test_a_failed_save_withdraws_a_growth_but_not_a_leave() -> None:
    """All ranks know it and none exits; the leaver tries again until its notice runs out."""
    job = Driven()
    (a,) = job.start(1)
    grown(job, [a])
    a.save_failed()
    assert job.phase is Phase.RUNNING
    leave = Driven()
    a, b = leave.start(2)
    a.step(1)
    b.leave()
    a.save_failed()
    assert leave.phase is Phase.DRAINING


def test_without_a_session_growth_waits_for_a_commit() -> None:
    """Then it restarts from there; without any commit the grow-wait ends the waiting."""
    job = Driven(settings(grow_wait=100))
    (a,) = job.start(1)
    late = job.node()
    late.join()
    late.warm()
    job.wait(10)
    assert job.phase is Phase.RUNNING
    a.save(4)
    assert job.phase is Phase.FORMING
    never = Driven(settings(grow_wait=20))
    never.start(1)
    never.node().join()
    never.wait(21)
    assert never.phase is Phase.FORMING


def test_without_a_session_an_older_commit_is_no_reason_to_restart() -> None:
    """A newcomer that came before the present epoch opened does not end it at once."""
    job = Driven(settings(grow_wait=100, max_nodes=2))
    a, _b = job.start(2)
    spare = job.node()
    spare.join()
    a.save(4)
    job.settings.max_nodes = 3
    job.job.settings = replace(job.job.settings, max_nodes=3)
    a.failed()
    a.join()
    job.nodes[1].join()
    job.wait(6)
    assert job.phase is Phase.RUNNING
    epoch = job.epoch
    job.wait(10)
    assert job.epoch == epoch


# ---- leaving --------------------------------------------------------------------------------------------------------


def test_a_leave_drains_with_it_and_forms_without_it() -> None:
    """The leaver is released once its part is drained."""
    job = Driven()
    a, b = job.start(2)
    a.step(1)
    b.leave()
    assert (job.phase, a.order) == (Phase.DRAINING, "drain")
    a.step(2, draining=True)
    a.save(2)
    b.drained(2)
    assert b.order == "release"
    b.hang_up()
    assert job.phase is Phase.DRAINING, "a drained node that goes is no loss"
    a.drained(2)
    a.join()
    a.convert()
    assert job.members == [a.name]
    assert a.directive.run.resume.source.step == 2


def test_a_leave_that_is_not_saved_in_time_is_unplanned() -> None:
    """Its notice runs out although ranks advance."""
    job = Driven(settings(drain_timeout=10))
    a, b = job.start(2)
    b.leave(notice=10)
    for step in range(1, 12):
        a.step(step)
        job.wait(1)
    assert job.phase is Phase.FORMING


def test_a_leave_turns_a_growth_into_a_drain_that_is_not_withdrawn() -> None:
    """The newcomer may go, the leaver stays a leaver."""
    job = Driven()
    a, b = job.start(2)
    late = grown(job, [a])
    b.leave()
    late.hang_up()
    job.wait(2)
    assert job.phase is Phase.DRAINING


def test_all_leave_at_once_and_the_run_goes_on_when_nodes_come() -> None:
    """Saved, WAITING, and on from the drained step."""
    job = Driven()
    a, b = job.start(2)
    a.step(1)
    for node in (a, b):
        node.leave()
    a.save(2)
    for node in (a, b):
        node.drained(2)
        node.hang_up()
    assert job.phase is Phase.WAITING
    job.wait(100)
    c, d = job.node(), job.node()
    all_join([c, d])
    job.wait(2)
    assert c.directive.run.resume.source.step == 2
    assert len(job.members) == 2


def test_a_newcomer_is_told_from_the_start_what_to_look_for() -> None:
    """Its Join tells of what it was asked for: nobody seems blind to an old resume point that was not asked for."""
    job = Driven(settings(keep_checkpoints=0, max_nodes=2))
    (a,) = job.start(1)
    start = a.save(1)
    a.failed()
    a.join()
    assert a.directive.run.resume.source.ref == start.ref
    for step in range(2, 30):
        a.save(step)
    late = job.node()
    assert late.directive.wait.look_for == start.ref
    late.join(sees=[start, *job.sealed[-16:]])
    assert late.directive.wait.reason == ""
    late.warm()
    a.step(30)
    assert job.phase is Phase.DRAINING


def test_a_newcomer_that_does_not_see_the_resume_point_is_told_so() -> None:
    """Once it has answered; and goes on looking for the same."""
    job = Driven(settings(max_nodes=2))
    (a,) = job.start(1)
    start = a.save(1)
    a.failed()
    a.join()
    late = job.node()
    assert "does not see" not in late.directive.wait.reason
    late.join(sees=[])
    assert f"does not see checkpoint {start.ref.name}" in late.directive.wait.reason
    assert late.directive.wait.look_for == start.ref


def test_a_spare_that_leaves_is_released_at_once() -> None:
    """Nothing of it runs."""
    job = Driven(settings(max_nodes=1))
    job.start(1)
    spare = job.node()
    spare.join()
    spare.leave()
    assert spare.order == "release"
    assert job.phase is Phase.RUNNING


def test_drained_ranks_in_running_are_an_ordinary_event() -> None:
    """A SIGTERM while the master was away: the workers agreed without it."""
    job = Driven()
    a, b = job.start(2)
    a.step(3)
    made = job.seal(4)
    a.commit(made)
    a.drained(4)
    assert job.phase is Phase.DRAINING
    b.drained(4)
    assert job.phase is Phase.FORMING
    assert job.job.run.left_step == 4


# ---- liveness -------------------------------------------------------------------------------------------------------


def test_a_closed_stream_is_a_death_after_one_second() -> None:
    """At once if a survivor has reported a failure."""
    job = Driven()
    a, b = job.start(2)
    a.step(1)
    job.wait(2)
    b.hang_up()
    job.wait(0.5)
    assert job.phase is Phase.RUNNING
    job.wait(0.7)
    assert job.phase is Phase.FORMING
    assert not b.is_known
    other = Driven()
    a, b = other.start(2)
    b.hang_up()
    a.failed()
    assert not b.is_known


def test_silence_is_a_death_after_the_node_timeout() -> None:
    """Its incarnation is fenced from then on."""
    job = Driven(settings(node_timeout=6))
    _a, b = job.start(2)
    job.silent.add(b.incarnation)
    job.wait(5)
    assert job.phase is Phase.RUNNING
    job.wait(2)
    assert job.phase is Phase.FORMING
    reply = b.beat()
    assert reply.code == "NOT_FOUND"


def test_advancing_peers_prove_a_silent_node_alive() -> None:
    """A step is a collective of all: no death, by silence or by a closed stream, while steps are made."""
    job = Driven()
    a, b = job.start(2)
    b.hang_up()
    for step in range(1, 20):
        a.step(step)
        job.wait(0.8)
    assert job.phase is Phase.RUNNING
    assert b.is_known
    job.wait(1.5)
    assert job.phase is Phase.FORMING


def test_what_is_told_of_old_steps_proves_nobody_alive() -> None:
    """After a restart of the master the first step that it hears of may be one from before; so may a late report."""
    job = Driven()
    a, b, c = job.start(3)
    a.step(7)
    timeout = job.job.settings.node_timeout
    job.restart()
    job.silent.add(c.incarnation)
    for node in (a, b):
        job.event(StreamOpened(node.name, node.incarnation))
    job.wait(timeout - 2)
    a.step(7)
    job.wait(1)
    b.step(6)
    job.wait(3)
    assert not c.is_known


def test_a_deaf_master_declares_nobody_dead() -> None:
    """When it hears no agent at all, each gets a node-timeout, and time to come back, from the first that it hears."""
    job = Driven()
    a, b = job.start(2)
    job.silent |= {a.incarnation, b.incarnation}
    job.wait(60)
    assert job.phase is Phase.RUNNING
    job.silent.clear()
    job.silent.add(b.incarnation)
    a.beat()
    job.wait(5)
    assert b.is_known
    job.wait(5)
    assert not b.is_known


def test_a_master_that_hears_nobody_sees_no_stall() -> None:
    """Its own network is gone for longer than any deadline: nothing changes, and everybody's time begins anew."""
    job = Driven()
    a, b = job.start(2)
    a.step(1)
    job.silent |= {a.incarnation, b.incarnation}
    job.wait(100)
    assert job.phase is Phase.RUNNING
    job.silent.clear()
    a.beat()
    job.wait(20)
    assert job.phase is Phase.RUNNING


def test_a_lone_silent_node_is_not_declared_dead_until_somebody_else_is_heard() -> None:
    """It may be the master's network; a newcomer's word gives it one more node-timeout."""
    job = Driven()
    (a,) = job.start(1)
    a.step(1)
    job.silent.add(a.incarnation)
    job.wait(60)
    assert a.is_known
    job.node()
    job.wait(5)
    assert a.is_known
    job.wait(5)
    assert not a.is_known


def test_connections_that_break_after_an_outage_are_no_deaths() -> None:
    """They come back one by one: a closed stream counts only some seconds after the first word."""
    job = Driven()
    a, b = job.start(2)
    job.silent |= {a.incarnation, b.incarnation}
    job.wait(20)
    a.beat()
    job.silent.discard(a.incarnation)
    b.hang_up()
    job.wait(4)
    assert b.is_known
    job.wait(4)
    assert not b.is_known


@pytest.mark.parametrize(("most", "seconds"), [(1, 1.2), (2, 6.2)])
def test_the_next_node_waits_only_the_grace_where_one_node_is_a_world(most: int, seconds: float) -> None:
    """It had closed its stream itself. Where several made a world, they may be coming back one by one."""
    job = Driven(settings(max_nodes=most, node_timeout=180))
    (a,) = job.start(1)
    a.step(1)
    job.wait(0.5)
    a.hang_up()
    job.wait(30)
    assert a.is_known, "nobody else is there"
    job.node()
    job.wait(seconds - 0.4)
    assert a.is_known
    job.wait(0.4)
    assert not a.is_known


def test_a_lone_node_that_was_silent_before_its_stream_broke_has_its_time() -> None:
    """It may be frozen, or cut off, and on its way back: no process has ended."""
    job = Driven(settings(max_nodes=1, node_timeout=60))
    (a,) = job.start(1)
    job.silent.add(a.incarnation)
    job.wait(30)
    a.hang_up()
    job.wait(30)
    job.node()
    job.wait(5)
    assert a.is_known


def test_a_lone_node_that_comes_back_first_has_its_time() -> None:
    """No newcomer, but one that was there: then something between them and the master was away."""
    job = Driven(settings(max_nodes=1, node_timeout=180))
    a, b = job.node(), job.node()
    a.join()
    b.join()
    job.wait(2)
    a.hang_up()
    b.hang_up()
    job.wait(30)
    b.beat()
    job.wait(4)
    assert a.is_known


def test_a_node_that_speaks_after_its_stream_broke_is_alive() -> None:
    """Its heartbeats go on: the stream broke, not the node."""
    job = Driven()
    _a, b = job.start(2)
    b.hang_up()
    job.silent.discard(b.incarnation)
    for _ in range(20):
        job.wait(0.8)
        b.beat()
    assert b.is_known


def test_a_master_that_was_held_up_gives_everybody_time_to_answer() -> None:
    """Join, drain and stall deadlines begin anew: the answers are in its queue."""
    job = Driven(settings(join_timeout=3, stall_timeout=40))
    a, b = job.start(2)
    a.step(1)
    b.failed()
    job.held_up(60)
    a.join()
    assert job.phase is Phase.FORMING
    b.join()
    assert job.members == [a.name, b.name]
    a.step(2)
    job.held_up(100)
    assert job.phase is Phase.RUNNING


def test_a_master_that_was_held_up_declares_nobody_dead() -> None:
    """Its own loop stood still: nobody's silence proves anything."""
    job = Driven()
    _a, b = job.start(2)
    job.held_up(30)
    assert job.phase is Phase.RUNNING
    job.silent.add(b.incarnation)
    job.wait(5)
    assert b.is_known


def test_a_restarted_master_presumes_everybody_alive_for_one_node_timeout() -> None:
    """And opens no world with whom it only presumes."""
    job = Driven()
    a, b = job.start(2)
    job.restart()
    assert job.phase is Phase.RUNNING
    job.silent.add(b.incarnation)
    job.wait(5)
    assert b.is_known
    job.wait(2)
    assert not b.is_known
    a.join()
    assert job.members == [a.name]


def test_answers_of_nodes_that_died_with_the_master_open_no_world() -> None:
    """They had joined, the master went away, and they do not speak again."""
    job = Driven(settings(min_nodes=2, quiet_time=3.0))
    a, b = job.node(), job.node()
    all_join([a, b])
    job.restart()
    job.silent |= {a.incarnation, b.incarnation}
    job.wait(30)
    assert job.epoch == 0


def test_a_node_lost_three_times_is_a_spare_for_a_doubling_time() -> None:
    """Unless fewer than min would remain; it is named."""
    job = Driven()
    (a,) = job.start(1)
    step = 1
    for _ in range(3):
        a.step(step)
        flaky = job.node(node="flaky")
        flaky.join()
        flaky.warm()
        a.save(step + 1)
        a.drained(step + 1)
        all_join([a, flaky])
        if a.lease:
            a.convert()
        step += 2
        a.step(step)
        flaky.hang_up()
        job.wait(2)
        a.join()
        if a.lease:
            a.convert()
        a.step(step)
    flaky = job.node(node="flaky")
    flaky.join()
    flaky.warm()
    assert job.phase is Phase.RUNNING
    assert "flaky was lost 3 times" in job.notices
    job.wait(31)
    a.step(step + 1)
    assert job.phase is Phase.DRAINING


def test_a_newcomer_that_dies_before_the_first_step_is_not_counted() -> None:
    """Over and over: it costs nobody a step, and it is no spare for it."""
    job = Driven()
    (a,) = job.start(1)
    for _ in range(4):
        doomed = grown(job, [a])
        a.save(job.job.epoch * 10)
        a.drained(job.job.epoch * 10)
        all_join([a, doomed])
        if a.lease:
            a.convert()
        doomed.hang_up()
        job.wait(2)
        a.join()
        a.step(job.job.epoch * 10 + 1)
    assert "lost 0 steps" in job.notices
    assert not job.state.live.held_until


def test_a_newcomer_that_ends_world_after_world_is_held() -> None:
    """Before their first steps: the first one costs nobody anything, then the run would never go on."""
    job = Driven()
    (a,) = job.start(1)
    doomed = grown(job, [a])
    a.save(1)
    a.drained(1)
    all_join([a, doomed])
    a.convert()
    for deaths in range(1, 5):
        assert job.members == [a.name, doomed.name], f"after {deaths - 1} deaths"
        assert job.state.live.held_until == {}
        doomed.hang_up()
        job.wait(3)
        doomed = job.node(node=doomed.name)
        all_join([a, doomed])
        job.wait(0.1)
    assert list(job.state.live.held_until) == [doomed.name]
    assert job.members == [a.name]
    assert "lost 3 times" in job.notices


# ---- stalls, failures, the end --------------------------------------------------------------------------------------


def test_a_stall_is_unplanned_and_counts_as_a_failure() -> None:
    """stall_timeout until the first step, then a multiple of the longest step seen (at least 60 s)."""
    job = Driven(settings(stall_timeout=40))
    (a,) = job.start(1)
    a.step(0)
    job.wait(39)
    assert job.phase is Phase.RUNNING
    job.wait(2)
    assert job.phase is Phase.FORMING
    a.join()
    a.step(1)
    job.wait(61)
    assert job.phase is not Phase.RUNNING
    assert "--stall-timeout" in job.notices


def test_without_a_stall_timeout_nothing_is_a_stall() -> None:
    """--stall-timeout=0: before the first step, between two, in a save, and behind the last step of one node."""
    job = Driven(settings(stall_timeout=0.0, max_restarts=0))
    a, b = job.start(2)
    while_standing = 700
    for said in ({"step": 0}, {"step": 1}, {"step": 2, "saved_bytes": 1000}, {"step": 3, "training_ended": True}):
        a.step(**said)  # type: ignore[arg-type]
        job.wait(while_standing)
        assert job.phase is Phase.RUNNING, said
    a.finished(3)
    job.wait(while_standing)
    assert job.phase is Phase.RUNNING
    b.finished(3)
    assert job.phase is Phase.SUCCEEDED
    assert "stall" not in job.notices


def test_a_growing_save_is_no_stall() -> None:
    """Bytes of a save in flight move the deadline."""
    from dalsegno.protos import control_pb2

    job = Driven(settings(stall_timeout=40))
    (a,) = job.start(1)
    for size in range(1, 6):
        job.call(control_pb2.ProgressRequest(caller=a.caller(number=0), has_session=True, saved_bytes=size))
        job.wait(20)
    assert job.phase is Phase.RUNNING


@pytest.mark.slow
def test_signs_of_life_between_steps_are_no_stall() -> None:
    """An evaluation of half an hour, after steps of half a second; the same sign again is none."""
    job = Driven(settings(stall_timeout=600))
    a, b = job.start(2)
    a.step(1)
    b.step(1)
    for beats in range(1, 40):
        (a if beats % 2 else b).step(1, beats=beats)
        job.wait(50)
        assert job.phase is Phase.RUNNING
    a.step(1, beats=39)
    job.wait(20)
    assert job.phase is not Phase.RUNNING
    assert "--stall-timeout" in job.notices


def test_a_script_without_a_session_does_not_stall() -> None:
    """Nobody hears of its steps."""
    job = Driven(settings(stall_timeout=40))
    job.start(1)
    job.wait(500)
    assert job.phase is Phase.RUNNING


def test_failures_without_progress_end_the_job_and_a_commit_beyond_them_refills_the_budget() -> None:
    """--max-restarts 1: the second failure in a row is the end, a commit in between is not."""
    job = Driven(settings(max_restarts=1))
    (a,) = job.start(1)
    a.step(3)
    a.failed(step=3)
    a.join()
    a.step(4)
    a.save(4)
    a.failed(step=4)
    a.join()
    assert job.phase is Phase.RUNNING
    a.failed("boom", step=4)
    a.join()
    assert job.phase is Phase.FAILED
    assert "boom" in a.directive.finish.message
    assert "--max-restarts" in a.directive.finish.message


def test_an_epoch_that_lost_a_node_counts_no_failure() -> None:
    """The workers' errors come from the loss."""
    job = Driven(settings(max_restarts=0))
    a, b = job.start(2)
    a.step(1)
    a.failed()
    b.hang_up()
    job.wait(2)
    a.join()
    assert job.phase is Phase.RUNNING


def test_every_node_failing_before_any_step_ends_the_job_at_once() -> None:
    """Trying again would not help; the message is the worker's."""
    job = Driven()
    a, b = job.start(2, expects_session=True)
    a.failed("no module named train")
    b.failed("no module named train")
    assert job.phase is Phase.FAILED
    assert "no module named train" in job.job.message


def test_a_script_without_a_session_that_fails_at_its_start_is_tried_again() -> None:
    """Nobody knows that it made no step: it has --max-restarts, as under torchrun, with pauses."""
    job = Driven(settings(max_restarts=2))
    a, b = job.start(2)
    began = job.now
    for epoch in (1, 2, 3):
        assert (job.phase, job.epoch) == (Phase.RUNNING, epoch)
        a.failed(f"no module named train (see attempt_{epoch})")
        b.failed("no module named train")
        all_join([a, b])
        job.wait(1.1)
    assert job.phase is Phase.FAILED
    assert "3 failures without progress" in job.job.message
    assert job.job.message not in job.notices, "the agents' last line says it"
    told = [notice.text for notice in job.job.notices if notice.warning]
    as_before = f"{a.name}: failed as before, attempt"
    assert told == [f"{a.name}: no module named train (see attempt_1)", f"{as_before} 2 of 3", f"{as_before} 3 of 3"]
    assert job.now - began < 5


def test_a_failure_report_carries_the_step_that_progress_did_not() -> None:
    """The run has made a step although its progress is still under way: not hopeless."""
    job = Driven()
    (a,) = job.start(1)
    a.failed(step=1)
    assert job.phase is Phase.FORMING


def test_steps_that_only_the_end_of_ranks_tells_of_count_as_lost() -> None:
    """The progress of the last ones was still under way: a failure carries its step, and late progress still counts."""
    job = Driven()
    a, b = job.start(2)
    a.step(1)
    a.save(1)
    a.failed(step=5)
    assert job.phase is Phase.FORMING
    b.step(7)
    b.step(6)
    all_join([a, b])
    a.step(2)
    assert "lost 6 steps" in job.notices
    assert [record.last_step for record in job.job.history] == [7, 2]


def test_a_first_step_that_only_a_failure_tells_of_is_one() -> None:
    """The world is announced, with what it cost."""
    job = Driven()
    (a,) = job.start(1)
    a.failed(step=3)
    assert "epoch 1:" in job.notices
    assert [record.last_step for record in job.job.history] == [3]


def test_success_is_when_all_ranks_finished() -> None:
    """Everybody stays until then, and is told."""
    job = Driven()
    a, b = job.start(2)
    a.step(10)
    a.save(10)
    a.finished(10)
    assert a.order == "run"
    b.finished(10)
    assert job.phase is Phase.SUCCEEDED
    assert a.directive.finish.success
    assert b.directive.finish.success


def test_a_node_lost_after_its_ranks_finished_counts_as_finished() -> None:
    """It does not undo the run."""
    job = Driven()
    a, b = job.start(2)
    a.save(10)
    b.finished(10)
    b.hang_up()
    job.wait(8)
    assert job.phase is Phase.RUNNING
    a.finished(10)
    assert job.phase is Phase.SUCCEEDED


def test_a_silent_node_whose_peers_finished_counts_as_finished_once_the_last_step_is_committed() -> None:
    """Without that commit it is an unplanned change with everybody still there."""
    for saved in (True, False):
        job = Driven()
        a, b = job.start(2)
        a.step(10)
        if saved:
            a.save(10)
        a.finished(10)
        b.hang_up()
        job.wait(8)
        assert (job.phase is Phase.SUCCEEDED) is saved


def test_a_failure_at_the_end_is_an_unplanned_change() -> None:
    """The finished node is still there and trains on."""
    job = Driven()
    a, b = job.start(2)
    a.step(10)
    a.save(8)
    a.finished(10)
    b.failed(step=10)
    all_join([a, b])
    assert job.phase is Phase.RUNNING
    assert job.epoch == 2
    assert list(job.job.parts.values()) == [MemberState.RUNNING, MemberState.RUNNING]  # type: ignore[union-attr]


@pytest.mark.parametrize("keep", [1, 3])
def test_old_checkpoints_are_retired_recorded_and_pruned_by_rank_zero(keep: int) -> None:
    """The last N stay, and what the world started from while it is in use."""
    job = Driven(settings(keep_checkpoints=keep))
    a, b = job.start(2)
    for step in range(1, 7):
        a.save(step)
        b.sights()
    kept = [record.step for record in job.job.checkpoints if not record.retired]
    assert kept == list(range(7 - keep, 7))
    assert len(a.directive.prune) == 6 - keep
    assert not b.directive.prune


def test_a_script_that_says_how_many_stay_is_asked_first() -> None:
    """From the checkpoint on that says so; 0 keeps all."""
    job = Driven(settings(keep_checkpoints=3))
    (a,) = job.start(1)
    kept = []
    for step, keep in enumerate([None, 1, 1, 0, 0, None], 1):
        made = job.seal(step)
        if keep is not None:
            made.keep = keep
        assert a.commit(made).code == "OK"
        kept.append([record.step for record in job.job.checkpoints if not record.retired])
    assert kept == [[1], [2], [3], [3, 4], [3, 4, 5], [4, 5, 6]]


def test_the_best_checkpoint_is_never_pruned() -> None:
    """It stays beyond the last N until there is a better one, also what was best as of one that may still be chosen."""
    job = Driven(settings(keep_checkpoints=2))
    (a,) = job.start(1)
    kept = []
    for step, best in enumerate([1, 1, 1, 1, 5, 5, 5], 1):
        made = job.seal(step)
        made.best = f"step-{best}.e1.1"
        assert a.commit(made).code == "OK"
        kept.append([record.step for record in job.job.checkpoints if not record.retired])
    assert kept == [[1], [1, 2], [1, 2, 3], [1, 3, 4], [1, 4, 5], [5, 6], [5, 6, 7]]


@pytest.mark.parametrize(("committed", "last"), [([10], 10), ([10, 28], 28)])
def test_the_end_of_an_unheard_run_names_its_last_checkpoint(committed: list[int], last: int) -> None:
    """No steps of a script without a session are heard, but what it saved is the run's, behind its resume point too."""
    job = Driven()
    (a,) = job.start(1)
    a.save(committed[0])
    a.failed()
    a.join()
    assert (job.phase, job.epoch) == (Phase.RUNNING, 2)
    for step in committed[1:]:
        a.save(step)
    a.finished(0)
    assert job.phase is Phase.SUCCEEDED
    assert a.directive.finish.message == f"the run finished at step {last}"
