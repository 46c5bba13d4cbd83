"""Which memory checkpoint nodes send to their buddies: one at a time, and all the same one.

Where steps are saved faster than parts can be sent, each node can send its part of some of them only. If each chose
for itself, of no step would all parts ever be on two nodes. So the master chooses: the newest step that it knows
when a member speaks and nothing is under way. It is under way until each part is on as many nodes as the job wants, or
cannot be brought there. What a member is told comes with the answer to what it says it holds, or to its next sign of
life if it has not heard of the step by then; it costs no message.

Members keep what is under way, what was last, and the newest step of which each part is on enough nodes. That one is
given up for a newer one only, so it is there when a node is lost.
"""

from __future__ import annotations

from dalsegno.protos import control_pb2

from .holders import is_copied
from .live import HeldStep, Replicas, Sending, State
from .state import Checkpoint, Job, Member, Node
from .turn import Turn

__all__ = ("answer", "heard", "kept", "newest")

# So many steps in a row that were overtaken by newer ones while they were sent are worth a line.
OVERTAKEN = 3
# If each took longer than this: what a node's loss costs otherwise is nothing to change a network for.
WORTH_TELLING_SECONDS = 0.5
# See `Replicas.patience`.
PATIENCE_SECONDS = 60.0
# Of the last commits a few may be in memory alone.
LOOKED_AT = 4


def heard(turn: Turn, member: Member, step: HeldStep, message: control_pb2.HeldRequest) -> None:
    """A member of the open world has said what it holds of a step."""
    replicas = of_epoch(turn)
    if replicas.sending is not None and is_obsolete(turn, replicas.sending):
        replicas.sending = None
    if replicas.sending is not None:
        hear(turn, replicas.sending, member, step, message)
    go_on(turn, replicas, member)


def answer(turn: Turn, node: Node, *, asked: bool) -> control_pb2.Replication | None:
    """What a node is told, if it has said what it holds (`asked`), or has not heard of the step that is under way."""
    replicas, world = of_epoch(turn), turn.job.world
    sending = replicas.sending
    if not asked:
        if sending is None or not sending.untold or world is None:
            return None
        member = world.member(node.incarnation)
        if member is None or member.group_rank not in sending.untold:
            return None
        sending.untold.discard(member.group_rank)
        go_on(turn, replicas, member)
    return control_pb2.Replication(
        epoch=replicas.epoch,
        sending="" if replicas.sending is None else replicas.sending.step.record.digest,
        sent="" if replicas.sent is None else replicas.sent.digest,
        replicated="" if replicas.replicated is None else replicas.replicated.digest,
    )


def newest(state: State) -> Checkpoint | None:
    """The newest step of the open epoch of which each part is on as many nodes as the job wants; None: none is."""
    replicas = state.live.held.replicas
    return replicas.replicated if replicas.epoch == state.job.epoch else None


def kept(replicas: Replicas) -> set[str]:
    """Digests of the steps that must not be forgotten."""
    sending = None if replicas.sending is None else replicas.sending.step.record
    return {record.digest for record in (sending, replicas.sent, replicas.replicated) if record is not None}


def of_epoch(turn: Turn) -> Replicas:
    """What is known of the open epoch's steps; a new epoch begins anew."""
    held = turn.live.held
    if held.replicas.epoch != turn.job.epoch:
        held.replicas = Replicas(turn.job.epoch, patience=PATIENCE_SECONDS)
    return held.replicas


def go_on(turn: Turn, replicas: Replicas, member: Member) -> None:
    """Ends what is under way if it is over, and begins the next step, of which this member hears now."""
    settle(turn, replicas)
    following = newest_unsent(turn, replicas) if replicas.sending is None else None
    if following is not None:
        replicas.sending = begin(turn, following)
        replicas.sending.untold.discard(member.group_rank)
        settle(turn, replicas)


def begin(turn: Turn, step: HeldStep) -> Sending:
    """This step is the next one."""
    parts = set(range(step.record.parts))
    pending = {part for part in parts - step.unsent if not is_copied(turn.job, step, part)}
    return Sending(step, turn.now, pending, untold=parts, moved=turn.now)


def hear(turn: Turn, sending: Sending, member: Member, step: HeldStep, message: control_pb2.HeldRequest) -> None:
    """What a member says may settle its own part, and those that it holds."""
    own, before = member.group_rank, len(sending.pending)
    sending.untold.discard(own)
    if step is sending.step:
        for part in (own, *message.parts):
            if is_copied(turn.job, step, part):
                sending.pending.discard(part)
        if own in step.unsent:
            sending.pending.discard(own)
    elif step.record.age > sending.step.record.age and own in step.own:
        sending.later.add(step.record.digest)
        if own not in sending.step.own:
            sending.pending.discard(own)  # Its ranks have saved a later one, and not this one.
    if len(sending.pending) < before:
        sending.moved = turn.now


def settle(turn: Turn, replicas: Replicas) -> None:
    """Nothing is under way any more, if each part is where it can be and each member has heard of the step.

    Who has not heard of it may have dropped it. Nor is it, if for long nothing has come of it and newer ones wait:
    whatever holds it up must not hold up all others.
    """
    sending = replicas.sending
    if sending is None:
        return
    waits = bool(sending.pending or sending.untold)
    if waits and not (sending.later and turn.now - sending.moved > replicas.patience):
        return
    record = sending.step.record
    replicas.sending, replicas.sent = None, record
    if waits:
        replicas.patience *= 2  # A part may just take so long.
    elif all(is_copied(turn.job, sending.step, part) for part in range(record.parts)):
        replicas.replicated = record
        replicas.patience = max(PATIENCE_SECONDS, 2 * (turn.now - sending.since))
    # Where a buddy takes nothing no network is too slow, and who cannot bring it a part has said so.
    replicas.overtaken = replicas.overtaken + 1 if sending.later and not sending.step.unsent else 0
    held, seconds = turn.live.held, turn.now - sending.since
    if replicas.overtaken >= OVERTAKEN and seconds > WORTH_TELLING_SECONDS and not held.slow_told:
        held.slow_told = True
        turn.notice(
            f"memory checkpoints are made faster than they reach a second node ({record.name} took {seconds:.1f} s):"
            f" the loss of a node costs the steps of up to {2 * seconds:.1f} s; a faster network helps, or a higher"
            " --memory-bandwidth",
            True,
        )


def is_obsolete(turn: Turn, sending: Sending) -> bool:
    """The step is given up, or one on the disk is as new."""
    record = sending.step.record
    return turn.live.held.steps.get(record.digest) is not sending.step or record.step <= durable_step(turn.job)


def newest_unsent(turn: Turn, replicas: Replicas) -> HeldStep | None:
    """The newest step of the open epoch, if it is newer than what was sent and what is on the disk."""
    own = (step for step in turn.live.held.steps.values() if step.own and step.record.epoch == turn.job.epoch)
    step = max(own, key=lambda step: step.record.age, default=None)
    if step is None or step.record.step <= durable_step(turn.job):
        return None
    return step if replicas.sent is None or step.record.age > replicas.sent.age else None


def durable_step(job: Job) -> int:
    """The newest step of the open epoch that is on the disk, and not in memory alone; -1: there is none."""
    newest = job.checkpoints.newest(LOOKED_AT)
    return max((record.step for record in newest if record.epoch == job.epoch and not record.parts), default=-1)
