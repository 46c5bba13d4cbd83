"""When the world breaks: ranks that may hold the last boundary get a moment to save it, and no others."""

from __future__ import annotations

import signal

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions.keeping import ANSWER_SECONDS, STAY_SECONDS, WORD_SECONDS, WRITE_SECONDS
from dalsegno.protos import control_pb2, worker_pb2

from .test_decisions import GATHER, Agent

KEPT = control_pb2.CheckpointRef(name="step-5.e1.1000", digest="d5")
SEALED = worker_pb2.Sealed(name=KEPT.name, digest=KEPT.digest, step=5, in_memory=True)
HELD = ev.HeldChanged(control_pb2.Checkpoint(ref=KEPT, step=5, epoch=1, in_memory=True), (0, 1))


def training(*may: bool) -> Agent:
    """A node whose ranks have said whether they may save by themselves."""
    agent = Agent(nproc=len(may)).registered().running()
    for rank, one in enumerate(may):
        agent.said(rank, progress=worker_pb2.Progress(step=5, may_keep=one))
    agent.actions.clear()
    return agent


def told(agent: Agent) -> bool:
    return any(tell.keep for tell in agent.did(ev.TellWorkers))


def test_ranks_that_may_save_are_told_and_get_a_moment() -> None:
    agent = training(True)
    agent.directed(gather=GATHER)
    assert told(agent)
    assert not agent.did(ev.StopWorkers)
    agent.waits(ANSWER_SECONDS - 0.1)
    assert not agent.did(ev.StopWorkers)
    agent.waits(0.2)
    assert agent.did(ev.StopWorkers) == [ev.StopWorkers(1, 0.0)]


def test_ranks_that_may_not_end_at_once() -> None:
    agent = training(False)
    agent.directed(gather=GATHER)
    assert not told(agent)
    assert agent.did(ev.StopWorkers)


def test_what_a_rank_said_first_does_not_count_any_more() -> None:
    agent = training(True)
    agent.said(progress=worker_pb2.Progress(step=6))
    agent.directed(gather=GATHER)
    assert agent.did(ev.StopWorkers)


def test_who_writes_has_longer() -> None:
    agent = training(True)
    agent.directed(gather=GATHER)
    agent.said(keeping=worker_pb2.Keeping(step=5))
    agent.waits(WRITE_SECONDS - 0.1)
    assert not agent.did(ev.StopWorkers)
    agent.waits(0.2)
    assert agent.did(ev.StopWorkers)


def test_who_begins_again_and_again_has_no_longer() -> None:
    """It has no room: it is refused each time, and tries again until it ends."""
    agent = training(True)
    agent.directed(gather=GATHER)
    for _ in range(4):
        agent.said(keeping=worker_pb2.Keeping(step=5))
        agent.waits((WRITE_SECONDS - 0.4) / 4)
    assert not agent.did(ev.StopWorkers)
    agent.said(keeping=worker_pb2.Keeping(step=5))
    agent.waits(0.5)
    assert agent.did(ev.StopWorkers)


def test_who_begins_behind_one_that_has_no_room_has_as_long() -> None:
    agent = training(True, True)
    agent.directed(gather=GATHER)
    agent.said(keeping=worker_pb2.Keeping(step=5))
    agent.waits(5)
    agent.said(1, keeping=worker_pb2.Keeping(step=5))
    agent.waits(WRITE_SECONDS - 0.1)
    assert not agent.did(ev.StopWorkers)
    agent.waits(0.2)
    assert agent.did(ev.StopWorkers)


def test_nobody_waits_for_one_that_has_given_up() -> None:
    """It had no room for a while."""
    agent = training(True)
    agent.directed(gather=GATHER)
    agent.said(keeping=worker_pb2.Keeping(step=5))
    agent.waits(1)
    assert not agent.did(ev.StopWorkers)
    agent.said(progress=worker_pb2.Progress(step=5))
    assert agent.did(ev.StopWorkers)


def test_nobody_waits_for_one_that_has_sealed() -> None:
    agent = training(True)
    agent.directed(gather=GATHER)
    agent.said(keeping=worker_pb2.Keeping(step=5))
    agent.said(sealed=SEALED)
    assert agent.did(ev.HoldPart) == [ev.HoldPart(KEPT.name, KEPT.digest)]
    assert agent.did(ev.StopWorkers)


