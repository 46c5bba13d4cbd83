"""The durable half of the state as rows of bytes: JSON with a version number, so that a person can read it.

There is one row for the job itself, one for the world, and one for each node, checkpoint, event and epoch of the
history. The dataclasses define the shape (pydantic), and every value is checked when it is read: a record of another
shape is refused with one line instead of half understood.

In the job's row all values stand side by side, no matter which object of the job they belong to. So the division into
objects may change with the program, and the record does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import make_dataclass, replace
from itertools import takewhile
from operator import attrgetter
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ..brain.chronicle import in_order
from ..brain.state import (
    Checkpoint,
    Checkpoints,
    EpochRecord,
    Job,
    JobEvent,
    MemberState,
    NextWorld,
    Node,
    Nodes,
    Opened,
    Pruned,
    Recollection,
    Run,
    Told,
    World,
)
from ..brain.table import Table
from . import legacy
from .store import Rows, StoreError

__all__ = ("STATE_VERSION", "JobCodec")

STATE_VERSION = 3
# Version 2 had no events: only the last lines for consoles, in the job's row.
_READ = (2, STATE_VERSION)

_JOB, _WORLD, _PARTS = "job", "world", "parts"
_NODE, _CHECKPOINT, _LATE, _EPOCH, _EVENT = "node/", "checkpoint/", "late/", "epoch/", "event/"
_PRUNED, _REMARK = "pruned/", "remark/"
_PREFIXES = (_NODE, _CHECKPOINT, _LATE, _EPOCH, _EVENT, _PRUNED, _REMARK)
_LATE_KEY, _PRUNED_KEY, _EPOCH_KEY = attrgetter("digest"), attrgetter("number"), attrgetter("epoch")
# Parts of the job that are kept in rows of their own.
_APART = ("nodes", "checkpoints", "opened", "history", "late", "pruned", "events", "remarks")
# Objects whose values stand in the job's row, each under its own name or under this one.
_NESTED: dict[str, Any] = {"run": Run, "next": NextWorld, "recollection": Recollection}
_NAMES = {
    "run.number": "run",
    "run.growth_cost_seconds": "growth_cost",
    "recollection.epoch": "listening_epoch",
}
# Values that came after the first records of this version, as they are read there.
_SINCE: dict[str, Any] = {
    **{"gone_back": [], "shapes": {}, "stopping": False, "save_order": None, "sequence": 0},
    **{"milestones": [], "ending": None, "spoilt": 0},
}
# One letter for each member, so that the row of all parts is short even for a large world.
_LETTERS = {
    MemberState.RUNNING: "r",
    MemberState.DRAINED: "d",
    MemberState.FINISHED: "f",
    MemberState.FAILED: "x",
    MemberState.LOST: "l",
    MemberState.LEFT: "g",
}
_PART_OF = {letter: part for part, letter in _LETTERS.items()}


class _Kind:
    """One kind of row."""

    def __init__(self, kind: Any) -> None:
        self._adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def encode(self, value: Any) -> bytes:
        # Not pydantic's own JSON, which writes a NaN loss as null; that does not come back as a number.
        plain = self._adapter.dump_python(value, mode="json")
        return json.dumps(plain, separators=(",", ":")).encode()

    def decode(self, plain: Any, where: str) -> Any:
        try:
            return self._adapter.validate_python(plain)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join([where, *(str(part) for part in first["loc"])])
            raise StoreError(
                f"the stored state does not fit this version of dalsegno: {place}: {first['msg']}"
            ) from error

    def all(self, plain: Mapping[str, Any], prefix: str) -> list[Any]:
        """Those whose keys begin so."""
        return [self.decode(row, key) for key, row in plain.items() if key.startswith(prefix)]


def _places() -> dict[str, tuple[str, Any]]:
    """For each value of the job's row, by name: where it lies in the job, and its type."""
    found: list[tuple[str, Any]] = []
    for name, kind in get_type_hints(Job).items():
        if name in _NESTED:
            found += [(f"{name}.{inner}", its) for inner, its in get_type_hints(_NESTED[name]).items()]
        elif name not in _APART:
            found.append((name, kind))
    places = {_NAMES.get(place, place.rpartition(".")[2]): (place, kind) for place, kind in found}
    if len(places) < len(found):
        raise AssertionError("two values of the job would be stored under one name")
    return places


_PLACES = _places()
# `grown` belongs to the drain while there is one, but is always in the row; what was told belongs to the opened world.
_VALUES = attrgetter(*("grown" if place == "next.grown" else place for place, _ in _PLACES.values()), "told")
_HEAD_TYPE = make_dataclass(
    "JobRow", [("version", int), *((name, kind) for name, (_, kind) in _PLACES.items()), ("told", Told)]
)
_HEAD, _NODES, _CHECKPOINTS = _Kind(_HEAD_TYPE), _Kind(Node), _Kind(Checkpoint)
_WORLDS, _EPOCHS, _EVENTS, _GONE = _Kind(World), _Kind(EpochRecord), _Kind(JobEvent), _Kind(Pruned)


