"""A master that answers, and does not take this node's token any more."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from dalsegno.agent.control.client_threads import Hearing, WaitingCall
from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions.contact import AWAY_AFTER_SECONDS
from dalsegno.agent.decisions.state import Workers
from dalsegno.protos import control_pb2

from .test_decisions import DRAINED, Agent

REFUSED = ev.LinkChanged(False, refused=True)
PATIENCE = 30.0


def alone(**settings: Any) -> Agent:
    """Its workers run, and have no session."""
    fields = {"adopts": True, "save_signal": "SIGUSR1", "master_outage_timeout": PATIENCE, **settings}
    return Agent(**fields).registered().running(session=False)


def lines(agent: Agent) -> list[str]:
    return [action.text for action in agent.did(ev.Say)]


def test_it_is_told_at_once_and_once_what_to_do() -> None:
    """However often it is refused; training goes on."""
    agent = alone()
    agent.hear(REFUSED, REFUSED)
    (line,) = [text for text in lines(agent) if "token" in text]
    assert "the master refuses this token: it was changed there; training goes on for 30 s" in line
    assert "start this again with the new one" in line
    assert agent.state.workers is Workers.RUNNING
    other = alone(token_file="/etc/token")
    other.hear(REFUSED)
    assert "write the new one to /etc/token" in lines(other)[-1]


@pytest.mark.parametrize(("settings", "seconds"), [({}, PATIENCE), ({"self_fence": 20.0}, 20.0 - AWAY_AFTER_SECONDS)])
def test_then_it_saves_as_for_a_notice_and_ends(settings: dict[str, Any], seconds: float) -> None:
    """A pod has its lease for that, another node the outage timeout. The exit code asks for other input."""
    agent = alone(**settings)
    agent.hear(REFUSED)
    agent.waits(seconds - 0.1)
    assert not agent.did(ev.StopWorkers)
    agent.waits(0.1)
    (order,) = agent.did(ev.StopWorkers)
    assert (order.ask, order.grace) == ("SIGUSR1", 10.0)
    agent.waits(1.0)
    assert len(agent.did(ev.StopWorkers)) == 1
    agent.hear(ev.WorkersStopped(1, answered=True))
    (ended,) = agent.did(ev.Exit)
    assert ended.code == ev.EXIT_USAGE
    assert "refuses this token" in ended.message
    assert "what it saved is taken" in ended.message


def test_workers_with_a_session_save_at_a_boundary() -> None:
    """They are told to drain; the save is sealed, and the next master finds it."""
    agent = Agent(master_outage_timeout=PATIENCE).registered().running()
    agent.hear(REFUSED)
    agent.waits(PATIENCE)
    assert agent.did(ev.TellWorkers)[-1].drain
    assert not agent.did(ev.StopWorkers)
    agent.said(drained=DRAINED)
    agent.hear(ev.WorkerExited(1, 0, ev.WORKER_DRAINED))
    (ended,) = agent.did(ev.Exit)
    assert (ended.code, "everything is saved" in ended.message) == (ev.EXIT_USAGE, True)


def test_a_token_that_is_taken_again_changes_nothing() -> None:
    """Also after many refusals, each in its time."""
    agent = alone()
    for _ in range(3):
        agent.hear(REFUSED)
        agent.waits(PATIENCE - 1)
        agent.hear(ev.LinkChanged(True))
    assert "the master takes this token again" in lines(agent)
    assert not agent.did(ev.StopWorkers)
    assert not agent.did(ev.Exit)


def test_silence_before_counts() -> None:
    """The Commander was away while it got its new token: the lease began with its last word."""
    agent = alone(self_fence=20.0)
    agent.hear(ev.LinkChanged(False))
    agent.waits(10.0)
    agent.hear(REFUSED)
    agent.waits(20.0 - AWAY_AFTER_SECONDS - 10.0)
    assert agent.did(ev.StopWorkers)
    agent.hear(ev.WorkersStopped(1, answered=True))
    assert agent.did(ev.Exit)[0].code == ev.EXIT_USAGE


def test_a_node_without_workers_waits_as_long() -> None:
    """It holds nothing that could be lost."""
    agent = Agent(master_outage_timeout=PATIENCE).registered()
    agent.hear(REFUSED)
    agent.waits(PATIENCE - 1)
    assert not agent.did(ev.Exit)
    agent.waits(1)
    assert agent.did(ev.Exit)[0].code == ev.EXIT_USAGE


def test_patience_without_an_end_never_ends() -> None:
    """Under plain torchrun nothing could save, so nothing stops."""
    agent = alone(master_outage_timeout=float("inf"))
    agent.hear(REFUSED)
    agent.waits(1e6)
    assert not agent.did(ev.StopWorkers)
    assert "training goes on;" in lines(agent)[-1]


def test_a_token_is_refused_once_two_links_say_so() -> None:
    """The first one may have had the old token, before the new one was read."""
    hearing, first, second = Hearing(), object(), object()
    assert not hearing.heard(0.0)
    assert not hearing.unheard(1.0, first, refused=True)
    assert not hearing.unheard(1.0, first, refused=True)
    assert hearing.unheard(1.1, second, refused=True)
    assert hearing.contact == (False, True)
    assert not hearing.unheard(9.0, second, refused=False), "it stays refused while nobody answers"
    assert hearing.heard(10.0)
    assert hearing.contact == (True, False)
    assert not hearing.unheard(11.0, second, refused=True)


def test_silence_is_no_refusal() -> None:
    """It counts as loss after some seconds."""
    hearing = Hearing()
    assert not hearing.unheard(100.0, None, refused=False), "nobody was heard yet"
    hearing.heard(100.0)
    assert not hearing.unheard(100.0 + AWAY_AFTER_SECONDS, None, refused=False)
    assert hearing.unheard(100.1 + AWAY_AFTER_SECONDS, None, refused=False)
    assert hearing.contact == (False, False)


@pytest.mark.parametrize(("method", "lacks"), [("ReportHeld", True), ("CommitCheckpoint", False)])
def test_a_call_is_unknown_to_an_older_master_that_is_heard_beside_it(method: str, lacks: bool) -> None:
    """While another program's server alone is there, or a proxy knows one route less, no call is lost."""
    hearing = Hearing()
    hearing.heard(0.0)

    def silent(call: WaitingCall) -> bool:
        return hearing.is_silence(grpc.StatusCode.UNIMPLEMENTED, "Method not found!", call)

    call = WaitingCall(method, control_pb2.HeldRequest(), 1)
    assert all(silent(call) for _ in range(100))
    for seconds in range(1, 100):
        hearing.heard(float(seconds))
        silent(call)
    assert silent(call) is not lacks
    assert silent(WaitingCall(method, control_pb2.HeldRequest(), 1)), "the next one is tried as often"


def test_a_master_that_cannot_record_gives_no_orders() -> None:
    """The ranks save to the disk as while it is not heard; all else of it goes on. One line for each time."""
    agent = Agent().registered().running()
    for time in (1, 2):
        agent.hear(ev.RecordingChanged(False), ev.RecordingChanged(False))
        assert agent.state.contact.up
        assert agent.did(ev.TellWorkers)[-1] == ev.TellWorkers(drain=False, master_seen=False)
        assert len([line for line in lines(agent) if "heard, but can record nothing" in line]) == time
        agent.hear(ev.RecordingChanged(True))
        assert agent.did(ev.TellWorkers)[-1].master_seen
        assert len([line for line in lines(agent) if "records again" in line]) == time
    assert not agent.did(ev.StopWorkers)


def test_a_master_that_is_back_may_still_lack_its_store() -> None:
    """It is heard before it says how it stands."""
    agent = Agent().registered().running()
    agent.hear(ev.RecordingChanged(False), ev.LinkChanged(False), ev.LinkChanged(True))
    assert not agent.did(ev.TellWorkers)[-1].master_seen
    agent.hear(ev.RecordingChanged(True))
    assert agent.did(ev.TellWorkers)[-1].master_seen
