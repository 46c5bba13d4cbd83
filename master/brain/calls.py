"""The unary calls: who may call what and when, and what it changes. `running` and `forming` make the transitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from google.protobuf.message import Message

from dalsegno.protos import control_pb2

from . import (
    announcements,
    checkpoints,
    conversion,
    doubts,
    durable,
    failures,
    flash,
    membership,
    memory,
    milestones,
    orders,
    refusals,
    remarks,
    replication,
    room,
    running,
    saves,
    shapes,
    taking,
)
from .chronicle import Kind
from .events import Reply
from .recollection import hear_epoch, remember
from .registration import proves, register, sees
from .scaling import scale
from .state import Failure, Job, Joined, MemberState, Node, Phase
from .turn import Turn, pace_of, world_of

Answer = tuple[str, str]
Noted = control_pb2.HeartbeatRequest | control_pb2.ProgressRequest
OK: Answer = ("OK", "")


def answer(turn: Turn, message: Message) -> Reply:
    """Answers one call, from the check of the caller to the reply."""
    if isinstance(message, control_pb2.RegisterRequest):
        return register(turn, message)
    order = ORDERS.get(type(message))
    if order is not None:
        return order(turn, message)
    if isinstance(message, Noted):
        return take_note(turn, message)[0]
    caller: control_pb2.Caller = message.caller  # type: ignore[attr-defined]
    node = enter(turn, caller)
    if isinstance(node, Reply):
        return node
    membership.hear(turn, node)
    hear_epoch(turn, node, caller.epoch)
    code, detail = numbered(turn, node, caller, message)
    return Reply(code, detail, ack(turn, node, message) if code == "OK" else None)


def enter(turn: Turn, caller: control_pb2.Caller) -> Node | Reply:
    """The calling node, or a refusal."""
    job = turn.job
    if caller.job_id and caller.job_id != job.job_id:
        return Reply("INVALID_ARGUMENT", f"this master runs job {job.job_id!r}, not {caller.job_id!r}: check --job-id")
    node = job.node_by(caller.incarnation)
    if node is None:
        return Reply("NOT_FOUND", f"{caller.node or 'this node'} is not registered (declared dead?)")
    if not proves(node, caller.secret):
        return Reply("PERMISSION_DENIED", f"only the agent that registered {node.name} may speak for it")
    return node


def take_note(turn: Turn, message: Noted) -> tuple[Reply, bool]:
    """A heartbeat or a progress report. Returns the reply, and whether anything follows that must be decided now."""
    node = enter(turn, message.caller)
    if isinstance(node, Reply):
        return node, False
    news = membership.hear(turn, node)
    news = hear_epoch(turn, node, message.caller.epoch) or news
    if isinstance(message, control_pb2.ProgressRequest):
        news = progress(turn, node, message) or news
    # This call may refute a suspicion that a broken stream has raised.
    news = news or turn.presence(node).closed is not None
    return Reply(message=ack(turn, node, message)), news


def ack(turn: Turn, node: Node, message: Message) -> control_pb2.Ack:
    """An Ack: how often the master wants to hear from the agent, and perhaps what the agent sends to others."""
    said = replication.answer(turn, node, asked=isinstance(message, control_pb2.HeldRequest))
    return control_pb2.Ack(generation=turn.job.generation, pace=pace_of(turn), replication=said)


def numbered(turn: Turn, node: Node, caller: control_pb2.Caller, message: Message) -> Answer:
    """Gives a repeat of the last changing call its old answer; an older call, which was overtaken, has no effect."""
    handler = HANDLERS.get(type(message))
    if handler is None:
        return "UNIMPLEMENTED", f"{type(message).__name__} is not a call of this service"
    if not caller.request:
        return handler(turn, node, message)
    if caller.request == node.request:
        return node.answer
    if caller.request < node.request:
        return OK
    answered = handler(turn, node, message)
    present = turn.job.nodes.get(node.name)
    if present is not None and present.incarnation == node.incarnation:
        turn.update(present, request=caller.request, answer=answered)
    return answered


def closed(epoch: int) -> Answer:
    return "FAILED_PRECONDITION", f"epoch {epoch} is closed"


def join(turn: Turn, node: Node, message: control_pb2.JoinRequest) -> Answer:
    """A node is ready for a place; its inventory may contain checkpoints that nobody could record."""
    job, live = turn.job, turn.live
    if job.phase.is_terminal:
        return OK
    if job.world is None and any(entry.epoch > job.epoch for entry in message.inventory):
        # Sealed after this agent had registered, of an epoch that this store knows nothing of.
        remember(turn, 0, [entry for entry in message.inventory if not entry.in_memory])
    if message.HasField("last_step"):
        counted(turn, node, message)
    flash.note_saved(turn, node, message)
    durable.on_disk(turn, message.inventory, node)
    if job.phase in (Phase.WAITING, Phase.FORMING):
        checkpoints.adopt_sealed(turn, message.inventory, node, taken=taking.took(turn, node, message.took))
    digests = {entry.ref.digest for entry in message.inventory}
    checkpoints.seen(turn, digests, node.name)
    known = frozenset(digest for digest in digests if job.checkpoint(digest) is not None)
    unusable = checkpoints.replaced(job, message.inventory) | {entry.name for entry in message.unusable}
    parts = frozenset(message.parts) if message.parts else None
    store = message.store_host, message.store_port
    joined = Joined(message.round, message.resume.digest, *store, known, unusable, parts)
    job.probe = job.probe or message.probe  # who registered could perhaps not read it
    turn.update(node, probe=message.probe, sees_directory=sees(job, message.probe), joined=joined)
    live.gathering.overdue.discard(node.name)
    presence = turn.presence(node)
    if job.phase is Phase.FORMING and job.world is not None and job.world.member(node.incarnation) is not None:
        turn.mark("stopped")
    if presence.joined is None:
        presence.joined = turn.heard
        if not live.gathering.is_crash_looping(node.name, turn.now):
            live.last_arrival = turn.now
        conversion.unblock(turn)
        conversion.verify_at_once(turn)
    return OK


def counted(turn: Turn, node: Node, message: control_pb2.JoinRequest) -> None:
    """Takes the exact last step, which is counted after the ranks of the last world have ended.

    All ranks take part in a step, so the count of one node is valid for all.
    """
    if membership.member_of(turn, node, message.caller.epoch) is not None and not turn.job.phase.has_workers:
        reached(turn, node, message.last_step)
        turn.live.gathering.counted = True


def leave(turn: Turn, node: Node, message: control_pb2.LeaveRequest) -> Answer:
    """A leave notice: the node goes as soon as the run is saved, at the latest when the notice ends. Or its goodbye."""
    if message.gone:
        membership.lose(turn, [(turn.update(node, leaving=True), "it left")])
        return OK
    if not node.leaving:
        turn.note(Kind.LEAVING, f"{node.name} leaves", nodes=(node.name,))
        membership.give_notice(turn, node, message.notice or turn.job.settings.drain_timeout)
    return OK


def progress(turn: Turn, node: Node, message: control_pb2.ProgressRequest) -> bool:
    """Notes steps and saves of the open epoch, without journalling. Returns whether something must be decided now."""
    job, epoch = turn.job, turn.open
    if membership.member_of(turn, node, message.caller.epoch) is None:
        return False  # late news of a closed epoch has no effect
    told = flash.note(turn, node, message)
    if not job.phase.has_workers:
        return reached(turn, node, message.step) or told
    news = told or epoch.first_step_at is None
    if message.has_session and not job.has_session:
        turn.update_run(has_session=True)
        news = True
        # Until here silence meant nothing, because a start may take longer than any step.
        epoch.moved = turn.heard
    if message.expects_session and not node.expects_session:
        expect_session(turn, node)
        news = True
    if message.cold:
        epoch.cold.add(node.name)
    elif node.name in epoch.cold:
        epoch.cold.discard(node.name)
        news = True
    epoch.saves_nothing = epoch.saves_nothing or message.saves_nothing
    epoch.longest_seconds = max(epoch.longest_seconds, message.longest)
    epoch.started_seconds = max(epoch.started_seconds, message.started_seconds)
    epoch.loaded_seconds = max(epoch.loaded_seconds, message.loaded_seconds)
    if message.step > epoch.top_step and not message.draining:
        # The ranks are beyond the boundary, if there was one: it was withdrawn, or its save failed.
        epoch.stopping = False
    if made_step(turn, node, message.step):
        epoch.loss = message.loss
    if message.training_ended and node.name not in epoch.ended:
        epoch.ended.add(node.name)
        epoch.moved = turn.heard
        news = True
    if message.saved_bytes > epoch.saved_bytes.get(node.name, 0):
        epoch.saved_bytes[node.name] = message.saved_bytes
        epoch.moved = turn.heard
    if message.beats > epoch.beats.get(node.name, 0):
        epoch.beats[node.name] = message.beats
        epoch.moved = turn.heard
    epoch.written_bytes[node.name], epoch.save_problems[node.name] = message.written_bytes, message.save_problem
    saves.note_written(turn)
    if message.draining and not epoch.stopping:
        epoch.stopping = news = True
    if message.draining and running.agree(turn, message.step):
        news = True
    return news


def expect_session(turn: Turn, node: Node) -> None:
    """Notes that its workers have imported session(): what was concluded from their silence is void."""
    turn.update(node, expects_session=True)
    turn.update_told(start=False)
    turn.open.growth_told = frozenset()


def made_step(turn: Turn, node: Node, step: int) -> bool:
    """Notes that a node's ranks have reached this step of the open epoch. Returns whether that is news."""
    epoch = turn.open
    if step <= epoch.steps.get(node.name, world_of(turn).resumed_step):
        return False
    epoch.advance(node.name, step, turn.now, turn.heard)
    epoch.steps[node.name] = step
    if epoch.first_step_at is None:
        announcements.first_step(turn, world_of(turn))
    return True


