"""How a leaver ends whose notice is over: with what is true of its save, as far as anybody can know it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions.state import Workers
from dalsegno.protos import control_pb2, worker_pb2
from tests.unit.agent.decisions.test_decisions import MANIFEST, SEALED, Agent, kinds, world

SAFE = (ev.EXIT_LEFT, "left on notice; everything is saved")


def saving(**order: Any) -> Agent:
    """It leaves, and its ranks save step 4; `order`: what the master says of that."""
    agent = Agent(release_timeout=5.0).registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.said(progress=worker_pb2.Progress(step=3))
    agent.said(draining=worker_pb2.Draining(step=4))
    if order:
        agent.directed(**order)
    return agent


def head(step: int, epoch: int = 1) -> control_pb2.Checkpoint:
    made = control_pb2.Checkpoint(step=step, epoch=epoch)
    made.ref.digest = f"digest {step}"
    return made


def is_over(agent: Agent) -> list[ev.Action]:
    """The notice; its workers are killed."""
    agent.waits(10.1)
    return agent.hear(ev.WorkersStopped(1))


def left(agent: Agent) -> tuple[int, str]:
    (exit_,) = agent.did(ev.Exit)
    return exit_.code, exit_.message


def drain(**fields: Any) -> control_pb2.Drain:
    return control_pb2.Drain(epoch=1, reason="me leaves", run=world(), **fields)


# ---- the agent was stopped meanwhile --------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [12.0, 100.0])
def test_what_came_while_the_agent_was_stopped_counts(seconds: float) -> None:
    """Ctrl-Z for longer than the notice, `fg`: its alarm was heard before all that lay unread, and it left with 76."""
    agent = saving(drain=drain())
    assert agent.stands_still(seconds) == []
    agent.directed(head=head(4), drain=drain())
    is_over(agent)
    assert left(agent) == SAFE


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_that_lengthens_a_notice_once(seconds: float) -> None:
    """A machine that is slow all the time must come to an end, too. What is in memory is given its time."""
    agent = Agent(release_timeout=5.0, save_timeout=seconds).registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    assert agent.stands_still(100.0) == []
    assert agent.waits(max(5.0, seconds) - 0.1) == []
    assert kinds(agent.waits(0.2)) == ["StopWorkers"]
    again = Agent(release_timeout=5.0).registered().running()
    again.hear(ev.Signalled(signal.SIGTERM))
    again.stands_still(100.0)
    assert kinds(again.stands_still(100.0)) != []


def test_what_a_leaver_saved_is_taken_behind_a_stop() -> None:
    """Its script has no session, and its workers are being stopped: Ctrl-Z, `fg`. It left 5 s later, with 76."""
    agent = Agent(save_timeout=10.0, release_timeout=5.0, adopts=True).registered().running(session=False)
    agent.hear(ev.Signalled(signal.SIGTERM))
    assert agent.state.workers is Workers.STOPPING
    assert agent.stands_still(200.0) == []
    assert "Exit" not in kinds(agent.waits(9.0))
    assert agent.state.workers is Workers.STOPPING


def test_a_stop_that_costs_a_notice_nothing_is_not_counted() -> None:
    """It goes on long before its end; the one that lasts until then counts."""
    agent = Agent(release_timeout=5.0).registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    assert agent.state.leave is not None
    agent.state.leave.deadline = agent.now + 100.0
    agent.waits(1.0)
    assert agent.stands_still(10.0) == []
    assert agent.stands_still(91.0) == []
    assert agent.waits(4.9) == []
    assert kinds(agent.waits(0.2)) == ["StopWorkers"]


def test_a_stop_within_a_notice_lengthens_no_notice() -> None:
    """The machine goes when it has said so, however long a save of this run may take."""
    agent = Agent(save_timeout=45.0).registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    assert agent.state.leave is not None
    deadline = agent.state.leave.deadline = agent.now + 30.0
    agent.waits(1.0)
    assert agent.stands_still(6.0) == []
    assert agent.state.leave.deadline == deadline


def test_a_release_that_lies_unread_counts() -> None:
    """Its part is safe, and the master's word came while the agent was stopped."""
    agent = saving(drain=drain())
    agent.said(sealed=SEALED)
    agent.hear(ev.WorkerExited(1, 0, ev.WORKER_DRAINED))
    agent.hear(MANIFEST)
    assert agent.state.leave is not None
    assert agent.state.leave.release_deadline is not None
    assert agent.did(ev.Exit) == []
    agent.stands_still(100.0)
    assert agent.did(ev.Exit) == []
    assert "Exit" in kinds(agent.waits(5.1))


