"""Compares what the master's directive wants of this agent with what the agent is doing."""

from __future__ import annotations

from dalsegno.protos import control_pb2

from . import events as ev
from . import flash, keeping, leaving, memory
from .decision import Decision
from .last_copy import is_safe
from .state import Admission, DrainOrder, Epoch, Start, Workers


def directed(decision: Decision, directive: control_pb2.Directive) -> None:
    """Handles one directive. Directives of older generations do not count."""
    state = decision.state
    if directive.generation < state.generation or state.fenced or state.door.registering:
        return
    state.epoch.untold_failure = None
    state.generation = directive.generation
    state.phase, state.open_epoch = directive.phase, directive.epoch
    state.run_id = directive.run_id or state.run_id
    state.has_head = directive.HasField("head")
    if directive.generation > state.heard_generation:
        new_master(decision, directive)
    if state.has_head and directive.head.epoch == state.started:
        state.epoch.committed_step = max(state.epoch.committed_step, directive.head.step)
        if not directive.head.in_memory:
            state.epoch.durable_step = max(state.epoch.durable_step, directive.head.step)
    for notice in directive.notices:
        # What happened before this node came is no news to it.
        if notice.sequence > state.notice and state.directed:
            decision.do(ev.Say(notice.text, notice.warning, quoted=False))
        state.notice = max(state.notice, notice.sequence)
    state.directed = True
    if directive.WhichOneof("order") == "fenced":
        decision.become_fenced(directive.fenced.reason)
        return
    if directive.HasField("leave"):
        leaving.ordered(decision, stop=directive.leave.stop)
    state.save_order = directive.save_order
    side_orders(decision, directive)
    flash.directed(decision, directive)
    match directive.WhichOneof("order"):
        case "run":
            ordered_run(decision, directive.run)
        case "drain":
            ordered_run(decision, directive.drain.run)
            order = directive.drain
            others_stay = directive.HasField("leave") and not order.all_leave
            state.drain = DrainOrder(order.ending, order.all_leave, order.to_memory, others_stay)
        case "gather":
            ordered_gather(decision, directive.gather)
        case "wait":
            ordered_wait(decision, directive.wait)
        case "finish":
            ordered_finish(decision, directive.finish)
        case "release":
            ordered_release(decision, directive.release)
    copy_head(decision, directive)
    memory.directed(decision, directive)


def new_master(decision: Decision, directive: control_pb2.Directive) -> None:
    """Handles a new master, whose numbers of verifications and notices may begin with 1 again; repeats do no harm."""
    state = decision.state
    state.heard_generation = directive.generation
    state.errands.verified = 0
    state.memory.wrote = None
    memory.tell_all(decision)
    if max((notice.sequence for notice in directive.notices), default=0) < state.notice:
        state.notice = 0


def side_orders(decision: Decision, directive: control_pb2.Directive) -> None:
    """Handles what goes on beside the workers: conversion, verification, deletion, the copy for people."""
    state = decision.state
    lease = directive.convert.lease if directive.HasField("convert") else 0
    if lease != state.lease:
        decision.stop_conversion()
        if lease and not state.leaving:
            state.lease = lease
            decision.call("ClaimConversion", control_pb2.ClaimRequest(caller=decision.caller(), lease=lease))
            decision.do(ev.StartConversion(directive.convert))
    if directive.HasField("verify") and directive.verify.number > state.errands.verified:
        state.errands.verified = directive.verify.number
        decision.do(ev.Verify(directive.verify))
    if directive.HasField("sight") and directive.sight.digest != state.errands.sighting:
        state.errands.sighting = directive.sight.digest
        decision.do(ev.Look(directive.sight))
    if directive.prune and not state.errands.pruning:
        state.errands.pruning = tuple(ref.name for ref in directive.prune)
        decision.do(ev.Prune(tuple(directive.prune)))
    if directive.HasField("head"):
        head_told(decision, directive)