def reached(turn: Turn, node: Node, step: int) -> bool:
    """Notes the step in a report of an end, because a node's last progress report may come after it, or never.

    Returns whether that is news.
    """
    job, epoch = turn.job, turn.open
    world = world_of(turn)
    if step <= epoch.steps.get(node.name, world.resumed_step):
        return False
    news = step > max(epoch.top_step, world.resumed_step)
    epoch.steps[node.name] = step
    epoch.top_step = max(epoch.top_step, step)
    turn.update_run(ever_stepped=True)
    if job.phase.has_workers:
        if epoch.first_step_at is None:
            announcements.first_step(turn, world)
    elif not job.phase.is_terminal and news:
        # The nodes are gathering already: steps beyond the next world's beginning are lost.
        turn.update_run(left_step=max(step, job.run.left_step))
        announcements.close_record(turn, world, step)
        shapes.note_worked(turn, world)
    return True


def warm(turn: Turn, node: Node, message: control_pb2.WarmRequest) -> Answer:
    if not node.warm:
        turn.update(node, warm=True)
    return OK


def drained(turn: Turn, node: Node, message: control_pb2.DrainedRequest) -> Answer:
    """All ranks of a node saved and stopped."""
    member = membership.member_of(turn, node, message.caller.epoch)
    if member is None:
        recorded = turn.job.checkpoint(message.checkpoint.digest) is not None
        return OK if recorded else closed(message.caller.epoch)
    if turn.job.part(member) is MemberState.RUNNING:
        turn.set_part(member, MemberState.DRAINED)
        turn.open.drained_at = turn.open.drained_at or turn.now
        reached(turn, node, message.step)
    return OK


