"""The unary calls: who may say what when, and what it changes. Timeouts and transitions follow in `phases`."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.message import Message

from dalsegno.protos import control_pb2

from . import announcements, checkpoints, conversion, membership, phases
from .events import Reply
from .recollection import remember
from .registration import register
from .scaling import scale
from .state import Failure, Joined, Member, Node, Part, Phase
from .turn import Turn
from .views import status

Answer = tuple[str, str]
OK: Answer = ("OK", "")


def answer(turn: Turn, message: Message) -> Reply:
    """One call, from its door to its reply."""
    job = turn.job
    if isinstance(message, control_pb2.StatusRequest):
        return Reply(message=status(turn.state, turn.now))
    if isinstance(message, control_pb2.RegisterRequest):
        return register(turn, message)
    if isinstance(message, control_pb2.ScaleRequest):
        return scale(turn, message)
    caller: control_pb2.Caller = message.caller  # type: ignore[attr-defined]
    if caller.job_id and caller.job_id != job.job_id:
        return Reply("INVALID_ARGUMENT", f"this master runs job {job.job_id!r}, not {caller.job_id!r}: check --job-id")
    node = job.node_by(caller.incarnation)
    if node is None:
        return Reply("FAILED_PRECONDITION", f"fenced: {caller.node or 'this node'} is not registered (declared dead?)")
    membership.hear(turn, node)
    code, detail = numbered(turn, node, caller, message)
    return Reply(code, detail, control_pb2.Ack(generation=job.generation) if code == "OK" else None)


def numbered(turn: Turn, node: Node, caller: control_pb2.Caller, message: Message) -> Answer:
    """A repeat of the last changing call gets its old answer; an older one, overtaken, has no effect."""
    handler = HANDLERS.get(type(message))
    if handler is None:
        return "UNIMPLEMENTED", f"{type(message).__name__} is not a call of this service"
    if not caller.request:
        return handler(turn, node, message)
    if caller.request == node.request:
        return node.answer
    if caller.request < node.request:
        return OK
    node.request = caller.request
    node.answer = handler(turn, node, message)
    return node.answer


def member_of(turn: Turn, node: Node, epoch: int) -> Member | None:
    """This node's part in the world of `epoch`, if that is the last opened one."""
    world = turn.job.world
    if world is None or world.epoch != epoch:
        return None
    return world.member(node.incarnation)


def closed(epoch: int) -> Answer:
    return "FAILED_PRECONDITION", f"epoch {epoch} is closed"


def heartbeat(turn: Turn, node: Node, message: control_pb2.HeartbeatRequest) -> Answer:
    return OK


def join(turn: Turn, node: Node, message: control_pb2.JoinRequest) -> Answer:
    """A node is ready for a place; its inventory may bring what nobody could record."""
    job, live = turn.job, turn.live
    if job.phase.is_terminal:
        return OK
    if job.world is None and any(entry.epoch > job.epoch for entry in message.inventory):
        # Sealed after this agent had registered, of an epoch that this store knows nothing of.
        remember(turn, 0, message.inventory)
    if job.phase in (Phase.WAITING, Phase.FORMING):
        checkpoints.adopt_sealed(turn, message.inventory)
    first = node.name not in live.joined_at
    node.probe = message.probe
    node.sees_directory = message.probe == job.probe
    node.joined = Joined(
        message.round,
        message.resume.digest,
        message.store_host,
        message.store_port,
        sorted(entry.ref.digest for entry in message.inventory),
    )
    live.unexpected.discard(node.name)
    if first:
        live.joined_at[node.name] = turn.now
        live.last_arrival = turn.now
        conversion.unblock(turn)
        conversion.verify_at_once(turn)
    return OK


def leave(turn: Turn, node: Node, message: control_pb2.LeaveRequest) -> Answer:
    """A notice: the node goes as soon as the run is saved, at the latest when the notice ends."""
    if not node.leaving:
        node.leaving = True
        gone = turn.now + (message.notice or turn.job.settings.drain_timeout)
        turn.live.leave_by[node.name] = gone
        if turn.job.drain is not None and not turn.job.drain.optional and turn.is_working(node):
            turn.live.drain_deadline = min(gone, turn.live.drain_deadline or gone)
    return OK


