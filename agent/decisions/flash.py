"""After the end of workers: what they left in memory of DLRover's Flash Checkpoint goes to the disk, or stays. Pure.

Where one node has all of it, that node has written it when its workers count as gone (`WorkersStopped.flash_step`).
Where each node has a part, none knows the others' step: it tells its own, and all write it if the master says that all
of them have the same. Until then this node neither joins nor leaves, for some seconds.
"""

from __future__ import annotations

from dataclasses import replace

from dalsegno.protos import control_pb2

from . import events as ev
from .decision import Decision
from .state import FlashPart, Outcome, Workers

__all__ = ["directed", "is_pending", "saved", "stopped"]

# Seconds until the master has heard of all nodes that have stopped, at about the same time.
AGREE_SECONDS = 5.0


def stopped(decision: Decision, event: ev.WorkersStopped) -> None:
    """The workers are gone, and this is what they left."""
    state = decision.state
    if event.epoch != state.started or state.workers is not Workers.NONE or state.ended:
        return
    state.epoch.flash_step = event.flash_step
    if (
        event.flash_part is None
        or state.world is None
        or state.epoch.outcome is Outcome.FINISHED
        or not state.contact.up
    ):
        return
    state.epoch.flash_part = FlashPart(event.flash_part, decision.now + AGREE_SECONDS, over=not event.flash_part)
    decision.report_progress()


def directed(decision: Decision, directive: control_pb2.Directive) -> None:
    """The master knows what the others have."""
    state, part = decision.state, decision.state.epoch.flash_part
    if part is None or part.over or part.saving or not directive.HasField("flash_save"):
        return
    if directive.epoch != state.started:
        return
    # Later, this node may have joined already, and its workers write into that memory.
    if directive.flash_save == part.step and decision.now < part.deadline:
        until = decision.now + state.settings.save_timeout
        state.epoch.flash_part = replace(part, saving=True, deadline=until)
        decision.do(ev.SaveFlash(state.started, part.step))
    else:
        state.epoch.flash_part = replace(part, over=True)


def saved(decision: Decision, event: ev.FlashSaved) -> None:
    """This node's part is on the disk, or could not be written."""
    state, part = decision.state, decision.state.epoch.flash_part
    if event.epoch != state.started or part is None:
        return
    state.epoch.flash_part = replace(part, over=True)
    state.epoch.flash_step = max(state.epoch.flash_step, event.step)


def is_pending(decision: Decision) -> bool:
    """Whether this node still waits for that."""
    part = decision.state.epoch.flash_part
    if part is None or part.over or decision.now >= part.deadline:
        return False
    decision.wake_at(part.deadline)
    return True