def save_failed(turn: Turn, node: Node, message: control_pb2.SaveFailedRequest) -> Answer:
    """A save failed on all ranks alike. If it was the drain's, that goes on; an earlier drain's has no effect."""
    job = turn.job
    member = membership.member_of(turn, node, message.caller.epoch)
    if member is None or not job.phase.has_workers:
        return OK
    if not member.group_rank:
        saves.note_failure(turn, message)
    if message.regular:
        if not member.group_rank:
            saves.note_attempt(turn, message)
        return OK
    drain = job.drain
    # Noted as a step, so that the next drain knows other nodes' late reports of this boundary for old ones.
    made_step(turn, node, message.step)
    if drain is None or (message.step and not running.is_of_this(turn, drain, message.step)):
        return OK
    turn.open.given_up_at = max(turn.open.given_up_at, message.step)
    job.drain, turn.drain_life.awaited = replace(drain, agreed=False), None
    if drain.optional:
        running.withdraw(turn, f"its save failed ({message.reason})")
    return OK


def finished(turn: Turn, node: Node, message: control_pb2.FinishedRequest) -> Answer:
    """All ranks of a node ran to their end."""
    member = membership.member_of(turn, node, message.caller.epoch)
    if member is None:
        return closed(message.caller.epoch)
    if turn.job.phase.has_workers:
        if turn.job.part(member) is not MemberState.FINISHED:
            turn.open.moved = turn.heard
        turn.set_part(member, MemberState.FINISHED)
        reached(turn, node, message.step)
    return OK


