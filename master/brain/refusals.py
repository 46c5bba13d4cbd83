"""Ranks that refuse to train, for a reason that no restart mends: some nodes go on without others, or the job ends.

All ranks of a world know of a refusal (`FAILURE_KIND_REFUSED`). If some nodes have trained this run before and others
came later, the later ones are put aside, because their script, data or number is what is new. Otherwise nobody can go
on, and the job ends with the ranks' line.
"""

from __future__ import annotations

from dalsegno.protos.reads import Reads

from . import failures, places
from .state import Failure, Job, Member
from .turn import Turn, names


def pending(turn: Turn) -> Failure | None:
    """The refusal that ended the last world, if one did.

    If re-sharding was to be tried, that is what did not work: the checkpoint is converted instead. If nodes had some
    parts of it only, one may be missing: they fetch all of it first.
    """
    job, failure = turn.job, turn.job.run.budget.pending
    if failure is None or not failure.refused or job.world is None:
        return None
    return None if may_be_resharding(job) or may_miss_a_part(turn) else failure


def may_miss_a_part(turn: Turn) -> bool:
    """Whether what the ranks refused may be what they did not find. Not where each loads the first part alone."""
    world = turn.job.world
    record = turn.job.checkpoint(world.resume) if world is not None else None
    return places.may_lack(turn) and (record is None or record.reads != Reads())


def may_be_resharding(job: Job) -> bool:
    """Whether the open world re-shards what it loads, and has not made a step: what it refuses may be that."""
    return job.world is not None and job.world.resharded and not job.told.first_step


def ends_job(turn: Turn) -> bool:
    """Whether nobody can go on: the nodes left of the world all trained before it, or none of them did."""
    return pending(turn) is not None and not (is_left(turn, proven=True) and newcomers(turn))


def put_aside(turn: Turn) -> None:
    """Makes those that came last spares, as long as they do not change; the others' budget is untouched.

    Each node of the world reports the same refusal; the last reports come after this is done.
    """
    refusal, new = pending(turn), newcomers(turn)
    if refusal is None:
        return
    failures.acquit(turn)
    who = [member.node for member in new]
    without = f"going on without {names(who)}"
    if without in turn.job.next.causes:
        return
    for member in new:
        node = turn.job.node_by(member.incarnation)
        if node is not None:
            turn.update(node, refused=refusal.message)
    it = "it" if len(who) == 1 else "them"
    turn.notice(f"{names(who)} cannot take part, the others go on without {it}: {refusal.message}", True)
    turn.cause(without)


def newcomers(turn: Turn) -> list[Member]:
    """Members of the world that refused which had never made a step of this run."""
    world = turn.job.world
    return [member for member in world.members if not member.proven] if world is not None else []


def is_left(turn: Turn, *, proven: bool) -> bool:
    """Whether some node of the last world is left that trained (`proven`), or did not train, before it."""
    world = turn.job.world
    return world is not None and any(
        turn.job.node_by(member.incarnation) is not None for member in world.members if member.proven is proven
    )
