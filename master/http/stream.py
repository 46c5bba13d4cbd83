"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html): the job's events as they come.

A stream lasts some seconds; the reader connects again with `Last-Event-ID`, as browsers do by themselves. So it loses
nothing, and no reader holds a connection for ever. One that reads too slowly is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from fastapi.responses import Response

from ..brain.chronicle import JobEvent
from ..server.feed import Feed
from .encoded import EncodedEvents
from .guard import Receive, Scope, Send

__all__ = ("EventStream", "Readers")

# Seconds: how long a stream lasts, less than any request may take; between two signs of life; in which a reader must
# have taken what was sent; after which it connects again.
LONGEST_STREAM_SECONDS = 20.0
ALIVE_EVERY_SECONDS = 5.0
SLOWEST_READER_SECONDS = 5.0
AGAIN_SECONDS = 1.0
# The most events that are sent at once, and the most that wait for some.
AT_ONCE = 100
MOST_READERS = 64


class Readers:
    """Counts those who wait for events."""

    def __init__(self) -> None:
        self._count = 0

    @property
    def full(self) -> bool:
        """Whether there are as many as may be."""
        return self._count >= MOST_READERS

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """One more, inside."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


class EventStream(Response):
    """The answer to a request for a stream.

    Args:
        feed: The events.
        after: The number of the last event that the reader knows.
        readers: Counts it.
        encoded: The texts of events.
    """

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, after: int, readers: Readers, encoded: EncodedEvents) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(b"", headers=headers)
        del self.headers["content-length"]
        self._feed, self._after, self._readers, self._encoded = feed, after, readers, encoded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the stream's time is over, or the reader has gone or is too slow."""
        work = asyncio.ensure_future(self._run(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            with self._readers.one():
                await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _run(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + LONGEST_STREAM_SECONDS
        with contextlib.suppress(asyncio.TimeoutError):
            await _sent(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._put(send, b"retry: %.0f\n\n" % (AGAIN_SECONDS * 1000))
            while (left := until - loop.time()) > 0:
                found = self._feed.after(self._after, AT_ONCE)
                if found:
                    texts = await self._encoded.of(found)
                    await self._put(send, b"".join(map(_block, found, texts)))
                    self._after = found[-1].sequence
                    continue
                await self._feed.wait(self._after, min(left, ALIVE_EVERY_SECONDS))
                if self._feed.newest == self._after:
                    await self._put(send, b": alive\n\n")
            await _sent(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _put(self, send: Send, text: bytes) -> None:
        await _sent(send, {"type": "http.response.body", "body": text, "more_body": True})


async def _sent(send: Send, message: dict[str, Any]) -> None:
    """Sends within the time that a reader has. Raises asyncio.TimeoutError."""
    await asyncio.wait_for(send(message), SLOWEST_READER_SECONDS)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _block(event: JobEvent, text: bytes) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.sequence, event.kind.value.encode(), text)
