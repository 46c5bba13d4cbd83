"""A master as the edge sees it from a thread of its own: hundreds of readers cost the master's loop one look.

An answer and the events that led to it come over in the order in which they became true.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from google.protobuf.message import Message

from ..brain.chronicle import JobEvent
from ..brain.events import Reply
from ..server.feed import Feed
from .looking import Master

__all__ = ("Across",)

T = TypeVar("T")


class Across:
    """A `Master` for one other loop than its own.

    Args:
        master: Whom it stands for. All that is asked of it happens in `home`.
        home: The master's loop.
    """

    def __init__(self, master: Master, home: asyncio.AbstractEventLoop) -> None:
        self._master, self._home = master, home
        # What the readers see, in their loop.
        self.feed = Feed()

    @property
    def turns(self) -> int:
        """How many turns of the brain have ended: a number that another thread may read at any time."""
        return self._master.turns

    async def status(self) -> Reply:
        """A `StatusReply` of its own, or why there is none."""
        return await self._at_home(self._look())

    async def call(self, message: Message) -> Reply:
        """The brain's answer to a request, once it is stored."""
        return await self._at_home(self._master.call(message))

    async def open(self) -> None:
        """Follows the master's events from now on, in the running loop."""
        here = asyncio.get_running_loop()

        def show(events: tuple[JobEvent, ...]) -> None:
            here.call_soon_threadsafe(self.feed.show, events)

        async def follow() -> None:
            self._master.feed.follow(show)

        await self._at_home(follow())

    async def _look(self) -> Reply:
        reply = await self._master.status()
        if reply.message is None:
            return reply
        # The master may show the same message to others, with what has changed since: not while it is read elsewhere.
        message = type(reply.message)()
        message.CopyFrom(reply.message)
        return Reply(reply.code, reply.detail, message)

    async def _at_home(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._home))
