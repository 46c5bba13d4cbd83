"""The master's side of its HTTP edge: it answers what the edge asks, and tells it what has happened."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError, Message

from dalsegno.protos import control_pb2 as pb

from ..brain.chronicle import JobEvent
from ..brain.events import Reply
from ..brain.shown import event_proto
from ..server.service import ORDERS
from .wire import LONGEST_LINE, EdgeWire, WireError

if TYPE_CHECKING:
    from .looking import Master

__all__ = ("Home",)

log = logging.getLogger(__name__)

# The most events of a frame, and the most asks that are answered at a time: further ones are not read.
AT_ONCE = 100
MOST_ASKS = 256
# The most lines in so many seconds.
MOST_LINES, LINES_SECONDS = 20, 60.0
_KINDS: dict[str, type[Message]] = {kind.DESCRIPTOR.name: kind for kind in (pb.StatusRequest, *ORDERS)}


class Home:
    """Serves one edge, in the master's loop.

    An answer and the events that led to it go out in the order in which they became true.
    """

    def __init__(self, master: Master, wire: EdgeWire, stands_by: Callable[[], bool]) -> None:
        self._master, self._wire, self._stands_by = master, wire, stands_by
        self._lock = asyncio.Lock()
        # What the other end has, by sequence number: a record that was lost begins with the same numbers again.
        self._there: dict[int, JobEvent] = {}
        self._told: tuple[JobEvent, ...] = ()
        self._asks: set[asyncio.Task[None]] = set()
        # When lines of it were logged.
        self._said: list[float] = []
        # Whether the edge has said anything since this was set to False.
        self.heard = True

    async def serve(self) -> None:
        """Until the edge has gone. Raises WireError, OSError."""
        news = asyncio.create_task(self._follow())
        news.add_done_callback(self._end_ask)
        try:
            while (frame := await self._wire.receive()) is not None:
                self.heard = True
                await self._take(*frame)
                # Frames that are here already are read without a wait: others are served in between.
                await asyncio.sleep(0)
        finally:
            for task in (news, *self._asks):
                task.cancel()
            await asyncio.gather(news, *self._asks, return_exceptions=True)

    async def _take(self, header: dict[str, Any], body: bytes) -> None:
        what, number, kind = header.get("what"), header.get("id"), header.get("kind")
        if what == "log" and isinstance(header.get("text"), str):
            self._log(header["text"])
        elif what == "ask" and type(number) is int and isinstance(kind, str):
            while len(self._asks) >= MOST_ASKS:
                await asyncio.wait(self._asks, return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.create_task(self._answer(number, kind, body))
            self._asks.add(task)
            task.add_done_callback(self._end_ask)
        else:
            raise WireError("a frame of no known kind")

    def _log(self, text: str) -> None:
        """Logs a line of the edge's, if it has not said too much of late: whoever took it over fills no disk."""
        now = asyncio.get_running_loop().time()
        self._said = [at for at in self._said if now - at < LINES_SECONDS]
        if len(self._said) < MOST_LINES:
            self._said.append(now)
            # What is no character would be one error more for each line.
            log.error("%s", text[:LONGEST_LINE].encode(errors="backslashreplace").decode())

    def _end_ask(self, task: asyncio.Task[None]) -> None:
        self._asks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, OSError):
            log.error("an answer for the HTTP edge failed", exc_info=error)

    async def _answer(self, number: int, kind: str, body: bytes) -> None:
        reply = await self._reply(kind, body)
        header = {
            "what": "answer",
            "id": number,
            "code": reply.code,
            "detail": reply.detail,
            "stands_by": self._stands_by(),
            "kind": "" if reply.message is None else reply.message.DESCRIPTOR.name,
        }
        # Now: the master may show the same message to others, with what has changed since.
        made = b"" if reply.message is None else reply.message.SerializeToString()
        async with self._lock:
            await self._tell_news()
            await self._wire.send(header, made)

    async def _reply(self, kind: str, body: bytes) -> Reply:
        """The master's answer to what the edge may ask; all else is refused."""
        if kind not in _KINDS:
            return Reply("INVALID_ARGUMENT", "the edge may not ask that", None)
        try:
            request = _KINDS[kind].FromString(body)
        except DecodeError:
            return Reply("INVALID_ARGUMENT", "the request's bytes are no such message", None)
        return await (self._master.status() if kind == "StatusRequest" else self._master.call(request))

    async def _follow(self) -> None:
        while True:
            async with self._lock:
                await self._tell_news()
            await self._master.feed.other_than(self._told)

    async def _tell_news(self) -> None:
        """Sends what the other end does not have, and what is gone. Called under the lock."""
        events = self._master.feed.events
        if events is self._told:
            return
        here = {event.sequence: event for event in events}
        gone = [number for number in self._there if number not in here]
        new = [event for event in events if self._there.get(event.sequence) is not event]
        for first in range(0, max(1, len(new)), AT_ONCE):
            some = pb.EventsReply(events=map(event_proto, new[first : first + AT_ONCE]))
            header = {"what": "news", "gone": gone if first == 0 else [], "more": first + AT_ONCE < len(new)}
            await self._wire.send(header, some.SerializeToString())
            # Agents are answered in between.
            await asyncio.sleep(0)
        self._there, self._told = here, events