def failure(turn: Turn, node: Node, message: control_pb2.FailureRequest) -> Answer:
    """A rank of a node failed, so the world is over."""
    job = turn.job
    member = membership.member_of(turn, node, message.caller.epoch)
    if member is None:
        return closed(message.caller.epoch)
    if job.part(member) is not MemberState.RUNNING:
        return OK
    refused = message.kind == control_pb2.FAILURE_KIND_REFUSED
    elsewhere = message.kind == control_pb2.FAILURE_KIND_PEER
    first = not {MemberState.FAILED, MemberState.LOST} & set(job.parts.values()) and job.phase.has_workers
    # A refusal gives its own reason; lost peers are only named if no other cause is known, see `announcements`.
    says_why = not refused and not elsewhere and (first or announcements.is_unexplained(job))
    turn.set_part(member, MemberState.FAILED)
    turn.open.trouble = True
    reached(turn, node, message.step)
    if says_why:
        turn.cause(f"{failures.FAILED_ON}{node.name}")
        text = failures.as_told(turn, node, message.message)
        turn.notice(text, True, Kind.FAILED, nodes=(node.name,), step=message.step)
    elif refused and refusals.may_be_resharding(job):
        turn.cause("the ranks refused what they re-sharded")
    # A peer's damage is reported before its node joins again, which clears this.
    if job.verification is None:
        told = Failure(message.caller.epoch, node.name, message.message, message.step, elsewhere, refused)
        failures.blame(turn, told)
    return OK


def commit(turn: Turn, node: Node, message: control_pb2.CommitRequest) -> Answer:
    """Records a commit. Refuses it from a node outside the writing epoch's world, or without the lease."""
    job, made = turn.job, message.checkpoint
    if made.form == control_pb2.FORM_UNIVERSAL:
        return commit_form(turn, node, message)
    if job.checkpoint(made.ref.digest) is not None:
        return OK
    member = membership.member_of(turn, node, made.epoch)
    if member is None:
        if made.epoch == job.epoch:
            return "FAILED_PRECONDITION", f"{node.name} is no member of epoch {made.epoch}: it has nothing to commit"
        return "FAILED_PRECONDITION", f"epoch {made.epoch} is closed; {made.ref.name} is not part of the run"
    refused = checkpoints.record_commit(turn, made, node.name)
    if refused:
        return "FAILED_PRECONDITION", refused
    saves.note_seconds(turn, made.step, message.seconds)
    return OK


def commit_form(turn: Turn, node: Node, message: control_pb2.CommitRequest) -> Answer:
    """Records a later form, which must come from the lease's owner, under the name that the lease gives."""
    job, made = turn.job, message.checkpoint
    record = job.checkpoint(made.source.digest)
    if record is not None and record.universal_digest == made.ref.digest:
        return OK
    held = job.conversion
    if held is None or not held.lease or held.owner != node.name or held.source != made.source.digest:
        return "FAILED_PRECONDITION", f"{node.name} does not hold the conversion lease of {made.source.name}"
    if record is None or made.ref.name != lease_name(record.name, held.lease):
        return "FAILED_PRECONDITION", f"{made.ref.name} is not what lease {held.lease} makes"
    refused = checkpoints.record_form(job, made)
    if refused:
        return "FAILED_PRECONDITION", refused
    turn.note(Kind.CONVERTED, f"{made.ref.name} is committed", nodes=(node.name,), checkpoint=made.ref.name)
    if job.phase is Phase.FORMING:
        turn.mark("converted")
    return OK


def lease_name(source: str, lease: int) -> str:
    """Name of the directory into which a lease converts."""
    return f"{source}.universal.{lease}"


