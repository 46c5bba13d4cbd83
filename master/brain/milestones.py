"""Milestones: checkpoints that were published outside of the checkpoint directory, for whoever goes on without it."""

from __future__ import annotations

from dataclasses import replace

from dalsegno.protos import control_pb2

from . import membership
from .chronicle import Kind
from .events import Reply
from .live import Named
from .published import MILESTONES_KEPT, Milestone
from .registration import proves
from .state import Job
from .turn import Turn

__all__ = ("milestones_proto", "record")


def record(turn: Turn, message: control_pb2.MilestoneRequest) -> Reply:
    """Notes a milestone, once. Refuses one whose checkpoint was never committed: it is no part of the run."""
    job, said = turn.job, message.milestone
    if not said.repo or not said.revision:
        return Reply("INVALID_ARGUMENT", "a milestone has a repository and a revision")
    made = Milestone(said.repo, said.revision, said.step, said.checkpoint.name, said.checkpoint.digest)
    is_holders = message.HasField("holder")
    refused = not_of_holder(turn, message.holder) if is_holders else not_committed(job, made)
    if refused:
        return Reply("FAILED_PRECONDITION", refused)
    # A holder names its last one with every report, beside the step that it is at by then.
    noted = [
        one
        for one in job.run.milestones
        if (is_holders and _is_at_the_same_place(one, made)) or replace(one, step=made.step) == made
    ]
    if not noted:
        turn.update_run(milestones=kept((*job.run.milestones, made)))
        text = f"step {made.step} is at {made.repo}, revision {made.revision}"
        turn.notice(text, kind=Kind.MILESTONE, step=made.step, checkpoint=made.checkpoint)
    if is_holders:
        _name(turn, noted[-1] if noted else made, made.step, message.holder.incarnation)
    text = f"{made.repo} has step {noted[-1].step if noted else made.step}"
    return Reply(message=control_pb2.OrderReply(generation=job.generation, text=text))


def _name(turn: Turn, noted: Milestone, step: int, holder: str) -> None:
    """A holder at this step names one that is noted as its last: the run's last one from now on.

    It may be an earlier one, from which it has gone on. A late report is not believed: the next holder would lose what
    was published since.
    """
    milestones = turn.job.run.milestones
    last, named = milestones[-1], turn.live.run.named
    is_last = _is_at_the_same_place(noted, last)
    has_named_last = named.holder == holder and (named.repo, named.revision) == (last.repo, last.revision)
    if has_named_last and (is_last or step <= named.step):
        return
    if not is_last:
        # Without a checkpoint: which of ours a pod goes on from does not change.
        others = [one for one in milestones if one.checkpoint or not _is_at_the_same_place(one, noted)]
        turn.update_run(milestones=kept((*others, Milestone(noted.repo, noted.revision, noted.step))))
    turn.live.run.named = Named(holder, noted.repo, noted.revision, step)


def _is_at_the_same_place(one: Milestone, other: Milestone) -> bool:
    return (one.repo, one.revision) == (other.repo, other.revision)


def kept(milestones: tuple[Milestone, ...]) -> tuple[Milestone, ...]:
    """The last ones with a checkpoint, and the last ones without: those displace none that a pod can go on from."""
    ours = [one for one in milestones if one.checkpoint]
    others = [one for one in milestones if not one.checkpoint]
    gone = {*ours[:-MILESTONES_KEPT], *others[:-MILESTONES_KEPT]}
    return tuple(one for one in milestones if one not in gone)


def not_of_holder(turn: Turn, holder: control_pb2.Caller) -> str:
    """Why this caller may not speak for the open world; "" if it may."""
    node = turn.job.node_by(holder.incarnation)
    known = node is not None and proves(node, holder.secret)
    if node is None or not known or membership.member_of(turn, node, turn.job.epoch) is None:
        return f"{holder.node or 'the node'} is not in the open world: what it has made is no part of the run"
    return ""


def not_committed(job: Job, made: Milestone) -> str:
    """Why its checkpoint is no part of the run; "" if it is, or was while its files were there."""
    record = job.checkpoint(made.digest)
    names = () if record is None else (record.name, record.universal_name)
    if made.checkpoint in names or any(
        (gone.name, gone.digest) == (made.checkpoint, made.digest) for gone in job.pruned
    ):
        return ""
    return f"{made.checkpoint or 'a checkpoint without a name'} was never committed: it is no part of the run"


def milestones_proto(job: Job) -> list[control_pb2.Milestone]:
    """The last milestones, oldest first."""
    return [
        control_pb2.Milestone(
            repo=made.repo,
            revision=made.revision,
            step=made.step,
            checkpoint=control_pb2.CheckpointRef(name=made.checkpoint, digest=made.digest),
        )
        for made in job.run.milestones
    ]
