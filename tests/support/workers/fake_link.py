"""A rank's link to its agent, in tests that have no agent."""

from __future__ import annotations

import threading
from typing import Any

from dalsegno.protos import worker_pb2


class FakeLink:
    """Keeps what the rank says.

    Args:
        endings: How a drain's save ends: the answer of each look, and the last one for all that follow.
        alive: The agent is.
    """

    drain = False
    master_seen = True
    may_stay = False
    save_order = 0

    def __init__(self, *endings: int, alive: bool = True) -> None:
        self.alive = alive
        self.said: list[worker_pb2.ToAgent] = []
        self.changed = threading.Condition()
        self._endings = list(endings) or [0]

    @property
    def ending(self) -> int:
        return self._endings.pop(0) if len(self._endings) > 1 else self._endings[0]

    def send(self, message: worker_pb2.ToAgent, *, droppable: bool = False) -> None:
        with self.changed:
            self.said.append(message)
            self.changed.notify_all()

    def of(self, kind: str) -> list[Any]:
        """What was said of one kind, in order."""
        return [getattr(message, kind) for message in self.said if message.WhichOneof("body") == kind]
