"""After the end of workers: all nodes write their parts of a Flash Checkpoint, or none does."""

from __future__ import annotations

import signal

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions.flash import AGREE_SECONDS
from dalsegno.protos import control_pb2, worker_pb2

from .test_decisions import GATHER, Agent, world


def stopped(part: int | None, *, leaves: bool = False, flash_step: int = 0) -> Agent:
    """A node of two whose workers, of a script without a session, have made step 7 and are gone."""
    agent = Agent(save_timeout=30.0).registered().running(session=False)
    agent.said(progress=worker_pb2.Progress(step=7))
    if leaves:
        agent.hear(ev.Signalled(signal.SIGTERM))
    else:
        agent.directed(gather=GATHER, epoch=1)
    agent.actions.clear()
    agent.hear(ev.WorkersStopped(1, flash_step, part))
    return agent


def joins(agent: Agent) -> bool:
    return bool(agent.did(ev.PrepareJoin))


def joined(agent: Agent) -> control_pb2.JoinRequest:
    """What it sends once it has all that belongs to a join."""
    wanted = agent.did(ev.PrepareJoin)[-1]
    agent.hear(ev.JoinPrepared(wanted.round, wanted.resume.digest, "h", 7, "probe", ()))
    request: control_pb2.JoinRequest = agent.calls("Join")[-1]
    return request


def told(agent: Agent, step: int, epoch: int = 1) -> None:
    """The master's word."""
    agent.directed(gather=GATHER, epoch=epoch, flash_save=step)


def test_where_no_other_node_has_a_part_it_joins_at_once() -> None:
    """What one node alone can write is written already."""
    agent = stopped(None, flash_step=7)
    assert joins(agent)
    assert not agent.calls("ReportProgress")
    assert joined(agent).flash_saved == 7


def test_it_says_its_step_and_writes_when_all_have_the_same() -> None:
    """It joins when that is done."""
    agent = stopped(7)
    assert agent.calls("ReportProgress")[-1].flash_step == 7
    assert not joins(agent)
    told(agent, 7)
    assert agent.did(ev.SaveFlash) == [ev.SaveFlash(1, 7)]
    told(agent, 7)
    assert len(agent.did(ev.SaveFlash)) == 1
    assert not joins(agent)
    agent.hear(ev.FlashSaved(1, 7))
    assert joins(agent)
    assert joined(agent).flash_saved == 7


@pytest.mark.parametrize("step", [0, 6])
def test_nobody_writes_what_not_all_have(step: int) -> None:
    """The master says that nobody does, or names another step."""
    agent = stopped(7)
    told(agent, step)
    assert not agent.did(ev.SaveFlash)
    assert joins(agent)


def test_who_has_nothing_says_so_and_waits_for_nobody() -> None:
    """The others need not wait for it either."""
    agent = stopped(0)
    report = agent.calls("ReportProgress")[-1]
    assert report.HasField("flash_step")
    assert report.flash_step == 0
    assert joins(agent)
    assert joined(agent).flash_saved == 0


def test_without_a_word_it_joins_after_some_seconds() -> None:
    """An older master, or one that is away."""
    agent = stopped(7)
    agent.waits(AGREE_SECONDS - 0.1)
    assert not joins(agent)
    agent.waits(0.2)
    assert joins(agent)
    told(agent, 7)
    assert not agent.did(ev.SaveFlash), "too late: it has joined"


def test_a_disk_that_hangs_holds_nobody_for_ever() -> None:
    """It joins at the end of the time for saving, and goes on writing behind."""
    agent = stopped(7)
    told(agent, 7)
    agent.waits(29.0)
    assert not joins(agent)
    agent.waits(2.0)
    assert joins(agent)


def test_the_word_of_another_epoch_does_not_count() -> None:
    agent = stopped(7)
    told(agent, 7, epoch=2)
    assert not agent.did(ev.SaveFlash)


@pytest.mark.parametrize(("saved", "code"), [(7, ev.EXIT_LEFT), (0, ev.EXIT_LEFT_UNSAVED)])
def test_a_leaver_goes_when_its_part_is_written(saved: int, code: int) -> None:
    """The others need it. Its exit code says whether all that it made is safe."""
    agent = stopped(7, leaves=True)
    assert not agent.did(ev.Exit)
    agent.directed(release=control_pb2.Release(), epoch=1, flash_save=7)
    assert not agent.did(ev.Exit)
    agent.hear(ev.FlashSaved(1, saved))
    (exit_,) = agent.did(ev.Exit)
    assert exit_.code == code


@pytest.mark.parametrize(("step", "code"), [(7, ev.EXIT_LEFT), (5, ev.EXIT_LEFT_UNSAVED), (0, ev.EXIT_LEFT_UNSAVED)])
def test_a_leaver_that_has_all_says_what_is_saved(step: int, code: int) -> None:
    """Steps after the last one in memory are lost."""
    agent = stopped(None, leaves=True, flash_step=step)
    (exit_,) = agent.did(ev.Exit)
    assert exit_.code == code
    assert (f"step {step}" in exit_.message) is bool(step)


def stops(agent: Agent) -> ev.StopWorkers:
    (order,) = agent.did(ev.StopWorkers)
    return order


def test_what_a_node_leaves_is_saved_while_its_epoch_is_the_last() -> None:
    """The world broke, and nobody has gone on yet."""
    agent = Agent().registered().running(session=False)
    agent.directed(gather=GATHER, epoch=1)
    assert stops(agent).save


def test_a_fenced_node_saves_nothing() -> None:
    """Others have gone on without it: its older step would become the newest on the disk."""
    agent = Agent().registered().running(session=False)
    agent.directed(fenced=control_pb2.Fenced(reason="silent"))
    assert not stops(agent).save


def test_a_node_that_was_passed_over_saves_nothing() -> None:
    """A newer world is open without it."""
    agent = Agent().registered().running(session=False)
    agent.directed(wait=control_pb2.Wait(reason="a spare"), epoch=2)
    assert not stops(agent).save


@pytest.mark.parametrize("nodes", [1, 2])
def test_without_a_master_only_a_world_of_one_saves(nodes: int) -> None:
    """Nobody else can have gone on."""
    agent = Agent().registered()
    one = world()
    one.nodes = nodes
    agent.directed(run=one, epoch=1)
    agent.hear(ev.LinkChanged(False))
    agent.exits(1)
    assert stops(agent).save is (nodes == 1)
