"""Checks what a master says. Pure: numbers within bounds, names of runs and checkpoints, possible places.

A master of ours passes these checks. Another program behind its address, or a bug, must not end an agent with a
traceback, lead it out of its directory or take its workers for nothing. So a message that fails is ignored, and a line
says so.
"""

from __future__ import annotations

import math
from collections.abc import MutableSequence

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from dalsegno.elastic.checkpoint import is_checkpoint_name
from dalsegno.protos import control_pb2
from dalsegno.protos.contract import run_number
from dalsegno.protos.limits import LONGEST_SECONDS, MOST
from dalsegno.protos.text import LONGEST_NAME

__all__ = ["MOST", "problem_of", "problem_of_reply"]

# Texts for people, which are made one printable line where they are shown.
_TEXTS = ("reason", "missing", "text", "message", "remark", "cause")
# Numbers that may be NaN, because a training that has diverged reports that.
_ANY = ("loss", "metric")


def problem_of_reply(reply: control_pb2.RegisterReply) -> str:
    """Why this reply can be no registration; empty: it makes sense."""
    if not reply.node:
        return "it gives this node no name"
    return _fields(reply)


def problem_of(directive: control_pb2.Directive, incarnation: str, nproc: int) -> str:
    """Why an agent cannot follow this directive; empty: it makes sense.

    Args:
        directive: as it came.
        incarnation, nproc: the agent's.
    """
    order = directive.WhichOneof("order")
    problem = _fields(directive) or _beside(directive)
    if not problem and order == "run":
        problem = _world(directive.run, incarnation, nproc)
    elif not problem and order == "drain":
        problem = _world(directive.drain.run, incarnation, nproc)
    elif not problem and order == "gather" and directive.gather.HasField("take"):
        take = directive.gather.take
        if not (take.epoch and take.run_id and take.world_size):
            problem = "it orders to take over what was saved in a world without an epoch, a run or ranks"
    return problem


def _beside(directive: control_pb2.Directive) -> str:
    """Checks that every order beside the workers' names its checkpoint."""
    wanted = {
        "convert": directive.convert.source.ref,
        "verify": directive.verify.ref,
        "sight": directive.sight,
    }
    for name, ref in wanted.items():
        if directive.HasField(name) and not (ref.name and ref.digest):  # type: ignore[arg-type]
            return f"{name} names no checkpoint"
    return ""


def _world(world: control_pb2.World, incarnation: str, nproc: int) -> str:
    place = world.place
    if place.incarnation != incarnation:
        return f"epoch {world.epoch} has no place for this node"
    if not world.epoch or not world.run_id:
        return "it orders a world without an epoch or a run"
    if place.nproc != nproc:
        return f"epoch {world.epoch} has {place.nproc} workers of this node, which has {nproc}"
    if place.group_rank >= world.nodes or place.first_rank + nproc > world.world_size:
        return (
            f"epoch {world.epoch} gives this node group rank {place.group_rank} of {world.nodes} and ranks"
            f" {place.first_rank} to {place.first_rank + nproc - 1} of {world.world_size}"
        )
    if not world.store_host or not 0 < world.store_port < 1 << 16:
        return f"the store of epoch {world.epoch} is at {world.store_host!r}, port {world.store_port}"
    return _resume(world.resume) if world.HasField("resume") else ""


def _resume(resume: control_pb2.ResumePoint) -> str:
    form = resume.form
    named = resume.source.ref.name and resume.source.ref.digest
    if form == control_pb2.FORM_UNIVERSAL:
        named = named and resume.universal.name and resume.universal.digest
    elif form != control_pb2.FORM_SHARDED:
        return f"it orders to load a checkpoint in form {form}"
    return "" if named else "it orders to load a checkpoint without a name or a digest"


def _fields(message: Message) -> str:
    """The first field with an impossible value, also in nested messages."""
    if isinstance(message, control_pb2.Pace):
        # A pace may have any value, because `Pace.told` brings it within bounds.
        return ""
    for field, value in message.ListFields():
        for entry in value if isinstance(value, MutableSequence) else (value,):
            problem = _fields(entry) if isinstance(entry, Message) else _value(message, field, entry)
            if problem:
                return problem
    return ""


def _value(message: Message, field: FieldDescriptor, value: object) -> str:
    name = field.name
    wrong = False
    if isinstance(value, str) and name not in _TEXTS:
        wrong = len(value) > LONGEST_NAME or not value.isprintable()
        wrong = wrong or (name == "run_id" and run_number(value) is None)
        of_checkpoint = name in ("earlier", "best", "candidate", "converting") or (
            isinstance(message, control_pb2.CheckpointRef) and name == "name"
        )
        wrong = wrong or (of_checkpoint and not is_checkpoint_name(value))
    elif isinstance(value, float) and name not in _ANY:
        wrong = not math.isfinite(value) or abs(value) > LONGEST_SECONDS
    elif isinstance(value, int):
        wrong = not 0 <= value <= MOST
    return f"{name} is {value!r:.80}" if wrong else ""
