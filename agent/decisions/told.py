"""What a supervisor is told of an agent (`--tell-fd`): what happened, as plain values. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dalsegno.protos import control_pb2

from . import events as ev
from .state import AgentState

__all__ = ["told"]


def told(
    before: AgentState, event: ev.Event, after: AgentState, actions: Sequence[ev.Action]
) -> Iterator[dict[str, Any]]:
    """What one event amounts to: objects with the key `event`, in order.

    `admitted` (node), `waits` (why), `fenced`, `link` (up), `starts` (run, epoch; resume, step: where from),
    `sealed` and `committed` (name, digest, step, epoch), `damaged` (name, file, why), `stops` (epoch),
    `stopped` (epoch, answered), `leaves`, `exits` (code, why).

    Args:
        before, after: the state around the event.
        actions: what it led to.
    """
    match event:
        case ev.Registered():
            yield {"event": "admitted", "node": event.reply.node}
        case ev.LinkChanged():
            yield {"event": "link", "up": event.up}
        case ev.WorkersStopped():
            yield {"event": "stopped", "epoch": event.epoch, "answered": event.answered}
        case ev.WorkerSaid() if event.message.HasField("sealed") and not event.message.sealed.in_memory:
            sealed = event.message.sealed
            yield _checkpoint("sealed", sealed.name, sealed.digest, sealed.step, event.epoch)
        case ev.WorkerSaid() if event.message.HasField("bad_checkpoint"):
            bad = event.message.bad_checkpoint
            yield {"event": "damaged", "name": bad.name, "file": bad.file, "why": bad.message}
    if after.fenced and not before.fenced:
        yield {"event": "fenced"}
    if after.leaving and not before.leaving:
        yield {"event": "leaves"}
    if after.wait_said and after.wait_said != before.wait_said:
        yield {"event": "waits", "why": after.wait_said}
    for action in actions:
        match action:
            case ev.StartWorkers():
                yield {
                    "event": "starts",
                    "run": action.world.run_id,
                    "epoch": action.world.epoch,
                    **_resume(action.world),
                }
            case ev.StopWorkers():
                yield {"event": "stops", "epoch": action.epoch}
            case ev.WriteLatest():
                head = action.head
                yield _checkpoint("committed", head.ref.name, head.ref.digest, head.step, head.epoch)
            case ev.Exit():
                yield {"event": "exits", "code": action.code, "why": action.message}


def _checkpoint(event: str, name: str, digest: str, step: int, epoch: int) -> dict[str, Any]:
    return {"event": event, "name": name, "digest": digest, "step": step, "epoch": epoch}


def _resume(world: control_pb2.World) -> dict[str, Any]:
    if not world.HasField("resume"):
        return {"resume": None, "step": 0}
    return {"resume": world.resume.source.ref.name, "step": world.resume.source.step}
