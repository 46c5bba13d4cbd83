"""Workers without a session that are asked to save before they end: on a notice, and when no master is heard."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions.contact import AWAY_AFTER_SECONDS
from dalsegno.agent.decisions.state import Workers
from dalsegno.agent.decisions.told import told
from dalsegno.protos import control_pb2, worker_pb2

from .test_decisions import SEALED, Agent, world

FENCE = 20.0


def alone(**settings: Any) -> Agent:
    """Its workers run, and have no session."""
    return Agent(adopts=True, save_signal="SIGUSR1", **settings).registered().running(session=False)


def test_a_notice_asks_the_workers_to_save() -> None:
    """They get the signal of --save-signal and the whole notice; without one they only get SIGTERM."""
    agent = alone()
    agent.hear(ev.Signalled(signal.SIGTERM))
    (order,) = agent.did(ev.StopWorkers)
    assert (order.ask, order.grace) == ("SIGUSR1", 10.0)
    plain = Agent(adopts=True).registered().running(session=False)
    plain.hear(ev.Signalled(signal.SIGTERM))
    assert plain.did(ev.StopWorkers)[0].ask == ""


@pytest.mark.parametrize(("answered", "code"), [(True, ev.EXIT_LEFT), (False, ev.EXIT_LEFT_UNSAVED)])
def test_only_a_save_that_was_taken_is_a_save(answered: bool, code: int) -> None:
    """The exit code says whether steps were lost."""
    agent = alone()
    agent.hear(ev.Signalled(signal.SIGTERM), ev.WorkersStopped(1, answered=answered))
    assert agent.did(ev.Exit)[0].code == code


def leaver() -> Agent:
    """Its workers were asked, have saved step 4 and are gone; the commit is on its way to the master."""
    agent = alone()
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.said(sealed=SEALED)
    agent.hear(ev.WorkersStopped(1, answered=True))
    assert not agent.did(ev.Exit)
    agent.hear(ev.ManifestRead("step-4.e1.1", control_pb2.Checkpoint(step=4, epoch=1), ""))
    assert agent.calls("CommitCheckpoint")
    return agent


def test_a_leaver_hears_that_what_it_was_asked_for_is_recorded() -> None:
    """Whoever watches it would miss the commit; it is there a moment later."""
    agent = leaver()
    assert not agent.did(ev.Exit)
    ref = control_pb2.CheckpointRef(name="step-4.e1.1", digest="d4")
    agent.directed(run=world(), head=control_pb2.Checkpoint(step=4, epoch=1, ref=ref))
    assert agent.did(ev.WriteLatest)
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT


def test_a_leaver_does_not_wait_for_the_word_for_long() -> None:
    """The call is on its way, and a master that goes just now knows of it when it is back."""
    agent = leaver()
    agent.waits(agent.state.settings.release_timeout + 0.1)
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT
    agent = leaver()
    agent.hear(ev.LinkChanged(False))
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT


def test_a_session_saves_by_itself() -> None:
    """Workers with a session are not sent the signal: they drain."""
    agent = Agent(adopts=True, save_signal="SIGUSR1").registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    assert not agent.did(ev.StopWorkers)
    assert agent.did(ev.TellWorkers)[-1].drain


def fenced(**settings: Any) -> Agent:
    """Nobody has heard the master for as long as it takes."""
    agent = alone(self_fence=FENCE, **settings)
    agent.hear(ev.LinkChanged(False))
    agent.waits(FENCE - AWAY_AFTER_SECONDS - 0.1)
    assert not agent.did(ev.StopWorkers), "not yet"
    agent.waits(0.1)
    return agent


def test_without_a_master_the_workers_stop_after_a_save() -> None:
    """The silence counts from the last word, which came before the link was known to be lost."""
    agent = fenced()
    (order,) = agent.did(ev.StopWorkers)
    assert (order.ask, order.grace) == ("SIGUSR1", 10.0)
    agent.waits(100.0)
    assert len(agent.did(ev.StopWorkers)) == 1


def test_a_master_that_is_heard_in_time_stops_nothing() -> None:
    """Each silence counts by itself."""
    agent = alone(self_fence=FENCE)
    for _ in range(3):
        agent.hear(ev.LinkChanged(False))
        agent.waits(FENCE - AWAY_AFTER_SECONDS - 0.1)
        agent.hear(ev.LinkChanged(True))
    assert not agent.did(ev.StopWorkers)


def test_without_self_fence_training_goes_on() -> None:
    """As ever."""
    agent = alone()
    agent.hear(ev.LinkChanged(False))
    agent.waits(10_000.0)
    assert agent.state.workers is Workers.RUNNING
    assert not agent.did(ev.StopWorkers)


def test_what_was_fenced_starts_again_when_the_master_is_heard() -> None:
    """It reports that its ranks have drained, so the master opens another epoch; before, it says nothing wrong."""
    agent = fenced()
    agent.hear(ev.WorkersStopped(1, answered=True))
    assert agent.state.workers is Workers.NONE
    (report,) = agent.calls("ReportDrained")
    assert not report.HasField("checkpoint")
    agent.hear(ev.LinkChanged(True))
    agent.directed(run=world())
    assert len(agent.did(ev.StartWorkers)) == 1, "that epoch is over"
    agent.directed(gather=control_pb2.Gather(round=2))
    agent.hear(ev.JoinPrepared(2, "", "h", 9, "probe", ()))
    agent.directed(run=world(2))
    assert len(agent.did(ev.StartWorkers)) == 2
    assert not agent.did(ev.Exit)


def test_a_fenced_node_that_was_declared_dead_registers_anew() -> None:
    """The master gave its place away: nothing of the old incarnation counts."""
    agent = fenced()
    agent.hear(ev.LinkChanged(True), ev.CallFailed("Heartbeat", "NOT_FOUND", "you are gone"))
    agent.hear(ev.WorkersStopped(1, answered=True))
    assert [action.previous_incarnation for action in agent.did(ev.Register)][-1] == "me.1"
    assert not agent.calls("ReportDrained")


def test_a_session_drains_when_it_is_fenced() -> None:
    """It saves at a step boundary, as in any drain, and nothing is killed."""
    agent = Agent(self_fence=FENCE).registered().running()
    agent.hear(ev.LinkChanged(False))
    agent.waits(FENCE)
    assert agent.did(ev.TellWorkers)[-1].drain
    assert not agent.did(ev.StopWorkers)


def told_of(agent: Agent, *events: ev.Event) -> list[dict[str, Any]]:
    found = []
    for event in events:
        before = agent.state
        actions = agent.hear(event)
        found += list(told(before, event, agent.state, actions))
    return found


def test_a_supervisor_is_told_what_happens() -> None:
    """From the place in a world to the end, in order; a commit only when the master says so."""
    agent = Agent(adopts=True, save_signal="SIGUSR1").registered()
    head = control_pb2.Checkpoint(step=7, epoch=1, ref=control_pb2.CheckpointRef(name="step-7.e1.1", digest="d"))
    sealed = worker_pb2.ToAgent(sealed=worker_pb2.Sealed(name="step-7.e1.1", digest="d", step=7))
    said = told_of(
        agent,
        ev.Directed(control_pb2.Directive(generation=1, run_id="run-0001", run=world(1))),
        ev.WorkerSaid(1, 0, sealed),
        ev.Directed(control_pb2.Directive(generation=1, run_id="run-0001", run=world(1), head=head)),
        ev.LinkChanged(False),
        ev.Signalled(signal.SIGTERM),
        ev.WorkersStopped(1, answered=True),
    )
    names = ["starts", "sealed", "committed", "link", "leaves", "stops", "stopped"]
    assert [one["event"] for one in said][: len(names)] == names
    assert said[2] == {"event": "committed", "name": "step-7.e1.1", "digest": "d", "step": 7, "epoch": 1}
    assert said[6]["answered"]


def test_a_damaged_resume_point_and_a_fence_are_told() -> None:
    """Both end what was trained, so a supervisor hears of them."""
    agent = alone()
    bad = worker_pb2.BadCheckpoint(name="step-7.e1.1", digest="d", file="a.bin", message="wrong")
    (said, *_) = told_of(agent, ev.WorkerSaid(1, 0, worker_pb2.ToAgent(bad_checkpoint=bad)))
    assert said == {"event": "damaged", "name": "step-7.e1.1", "file": "a.bin", "why": "wrong"}
    assert {"event": "fenced"} in told_of(agent, ev.CallFailed("Heartbeat", "NOT_FOUND", "gone"))