# ---- committed ------------------------------------------------------------------------------------------------------


def test_what_is_committed_is_saved_whatever_the_workers_still_do() -> None:
    """They sync a copy for people, on a slow disk, when the notice is over: 75 all the same."""
    agent = saving()
    agent.directed(head=head(4), drain=drain())
    is_over(agent)
    assert left(agent) == SAFE


@pytest.mark.parametrize(("step", "epoch"), [(3, 1), (4, 2)])
def test_an_older_commit_is_not_the_boundarys(step: int, epoch: int) -> None:
    """Nor is one of another epoch."""
    agent = saving()
    agent.directed(head=head(step, epoch), drain=drain())
    is_over(agent)
    assert left(agent)[0] == ev.EXIT_LEFT_UNSAVED


def test_a_commit_is_not_enough_where_steps_were_made_since() -> None:
    """No boundary was agreed on yet: not every step is heard."""
    agent = Agent().registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.said(progress=worker_pb2.Progress(step=4))
    agent.directed(head=head(4), drain=drain())
    is_over(agent)
    assert left(agent)[0] == ev.EXIT_LEFT_UNSAVED


def test_the_commit_of_its_own_seal_is_waited_for() -> None:
    """It was sealed at the last moment: the call goes out, and the master's word is worth a moment."""
    agent = saving()
    agent.said(sealed=SEALED)
    assert "CommitCheckpoint" in kinds(agent.hear(MANIFEST))
    is_over(agent)
    assert not agent.did(ev.Exit)
    agent.directed(head=head(4), release=control_pb2.Release())
    assert left(agent) == SAFE


def test_a_seal_that_nobody_records_is_no_commit() -> None:
    """A newer epoch may be open."""
    agent = saving()
    agent.said(sealed=SEALED)
    agent.hear(MANIFEST)
    is_over(agent)
    agent.waits(5.1)
    assert left(agent)[0] == ev.EXIT_LEFT_UNSAVED


def test_a_seal_counts_where_the_master_is_away() -> None:
    """It finds what is sealed in an inventory, as after a drain."""
    agent = saving()
    agent.hear(ev.LinkChanged(False))
    agent.said(sealed=SEALED)
    is_over(agent)
    assert left(agent) == SAFE


def test_a_second_signal_after_the_commit_loses_nothing() -> None:
    """The exit says what is true, not what was asked for."""
    agent = saving()
    agent.directed(head=head(4), drain=drain())
    agent.hurried()
    assert left(agent) == SAFE


def test_a_second_signal_before_it_says_what_is_lost() -> None:
    """As ever."""
    agent = saving()
    agent.hurried()
    assert left(agent) == (ev.EXIT_LEFT_UNSAVED, "left without waiting for a save")


# ---- who completes it -----------------------------------------------------------------------------------------------


def test_the_others_are_named_where_there_are_some() -> None:
    """Nobody knows here whether they can complete it."""
    agent = saving(drain=drain())
    is_over(agent)
    code, message = left(agent)
    assert (code, "the others complete the save if" in message) == (ev.EXIT_LEFT_UNSAVED, True)


