"""When an embedded master ends: with its job, or when nobody has needed it for a while."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from dalsegno.protos import control_pb2
from dalsegno.protos.phases import ENDED_PHASES

from .server import ControlServer

__all__ = ("Lifetime",)

log = logging.getLogger(__name__)

# So many looks in a row at which the store's file is not where it was.
GONE_LOOKS = 6
# Seconds between two looks.
LOOK_INTERVAL_SECONDS = 0.5
# Seconds after the job's end, or a signal, with no agent connected any more.
LAST_WORD_SECONDS = 2.0


class _StoreLooks(threading.Thread):
    """Looks at the store's file, on a thread of its own: a disk that does not answer must not hold the master up.

    Attributes:
        gone: so many looks in a row did not find it where it was.
        ended: set this to end the thread, once its look is over.
    """

    def __init__(self, is_there: Callable[[], bool]) -> None:
        super().__init__(name="store-looks", daemon=True)
        self._is_there = is_there
        self.gone, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(LOOK_INTERVAL_SECONDS):
            self.gone = 0 if self._is_there() else self.gone + 1


class Lifetime:
    """Stops `server` when its time is over.

    Args:
        server: the master's.
        idle_timeout: seconds without any agent after which it ends.
        linger: seconds that agents may stay after the job's end.
        is_there: whether the store is where it was. Whoever deletes that takes the claim by which agents find this
            master along, and nothing can be recorded any more: it ends, so that it is no second one.
    """

    def __init__(
        self,
        server: ControlServer,
        idle_timeout: float,
        linger: float,
        is_there: Callable[[], bool] = lambda: True,
    ) -> None:
        self._server = server
        self._store = _StoreLooks(is_there)
        self._idle_timeout_seconds = idle_timeout
        self._linger_seconds = linger
        self._connected_at = time.monotonic()
        self._ended_at: float | None = None

    def hurry(self) -> None:
        """All processes of a node were told to end: the present agents decide when, and no others are awaited."""
        self._idle_timeout_seconds = min(self._idle_timeout_seconds, LAST_WORD_SECONDS)

    async def run(self) -> None:
        """Runs until the server is told to stop, or the task is cancelled."""
        self._store.start()
        try:
            while not await self._over():
                await asyncio.sleep(LOOK_INTERVAL_SECONDS)
        finally:
            self._store.ended.set()
        self._server.stop()

    async def _over(self) -> bool:
        reply = await self._server.driver.status()
        if reply.code == "UNAVAILABLE":
            return True
        if self._store.gone >= GONE_LOOKS:
            log.warning("the store was deleted, or its volume is away: ending, as nothing can be recorded any more")
            return True
        now = time.monotonic()
        connected = len(self._server.watchers) > 0
        if connected:
            self._connected_at = now
        alone = now - max(self._connected_at, self._server.driver.heard_at)
        if alone > self._idle_timeout_seconds:
            log.info("no agent for %.0f s: ending", alone)
            return True
        if not isinstance(reply.message, control_pb2.StatusReply) or reply.message.phase not in ENDED_PHASES:
            self._ended_at = None
            return False
        if self._ended_at is None:
            self._ended_at = now
        ended = now - self._ended_at
        if ended > self._linger_seconds or (
            not connected and min(ended, alone) > min(LAST_WORD_SECONDS, self._linger_seconds)
        ):
            log.info("the job has ended: ending")
            return True
        return False