def head_told(decision: Decision, directive: control_pb2.Directive) -> None:
    """Keeps the copy for people up to date. What is in memory has no manifest to copy until it is on the disk, too."""
    state, head = decision.state, directive.head
    digest, leads = head.ref.digest, decision.is_rank_zero()
    copy_head(decision, directive)
    if leads and digest != state.head:
        # A commit of the open epoch: whatever was left unsealed before it is of no use to anybody any more. If it is in
        # memory alone, something before it may still be on its way to the disk.
        decision.do(ev.Sweep(head.epoch, 0 if head.in_memory else head.step, directive.converting))
    state.head = digest


def copy_head(decision: Decision, directive: control_pb2.Directive) -> None:
    """Orders the copy for people, if this node leads. Another one may have been lost before it came to that."""
    state, head = decision.state, directive.head
    wanted = state.has_head and not head.in_memory and head.ref.digest != state.latest
    if wanted and decision.is_rank_zero() and not state.ended:
        decision.do(ev.WriteLatest(head))
        state.latest = head.ref.digest
    elif wanted:
        state.latest = ""  # who leads meanwhile writes others


def ordered_run(decision: Decision, world: control_pb2.World) -> None:
    """Becomes part of a world. Starts the workers of an epoch once."""
    state = decision.state
    state.place.order = state.drain = None
    if world.epoch <= state.started or state.workers is not Workers.NONE:
        return  # already running, already ended (and reported), or still stopping: see workers_stopped
    if state.leaving:
        # The peers wait for ranks that will never start: the sooner this node is seen to go the better.
        if is_safe(state):
            decision.exit_left()
        return
    start(decision, world)


def start(decision: Decision, world: control_pb2.World) -> None:
    """Begins an epoch: everything that was known of the old workers is forgotten."""
    state = decision.state
    state.world = world
    state.started = world.epoch
    state.workers = Workers.RUNNING
    step = world.resume.source.step if world.HasField("resume") else 0
    state.epoch = Epoch(step=step, loss=state.epoch.loss, start=Start(decision.now))
    state.place = Admission()
    decision.do(ev.StartWorkers(world))


def ordered_gather(decision: Decision, gather: control_pb2.Gather) -> None:
    """Stops what runs, then joins (see `decisions.prepare_join`)."""
    state = decision.state
    state.place.order = gather
    state.drain = None
    if gather.missing and gather.missing != state.wait_said:
        decision.do(ev.Say(gather.missing, quoted=False))
    state.wait_said = gather.missing
    if state.workers is Workers.RUNNING:
        keeping.end_workers(decision)


def ordered_wait(decision: Decision, wait: control_pb2.Wait) -> None:
    """Handles having no place in the present world: no worker of ours may run."""
    state = decision.state
    state.place.order = wait
    state.drain = None
    if state.workers is Workers.RUNNING:
        keeping.end_workers(decision)
    if wait.reason and wait.reason != state.wait_said:
        decision.do(ev.Say(wait.reason, quoted=False))
    state.wait_said = wait.reason


def ordered_finish(decision: Decision, finish: control_pb2.Finish) -> None:
    """Handles the job's end. A leaver's workers may still be saving by themselves: they have their notice."""
    if decision.state.leaving and decision.state.workers is Workers.STOPPING:
        return
    if decision.state.workers is Workers.RUNNING:
        decision.kill_workers()
    if finish.success:
        decision.do(ev.MarkFinished(decision.state.run_id))
    stopped = decision.state.phase == control_pb2.PHASE_STOPPED
    decision.exit(ev.EXIT_FINISHED if finish.success else ev.EXIT_FAILED, finish.message, final=stopped)


def ordered_release(decision: Decision, release: control_pb2.Release) -> None:
    """Handles the permission for a leaver to go."""
    state = decision.state
    if release.resumed_epoch and release.resumed_epoch == state.started:
        # What another world started from counts as a commit of this node's ranks.
        state.epoch.committed_step = max(state.epoch.committed_step, release.resumed_step)
    if state.leave is not None and state.workers is Workers.RUNNING:
        # Its world has broken, and its ranks may wait for others that never come.
        keeping.end_workers(decision)
    if state.leave is not None and state.workers is Workers.NONE:
        state.leave.released = True
        if not flash.is_pending(decision):
            decision.exit_left()
