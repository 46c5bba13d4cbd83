"""What tools ask and order over HTTP, `/api/v1`. It only translates: the brain gets calls like any other."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, HTTPException, Path, Query, Request, Response
from google.protobuf.message import Message
from pydantic import BaseModel, Field

from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.contract import CONTROL_PROTOCOL

from ..brain.chronicle import KEPT
from ..brain.door import ShapeError, admit
from ..server.feed import Feed
from .encoded import EncodedEvents
from .guard import Guard
from .looking import Looking, Master
from .stream import EventStream, Readers

__all__ = ("Api",)

# The status code of each answer of the brain.
STATUS_OF = {
    "OK": 200,
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
}
# Seconds that a request for events may wait for one; less than any request may take.
LONGEST_WAIT_SECONDS = 20.0
# Seconds after which it is seen that a reader who waits has hung up.
GONE_WITHIN_SECONDS = 0.5
_JSON = "application/json"
_REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"description": "The token is missing or wrong"},
    403: {"description": "The order comes from a page of another site"},
    404: {"description": "There is no such node"},
    409: {"description": "It cannot be done as the job stands; the detail says why"},
    503: {"description": "This master stands by or stops, or its store is away: see the detail"},
}


class Scale(BaseModel):
    """How many nodes the world may have."""

    nodes: int = Field(strict=True, ge=1, le=2**31 - 1, description="Between --nnodes' two numbers")


class Limit(BaseModel):
    """What holds now."""

    limit: int = Field(description="The most nodes of a world")
    nodes: int = Field(description="Nodes of the present world, which changes only later")


class Ordered(BaseModel):
    """What follows from an order."""

    text: str = Field(description="One line for a person")
    step: int = Field(0, description="Of a save: it is of a later step than this one")


class Events(BaseModel):
    """What happened, oldest first."""

    events: list[dict[str, Any]]
    oldest: int = Field(description="Number of the oldest event that is kept; 0: there is none")
    newest: int = Field(description="Number of the newest event")


class Api:
    """The routes below `/api/v1`.

    Args:
        master: Who answers.
        guard: Who may ask.
        looking: The job as the page sees it.
        prefix: Where they are, if the master is one of several behind one port.
    """

    def __init__(self, master: Master, guard: Guard, looking: Looking, prefix: str = "/api/v1") -> None:
        self._master, self._looking, self._readers = master, looking, Readers()
        self._encoded = EncodedEvents(master.feed)
        self.router = router = APIRouter(prefix=prefix, responses=_REFUSALS)
        reads, orders = [Depends(guard.reads)], [Depends(guard.orders)]
        add = router.add_api_route
        add("/job", self._job, dependencies=reads, summary="The job as it stands", response_model=dict[str, Any])
        text = "What happened; a stream with `Accept: text/event-stream`"
        add("/events", self._events, dependencies=reads, summary=text, response_model=Events)
        for path, act, text in (
            ("/nodes/{name}/drain", self._drain, "A node saves with all others, and goes"),
            ("/scale", self._scale, "Sets how many nodes the world may have"),
            ("/stop", self._stop, "All nodes save and go"),
            ("/start", self._start, "Lets agents of a stopped job in again"),
            ("/checkpoint", self._checkpoint, "The ranks save at the next boundary, and train on"),
        ):
            add(path, act, methods=["POST"], dependencies=orders, summary=text)

    async def _job(self) -> Any:
        return Response(await self._looking.as_json(), media_type=_JSON)

    async def _events(
        self,
        request: Request,
        after: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=KEPT)] = KEPT,
        wait: Annotated[float, Query(ge=0, le=LONGEST_WAIT_SECONDS, description="Seconds, if there is none")] = 0.0,
        accept: Annotated[str, Header()] = "",
        last_event_id: Annotated[int | None, Header(ge=0, le=2**53)] = None,
    ) -> Any:
        """Events behind `after`. Only what is stored is shown."""
        await self._looking.now()
        streams, feed = "text/event-stream" in accept, self._master.feed
        if not streams and not wait:
            return await self._answer(after, limit)
        if self._readers.full:
            raise HTTPException(429, "too many readers wait for events already: ask without `wait`, or later")
        if streams:
            return EventStream(feed, after if last_event_id is None else last_event_id, self._readers, self._encoded)
        with self._readers.one():
            await _until_news(request, feed, after, wait)
        return await self._answer(after, limit)

    async def _answer(self, after: int, limit: int) -> Response:
        """`Events`, put together from the texts of each: a model would look at every value again."""
        feed = self._master.feed
        found, oldest, newest = feed.after(after, limit), feed.oldest, feed.newest
        texts = b",".join(await self._encoded.of(found))
        return Response(b'{"events":[%s],"oldest":%d,"newest":%d}' % (texts, oldest, newest), media_type=_JSON)

    async def _drain(self, name: Annotated[str, Path(max_length=256)]) -> Ordered:
        return await self._order(pb.DrainNodeRequest(protocol=CONTROL_PROTOCOL, node=name))

    async def _stop(self) -> Ordered:
        return await self._order(pb.StopRequest(protocol=CONTROL_PROTOCOL))

    async def _start(self) -> Ordered:
        return await self._order(pb.StartRequest(protocol=CONTROL_PROTOCOL))

    async def _checkpoint(self) -> Ordered:
        return await self._order(pb.SaveNowRequest(protocol=CONTROL_PROTOCOL))

    async def _scale(self, scale: Scale) -> Limit:
        reply = await self._call(pb.ScaleRequest(protocol=CONTROL_PROTOCOL, nodes=scale.nodes))
        return Limit(limit=reply.limit, nodes=reply.nodes)

    async def _order(self, message: Message) -> Ordered:
        reply = await self._call(message)
        return Ordered(text=reply.text, step=reply.step)

    async def _call(self, message: Message) -> Any:
        """The brain's answer. Raises HTTPException with its refusal."""
        try:
            admit(message)
        except ShapeError as error:
            raise HTTPException(400, str(error)) from error
        reply = await self._master.call(message)
        if reply.message is None:
            raise HTTPException(STATUS_OF.get(reply.code, 500), reply.detail)
        return reply.message


async def _until_news(request: Request, feed: Feed, after: int, seconds: float) -> None:
    """Waits for an event behind this one, at most so long, and while the reader is there."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while not feed.after(after, 1) and (left := until - loop.time()) > 0 and not await request.is_disconnected():
        await feed.wait(after, min(left, GONE_WITHIN_SECONDS))
