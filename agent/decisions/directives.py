"""What the master's directive says this agent should be doing, compared with what it is doing."""

from __future__ import annotations

from dalsegno.protos import control_pb2

from . import events as ev
from .decision import Turn
from .state import Outcome, Workers


def directed(turn: Turn, directive: control_pb2.Directive) -> None:
    """One directive, compared with what this agent is doing. Older generations do not count."""
    state = turn.state
    if directive.generation < state.generation or state.fenced or state.registering:
        return
    state.generation = directive.generation
    state.phase = directive.phase
    state.run_id = directive.run_id or state.run_id
    state.has_head = directive.HasField("head")
    if directive.generation > state.heard_generation:
        new_master(turn, directive)
    for notice in directive.notices:
        # What happened before this node came is not its news.
        if notice.sequence > state.notice and state.directed:
            turn.do(ev.Say(notice.text, notice.warning))
        state.notice = max(state.notice, notice.sequence)
    state.directed = True
    if directive.WhichOneof("order") == "fenced":
        turn.become_fenced(directive.fenced.reason)
        return
    side_orders(turn, directive)
    match directive.WhichOneof("order"):
        case "run":
            ordered_run(turn, directive.run, drain=False)
        case "drain":
            ordered_run(turn, directive.drain.run, drain=True)
            state.ending = directive.drain.ending
        case "gather":
            ordered_gather(turn, directive.gather)
        case "wait":
            ordered_wait(turn, directive.wait)
        case "finish":
            ordered_finish(turn, directive.finish)
        case "release":
            ordered_release(turn)


def new_master(turn: Turn, directive: control_pb2.Directive) -> None:
    """One that lost its store counts verifications and notices from 1 again; verifying twice harms nothing."""
    state = turn.state
    state.heard_generation = directive.generation
    state.verified = 0
    if max((notice.sequence for notice in directive.notices), default=0) < state.notice:
        state.notice = 0


def side_orders(turn: Turn, directive: control_pb2.Directive) -> None:
    """What goes on beside the workers: conversion, verification, deletion, the copy for people."""
    state = turn.state
    lease = directive.convert.lease if directive.HasField("convert") else 0
    if lease != state.lease:
        turn.stop_conversion()
        if lease and not state.leaving:
            state.lease = lease
            turn.call("ClaimConversion", control_pb2.ClaimRequest(caller=turn.caller(), lease=lease))
            turn.do(ev.StartConversion(directive.convert))
    if directive.HasField("verify") and directive.verify.number > state.verified:
        state.verified = directive.verify.number
        turn.do(ev.Verify(directive.verify))
    if directive.HasField("sight") and directive.sight.digest != state.sighting:
        state.sighting = directive.sight.digest
        turn.do(ev.Look(directive.sight))
    if directive.prune and not state.pruning:
        state.pruning = tuple(ref.name for ref in directive.prune)
        turn.do(ev.Prune(tuple(directive.prune)))
    if directive.HasField("head") and directive.head.ref.digest != state.head:
        state.head = directive.head.ref.digest
        if turn.is_rank_zero():
            # A commit of the open epoch: whatever older epochs left unsealed is of no use to anybody any more.
            turn.do(ev.WriteLatest(directive.head), ev.Sweep(directive.head.epoch))


def ordered_run(turn: Turn, world: control_pb2.World, drain: bool) -> None:
    """Be part of a world; with `drain` save and stop. Starts the workers of an epoch once."""
    state = turn.state
    state.gather = None
    state.wait = None
    state.drain_ordered, state.ending = drain, control_pb2.ENDING_TOGETHER
    if world.epoch <= state.started or state.workers is not Workers.NONE:
        return  # Already running, already ended (and reported), or still stopping: see workers_stopped.
    if state.leaving:
        # The peers wait for ranks that will never start: the sooner this node is seen to go the better.
        turn.exit_left()
        return
    start(turn, world)


def start(turn: Turn, world: control_pb2.World) -> None:
    """Begin an epoch: everything that was known of the old workers is forgotten."""
    state = turn.state
    state.world = world
    state.started = world.epoch
    state.workers = Workers.RUNNING
    state.outcome = Outcome.NONE
    state.exits = ()
    state.drained_ranks = frozenset()
    state.finished_ranks = frozenset()
    state.drained = None
    state.refused = False
    state.step = world.resume.source.step if world.HasField("resume") else 0
    state.longest = 0.0
    state.saved_bytes = 0
    state.saving, state.saving_parts, state.written = "", {}, {}
    state.beats = {}
    state.has_session = state.expects_session = False
    state.agreed = False
    state.anyone_sees_master = False
    state.bad_reported = False
    state.refusals = {}
    state.told = (False, False, 0)
    state.joining = None
    turn.do(ev.StartWorkers(world))


def ordered_gather(turn: Turn, gather: control_pb2.Gather) -> None:
    """Stop what runs, then join (see `decisions.prepare_join`)."""
    state = turn.state
    state.gather = gather
    state.wait = None
    state.drain_ordered = False
    if gather.missing and gather.missing != state.wait_said:
        turn.do(ev.Say(gather.missing))
    state.wait_said = gather.missing
    if state.workers is Workers.RUNNING:
        turn.kill_workers()


def ordered_wait(turn: Turn, wait: control_pb2.Wait) -> None:
    """No place in the present world: nothing of ours may run."""
    state = turn.state
    state.gather = None
    state.wait = wait
    state.drain_ordered = False
    if state.workers is Workers.RUNNING:
        turn.kill_workers()
    if wait.reason and wait.reason != state.wait_said:
        turn.do(ev.Say(wait.reason))
    state.wait_said = wait.reason


def ordered_finish(turn: Turn, finish: control_pb2.Finish) -> None:
    """The job ended. A leaver's workers may be saving by themselves all the same: they have their notice."""
    if turn.state.leaving and turn.state.workers is Workers.STOPPING:
        return
    if turn.state.workers is Workers.RUNNING:
        turn.kill_workers()
    if finish.success:
        turn.do(ev.MarkFinished(turn.state.run_id))
    turn.exit(ev.EXIT_FINISHED if finish.success else ev.EXIT_FAILED, finish.message)


def ordered_release(turn: Turn) -> None:
    """A leaver may go."""
    state = turn.state
    if state.leaving and state.workers is Workers.NONE:
        turn.exit_left()
