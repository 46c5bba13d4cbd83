"""What belongs to a place in a world, or to a notice, is made and dropped whole."""

from __future__ import annotations

import copy
import signal

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions.state import Admission, Join
from dalsegno.protos import control_pb2
from tests.unit.agent.decisions.test_decisions import GATHER, Agent, kinds, world


def joined(agent: Agent) -> Agent:
    """It was asked, has answered, and did not have the checkpoint in sight."""
    agent.directed(gather=GATHER)
    agent.hear(ev.JoinPrepared(2, "d3", "h", 7, "probe", ()))
    place = agent.state.place
    assert place == Admission(GATHER, Join(2, "d3", sent=True), unseen="d3")
    return agent


def test_who_has_a_place_looks_for_none() -> None:
    """A Join that is ready only now, or has failed, is of no use to anybody."""
    agent = joined(Agent().registered())
    agent.directed(run=world(2))
    assert agent.state.place == Admission()
    assert agent.hear(ev.JoinFailed(2, "d3", "cannot listen")) == []
    assert agent.hear(ev.JoinPrepared(2, "d3", "h", 7, "probe", ())) == []
    assert agent.state.place == Admission()


def test_a_new_incarnation_was_asked_for_nothing() -> None:
    """From the moment it is declared dead, and when the door opens again."""
    agent = joined(Agent().registered())
    agent.directed(fenced=control_pb2.Fenced(reason="silent"))
    assert agent.state.place == Admission()
    agent.hear(ev.Registered("me.2", control_pb2.RegisterReply(generation=1, node="me")))
    assert agent.state.place == Admission()
    assert kinds(agent.directed(gather=GATHER)) == ["PrepareJoin"]


def test_a_notice_is_one_thing() -> None:
    """When it ends, what it finds unsaved, and how long the master's word is waited for; nothing of it before."""
    agent = Agent().registered().running()
    assert not agent.state.leaving
    agent.hear(ev.Signalled(signal.SIGTERM))
    leave = agent.state.leave
    assert leave is not None
    assert (leave.deadline, leave.unsaved, leave.release_deadline) == (agent.now + 10.0, True, None)
    agent.hear(ev.WorkerExited(1, 0, ev.WORKER_DRAINED))
    assert agent.state.leave is not None
    assert agent.state.leave.release_deadline == agent.now + agent.state.settings.release_timeout


def test_what_was_decided_on_stays_as_it_was() -> None:
    """The state that went in is whole: an event that cannot be handled is none."""
    agent = joined(Agent().registered())
    for event in (ev.JoinFailed(2, "d3", "cannot listen"), ev.Signalled(signal.SIGTERM), ev.Tick()):
        state, before = agent.state, copy.deepcopy(agent.state)
        agent.now += 1.0
        agent.hear(event)
        assert state == before


def test_a_new_incarnation_has_answered_nothing() -> None:
    """Answers that waited to be sent are gone with the old one: what was asked of that is asked again."""
    agent = Agent().registered()
    ref = control_pb2.CheckpointRef(name="step-3.e1.1", digest="d3")
    verify = control_pb2.Verification(number=2, ref=ref)
    assert kinds(agent.directed(wait=control_pb2.Wait(), verify=verify, sight=ref)) == ["Verify", "Look"]
    agent.directed(fenced=control_pb2.Fenced(reason="silent"))
    agent.hear(ev.Registered("me.2", control_pb2.RegisterReply(generation=1, node="me")))
    assert kinds(agent.directed(wait=control_pb2.Wait(), verify=verify, sight=ref)) == ["Verify", "Look"]