def test_one_that_stays_for_the_next_world_has_time_to_leave_this_one() -> None:
    agent = training(True)
    agent.directed(gather=GATHER)
    agent.said(keeping=worker_pb2.Keeping(step=5, stays=True))
    agent.waits(WRITE_SECONDS - 0.1)
    agent.said(sealed=SEALED)
    agent.waits(STAY_SECONDS - 0.1)
    assert not agent.did(ev.StopWorkers)
    agent.exits(1)
    assert agent.did(ev.StopWorkers) == [ev.StopWorkers(1, 0.0)]
    assert not agent.calls("ReportFailure")


def test_one_that_stays_and_does_not_leave_is_ended() -> None:
    agent = training(True)
    agent.directed(gather=GATHER)
    agent.said(keeping=worker_pb2.Keeping(step=5, stays=True))
    agent.waits(WRITE_SECONDS - 0.1)
    agent.said(sealed=SEALED)
    agent.waits(STAY_SECONDS + 0.1)
    assert agent.did(ev.StopWorkers)


def test_one_that_stays_leaves_before_the_master_says_so() -> None:
    """Its end is a failure as ever, of which a lost peer is the cause."""
    agent = training(True)
    agent.said(peer_lost=worker_pb2.PeerLost())
    agent.said(keeping=worker_pb2.Keeping(step=5, stays=True))
    agent.said(sealed=SEALED)
    agent.directed(gather=GATHER)
    assert not agent.did(ev.StopWorkers)
    agent.exits(1)
    assert agent.did(ev.StopWorkers)


def test_the_master_hears_of_it_before_this_node_joins() -> None:
    agent = training(True)
    agent.directed(gather=GATHER)
    agent.said(keeping=worker_pb2.Keeping(step=5))
    agent.said(sealed=SEALED)
    agent.hear(ev.WorkersStopped(1))
    assert not agent.did(ev.PrepareJoin)
    agent.hear(HELD)
    assert agent.calls("ReportHeld")
    assert agent.did(ev.PrepareJoin)


def test_what_never_shows_itself_holds_nobody_up_for_long() -> None:
    agent = training(True)
    agent.directed(gather=GATHER)
    agent.said(sealed=SEALED)
    agent.hear(ev.WorkersStopped(1))
    agent.waits(ANSWER_SECONDS + 0.1)
    agent.hear(ev.WorkersStopped(1))
    assert not agent.did(ev.PrepareJoin)
    agent.waits(WORD_SECONDS + 0.1)
    assert agent.did(ev.PrepareJoin)


def test_the_other_ranks_of_a_node_whose_rank_died_may_save() -> None:
    """The failure is reported at once, and only once."""
    agent = training(True, True)
    agent.hear(ev.WorkerExited(1, 1, -9))
    assert len(agent.calls("ReportFailure")) == 1
    assert told(agent)
    assert not agent.did(ev.StopWorkers)
    agent.directed(gather=GATHER)
    agent.hear(ev.WorkerExited(1, 0, 1))
    assert agent.did(ev.StopWorkers) == [ev.StopWorkers(1, 0.0)]
    assert len(agent.calls("ReportFailure")) == 1


def test_a_rank_that_saves_by_itself_and_ends_is_a_failure_as_ever() -> None:
    """It had lost a peer before the master said so."""
    agent = training(True)
    agent.said(peer_lost=worker_pb2.PeerLost())
    agent.said(keeping=worker_pb2.Keeping(step=5))
    agent.said(sealed=SEALED)
    agent.exits(1)
    (failure,) = agent.calls("ReportFailure")
    assert failure.kind == control_pb2.FAILURE_KIND_PEER
    assert agent.did(ev.StopWorkers)


@pytest.mark.parametrize("way", ["fenced", "finished", "signal"])
def test_where_nothing_counts_any_more_ranks_end_at_once(way: str) -> None:
    agent = training(True)
    if way == "fenced":
        agent.directed(fenced=control_pb2.Fenced(reason="silent"))
    elif way == "finished":
        agent.directed(finish=control_pb2.Finish(success=False, message="over"))
    else:
        agent.hear(ev.Signalled(signal.SIGTERM))
        agent.hurried()
    assert not told(agent)
    assert agent.did(ev.StopWorkers)


def test_the_next_ranks_have_said_nothing_yet() -> None:
    agent = training(True)
    agent.directed(gather=GATHER)
    agent.waits(ANSWER_SECONDS + 0.1)
    agent.hear(ev.WorkersStopped(1))
    agent.running(epoch=2)
    agent.actions.clear()
    agent.directed(gather=control_pb2.Gather(round=3))
    assert agent.did(ev.StopWorkers)
