"""The job as people and monitors see it, not asked of the brain more often than needed."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

from fastapi import HTTPException
from google.protobuf.message import Message

from dalsegno.protos import control_pb2

from ..brain.events import Reply
from ..server.feed import Feed
from .encoded import message_json

__all__ = ("Curve", "Looking", "Master")

# The most points of the page's curve, and the seconds for which one look serves all who ask.
CURVE_POINTS = 1000
FRESH_SECONDS = 0.1
_TRAINING = (control_pb2.PHASE_RUNNING, control_pb2.PHASE_DRAINING)


class Master(Protocol):
    """The server whose job is shown."""

    @property
    def feed(self) -> Feed:
        """The job's events."""

    @property
    def turns(self) -> int:
        """How many turns of the brain have ended."""

    async def status(self) -> Reply:
        """A `StatusReply`, or why there is none."""

    async def call(self, message: Message) -> Reply:
        """The brain's answer to a request, once it is stored."""


class Curve:
    """The loss of the steps that this master has heard of."""

    def __init__(self) -> None:
        self.points: deque[tuple[int, float]] = deque(maxlen=CURVE_POINTS)
        # Whose points these are, and the last world that was seen of it.
        self._run_id, self._epoch = "", 0

    def see(self, status: control_pb2.StatusReply) -> None:
        """Notes the last step, if it is further than all before; forgets what is no part of this run any more."""
        if status.run_id != self._run_id:
            self.points.clear()
        elif status.epoch != self._epoch:
            # It may have gone back. Of a world that is not heard yet, `step` is the step that it began from.
            first = status.step + 1 if status.unheard else status.step
            while self.points and self.points[-1][0] >= first:
                self.points.pop()
        self._run_id, self._epoch = status.run_id, status.epoch
        known = self.points[-1][0] if self.points else 0
        if status.step > known and status.phase in _TRAINING and not status.unheard:
            self.points.append((status.step, status.loss))


class Looking:
    """Looks at the job: one look serves all who ask within a moment, unless a turn has ended since it began.

    So whoever has the answer to an order sees what followed from it.
    """

    def __init__(self, master: Master) -> None:
        self._master, self.curve = master, Curve()
        self._seen: tuple[float, Reply] | None = None
        self._look: asyncio.Task[Reply] | None = None
        # The turns that had ended when the last look began.
        self._turns = -1
        # The look that was encoded last, and its text.
        self._encoded: control_pb2.StatusReply | None = None
        self._encoding: asyncio.Task[bytes] | None = None

    async def now(self) -> control_pb2.StatusReply:
        """The status. Raises HTTPException (503) if this master cannot tell."""
        turns = self._master.turns
        if self._turns == turns and self._seen is not None and time.monotonic() - self._seen[0] <= FRESH_SECONDS:
            reply = self._seen[1]
        else:
            if self._look is None or self._look.done() or self._turns != turns:
                self._look, self._turns, self._seen = asyncio.create_task(self._ask(turns)), turns, None
            # Shielded, so that one reader who hangs up does not end it for the others.
            reply = await asyncio.shield(self._look)
        if not isinstance(reply.message, control_pb2.StatusReply):
            raise HTTPException(503, reply.detail)
        return reply.message

    async def _ask(self, turns: int) -> Reply:
        reply = await self._master.status()
        if turns == self._turns:
            self._seen = time.monotonic(), reply
        if isinstance(reply.message, control_pb2.StatusReply):
            self.curve.see(reply.message)
        return reply

    async def as_json(self) -> bytes:
        """The status with what this master has seen of the loss, encoded once for each look. Raises HTTPException."""
        status = await self.now()
        if self._encoding is None or self._encoded is not status:
            more = {
                "goodput": status.goodput if status.HasField("goodput") else None,
                "curve": list(self.curve.points),
            }
            self._encoding, self._encoded = asyncio.create_task(message_json(status, more)), status
        # As with a look.
        return await asyncio.shield(self._encoding)
