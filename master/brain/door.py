"""Checks the shape of a request, before anybody asks who sent it and what it would change.

Pure. The brain only sees what has passed here: numbers that can grow by one for ever and still fit into SQLite and
protobuf, names that can stand in a log, a directive or a path, finite durations, bounded lists. Every field is checked;
a field that a later protocol adds is bounded by its type from the start.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, MutableSequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from dalsegno.protos import control_pb2
from dalsegno.protos.limits import LONGEST_SECONDS, MOST, MOST_CHECKPOINTS, MOST_SETTING
from dalsegno.protos.peer_address import PeerAddress
from dalsegno.protos.text import LONGEST_NAME, SHA256, name_problem, one_line, text_problem

__all__ = ("MOST_NODES", "ShapeError", "admit")

# The most nodes registered at a time.
MOST_NODES = 20_000
# An agent's memory of epoch and generation lifts the master's above it, but no further than this. So whatever an agent
# claims, what the master then counts up to and hands out stays below MOST.
MOST_REMEMBERED = 1 << 48
# The most workers of one node; with MOST_NODES nodes the number of ranks still fits into 32 bits.
MOST_WORKERS = 1 << 16
# The most characters of a probe.
LONGEST_PROBE = 256
# The most entries of other lists.
MOST_REFS = 4096
SECRET_BYTES = (16, 64)

_RUN = re.compile(r"run-[0-9]{4,9}", re.ASCII)
_NUMBER = r"(0|[1-9][0-9]{0,15})"
_CHECKPOINT = re.compile(rf"step-{_NUMBER}\.e{_NUMBER}\.{_NUMBER}(?:\.(universal|weights)\.{_NUMBER})?", re.ASCII)
_FORMS = {
    None: control_pb2.FORM_SHARDED,
    "universal": control_pb2.FORM_UNIVERSAL,
    "weights": control_pb2.FORM_WEIGHTS,
}


class ShapeError(ValueError):
    """The request makes no sense; one line says what is wrong with it."""


def admit(message: Message) -> list[str]:
    """Checks a request. Shortens and cleans its free text in place, and removes unusable entries from its lists.

    Returns one line for each thing that was left out. Raises ShapeError if the request as a whole cannot be used.
    """
    left_out: list[str] = []
    if isinstance(message, control_pb2.RegisterRequest | control_pb2.JoinRequest):
        left_out += _take_inventory(message.inventory)
    if isinstance(message, control_pb2.RegisterRequest):
        left_out += _keep(message.finished_runs, _run, lambda run: run, MOST_CHECKPOINTS)
    if isinstance(message, control_pb2.JoinRequest):
        left_out += _keep(message.unusable, _fields, lambda entry: entry.name, MOST_CHECKPOINTS)
    if isinstance(message, control_pb2.CommitRequest) or (
        isinstance(message, control_pb2.HeldRequest) and not _names_none(message)
    ):
        _checkpoint(message.checkpoint)
    _fields(message)
    if isinstance(message, control_pb2.RegisterRequest):
        _complete(message)
        message.epoch = min(message.epoch, MOST_REMEMBERED)
        message.generation = min(message.generation, MOST_REMEMBERED)
    caller = getattr(message, "caller", None)
    if isinstance(caller, control_pb2.Caller) and not caller.incarnation:
        raise ShapeError("incarnation is missing")
    return left_out


def _names_none(message: control_pb2.HeldRequest) -> bool:
    """It is about no checkpoint's parts."""
    return (message.all or bool(message.gathering)) and not message.HasField("checkpoint")


def _complete(message: control_pb2.RegisterRequest) -> None:
    if not message.incarnation:
        raise ShapeError("incarnation is missing")
    if not message.node and not message.host:
        raise ShapeError("node and host are missing: the node needs a name")
    if not message.nproc:
        raise ShapeError("nproc is 0: a node has at least 1 worker")
    if not message.secret:
        raise ShapeError("secret is missing: upgrade dalsegno on this node")


# ---- lists ----------------------------------------------------------------------------------------------------------


def _take_inventory(inventory: Any) -> list[str]:
    """Keeps the newest usable entries."""
    left_out = _keep(inventory, _checkpoint, lambda entry: entry.ref.name, len(inventory))
    if len(inventory) > MOST_CHECKPOINTS:
        left_out.append(f"an inventory of {len(inventory)} checkpoints: the newest {MOST_CHECKPOINTS} count")
        newest = sorted(inventory, key=lambda entry: (entry.epoch, entry.step))[-MOST_CHECKPOINTS:]
        _replace(inventory, newest)
    return left_out


def _keep(entries: Any, check: Callable[[Any], None], name: Callable[[Any], str], most: int) -> list[str]:
    """Removes from a repeated field what `check` refuses, and all but the last `most` entries."""
    good, left_out = [], []
    for entry in entries:
        try:
            check(entry)
        except ShapeError as error:
            left_out.append(f"{one_line(name(entry), LONGEST_NAME) or 'an entry'} is left out: {error}")
        else:
            good.append(entry)
    if len(good) < len(entries) or len(good) > most:
        _replace(entries, good[-most:])
    return left_out


def _replace(entries: Any, wanted: list[Any]) -> None:
    kept = [entry if isinstance(entry, str) else _copy(entry) for entry in wanted]
    del entries[:]
    entries.extend(kept)


def _copy(entry: Message) -> Message:
    copied = type(entry)()
    copied.CopyFrom(entry)
    return copied


