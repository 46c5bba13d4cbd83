"""A master as the process of its HTTP edge sees it: hundreds of readers cost the master's loop one look."""

from __future__ import annotations

import asyncio
from typing import Any

from google.protobuf.message import Message

from dalsegno.protos import control_pb2 as pb

from ..brain.chronicle import JobEvent
from ..brain.events import Reply
from ..brain.shown import event_of
from ..server.feed import Feed
from .wire import EdgeWire

__all__ = ("Across",)

# Seconds in which the master answers.
STATUS_SECONDS = 10.0
ORDER_SECONDS = 30.0
_ANSWERS: dict[str, type[Message]] = {
    kind.DESCRIPTOR.name: kind for kind in (pb.StatusReply, pb.ScaleReply, pb.OrderReply)
}
_SILENT = Reply("UNAVAILABLE", "the master does not answer: try again", None)
_IN_DOUBT = Reply(
    "UNAVAILABLE",
    "the master has not answered the order in time, and may carry it out: ask `dalsegno status` before you repeat it",
    None,
)


class Across:
    """A `Master` at the other end of a wire."""

    def __init__(self, wire: EdgeWire) -> None:
        self._wire = wire
        self.feed = Feed()
        # Grows with whatever may have changed the job, so that whoever asks after that gets another look.
        self.turns = 0
        # Whether another master leads, as this one said last.
        self.stands_by = False
        self._events: dict[int, JobEvent] = {}
        # Who waits, with what is said if no answer comes.
        self._asked: dict[int, tuple[asyncio.Future[Reply], Reply]] = {}
        self._last = 0
        self._over = False
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """Takes what the master says, until it has gone; then nothing asked is answered. Raises WireError, OSError."""
        try:
            while (frame := await self._wire.receive()) is not None:
                self._take(*frame)
        finally:
            self._over = True
            for asked, unanswered in self._asked.values():
                if not asked.done():
                    asked.set_result(unanswered)

    async def status(self) -> Reply:
        """A `StatusReply`, or why there is none."""
        return await self._ask(pb.StatusRequest(), STATUS_SECONDS, _SILENT)

    async def call(self, message: Message) -> Reply:
        """The brain's answer to an order, once it is stored."""
        reply = await self._ask(message, ORDER_SECONDS, _IN_DOUBT)
        self.turns += 1
        return reply

    async def say(self, text: str) -> None:
        """A line for the master's log. Raises OSError."""
        async with self._lock:
            await self._wire.send({"what": "log", "text": text})

    async def _ask(self, message: Message, seconds: float, unanswered: Reply) -> Reply:
        if self._over:
            return _SILENT
        self._last += 1
        number = self._last
        asked: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._asked[number] = asked, unanswered
        header = {"what": "ask", "id": number, "kind": message.DESCRIPTOR.name}
        try:
            return await asyncio.wait_for(self._answered(header, message.SerializeToString(), asked), seconds)
        except (asyncio.TimeoutError, OSError):
            # Nothing is known of it any more, neither whether it stands by.
            self.stands_by = False
            return unanswered
        finally:
            del self._asked[number]

    async def _answered(self, header: dict[str, Any], body: bytes, asked: asyncio.Future[Reply]) -> Reply:
        async with self._lock:
            await self._wire.send(header, body)
        return await asked

    def _take(self, header: dict[str, Any], body: bytes) -> None:
        if header["what"] == "news":
            for number in header["gone"]:
                self._events.pop(number, None)
            self._events |= {proto.sequence: event_of(proto) for proto in pb.EventsReply.FromString(body).events}
            # Readers see all of a change or nothing of it.
            if not header["more"]:
                self.turns += 1
                self.feed.show(tuple(self._events[number] for number in sorted(self._events)))
            return
        self.stands_by = bool(header["stands_by"])
        message = _ANSWERS[header["kind"]].FromString(body) if header["kind"] else None
        asked, _ = self._asked.get(header["id"], (None, None))
        if asked is not None and not asked.done():
            asked.set_result(Reply(header["code"], header["detail"], message))