def test_where_all_leave_nobody_is_said_to_complete_it() -> None:
    """One of them still may."""
    agent = saving(drain=drain(all_leave=True))
    is_over(agent)
    code, message = left(agent)
    assert (code, "the others complete" in message) == (ev.EXIT_LEFT_UNSAVED, False)
    assert "all other nodes leave, too" in message
    assert "last commit" in message


def test_a_node_alone_has_no_others() -> None:
    """It says what it takes to save in time."""
    alone = world()
    alone.nodes = 1
    agent = Agent().registered()
    agent.directed(run=alone)
    agent.said(hello=worker_pb2.Hello(epoch=1))
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.said(draining=worker_pb2.Draining(step=4))
    agent.directed(drain=control_pb2.Drain(epoch=1, run=alone, all_leave=True))
    is_over(agent)
    code, message = left(agent)
    assert (code, "other" in message, "--drain-timeout" in message) == (ev.EXIT_LEFT_UNSAVED, False, True)


def test_steps_behind_a_committed_boundary_are_not_saved() -> None:
    """The drain was withdrawn, they trained on, and what they told of that was left out: their count tells."""
    agent = saving()
    agent.directed(head=head(4), drain=drain())
    agent.waits(10.1)
    agent.hear(ev.StepsCounted(1, 6), ev.WorkersStopped(1))
    assert left(agent)[0] == ev.EXIT_LEFT_UNSAVED


# ---- its part is written, and others complete the save ---------------------------------------------------------------


def wrote_its_part() -> Agent:
    """Another leaver's notice is over: these ranks write what is theirs and go, and another node is to seal it."""
    agent = saving(drain=drain(ending=control_pb2.ENDING_WRITE))
    agent.said(drained=worker_pb2.Drained(step=4))
    agent.exits(ev.WORKER_DRAINED)
    agent.directed(wait=control_pb2.Wait(reason="me stays until the others have completed the save"))
    agent.waits(6.0)
    assert agent.did(ev.Exit) == []
    return agent


def test_who_leaves_the_seal_to_others_waits_for_their_commit() -> None:
    """Longer than the master's word is waited for otherwise."""
    agent = wrote_its_part()
    agent.directed(head=head(4), release=control_pb2.Release())
    assert left(agent) == SAFE


def test_who_leaves_the_seal_to_others_goes_with_its_notice() -> None:
    """Whether they complete it is not known by then; that the script saves nothing would be wrong."""
    agent = wrote_its_part()
    agent.waits(4.1)
    code, text = left(agent)
    assert code == ev.EXIT_LEFT_UNSAVED
    assert text.startswith("left on notice; its part of the last save is written; the others complete the save if")


# ---- nothing was made -----------------------------------------------------------------------------------------------


def test_a_leaver_whose_world_has_broken_ends_its_ranks() -> None:
    """They may wait in their first collective for ranks that have gone: it is released, and does not sit them out."""
    agent = Agent().registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.directed(release=control_pb2.Release(), phase=control_pb2.PHASE_WAITING)
    assert agent.did(ev.StopWorkers) == [ev.StopWorkers(1, 0.0)]
    agent.hear(ev.StepsCounted(1, 0), ev.WorkersStopped(1))
    assert left(agent) == (ev.EXIT_LEFT, "left on notice; no step was made here that could be lost")


@pytest.mark.parametrize("made", [0, 1, None])
def test_a_leaver_that_was_declared_dead_says_what_it_lost(made: int | None) -> None:
    """Nothing, if its ranks are known to have made no step; silence proves nothing (None: nobody counted)."""
    agent = Agent().registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.directed(fenced=control_pb2.Fenced(reason="declared dead"))
    counted = [] if made is None else [ev.StepsCounted(1, made)]
    agent.hear(*counted, ev.WorkersStopped(1))
    assert left(agent)[0] == (ev.EXIT_LEFT if made == 0 else ev.EXIT_LEFT_UNSAVED)
