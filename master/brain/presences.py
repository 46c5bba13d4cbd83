"""When each registered node was last heard, and which nodes might have fallen silent.

Nearly all of thousands of nodes were heard lately. So each turn looks only at nodes whose stream is closed or whose
silence comes near to a node-timeout. The others wait in a heap, ordered by when they were heard, and are taken out when
they are due.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, ValuesView
from dataclasses import dataclass

__all__ = ("Presence", "Presences")

# In node-timeouts: silences from this length on are looked at in every turn. When one is due, those that soon will be
# are brought up to date with it.
_NEAR, _SOON = 2 / 3, 1 / 2
# The rounding error of a time, in seconds.
_ROUNDING_SECONDS = 1e-6


@dataclass
class Presence:
    """One registered node, as this process hears it."""

    heard: float
    # When that was in real time, less what the master's loop had stood still until then.
    at: float = 0.0
    # It has spoken to this process; otherwise it is only presumed alive, because the record names it.
    spoke: bool = False
    # It has opened a stream since it registered.
    opened: bool = False
    # When its stream closed.
    closed: float | None = None
    # When it announced itself.
    joined: float | None = None
    # When a leaver is gone.
    leaves: float | None = None
    # Lines that it has said in the present minute, and when that ends.
    lines: int = 0
    lines_until: float = 0.0


class Presences:
    """Presences by name. Times are the listening clock's."""

    __slots__ = ("_count", "_entries", "_heap", "_near", "_rows", "broken")

    def __init__(self) -> None:
        self._rows: dict[str, Presence] = {}
        # Names whose stream is closed.
        self.broken: dict[str, None] = {}
        # Names that had been silent for long at the last look.
        self._near: dict[str, None] = {}
        # Heap of (when it was heard, number of the entry, name); and each name's current number. Other entries are
        # outdated.
        self._heap: list[tuple[float, int, str]] = []
        self._entries: dict[str, int] = {}
        self._count = 0

    def add(self, name: str, presence: Presence) -> None:
        self.drop(name)
        self._rows[name] = presence
        if presence.closed is not None:
            self.broken[name] = None
        self._await(name)

    def drop(self, name: str) -> None:
        self._rows.pop(name, None)
        self.broken.pop(name, None)
        self._near.pop(name, None)
        self._entries.pop(name, None)

    def close(self, name: str, heard: float) -> None:
        """Its stream closed; a stream that was closed before stays so."""
        presence = self._rows[name]
        if presence.closed is None:
            presence.closed = heard
            self.broken[name] = None

    def open(self, name: str) -> None:
        """It has an open stream."""
        presence = self._rows[name]
        presence.closed, presence.opened = None, True
        self.broken.pop(name, None)

    def suspects(self, shown: float, timeout_seconds: float) -> list[str]:
        """Names that may be dead by a silence of `timeout_seconds`, or because their stream closed; some are not."""
        near = shown - timeout_seconds * _NEAR + _ROUNDING_SECONDS
        for name in [name for name in self._near if self._rows[name].heard > near]:
            del self._near[name]
            self._await(name)
        if self._heap and self._heap[0][0] <= near:
            for name in self._taken(shown - timeout_seconds * _SOON):
                if self._rows[name].heard > near:
                    self._await(name)
                else:
                    self._near[name] = None
        return [*self._near, *(name for name in self.broken if name not in self._near)]

    def _taken(self, until: float) -> list[str]:
        """Removes all entries up to that time, and returns their names."""
        taken = []
        while self._heap and self._heap[0][0] <= until:
            _, number, name = heapq.heappop(self._heap)
            if self._entries.get(name) == number:
                del self._entries[name]
                taken.append(name)
        return taken

    def next_look(self, timeout_seconds: float) -> float | None:
        """When the next name comes near a silence of `timeout_seconds`; None: nobody waits."""
        return self._heap[0][0] + timeout_seconds * _NEAR if self._heap else None

    def _await(self, name: str) -> None:
        self._count += 1
        self._entries[name] = self._count
        heapq.heappush(self._heap, (self._rows[name].heard, self._count, name))

    def values(self) -> ValuesView[Presence]:
        return self._rows.values()

    def get(self, name: str) -> Presence | None:
        return self._rows.get(name)

    def __getitem__(self, name: str) -> Presence:
        return self._rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
