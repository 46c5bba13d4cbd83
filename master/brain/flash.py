"""What workers left in memory by DLRover's Flash Checkpoint: all nodes of an epoch write the same step, or none does.

Each node holds a part of it, and knows the step of its own part alone. When its workers are gone it says which that is,
and waits some seconds for an answer before it joins the next world. What nodes have said is not stored: under a new
master nobody writes, and the run goes on from what is on the disk.
"""

from __future__ import annotations

from dataclasses import replace

from dalsegno.protos import control_pb2

from .live import State
from .membership import member_of
from .progress import is_further, refilled
from .state import MemberState, Node
from .turn import Turn

__all__ = ("agreed", "note", "note_saved")


def note(turn: Turn, node: Node, message: control_pb2.ProgressRequest) -> bool:
    """Notes the step that a member holds after the end of its workers. Returns whether that is news."""
    if not message.HasField("flash_step") or member_of(turn, node, message.caller.epoch) is None:
        return False
    held = turn.open.flash
    if node.incarnation in held:
        return False
    held[node.incarnation] = message.flash_step
    return True


def note_saved(turn: Turn, node: Node, message: control_pb2.JoinRequest) -> None:
    """Notes what a member of the last world has brought to the disk: nothing else tells that the run came further."""
    budget, step = turn.job.run.budget, message.flash_saved
    if is_further(budget, step) and member_of(turn, node, message.caller.epoch) is not None:
        # Steps are heard late: the failure may have been beyond the one that is known.
        turn.update_run(budget=replace(refilled(budget, step), last_step=max(budget.last_step, step)))


def agreed(state: State) -> int | None:
    """The step that all members of the last world hold, and now write; 0: none is written. None: not known yet."""
    job, held = state.job, state.live.epoch.flash
    if job.world is None or not held:
        return None
    steps = set(held.values())
    if len(steps) > 1 or 0 in steps:
        return 0
    if len(held) == len(job.world.members):
        return steps.pop()
    for member in job.world.members:
        if member.incarnation not in held and (
            job.node_by(member.incarnation) is None or job.part(member) is MemberState.FINISHED
        ):
            return 0
    return None
