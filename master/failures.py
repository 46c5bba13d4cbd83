"""The failure budget: which ends of a world were the script's own, and how many of them end the job."""

from __future__ import annotations

from .membership import has_answered
from .phases import end
from .state import Checkpoint, Member, Part, Phase
from .turn import Turn


def count(turn: Turn) -> bool:
    """The next world is about to open: was the script to blame for the end of this one, once too often?"""
    job = turn.job
    failure, job.pending_failure = job.pending_failure, None
    doubtful, job.doubtful = job.doubtful, []
    if failure is None or job.world is None:
        return False
    if doubtful and all(is_there(turn, incarnation) for incarnation in doubtful):
        job.failures += 1  # The one before this: nobody was lost then either.
    members = job.world.members
    if not any(broke_it(turn, member) for member in members):
        job.doubtful = [member.incarnation for member in members if not answers(turn, member)]
        job.last_failure_step = max(job.last_failure_step, failure.step)
        job.failures += not job.doubtful
    if job.failures <= job.settings.max_restarts:
        return False
    end(
        turn,
        Phase.FAILED,
        f"{failure.node}: {failure.message}; {job.failures} failures without progress (--max-restarts "
        f"{job.settings.max_restarts})",
    )
    return True


def broke_it(turn: Turn, member: Member) -> bool:
    """A node that was lost or left takes its world with it."""
    node = turn.job.node_by(member.incarnation)
    return node is None or node.leaving or member.part is Part.LOST


def answers(turn: Turn, member: Member) -> bool:
    """Certainly there after the failure. One that is silent may only not be declared dead yet."""
    node = turn.job.node_by(member.incarnation)
    if node is None or not turn.is_fresh(node):
        return False
    return member.part is Part.FAILED or has_answered(turn, node)


def is_there(turn: Turn, incarnation: str) -> bool:
    """It was only slow."""
    node = turn.job.node_by(incarnation)
    return node is not None and not node.leaving and turn.is_fresh(node)


def cannot_reshard(turn: Turn, resume: Checkpoint) -> bool:
    """The last world was to do that, and its workers failed before their first step although no node was lost."""
    world = turn.job.world
    if world is None or not world.resharded or world.resume != resume.digest or world.announced:
        return False
    return turn.job.pending_failure is not None and not any(broke_it(turn, member) for member in world.members)
