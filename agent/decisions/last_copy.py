"""A step in this node's memory that the run may go on from, and that nobody else may have. Pure."""

from __future__ import annotations

from dalsegno.protos import control_pb2

from . import events as ev
from .state import AgentState, Leave, Outcome, Workers


def drained_into(state: AgentState) -> str:
    """The digest of the step in memory that these ranks drained into; empty where they did not."""
    drained = state.epoch.drained
    return drained.digest if drained is not None and state.epoch.drained_in_memory else ""


def needed(state: AgentState) -> control_pb2.CheckpointRef | None:
    """What the run goes on from, if that is in memory, and some of it here."""
    drained = drained_into(state)
    ref = state.epoch.drained if drained else state.memory.head
    if ref is not None and ref.digest in state.memory.held:
        return ref
    own = None if drained else newest_own(state)
    return None if own is None else own.checkpoint.ref


def newest_own(state: AgentState) -> ev.HeldChanged | None:
    """The newest step that ranks which have failed, or were stopped, have left here and not on the disk.

    A master makes it the newest commit if it hears of it; and it may be away. One that others have, too, is more likely
    to be whole. Where the ranks have finished it is the newest one that they wanted on the disk.
    """
    world, epoch = state.world, state.epoch
    ended = state.workers is Workers.NONE and epoch.outcome in (Outcome.FAILED, Outcome.STOPPED, Outcome.FINISHED)
    if world is None or not ended or state.fenced or state.open_epoch > state.started:
        return None
    own = [held for digest, held in state.memory.held.items() if is_own(state, digest)]
    if epoch.outcome is Outcome.FINISHED:
        # The job ends without what they saved for the case of a crash alone.
        own = [held for held in own if held.checkpoint.ref.digest in epoch.to_disk]
    # What was sealed on the disk counts at the next start, recorded or not.
    newer = [held for held in own if held.checkpoint.step > max(epoch.durable_step, epoch.sealed_step)]
    nodes = world.nodes
    return max(
        newer, key=lambda held: (held.copies > 0 or len(held.parts) == nodes, held.checkpoint.step), default=None
    )


def is_own(state: AgentState, digest: str) -> bool:
    """Whether the part that this node's ranks have written of a step, in the world that they are in, is here."""
    held, world = state.memory.held.get(digest), state.world
    if held is None or world is None or held.checkpoint.epoch != state.started:
        return False
    return world.place.group_rank in held.parts


def is_safe(state: AgentState) -> bool:
    """What the run goes on from does not depend on this node's memory, as far as it knows."""
    ref, leave = needed(state), state.leave
    if ref is None:
        return True
    if leave is None:
        return False
    if leave.released or has_sealed(leave, ref):
        return True
    return leave.spill is not None and leave.spill.over and outlives_it(state, ref.digest)


def is_copied(state: AgentState, digest: str) -> bool:
    """Whether another node holds this node's part of a step, and no master is heard, whose word would count more."""
    held = state.memory.held.get(digest)
    return held is not None and held.copies > 0 and not state.contact.up


def outlives_it(state: AgentState, digest: str) -> bool:
    """Whether this leaver's part of a step is in safety although no master says so.

    A copy alone is not enough: who holds it may leave, too, and count on the copy that is here. So either the part is
    on the disk as well, or all others hold it, and one of them is known to stay.
    """
    leave, world = state.leave, state.world
    if leave is None or world is None or not is_copied(state, digest):
        return False
    spill = leave.spill
    if spill is not None and spill.digest == digest and world.place.group_rank in spill.written:
        return True
    stays = state.drain is not None and state.drain.others_stay
    return stays and state.memory.held[digest].copies >= world.nodes - 1


def has_sealed(leave: Leave, ref: control_pb2.CheckpointRef) -> bool:
    """Whether this leaver has written the step to the disk."""
    return leave.spill is not None and leave.spill.sealed and leave.spill.digest == ref.digest


def goes_with_it(state: AgentState) -> bool:
    """Whether a step that its ranks did not drain into may be lost with this leaver."""
    return state.leave is not None and not drained_into(state) and not is_safe(state)