class JobCodec:
    """Encodes what changed of one job. It remembers the objects that it has encoded."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}
        # What is being encoded now; it counts once all of it is.
        self._new: dict[str, Any] = {}
        # Keys of the rows that were decoded, until the first changes after that: of those rows nothing is in `_kept`.
        self._decoded: frozenset[str] = frozenset()

    def changes(self, job: Job) -> Rows:
        """The rows that changed since the last call; a row that is gone is None.

        The cost grows with what changed, not with the job. If something cannot be encoded, the whole call does not
        count: the next call returns everything that changed since the last successful one.
        """
        rows: Rows = {}
        self._new = {}
        head = tuple(map(_own, _VALUES(job)))
        if head != self._kept.get(_JOB):
            self._new[_JOB] = head
            rows[_JOB] = _HEAD.encode(_HEAD_TYPE(STATE_VERSION, *head))
        self._put(rows, _WORLD, job.world, _WORLDS.encode)
        letters = _letters(job)
        if letters != self._kept.get(_PARTS):
            self._new[_PARTS] = letters
            rows[_PARTS] = letters.encode()
        self._table(rows, _NODE, job.nodes, _NODES.encode)
        self._table(rows, _CHECKPOINT, job.checkpoints.table, _CHECKPOINTS.encode)
        self._tuple(rows, _LATE, job.late, _LATE_KEY, _CHECKPOINTS.encode)
        self._tuple(rows, _PRUNED, job.pruned, _PRUNED_KEY, _GONE.encode)
        self._tuple(rows, _EPOCH, job.history, _EPOCH_KEY, _EPOCHS.encode)
        self._log(rows, _EVENT, job.events)
        self._log(rows, _REMARK, job.remarks)
        if self._decoded:
            # What went since then must not come back with the next master. Another kind may be a newer version's.
            rows.update(dict.fromkeys(key for key in self._decoded - _keys(job) if _is_known(key)))
            self._decoded = frozenset()
        for key, kept in self._new.items():
            if kept is None:
                self._kept.pop(key, None)
            else:
                self._kept[key] = kept
        job.nodes.touched.clear()
        job.checkpoints.table.touched.clear()
        return rows

    @classmethod
    def everything(cls, job: Job) -> dict[str, bytes]:
        """All rows, as in a store to which everything was saved at once."""
        copy = job.copy()
        for table in (copy.nodes, copy.checkpoints.table):
            table.touched = set(table)
        return {key: data for key, data in cls().changes(copy).items() if data is not None}

    def _put(self, rows: Rows, key: str, row: object | None, encode: Callable[[Any], bytes]) -> None:
        if row is self._kept.get(key):
            return
        self._new[key] = row
        rows[key] = None if row is None else encode(row)

    def _table(self, rows: Rows, prefix: str, table: Table[Any], encode: Callable[[Any], bytes]) -> None:
        for key in table.touched:
            self._put(rows, prefix + key, table.get(key), encode)

    def _tuple(
        self,
        rows: Rows,
        prefix: str,
        entries: tuple[Any, ...],
        key_of: Callable[[Any], object],
        encode: Callable[[Any], bytes],
    ) -> None:
        if entries is self._kept.get(prefix):
            return
        before: Iterable[Any] = self._kept.get(prefix, ())
        self._new[prefix] = entries
        present = {f"{prefix}{key_of(entry)}": entry for entry in entries}
        for entry in before:
            key = f"{prefix}{key_of(entry)}"
            if key not in present:
                self._put(rows, key, None, encode)
        for key, entry in present.items():
            self._put(rows, key, entry, encode)

    def _log(self, rows: Rows, prefix: str, events: tuple[JobEvent, ...]) -> None:
        """Events are only added at the end and dropped at the beginning, so that few of many are looked at."""
        before: tuple[JobEvent, ...] = self._kept.get(prefix, ())
        if events is before:
            return
        self._new[prefix] = events
        oldest = events[0].sequence if events else 0
        for gone in takewhile(lambda event: event.sequence < oldest, before):
            rows[f"{prefix}{gone.sequence}"] = None
        known = before[-1].sequence if before else 0
        for event in reversed(tuple(takewhile(lambda event: event.sequence > known, reversed(events)))):
            rows[f"{prefix}{event.sequence}"] = _EVENTS.encode(event)

    def decode(self, rows: Mapping[str, bytes]) -> Job:
        """The job that the rows hold. Raises StoreError if they are not a state of a known version."""
        plain = {key: _json(key, data) for key, data in rows.items() if key != _PARTS}
        letters = rows.get(_PARTS, b"").decode(errors="replace")
        # Rows are newer: an earlier version left the one record of format 1 beside them.
        if legacy.KEY in plain and _JOB not in plain:
            plain, letters = legacy.upgraded(plain[legacy.KEY])
        head = plain.get(_JOB)
        version = head.get("version") if isinstance(head, dict) else None
        if version not in _READ:
            raise StoreError(
                f"the stored state has version {version}, this master reads {STATE_VERSION}:"
                " use the version of dalsegno that wrote it"
            )
        job = _job(plain, letters)
        if version == STATE_VERSION:
            # Whose rows are there: those that are dropped with the next change must be deleted.
            self._kept[_EVENT], self._kept[_REMARK] = job.events, job.remarks
        self._decoded = frozenset(rows)
        return job


def _keys(job: Job) -> set[str]:
    """Keys of all rows of the job."""
    keys = {_JOB, _PARTS} if job.world is None else {_JOB, _PARTS, _WORLD}
    keys.update(_NODE + name for name in job.nodes)
    keys.update(_CHECKPOINT + digest for digest in job.checkpoints.table)
    keys.update(f"{_LATE}{_LATE_KEY(record)}" for record in job.late)
    keys.update(f"{_PRUNED}{_PRUNED_KEY(gone)}" for gone in job.pruned)
    keys.update(f"{_EPOCH}{_EPOCH_KEY(entry)}" for entry in job.history)
    keys.update(f"{_EVENT}{event.sequence}" for event in job.events)
    keys.update(f"{_REMARK}{event.sequence}" for event in job.remarks)
    return keys


def _is_known(key: str) -> bool:
    """Whether this version, or one before it, writes rows of this kind."""
    return key in (_JOB, _WORLD, _PARTS, legacy.KEY) or key.startswith(_PREFIXES)


def _own(value: Any) -> Any:
    """A copy of what changes in place, so that the encoded value stays as it was."""
    return dict(value) if isinstance(value, dict) else value


def _letters(job: Job) -> str:
    if job.opened is None:
        return ""
    parts = job.opened.parts
    return "".join([_LETTERS[parts[member.incarnation]] for member in job.opened.world.members])


def _json(key: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"the stored state is not JSON ({key}): {error}") from error


def _job(plain: Mapping[str, Any], letters: str) -> Job:
    head = _HEAD.decode({**_SINCE, **plain[_JOB]}, _JOB)
    job = _unfolded(head)
    job.nodes = Nodes(sorted(_NODES.all(plain, _NODE), key=lambda node: node.order))
    job.checkpoints = Checkpoints(sorted(_CHECKPOINTS.all(plain, _CHECKPOINT), key=lambda record: record.age))
    job.late = tuple(_CHECKPOINTS.all(plain, _LATE))
    job.pruned = tuple(sorted(_GONE.all(plain, _PRUNED), key=lambda one: one.number))
    job.history = tuple(sorted(_EPOCHS.all(plain, _EPOCH), key=lambda entry: entry.epoch))
    job.events, job.remarks = (in_order(_EVENTS.all(plain, prefix)) for prefix in (_EVENT, _REMARK))
    if head.version == 2:
        job.events = tuple(_EVENTS.decode(row, _EVENT) for row in plain[_JOB].get("notices", ()))
        job.sequence = job.noticed
    run = job.run
    # Of a run that went back, what is aside is its own: a checkpoint was sealed, though nobody heard of a step.
    if run.begun_anew and not (run.ever_stepped or run.milestones or run.gone_back):
        _forget_earlier_runs(job)
    # An earlier version left the row of a world that an ended job no longer had, and wrote that there are no parts.
    if plain.get(_WORLD) is not None and (letters or job.phase.has_workers):
        world = _WORLDS.decode(plain[_WORLD], _WORLD)
        if len(letters) != len(world.members) or not set(letters) <= set(_PART_OF):
            raise StoreError(f"the stored state does not fit this version of dalsegno: parts: {letters[:80]!r}")
        parts = {m.incarnation: _PART_OF[letter] for m, letter in zip(world.members, letters, strict=True)}
        job.opened = Opened(world, parts, head.told)
    return job


def _forget_earlier_runs(job: Job) -> None:
    """Drops what an earlier version left on the record of the runs before one that has made no step.

    Such a run has committed nothing.
    """
    stepped = [entry.epoch for entry in job.history if entry.stepped_at > 0]
    last = max([*stepped, *(record.epoch for record in job.checkpoints)], default=0)
    job.checkpoints, job.pruned = Checkpoints(), ()
    job.history = tuple(entry for entry in job.history if entry.epoch > last)


def _unfolded(head: Any) -> Job:
    """The part of the job that the job's row contains."""
    values: dict[str, dict[str, Any]] = {name: {} for name in ("", *_NESTED)}
    for name, (place, _) in _PLACES.items():
        owner, _, field = place.rpartition(".")
        values[owner][field] = getattr(head, name)
    own = values.pop("")
    job = Job(**own, **{name: kind(**values[name]) for name, kind in _NESTED.items()})
    if job.drain is not None and job.next.grown:
        job.drain, job.next = replace(job.drain, grown=True), replace(job.next, grown=False)
    return job