def claim(turn: Turn, node: Node, message: control_pb2.ClaimRequest) -> Answer:
    """The owner of the lease begins to convert."""
    held = turn.job.conversion
    if held is None or held.lease != message.lease or held.owner != node.name:
        return "FAILED_PRECONDITION", f"lease {message.lease} is not {node.name}'s"
    source = turn.job.checkpoint(held.source)
    if source is not None and (name := lease_name(source.name, held.lease)) not in held.earlier:
        conversion.note_earlier(turn, held, name)
    turn.live.conversion.lease.moved = turn.heard
    return OK


def sighted(turn: Turn, node: Node, message: control_pb2.SightedRequest) -> Answer:
    """A node other than the committer sees a checkpoint."""
    if node.name in checkpoints.witnesses(turn.job):
        checkpoints.seen(turn, [message.ref.digest], node.name)
    return OK


def converted(turn: Turn, node: Node, message: control_pb2.ConversionReport) -> Answer:
    return conversion.report(turn, node, message)


def bad_checkpoint(turn: Turn, node: Node, message: control_pb2.BadCheckpointRequest) -> Answer:
    """A node could not load the resume point: another one verifies it."""
    job = turn.job
    member = membership.member_of(turn, node, message.caller.epoch)
    if member is None or job.phase.is_terminal:
        return closed(message.caller.epoch)
    # A peer that could not load it either may have reported first; that was no failure of the script.
    failures.acquit(turn)
    universal = message.form == control_pb2.FORM_UNIVERSAL
    record = next(
        (r for r in job.checkpoints if message.ref.digest in (r.digest, r.universal_digest) and not r.retired), None
    )
    if record is not None:
        why = f"{message.file}: {message.message}"
        if record.parts:
            doubts.spoil(turn)
            doubts.doubt(turn, record, node, why)
        else:
            conversion.suspect(turn, record, universal, node.name, why)
        turn.cause(f"{record.name} could not be loaded")
    turn.set_part(member, MemberState.FAILED)
    return OK


def pruned(turn: Turn, node: Node, message: control_pb2.PrunedRequest) -> Answer:
    """The files of retired checkpoints are gone; of none, if none could be deleted."""
    if has_rank_zero(turn.job, node):
        room.note_deletion(turn, len(message.refs))
        checkpoints.forget_pruned(turn, {ref.digest for ref in message.refs})
    return OK


def short(turn: Turn, node: Node, message: control_pb2.ShortageRequest) -> Answer:
    """There is no room for the next checkpoint."""
    if has_rank_zero(turn.job, node):
        room.make_room(turn, message.missing_bytes)
    return OK


def has_rank_zero(job: Job, node: Node) -> bool:
    """Whether this is the node that deletes checkpoints and looks after the room for them. Others do not count."""
    member = job.world.member(node.incarnation) if job.world is not None else None
    return member is not None and member.group_rank == 0


ORDERS: dict[type[Message], Callable[..., Reply]] = {
    control_pb2.ScaleRequest: scale,
    control_pb2.DrainNodeRequest: orders.drain_node,
    control_pb2.StopRequest: orders.stop,
    control_pb2.StartRequest: orders.start,
    control_pb2.SaveNowRequest: orders.save_now,
    control_pb2.FenceNodeRequest: orders.fence,
    control_pb2.MilestoneRequest: milestones.record,
}

HANDLERS: dict[type[Message], Callable[..., Answer]] = {
    control_pb2.JoinRequest: join,
    control_pb2.LeaveRequest: leave,
    control_pb2.WarmRequest: warm,
    control_pb2.DrainedRequest: drained,
    control_pb2.SaveFailedRequest: save_failed,
    control_pb2.FinishedRequest: finished,
    control_pb2.FailureRequest: failure,
    control_pb2.CommitRequest: commit,
    control_pb2.ClaimRequest: claim,
    control_pb2.ConversionReport: converted,
    control_pb2.BadCheckpointRequest: bad_checkpoint,
    control_pb2.VerificationReport: conversion.verified,
    control_pb2.PrunedRequest: pruned,
    control_pb2.ShortageRequest: short,
    control_pb2.SightedRequest: sighted,
    control_pb2.HeldRequest: memory.report,
    control_pb2.DurableRequest: durable.durable,
    control_pb2.RemarkRequest: remarks.remark,
}
