"""What people and tools see of a job: pure functions of the state."""

from __future__ import annotations

from collections.abc import Iterable

from dalsegno.protos import control_pb2

from . import memory, replication
from .checkpoints import resume_point
from .chronicle import JobEvent, Kind, PausePart, goodput
from .described import to_proto
from .forming import missing, why_over
from .going_back import stands_at
from .live import State
from .milestones import milestones_proto
from .registration import settings_proto
from .state import Checkpoint, Job, Phase
from .views import PHASES, reasons_to_wait

__all__ = ("event_of", "event_proto", "status")

# The most checkpoints of which the status tells.
MOST_SHOWN = 20


def status(state: State, now: float) -> control_pb2.StatusReply:
    """The job's status, for people and tools."""
    job, live = state.job, state.live
    waiting, world = job.phase in (Phase.WAITING, Phase.FORMING), job.world
    unheard, step = world is None or not job.told.first_step, max(live.epoch.top_step, job.run.left_step)
    if world is not None:
        # Perhaps only another master has heard of the steps that led to its last commit.
        before = world.resumed_step if unheard and job.phase.has_workers else step
        step = stands_at(job, max(before, job.checkpoints.last_step(world.epoch)))
    reply = control_pb2.StatusReply(
        generation=job.generation,
        job_id=job.job_id,
        run_id=job.run_id,
        phase=PHASES[job.phase],
        epoch=job.epoch,
        reason=why_over(job) or (missing(state) if waiting else job.message),
        step=step,
        loss=live.epoch.loss,
        settings=settings_proto(job.settings),
        limit=job.limit,
        unheard=unheard,
        goodput=goodput(job.history, now + live.unix_offset, over=job.phase.is_terminal),
        checkpoints=[to_proto(job, record) for record in newest_records(job)],
        milestones=milestones_proto(job),
        probe=job.probe,
        save_order=job.save_order.number if job.save_order is not None else 0,
    )
    reasons = reasons_to_wait(state)
    for node in job.nodes.values():
        member = world.member(node.incarnation) if world is not None else None
        # Of the last world's nodes some may have a place no more, long before there is a next world.
        is_member = member is not None and (job.phase.has_workers or not reasons.get(node.name))
        role = "leaving" if node.leaving else "member" if is_member else "spare"
        reply.nodes.add(
            node=node.name,
            role=role,
            group_rank=member.group_rank if member is not None and is_member else 0,
            host=node.host,
            nproc=node.nproc,
            reason=reasons.get(node.name, ""),
            incarnation=node.incarnation,
            silent_seconds=live.silence(node.name, now),
        )
    head = resume_point(job)
    if head is not None:
        reply.head.CopyFrom(to_proto(job, head))
    if (held := memory.would_go_on_from(state)) is not None:
        reply.held.CopyFrom(to_proto(job, held))
        reply.held_copies = memory.copies_of(state, held)
        replicated = replication.newest(state)
        if replicated is not None and (head is None or head.age < replicated.age) and replicated.age < held.age:
            reply.replicated.CopyFrom(to_proto(job, replicated))
    for record in job.history:
        reply.history.add(
            epoch=record.epoch,
            nodes=record.nodes,
            world_size=record.world_size,
            cause=record.cause,
            resumed_step=record.resumed_step,
            form=control_pb2.FORM_UNIVERSAL if record.universal else control_pb2.FORM_SHARDED,
            paused=record.paused,
            lost_steps=record.lost_steps,
            first_step=record.first_step,
            last_step=record.last_step,
            unheard=not record.heard,
            lost_more=record.lost_more,
            parts=parts_proto(record.parts),
        )
    return reply


def newest_records(job: Job) -> list[Checkpoint]:
    """The newest checkpoints that the run keeps, oldest first."""
    kept = [record for record in job.checkpoints if not record.retired]
    return kept[-MOST_SHOWN:]


def parts_proto(parts: Iterable[PausePart]) -> list[control_pb2.PausePart]:
    """The parts of a pause."""
    return [control_pb2.PausePart(name=part.name, seconds=part.seconds) for part in parts]


def event_proto(event: JobEvent) -> control_pb2.Event:
    """An event, for people and tools."""
    return control_pb2.Event(
        sequence=event.sequence,
        at=event.at,
        kind=event.kind.value,
        text=event.text,
        warning=event.warning,
        epoch=event.epoch,
        nodes=event.nodes,
        step=event.step,
        seconds=event.seconds,
        parts=parts_proto(event.parts),
        lost_steps=event.lost_steps,
        checkpoint=event.checkpoint,
    )


def event_of(proto: control_pb2.Event) -> JobEvent:
    """The inverse of `event_proto`; whether consoles show it is not part of that. Raises ValueError."""
    return JobEvent(
        proto.sequence,
        proto.text,
        proto.warning,
        Kind(proto.kind),
        at=proto.at,
        epoch=proto.epoch,
        nodes=tuple(proto.nodes),
        step=proto.step if proto.HasField("step") else None,
        seconds=proto.seconds,
        parts=tuple(PausePart(part.name, part.seconds) for part in proto.parts),
        lost_steps=proto.lost_steps,
        checkpoint=proto.checkpoint,
    )