def _checkpoint(entry: control_pb2.Checkpoint) -> None:
    """Checks that a manifest agrees with its directory's name."""
    _fields(entry)
    parsed = _CHECKPOINT.fullmatch(entry.ref.name)
    if parsed is None or not entry.ref.digest:
        raise ShapeError("it has no name or no digest")
    step, epoch, _, form, _ = parsed.groups()
    if (int(step), int(epoch), _FORMS[form]) != (entry.step, entry.epoch, entry.form):
        raise ShapeError(f"its name disagrees with step {entry.step}, epoch {entry.epoch}, form {entry.form}")
    if not entry.run_id:
        raise ShapeError("it names no run")


# ---- fields ---------------------------------------------------------------------------------------------------------


def _fields(message: Message) -> None:
    """Checks every field that is set, also in nested messages."""
    kind = message.DESCRIPTOR.name
    for field, value in message.ListFields():
        rule = _RULES.get((kind, field.name)) or _BY_NAME.get(field.name) or _by_type(field)
        if not isinstance(value, MutableSequence):
            _apply(rule, message, field, value)
            continue
        if len(value) > MOST_REFS:
            raise ShapeError(f"{field.name} has {len(value)} entries, at most {MOST_REFS} are taken")
        for entry in value:
            _apply(rule, message, field, entry)


def _apply(rule: Callable[[Any], None] | None, message: Message, field: FieldDescriptor, value: Any) -> None:
    if isinstance(value, Message):
        _fields(value)
    elif rule is _text:
        cleaned = one_line(value)
        if cleaned != value:
            setattr(message, field.name, cleaned)
    elif rule is not None:
        try:
            rule(value)
        except ShapeError as error:
            raise ShapeError(f"{field.name} {error}") from None


def _by_type(field: FieldDescriptor) -> Callable[[Any], None] | None:
    return _BY_TYPE.get(field.cpp_type)


def _number(value: int) -> None:
    _below(value, MOST)


def _below(value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise ShapeError(f"is {value}, at most {most} is taken")


def _at_most(most: int) -> Callable[[int], None]:
    return lambda value: _below(value, most)


def _finite(value: float) -> None:
    if not math.isfinite(value):
        raise ShapeError(f"is {value}, not a finite number")


def _seconds(value: float) -> None:
    _signed_seconds(value)
    if value < 0:
        raise ShapeError(f"is {value:g}, not a number of seconds")


def _signed_seconds(value: float) -> None:
    """As `_seconds`; negative means "auto" or for ever."""
    _finite(value)
    if abs(value) > LONGEST_SECONDS:
        raise ShapeError(f"is {value:g} seconds, at most {LONGEST_SECONDS:g} are taken")


def _string(value: str | bytes, longest: int = LONGEST_NAME) -> None:
    if problem := text_problem(value, longest):
        raise ShapeError(problem)


def _name(value: str) -> None:
    if problem := name_problem(value):
        raise ShapeError(problem)


def _probe(value: str) -> None:
    _string(value, LONGEST_PROBE)


def _matches(pattern: re.Pattern[str], what: str) -> Callable[[str], None]:
    def rule(value: str) -> None:
        if value and not pattern.fullmatch(value):
            raise ShapeError(f"is {one_line(value, LONGEST_NAME)!r}, not {what}")

    return rule


_run = _matches(_RUN, "a run's name: run-0001")
_digest = _matches(SHA256, "a SHA-256 of 64 hex digits")
_directory = _matches(_CHECKPOINT, "a checkpoint's name: step-<n>.e<epoch>.<attempt>")


def _checkpoint_name(value: str) -> None:
    _directory(value)
    for number in _numbers_of(value):
        _number(number)


def _numbers_of(name: str) -> Iterable[int]:
    return (int(digits) for digits in re.findall(r"[0-9]+", name))


def _peer_address(value: str) -> None:
    try:
        PeerAddress.parse(value)
    except ValueError as error:
        raise ShapeError(str(error)) from None


def _secret(value: bytes) -> None:
    least, most = SECRET_BYTES
    if not least <= len(value) <= most:
        raise ShapeError(f"is {len(value)} bytes, {least} to {most} are taken")


def _text(value: str) -> None:
    """Marks free text, which is never refused, only cleaned."""


def _any(value: Any) -> None:
    """Marks a field that may have any value of its type."""


# Rules by message and field, then by field, then by type.
_RULES: dict[tuple[str, str], Callable[[Any], None]] = {
    ("Settings", "grow_interval"): _signed_seconds,
    ("Settings", "grow_wait"): _signed_seconds,
    ("Settings", "wait_for_nodes"): _signed_seconds,
    ("Process", "pid"): _at_most(2**31 - 1),  # of a kernel's pid_t
}
_BY_NAME: dict[str, Callable[[Any], None]] = {
    **dict.fromkeys(("job_id", "node", "host", "store_host", "incarnation", "previous_incarnation"), _name),
    **dict.fromkeys(("name", "best", "candidate"), _checkpoint_name),
    **dict.fromkeys(("run_id", "finished_runs"), _run),
    **dict.fromkeys(("message", "reason", "file", "text", "save_problem"), _text),
    **dict.fromkeys(("min_nodes", "max_nodes", "node_unit"), _at_most(MOST_SETTING)),
    **dict.fromkeys(("digest", "gathering"), _digest),
    "probe": _probe,
    "secret": _secret,
    "peer_address": _peer_address,
    "nproc": _at_most(MOST_WORKERS),
    "store_port": _at_most(65535),
    # A training that has diverged reports NaN.
    "loss": _any,
    "metric": _finite,
}
_BY_TYPE: dict[int, Callable[[Any], None]] = {
    FieldDescriptor.CPPTYPE_UINT64: _number,
    FieldDescriptor.CPPTYPE_DOUBLE: _seconds,
    FieldDescriptor.CPPTYPE_STRING: _string,
}
