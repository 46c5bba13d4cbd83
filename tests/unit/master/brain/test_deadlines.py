"""Every phase has a deadline and a way out, also where nobody says another word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.agent.commands.values import LEAST_NODE_TIMEOUT_SECONDS as LEAST_OF_AGENTS
from dalsegno.master.brain.events import StreamClosed, StreamOpened
from dalsegno.master.brain.state import LEAST_NODE_TIMEOUT_SECONDS, Phase
from dalsegno.master.brain.turn import heartbeat_of
from tests.support.jobs.masters import Driven, Node, settings

# ---- silence --------------------------------------------------------------------------------------------------------


def stored(timeout: float) -> tuple[Driven, list[Node]]:
    """Two nodes of a job that an older version stored: with a node-timeout that would be refused today, perhaps."""
    job = Driven()
    nodes = job.start(2)
    job.job.settings = replace(job.job.settings, node_timeout=timeout)
    return job, nodes


@pytest.mark.parametrize("timeout", [2.0, LEAST_NODE_TIMEOUT_SECONDS, 6.0])
def test_a_silent_node_is_dead_however_short_the_node_timeout(timeout: float) -> None:
    """The time between two heartbeats of its peer, a second and the way, is not taken for the master's own deafness."""
    job, (a, b) = stored(timeout)
    a.step(1)
    job.silent |= {a.incarnation, b.incarnation}
    ends = job.now + timeout + 1.5
    while job.now < ends:
        job.wait(1.2)
        a.beat()
    assert not b.is_known
    assert a.is_known


@pytest.mark.parametrize("timeout", [2.0, LEAST_NODE_TIMEOUT_SECONDS, 6.0])
def test_when_all_are_silent_nobody_is_dead_however_short_the_node_timeout(timeout: float) -> None:
    """Deafness is seen before the first deadline passes."""
    job, (a, b) = stored(timeout)
    a.step(1)
    job.silent |= {a.incarnation, b.incarnation}
    job.wait(60)
    assert a.is_known
    assert b.is_known
    assert job.phase is Phase.RUNNING


def test_silence_that_begins_between_two_nodes_heartbeats_is_nobodys_death() -> None:
    """The one that was to speak next is not dead because its peer was heard a moment later, before all were cut off."""
    job, (a, b) = stored(2.0)
    a.step(1)
    job.silent |= {a.incarnation, b.incarnation}
    a.beat()
    b.beat()
    job.wait(0.95)
    b.beat()
    job.wait(60)
    assert a.is_known
    assert b.is_known


@pytest.mark.parametrize("away", [20.0, 300.0])
def test_a_new_master_that_nobody_can_reach_declares_nobody_dead(away: float) -> None:
    """For longer than a node-timeout, as its network is away: the first word of one is not the death of the others."""
    job = Driven(settings(node_timeout=15.0))
    nodes = job.start(3)
    nodes[0].step(1)
    job.restart()
    job.silent |= {node.incarnation for node in nodes}
    job.wait(away)
    nodes[0].beat()
    job.wait(0.5)
    for node in nodes[1:]:
        node.beat()
    job.silent.clear()
    job.wait(20)
    assert all(node.is_known for node in nodes)
    assert job.phase is Phase.RUNNING
    assert job.epoch == 1


def test_who_died_while_a_new_master_could_not_be_reached_is_found_all_the_same() -> None:
    """Within a node-timeout and the time that others have to come back."""
    job = Driven(settings(node_timeout=15.0))
    nodes = job.start(3)
    nodes[0].step(1)
    job.restart()
    job.silent |= {node.incarnation for node in nodes}
    job.wait(40)
    job.silent -= {node.incarnation for node in nodes[:2]}
    job.wait(5)
    assert nodes[2].is_known
    job.wait(15)
    assert not nodes[2].is_known
    assert nodes[0].is_known
    assert nodes[1].is_known


def test_a_node_timeout_shorter_than_a_lost_heartbeat_takes_is_refused_at_the_door() -> None:
    """In one line that names the flag; agents know the same limit from their own command line."""
    job = Driven()
    job.start(1)
    reply = Node(job, "late").register(settings=settings(node_timeout=3.9))
    assert reply.code == "INVALID_ARGUMENT"
    assert "--node-timeout=3.9" in reply.detail
    assert LEAST_OF_AGENTS == LEAST_NODE_TIMEOUT_SECONDS


@pytest.mark.parametrize("spare", [False, True])
def test_a_frozen_node_has_its_whole_node_timeout(spare: bool) -> None:
    """Its connection is found dead by pings after ten seconds: that is silence, and no peer that closed."""
    job = Driven(settings(node_timeout=60.0, max_nodes=2, stall_timeout=0.0))
    a, b = job.start(2)
    a.step(1)
    if spare:
        b = job.node()
    job.silent.add(b.incarnation)
    job.wait(10.0)
    job.event(StreamClosed(b.name, b.incarnation))
    job.wait(45.0)
    assert b.is_known
    assert (job.phase, job.epoch) == (Phase.RUNNING, 1)
    job.silent.discard(b.incarnation)
    b.beat()
    job.event(StreamOpened(b.name, b.incarnation))
    job.wait(120.0)
    assert b.is_known, "it went on"
    job.silent.add(b.incarnation)
    job.wait(10.0)
    job.event(StreamClosed(b.name, b.incarnation))
    job.wait(53.0)
    assert not b.is_known


