"""Leaving behind a failure: what the ranks have left in memory goes to the disk, or is said to go with the node."""

from __future__ import annotations

import signal

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.protos import control_pb2, worker_pb2

from .test_decisions import Agent, world
from .test_memory import REF, STEP, how_it_goes, step_of

TERM = ev.Signalled(signal.SIGTERM)
ONLY_HERE = "nobody had said that others hold what it had in memory; the run goes on from what they have"


def failed(*held: ev.HeldChanged) -> Agent:
    """Its rank has failed, and no master is heard that could make what is here the newest commit."""
    agent = Agent().registered().running()
    agent.hear(*held)
    agent.exits(1)
    agent.hear(ev.WorkersStopped(1))
    agent.hear(ev.LinkChanged(False))
    agent.actions.clear()
    return agent


def test_what_failed_ranks_left_goes_to_the_disk_where_no_master_is_heard() -> None:
    agent = failed(ev.HeldChanged(step_of(4), (0,)), ev.HeldChanged(STEP, (0,)))
    agent.hear(TERM)
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)]
    assert not agent.did(ev.Exit)
    agent.hear(ev.MadeDurable(REF))
    (left,) = agent.did(ev.Exit)
    assert (left.code, left.message) == (ev.EXIT_LEFT, "left on notice; what was in memory here is on the disk")


def test_ranks_that_fail_behind_a_notice_have_not_saved_all() -> None:
    """What they had in memory goes to the disk, and the steps since then are lost."""
    agent = Agent().registered().running()
    agent.hear(ev.HeldChanged(STEP, (0,)))
    agent.said(progress=worker_pb2.Progress(step=8))
    agent.hear(TERM)
    agent.exits(1)
    agent.hear(ev.WorkersStopped(1), ev.MadeDurable(REF), ev.LinkChanged(False))
    (left,) = agent.did(ev.Exit)
    assert left.code == ev.EXIT_LEFT_UNSAVED
    assert left.message == (
        "left on notice; its ranks failed before they had saved; the run goes on from what was in memory here, which is"
        " on the disk"
    )


def test_nor_have_those_of_which_others_have_what_they_left() -> None:
    """The master lets it go before anything is written."""
    agent = Agent().registered().running()
    agent.directed(run=world(), settings=control_pb2.Settings(memory_replicas=1))
    agent.hear(ev.HeldChanged(STEP, (0,), copies=1))
    agent.said(progress=worker_pb2.Progress(step=8))
    agent.hear(TERM)
    agent.exits(1)
    agent.hear(ev.WorkersStopped(1))
    agent.directed(release=control_pb2.Release(), phase=control_pb2.PHASE_FORMING)
    (left,) = agent.did(ev.Exit)
    assert left.code == ev.EXIT_LEFT_UNSAVED
    assert left.message.endswith("the run goes on from its last commit, or what others hold")


def test_what_others_have_too_is_chosen() -> None:
    """They may be sealing it by now; of a newer one nobody may have the other parts."""
    agent = failed(ev.HeldChanged(step_of(4), (0,), copies=1), ev.HeldChanged(STEP, (0,)))
    assert agent.state.world is not None
    agent.state.world.nodes = 2
    agent.hear(TERM)
    assert [action.ref for action in agent.did(ev.MakeDurable)] == [step_of(4).ref]


@pytest.mark.parametrize("again", [False, True])
def test_who_could_not_write_it_does_not_say_that_all_is_saved(again: bool) -> None:
    agent = failed(ev.HeldChanged(STEP, (0,)))
    agent.hear(TERM)
    agent.hear(ev.MadeDurable(REF, "no space left on device"))
    assert not agent.did(ev.Exit)
    if again:
        agent.hurried(signal.SIGINT)
    else:
        agent.waits(11)
    (left,) = agent.did(ev.Exit)
    assert left.code == ev.EXIT_LEFT_UNSAVED
    assert left.message == ("left without waiting for a save" if again else f"left on notice; {ONLY_HERE}")


def test_nor_does_a_copy_make_up_for_that() -> None:
    """Who holds it may leave, too. It is tried again."""
    agent = failed(ev.HeldChanged(STEP, (0,), copies=1))
    agent.hear(TERM)
    agent.hear(ev.MadeDurable(REF, "no space left on device"))
    agent.waits(2)
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)] * 2
    assert not agent.did(ev.Exit)
    assert "is not on the disk, and who holds a copy may leave, too" in how_it_goes(agent, False).message


@pytest.mark.parametrize("again", [False, True])
def test_who_leaves_a_job_that_waits_for_its_disk_says_what_goes_with_it(again: bool) -> None:
    """The job has failed for good, and its newest step is in memory alone. The master is heard."""
    agent = Agent().registered().running()
    agent.hear(ev.HeldChanged(STEP, (0,)))
    agent.exits(1)
    agent.hear(ev.WorkersStopped(1))
    agent.directed(head=STEP, phase=control_pb2.PHASE_FORMING)
    agent.hear(TERM)
    assert how_it_goes(agent, again).code == ev.EXIT_LEFT_UNSAVED


