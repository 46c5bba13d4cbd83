"""The open `Watch` streams: who gets which directive next.

A directive is a view, so a slow stream needs no queue: it gets the newest one and misses those in between.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Any

from dalsegno.protos import control_pb2

from ..brain.door import MOST_NODES

__all__ = ("End", "TooManyStreams", "Watcher", "Watchers")

# The most streams: one for each node that may be registered, and some for nodes that no longer are.
MOST_STREAMS = MOST_NODES + 1000


class TooManyStreams(Exception):
    """No further stream may be opened; one line for the agent that wants one."""


class End(enum.Enum):
    """Why the master ended a stream."""

    REPLACED = "a newer stream of the same incarnation took over"
    FENCED = "its last directive says so"
    STOPPING = "the master is stopping: try again"
    BROKEN = "the master failed on this node's directive: its log says why"


class Watcher:
    """One stream's place: holds at most one directive that was not sent yet."""

    def __init__(self, node: str, incarnation: str) -> None:
        self.node = node
        self.incarnation = incarnation
        # Done once the brain knows that the stream is open: directives from before may be wrong.
        self.opened: asyncio.Future[Any] | None = None
        self._next: control_pb2.Directive | None = None
        self._offered: bytes | None = None
        self._told: object = None
        self._changed = asyncio.Event()
        self.ended: End | None = None

    def knows(self, key: object) -> bool:
        """Whether it was sent what this stands for; from now on it counts as sent."""
        told, self._told = self._told, key
        return told is not None and told == key

    def offer(self, directive: control_pb2.Directive) -> None:
        """Sends this directive next, unless it is the one sent last."""
        content = directive.SerializeToString(deterministic=True)
        if content == self._offered or self.ended is not None:
            return
        self._offered = content
        self._next = directive
        self._changed.set()

    def end(self, why: End) -> None:
        """Ends the stream after what is still to be sent."""
        self.ended = self.ended or why
        self._changed.set()

    async def next(self) -> control_pb2.Directive | None:
        """The next directive; None at the end. It may take as long as the stream lives."""
        await self._changed.wait()
        directive, self._next = self._next, None
        if self.ended is None:
            self._changed.clear()
        return directive


class Watchers:
    """One stream per incarnation of a node: a newer one replaces the older."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], Watcher] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, node: str, incarnation: str) -> Watcher:
        """Opens a stream's place; ends the older stream of the same incarnation. Raises TooManyStreams."""
        if len(self._open) >= MOST_STREAMS and (node, incarnation) not in self._open:
            raise TooManyStreams(
                f"{len(self._open)} streams of directives are open, which is all that the master keeps"
            )
        watcher = Watcher(node, incarnation)
        older = self._open.pop((node, incarnation), None)
        if older is not None:
            older.end(End.REPLACED)
        self._open[node, incarnation] = watcher
        return watcher

    def close(self, watcher: Watcher) -> bool:
        """Returns True if this was the incarnation's newest stream, so that the node is now unheard."""
        key = (watcher.node, watcher.incarnation)
        if self._open.get(key) is not watcher:
            return False
        del self._open[key]
        return True

    def ready(self) -> list[Watcher]:
        """The streams that the brain knows."""
        return [watcher for watcher in self._open.values() if watcher.opened is not None and watcher.opened.done()]

    def end_all(self, why: End) -> None:
        for watcher in self._open.values():
            watcher.end(why)
