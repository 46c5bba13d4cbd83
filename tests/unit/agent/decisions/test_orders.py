"""Orders that reach an agent in its directive: it goes, or has its ranks save and train on."""

from __future__ import annotations

import signal

from dalsegno.agent.decisions import events as ev
from dalsegno.protos import control_pb2, worker_pb2
from tests.unit.agent.decisions.test_decisions import DRAINED, GATHER, Agent, kinds, world

GO = control_pb2.LeaveOrder()
STOP = control_pb2.LeaveOrder(stop=True)


def told_to_go(agent: Agent, leave: control_pb2.LeaveOrder = GO) -> list[ev.Action]:
    return agent.directed(leave=leave, drain=control_pb2.Drain(epoch=1, run=world()))


def test_an_order_to_go_is_a_notice() -> None:
    """The flag reaches the workers; the master knows of it already; said once, however often it is ordered."""
    agent = Agent().registered().running()
    assert kinds(told_to_go(agent)) == ["Say", "TellWorkers"]
    assert agent.did(ev.TellWorkers)[-1].drain
    assert kinds(told_to_go(agent)) == []
    assert not agent.calls("Leave")
    agent.said(drained=DRAINED)
    agent.exits(ev.WORKER_DRAINED)
    agent.directed(leave=GO, release=control_pb2.Release())
    (exit_,) = agent.did(ev.Exit)
    assert (exit_.code, exit_.message) == (ev.EXIT_LEFT, "left by order; everything is saved")


def test_a_spare_that_is_told_to_go_goes_at_once() -> None:
    """It has nothing to save."""
    agent = Agent().registered()
    agent.directed(wait=control_pb2.Wait())
    agent.directed(leave=GO, release=control_pb2.Release())
    (exit_,) = agent.did(ev.Exit)
    assert exit_.code == ev.EXIT_LEFT


def test_a_first_signal_behind_an_order_does_not_hurry() -> None:
    """Whoever takes a node out may end its machine next: that is no second signal, which would mean now."""
    agent = Agent().registered().running()
    told_to_go(agent)
    agent.hear(ev.Signalled(signal.SIGTERM))
    # Nor is one that comes with it, as `timeout` sends it.
    agent.hear(ev.Signalled(signal.SIGTERM))
    assert not agent.did(ev.StopWorkers)
    assert not agent.did(ev.Exit)
    agent.hurried()
    assert agent.did(ev.StopWorkers)


def test_an_order_behind_a_signal_changes_nothing() -> None:
    """The master tells every leaver, whoever wanted it to go."""
    agent = Agent().registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    leave = agent.state.leave
    assert leave is not None
    deadline = leave.deadline
    agent.now += 3
    assert kinds(told_to_go(agent)) == []
    assert agent.state.leave is not None
    assert agent.state.leave.deadline == deadline
    agent.hear(ev.Signalled(signal.SIGTERM))
    assert agent.did(ev.StopWorkers)


def test_a_stopped_job_ends_its_agents_with_1() -> None:
    """No supervisor is to start them again; and nothing has failed."""
    agent = Agent().registered().running()
    told_to_go(agent, STOP)
    agent.said(drained=DRAINED)
    agent.exits(ev.WORKER_DRAINED)
    agent.directed(leave=STOP, release=control_pb2.Release())
    (exit_,) = agent.did(ev.Exit)
    assert (exit_.code, exit_.final) == (ev.EXIT_FAILED, True)
    assert exit_.message == "the job was stopped by order; everything is saved"


def test_a_stop_overtakes_a_drain() -> None:
    """One node was told to go, then all of them."""
    agent = Agent().registered().running()
    told_to_go(agent)
    told_to_go(agent, STOP)
    agent.said(drained=DRAINED)
    agent.exits(ev.WORKER_DRAINED)
    agent.directed(leave=STOP, release=control_pb2.Release())
    assert agent.did(ev.Exit)[-1].code == ev.EXIT_FAILED


def test_an_agent_of_a_stopped_job_says_who_stopped_it() -> None:
    """It came too late to be let in."""
    agent = Agent().registered()
    finish = control_pb2.Finish(message="the job was stopped by order")
    agent.directed(phase=control_pb2.PHASE_STOPPED, finish=finish)
    (exit_,) = agent.did(ev.Exit)
    assert (exit_.code, exit_.final) == (ev.EXIT_FAILED, True)


def test_an_order_to_save_reaches_the_ranks_and_ends() -> None:
    """They train on; without the order they are told that there is none."""
    agent = Agent().registered().running()
    agent.directed(run=world(), save_order=7)
    tell = agent.did(ev.TellWorkers)[-1]
    assert (tell.save_order, tell.drain) == (7, False)
    agent.directed(run=world())
    assert agent.did(ev.TellWorkers)[-1].save_order == 0


def test_the_start_of_the_ranks_is_timed() -> None:
    """From the order to run: until the last rank had its session, and until the last one had loaded."""
    agent = Agent(nproc=2).registered()
    agent.directed(gather=GATHER)
    agent.running(session=False)
    for rank, seconds in ((0, 1.0), (1, 0.5)):
        agent.now += seconds
        agent.said(rank, hello=worker_pb2.Hello(epoch=1))
    agent.now += 2.0
    agent.said(0, ready=worker_pb2.Ready())
    agent.said(0, progress=worker_pb2.Progress(step=1))
    last = agent.calls("ReportProgress")[-1]
    assert (last.started_seconds, last.loaded_seconds) == (1.5, 3.5)
