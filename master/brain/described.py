"""A checkpoint's record, and the message that describes the same checkpoint."""

from __future__ import annotations

from dataclasses import asdict

from dalsegno.protos import control_pb2
from dalsegno.protos.reads import Reads

from .state import Checkpoint, Job

__all__ = ("from_proto", "to_proto")

NOT_DEEPSPEEDS = "it was not saved by a DeepSpeed engine, and only its files can be converted"


def from_proto(message: control_pb2.Checkpoint) -> Checkpoint:
    """The record of a sharded checkpoint as its manifest describes it."""
    return Checkpoint(
        name=message.ref.name,
        digest=message.ref.digest,
        step=message.step,
        epoch=message.epoch,
        world_size=message.shape.world_size,
        strategy=message.shape.strategy,
        any_world_size=message.shape.any_world_size,
        reshards=message.shape.reshards,
        by_place=message.shape.by_place,
        reads=reads_of(message.shape),
        data_epoch=message.position.data_epoch,
        samples=message.position.samples,
        resumed_from=message.resumed_from.digest,
        bytes=message.bytes,
        largest_file=message.largest_file,
        metric=message.metric if message.HasField("metric") else None,
        best=message.best,
        candidate=message.candidate,
        keep=message.keep if message.HasField("keep") else None,
        unconvertible=NOT_DEEPSPEEDS if message.no_universal_form else "",
    )


def reads_of(shape: control_pb2.Shape) -> Reads | None:
    """What a checkpoint's ranks load in a world of another size; what makes no sense says nothing."""
    if not shape.HasField("reads"):
        return None
    try:
        return Reads(tuple(shape.reads.lengths), shape.reads.alignment)
    except ValueError:
        return None


def to_proto(job: Job, record: Checkpoint) -> control_pb2.Checkpoint:
    """A record as agents and workers are told of it."""
    message = control_pb2.Checkpoint(
        ref=control_pb2.CheckpointRef(name=record.name, digest=record.digest),
        run_id=job.run_id,
        step=record.step,
        epoch=record.epoch,
        form=control_pb2.FORM_SHARDED,
        shape=control_pb2.Shape(
            world_size=record.world_size,
            strategy=record.strategy,
            any_world_size=record.any_world_size,
            reshards=record.reshards,
            by_place=record.by_place,
            reads=None if record.reads is None else control_pb2.Reads(**asdict(record.reads)),
        ),
        position=control_pb2.Position(data_epoch=record.data_epoch, samples=record.samples),
        resumed_from=control_pb2.CheckpointRef(digest=record.resumed_from),
        bytes=record.bytes,
        largest_file=record.largest_file,
        best=record.best,
        candidate=record.candidate,
    )
    if record.parts:
        message.in_memory = True
    if record.metric is not None:
        message.metric = record.metric
    if record.keep is not None:
        message.keep = record.keep
    return message
