"""The job's events for readers outside: what is stored, and a way to wait for more.

Readers come with the number of the last event that they know, and take what has come since from one snapshot. So a slow
reader costs nothing but its own connection, and a turn never waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right

from ..brain.chronicle import JobEvent

__all__ = ("Feed",)


class Feed:
    """The events of a job as they are stored. Everything happens in the server's loop."""

    def __init__(self) -> None:
        self._events: tuple[JobEvent, ...] = ()
        self._more = asyncio.Event()

    def show(self, events: tuple[JobEvent, ...]) -> None:
        """What is stored now, oldest first; wakes up everybody who waits."""
        if events is self._events:
            return
        self._events = events
        self._more.set()
        self._more = asyncio.Event()

    @property
    def events(self) -> tuple[JobEvent, ...]:
        """What is stored, oldest first."""
        return self._events

    async def other_than(self, events: tuple[JobEvent, ...]) -> tuple[JobEvent, ...]:
        """What is stored, once it is not this very tuple. The caller bounds the wait, or ends it."""
        while self._events is events:
            await self._more.wait()
        return self._events

    @property
    def oldest(self) -> int:
        """Number of the oldest event that is kept; 0: there is none."""
        return self._events[0].sequence if self._events else 0

    @property
    def newest(self) -> int:
        """Number of the newest event; 0: there is none."""
        return self._events[-1].sequence if self._events else 0

    def after(self, sequence: int, limit: int) -> tuple[JobEvent, ...]:
        """The oldest events behind this one, at most `limit` of them.

        A number that is higher than any comes from a record that was lost: then all are news.
        """
        if sequence > self.newest:
            sequence = 0
        first = bisect_right(self._events, sequence, key=lambda event: event.sequence)
        return self._events[first : first + limit]

    async def wait(self, sequence: int, seconds: float) -> None:
        """Returns once there is an event behind this one, or after so many seconds."""
        # A number that is higher than any comes from a record that was lost.
        if self.newest == sequence or not self._events:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._more.wait(), seconds)