def progress(turn: Turn, node: Node, message: control_pb2.ProgressRequest) -> Answer:
    """Steps and saves of the open epoch; not journalled."""
    job, live = turn.job, turn.live
    member = member_of(turn, node, message.caller.epoch)
    if member is None:
        return OK  # Late news of a closed epoch harms nothing.
    if not job.phase.has_workers:
        reached(turn, node, message.step)
        return OK
    job.has_session = job.has_session or message.has_session
    live.longest = max(live.longest, message.longest)
    if made_step(turn, node, message.step):
        live.loss = message.loss
    if message.training_ended and node.name not in live.ended:
        live.ended.add(node.name)
        live.moved_at = turn.now
    if message.saved_bytes > live.saved_bytes.get(node.name, 0):
        live.saved_bytes[node.name] = message.saved_bytes
        live.moved_at = turn.now
    if message.beats > live.beats.get(node.name, 0):
        live.beats[node.name] = message.beats
        live.moved_at = turn.now
    live.stopping = live.stopping or message.draining
    # A copy that was long under way speaks of a drain before this one.
    if message.draining and job.drain is not None and message.step > job.drain.after:
        job.drain.agreed = True
    return OK


def made_step(turn: Turn, node: Node, step: int) -> bool:
    """A node's ranks have come to this step of the open epoch. Returns whether that is news."""
    live = turn.live
    if step <= live.steps.get(node.name, phases.world_of(turn).resumed_step):
        return False
    live.steps[node.name] = step
    live.advanced[node.name] = live.moved_at = turn.now
    if live.first_step_at is None:
        announcements.first_step(turn, phases.world_of(turn))
    return True


def reached(turn: Turn, node: Node, step: int) -> None:
    """What the report of an end says of the steps: the last progress of a node may come after it, or never."""
    job, live = turn.job, turn.live
    world = phases.world_of(turn)
    if step <= live.steps.get(node.name, world.resumed_step):
        return
    live.steps[node.name] = step
    job.ever_stepped = True
    if job.phase.has_workers:
        if live.first_step_at is None:
            announcements.first_step(turn, world)
    elif not job.phase.is_terminal and step > job.left_step:
        # They are gathering already: what the next world begins behind is lost.
        job.left_step = step
        announcements.close_record(turn, world, step)


def warm(turn: Turn, node: Node, message: control_pb2.WarmRequest) -> Answer:
    node.warm = True
    return OK


def drained(turn: Turn, node: Node, message: control_pb2.DrainedRequest) -> Answer:
    """All ranks of a node saved and stopped."""
    member = member_of(turn, node, message.caller.epoch)
    if member is None:
        recorded = turn.job.checkpoint(message.checkpoint.digest) is not None
        return OK if recorded else closed(message.caller.epoch)
    if member.part is Part.RUNNING:
        member.part = Part.DRAINED
        reached(turn, node, message.step)
    return OK


def save_failed(turn: Turn, node: Node, message: control_pb2.SaveFailedRequest) -> Answer:
    """The drain's save failed on all ranks alike. Of an earlier drain it is known, or does not matter any more."""
    job = turn.job
    if member_of(turn, node, message.caller.epoch) is None or not job.phase.has_workers:
        return OK
    drain = job.drain
    # A drain that begins from now on knows other nodes' reports of this boundary, however late, for what they are.
    made_step(turn, node, message.step)
    if drain is None or 0 < message.step <= drain.after:
        return OK
    drain.agreed = False
    if drain.optional:
        phases.withdraw(turn, f"its save failed ({message.reason})")
    return OK


def finished(turn: Turn, node: Node, message: control_pb2.FinishedRequest) -> Answer:
    """All ranks of a node ran to their end."""
    member = member_of(turn, node, message.caller.epoch)
    if member is None:
        return closed(message.caller.epoch)
    if turn.job.phase.has_workers:
        if member.part is not Part.FINISHED:
            turn.live.moved_at = turn.now
        member.part = Part.FINISHED
        reached(turn, node, message.step)
    return OK