def test_what_is_on_the_disk_or_not_wanted_any_more_holds_nobody() -> None:
    """A newer commit is on the disk, or another world has opened since."""
    newer = control_pb2.Checkpoint(ref=control_pb2.CheckpointRef(name="step-7.e1.1", digest="d7"), step=7, epoch=1)
    for order in ({"head": newer}, {"epoch": 2}):
        agent = Agent().registered().running()
        agent.hear(ev.HeldChanged(STEP, (0,)))
        agent.directed(run=world(), **{"head": control_pb2.Checkpoint(), **order})
        agent.exits(1)
        agent.hear(ev.WorkersStopped(1), ev.LinkChanged(False), TERM)
        (left,) = agent.did(ev.Exit)
        assert left.code == ev.EXIT_LEFT


def test_what_the_ranks_have_sealed_on_the_disk_since_is_enough() -> None:
    """Recorded or not, it counts at the next start."""
    agent = Agent().registered().running()
    agent.hear(ev.HeldChanged(STEP, (0,)))
    agent.said(sealed=worker_pb2.Sealed(name="step-7.e1.1", digest="d7", step=7))
    agent.hear(ev.ManifestRead("step-7.e1.1", control_pb2.Checkpoint(epoch=1, step=7)))
    agent.exits(1)
    agent.hear(ev.WorkersStopped(1), ev.LinkChanged(False), TERM)
    assert not agent.did(ev.MakeDurable)


def test_the_master_may_let_it_go() -> None:
    """Others have it: then nothing is waited for."""
    agent = Agent().registered().running()
    agent.hear(ev.HeldChanged(STEP, (0,)))
    agent.exits(1)
    agent.hear(ev.WorkersStopped(1), TERM)
    assert not agent.did(ev.Exit)
    agent.directed(release=control_pb2.Release(), phase=control_pb2.PHASE_FORMING)
    (left,) = agent.did(ev.Exit)
    assert left.code == ev.EXIT_LEFT


# ---- ranks that have finished ---------------------------------------------------------------------------------------


def finished(*, wanted: bool = True, contact: bool = True) -> Agent:
    """Its rank has left its loop right behind a save to memory, and finished; was that `wanted` on the disk?"""
    agent = Agent().registered().running()
    sealed = worker_pb2.Sealed(name=REF.name, digest=REF.digest, step=STEP.step, in_memory=True, make_durable=wanted)
    agent.said(sealed=sealed)
    agent.hear(ev.HeldChanged(STEP, (0,)))
    agent.said(finished=worker_pb2.Finished(step=STEP.step))
    agent.exits(0)
    if not contact:
        agent.hear(ev.LinkChanged(False))
    agent.actions.clear()
    return agent


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("contact", [False, True])
def test_what_finished_ranks_wanted_on_the_disk_is_not_saved_before_it_is_there(contact: bool, stop: bool) -> None:
    """The disk takes nothing until its notice is over."""
    agent = finished(contact=contact)
    if stop and contact:
        agent.directed(leave={"stop": True})
    else:
        agent.hear(TERM)
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)]
    agent.hear(ev.MadeDurable(REF, "no space left on device"))
    agent.waits(6)
    assert not agent.did(ev.Exit)
    left = how_it_goes(agent, False)
    assert left.code == (ev.EXIT_FAILED if stop and contact else ev.EXIT_LEFT_UNSAVED)
    assert left.message.endswith(f"; {ONLY_HERE}")


def test_a_second_notice_does_not_call_it_saved_either() -> None:
    agent = finished()
    agent.hear(TERM)
    assert how_it_goes(agent, True).code == ev.EXIT_LEFT_UNSAVED


def test_what_finished_ranks_wanted_on_the_disk_may_come_there_meanwhile() -> None:
    agent = finished(contact=False)
    agent.hear(TERM)
    agent.hear(ev.MadeDurable(REF, "no space left on device"))
    agent.waits(2)
    assert not agent.did(ev.Exit)
    agent.hear(ev.MadeDurable(REF))
    (left,) = agent.did(ev.Exit)
    assert (left.code, left.message) == (ev.EXIT_LEFT, "left on notice; its part of the run is finished")


def test_what_finished_ranks_saved_for_a_crash_alone_holds_nobody() -> None:
    agent = finished(wanted=False, contact=False)
    agent.hear(TERM)
    (left,) = agent.did(ev.Exit)
    assert left.code == ev.EXIT_LEFT


def test_a_node_that_can_start_no_workers_writes_what_it_has_first() -> None:
    """Its working directory is gone. What it alone had in memory went with it, at once."""
    agent = Agent().registered().running()
    agent.hear(ev.HeldChanged(STEP, (0,)))
    agent.exits(1)
    agent.hear(ev.WorkersStopped(1))
    agent.directed(epoch=2, run=world(epoch=2), head=STEP)
    assert agent.state.started == 2
    agent.hear(ev.StartFailed(2, "the working directory /x is gone", unfit=True))
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)]
    assert not agent.did(ev.Exit)
    assert agent.calls("Leave")[-1].notice > 0
    agent.hear(ev.MadeDurable(REF))
    (left,) = agent.did(ev.Exit)
    assert left.code == ev.EXIT_LEFT
    assert left.message == "left, as no workers can be started here; what was in memory here is on the disk"