def test_a_frozen_node_is_dead_at_once_where_a_survivor_reports_a_failure() -> None:
    """Then it is what broke the world, and nobody waits for it."""
    job = Driven(settings(node_timeout=60.0))
    a, b = job.start(2)
    a.step(1)
    job.silent.add(b.incarnation)
    job.wait(10.0)
    job.event(StreamClosed(b.name, b.incarnation))
    a.failed("collective timed out", 1)
    assert not b.is_known


@pytest.mark.slow
def test_a_node_that_ends_is_dead_within_seconds_among_rare_voices() -> None:
    """With many agents heartbeats are rare: the time since the last one is no silence."""
    job = Driven(settings(node_timeout=15.0, max_nodes=1000))
    nodes = job.start(300)
    nodes[0].step(1)
    job.silent.add(nodes[7].incarnation)
    job.wait(heartbeat_of(job.job))
    nodes[7].hang_up()
    job.wait(2.5)
    assert not nodes[7].is_known


# ---- after the training ---------------------------------------------------------------------------------------------


def test_a_world_of_which_one_node_finished_and_another_hangs_ends() -> None:
    """The full --stall-timeout counts from the last finish, however short the steps were."""
    job = Driven(settings(stall_timeout=200))
    a, b, c = job.start(3)
    for node in (a, b, c):
        node.step(2)
    a.finished(2)
    job.wait(150)
    b.finished(2)
    job.wait(199)
    assert job.phase is Phase.RUNNING
    job.wait(2)
    assert job.phase is Phase.FORMING
    assert "not all ranks finished for 200 s (--stall-timeout)" in job.notices


def test_a_repeated_finish_is_no_sign_of_life() -> None:
    """The count goes on from the first."""
    job = Driven(settings(stall_timeout=200))
    a, b = job.start(2)
    b.step(2)
    a.finished(2)
    job.wait(150)
    a.finished(2)
    job.wait(51)
    assert job.phase is Phase.FORMING


def test_what_a_script_does_after_its_training_has_the_full_stall_timeout() -> None:
    """An export of minutes after steps of less than a second is no stall."""
    job = Driven(settings(stall_timeout=600))
    (a,) = job.start(1)
    a.step(5)
    a.step(5, training_ended=True)
    job.wait(300)
    a.step(5, training_ended=True)
    job.wait(299)
    assert job.phase is Phase.RUNNING
    job.wait(2)
    assert job.phase is Phase.FORMING


def test_a_training_that_ended_does_not_grow() -> None:
    """There is no boundary left at which it could drain."""
    job = Driven()
    (a,) = job.start(1)
    a.step(5)
    a.step(5, training_ended=True)
    late = job.node()
    late.join()
    late.warm()
    assert job.phase is Phase.RUNNING
    job.wait(30)
    assert "put off" not in job.notices


# ---- scripts that nobody hears --------------------------------------------------------------------------------------


def test_a_script_that_never_says_hello_is_doubted_once_and_left_alone() -> None:
    """It may have no session, or hang before it: that cannot be told, and one line says so."""
    job = Driven(settings(stall_timeout=200))
    job.start(2)
    job.wait(199)
    assert "--stall-timeout" not in job.notices
    job.wait(1000)
    assert job.notices.count("no rank called session() for 200 s (--stall-timeout)") == 1
    assert job.phase is Phase.RUNNING


def test_a_silent_script_of_which_one_node_finished_is_doubted_by_name() -> None:
    """Who finished, and who did not."""
    job = Driven(settings(stall_timeout=200))
    a, b = job.start(2)
    job.wait(100)
    a.finished(0)
    job.wait(199)
    assert "--stall-timeout" not in job.notices
    job.wait(2)
    assert f"{a.name} finished, {b.name} did not for 200 s" in job.notices
    assert job.phase is Phase.RUNNING


# ---- a drain that the master did not begin ---------------------------------------------------------------------------


def test_a_cut_off_node_is_not_dead_while_its_ranks_save_to_stop() -> None:
    """It had them agree on a drain because it cannot reach the master; its peers tell how their save comes along."""
    job = Driven(settings(node_timeout=12.0))
    a, b = job.start(2)
    for step in (1, 2):
        a.step(step)
    b.hang_up()
    a.step(3, draining=True)
    for size in (100, 200, 300):
        job.wait(8)
        assert job.phase is Phase.RUNNING
        a.step(3, saved_bytes=size, draining=True)
    a.drained(3)
    job.seal(3, any_size=True)
    job.wait(13)
    assert not b.is_known
    a.join()
    job.wait(2)
    assert job.job.world is not None
    assert (job.members, job.job.world.resumed_step) == ([a.name], 3)


def test_a_drain_whose_save_stands_still_does_not_keep_a_dead_node_alive() -> None:
    job = Driven(settings(node_timeout=12.0))
    a, b = job.start(2)
    a.step(1)
    b.hang_up()
    a.step(2, draining=True)
    job.wait(14)
    assert not b.is_known