def failure(turn: Turn, node: Node, message: control_pb2.FailureRequest) -> Answer:
    """A rank of a node broke; the world is over."""
    job = turn.job
    member = member_of(turn, node, message.caller.epoch)
    if member is None:
        return closed(message.caller.epoch)
    if member.part is not Part.RUNNING:
        return OK
    member.part = Part.FAILED
    turn.live.trouble = True
    reached(turn, node, message.step)
    first = not any(m.part in (Part.FAILED, Part.LOST) for m in phases.world_of(turn).members if m is not member)
    if first and job.phase.has_workers:
        job.causes.append(f"a worker failed on {node.name}")
        turn.notice(f"{node.name}: {message.message}", True)
    # A peer's damage is reported before its node joins again, and clears this.
    if job.pending_failure is None and job.verification is None:
        job.pending_failure = Failure(message.caller.epoch, node.name, message.message, message.step)
    return OK


def commit(turn: Turn, node: Node, message: control_pb2.CommitRequest) -> Answer:
    if message.checkpoint.form == control_pb2.FORM_UNIVERSAL:
        refused = checkpoints.record_form(turn.job, message.checkpoint)
    else:
        refused = checkpoints.record_commit(turn, message.checkpoint)
    return ("FAILED_PRECONDITION", refused) if refused else OK


def claim(turn: Turn, node: Node, message: control_pb2.ClaimRequest) -> Answer:
    """The owner of the lease begins."""
    held = turn.job.conversion
    if held is None or held.lease != message.lease or held.owner != node.name:
        return "FAILED_PRECONDITION", f"lease {message.lease} is not {node.name}'s"
    source = turn.job.checkpoint(held.source)
    name = f"{source.name}.universal.{held.lease}" if source is not None else ""
    if name and name not in held.earlier:
        held.earlier.append(name)
    turn.live.conversion_moved = turn.now
    return OK


def converted(turn: Turn, node: Node, message: control_pb2.ConversionReport) -> Answer:
    return conversion.report(turn, node, message)


def bad_checkpoint(turn: Turn, node: Node, message: control_pb2.BadCheckpointRequest) -> Answer:
    """The resume point could not be loaded: somebody else looks at it."""
    job = turn.job
    member = member_of(turn, node, message.caller.epoch)
    if member is None or job.phase.is_terminal:
        return closed(message.caller.epoch)
    # A peer that could not load it either may have been heard first: that was no failure of the script's.
    job.pending_failure = None
    universal = message.form == control_pb2.FORM_UNIVERSAL
    record = next(
        (r for r in job.checkpoints if message.ref.digest in (r.digest, r.universal_digest) and not r.retired), None
    )
    if record is not None:
        conversion.suspect(turn, record, universal, node.name, f"{message.file}: {message.message}")
        job.causes.append(f"{record.name} could not be loaded")
    member.part = Part.FAILED
    return OK


def verification(turn: Turn, node: Node, message: control_pb2.VerificationReport) -> Answer:
    return conversion.verified(turn, node, message)


def pruned(turn: Turn, node: Node, message: control_pb2.PrunedRequest) -> Answer:
    checkpoints.forget_pruned(turn.job, {ref.digest for ref in message.refs})
    return OK


HANDLERS: dict[type[Message], Callable[..., Answer]] = {
    control_pb2.HeartbeatRequest: heartbeat,
    control_pb2.JoinRequest: join,
    control_pb2.LeaveRequest: leave,
    control_pb2.ProgressRequest: progress,
    control_pb2.WarmRequest: warm,
    control_pb2.DrainedRequest: drained,
    control_pb2.SaveFailedRequest: save_failed,
    control_pb2.FinishedRequest: finished,
    control_pb2.FailureRequest: failure,
    control_pb2.CommitRequest: commit,
    control_pb2.ClaimRequest: claim,
    control_pb2.ConversionReport: converted,
    control_pb2.BadCheckpointRequest: bad_checkpoint,
    control_pb2.VerificationReport: verification,
    control_pb2.PrunedRequest: pruned,
}
