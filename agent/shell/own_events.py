"""Events of the agent's own threads that say more than the decisions need."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.protos import worker_pb2

from ..decisions import events as ev

__all__ = ["Exited", "Placed"]


@dataclass(frozen=True)
class Exited(ev.WorkerExited):
    """Also says to which start of the epoch's workers it belongs."""

    start: int = 0


@dataclass(frozen=True)
class Placed(ev.StartFailed):
    """What a script without a session needs of the resume point is there, or cannot be: then there is a message."""

    damage: worker_pb2.BadCheckpoint | None = None
