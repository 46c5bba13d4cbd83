"""This node's share of what is brought to the disk: one order after the other, and none that hangs for ever.

A disk may hang without an error: a mount whose server is gone answers nothing. Nothing can end such a call. So after a
while without a byte its order is answered, as are those that wait behind it, and other nodes write the parts. Until the
call comes back new orders are answered at once: there is never more than one thread. When it comes back, what it was at
has been given up: it seals nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from dalsegno.protos.priority import yield_of_thread

from .line import Line
from .watch import StallWatch

__all__ = ["DISK_STALL_SECONDS", "Writer"]

# Without a byte, or a file made durable. A slow disk may take long for one sync; nothing is lost if it is given up.
DISK_STALL_SECONDS = 120.0
# How nice the thread is: behind all that trains.
_NICENESS = 10

logger = logging.getLogger(__name__)


class _Order:
    """One order. `then` is called once."""

    def __init__(self, digest: str, then: Callable[[str], None]) -> None:
        self.digest = digest
        self._then: Callable[[str], None] | None = then
        self._lock = threading.Lock()
        # Why it is given up; empty: it is not.
        self.stopped = ""

    @property
    def over(self) -> bool:
        return self._then is None

    def answer(self, failure: str) -> None:
        with self._lock:
            then, self._then = self._then, None
        if then is not None:
            then(failure)


class Writer:
    """Thread-safe.

    Args:
        stall_seconds: See `DISK_STALL_SECONDS`.
    """

    def __init__(self, stall_seconds: float = DISK_STALL_SECONDS) -> None:
        self._line = Line("memory-durable", lambda: yield_of_thread(_NICENESS))
        self._watch, self._limit = StallWatch(stall_seconds), stall_seconds
        self._lock = threading.Lock()
        # What is under way, and what waits.
        self._orders: list[_Order] = []
        self._closed = False
        # Why it hangs; empty: it does not.
        self._hangs = ""

    def put(self, digest: str, write: Callable[[Callable[[], str]], str], then: Callable[[str], None]) -> None:
        """Orders something to be written.

        Args:
            digest: of its checkpoint.
            write: called on the writer's thread, returns why it is not done, or "". It calls what it is given whenever
                it has got on, and gives up where that returns a reason.
            then: called once, with the same.
        """
        order = _Order(digest, then)
        with self._lock:
            hangs = self._hangs
            if not hangs:
                self._orders.append(order)
        if hangs:
            order.answer(hangs)
        elif not self._line.put(lambda: self._work(order, write)):
            self._forget(order)
            order.answer("too many checkpoints are being written to the disk")

    def stop(self, digest: str) -> None:
        """Nobody wants this one on the disk any more."""
        with self._lock:
            for order in self._orders:
                if order.digest == digest:
                    order.stopped = order.stopped or "a newer one counts"

    def end(self) -> None:
        """What is under way gives up as soon as it gets on."""
        with self._lock:
            self._closed = True

    def close(self, timeout_seconds: float) -> None:
        """Ends it; blocks for so many seconds at most."""
        self.end()
        self._line.close(timeout_seconds)
        self._watch.close()

    def _work(self, order: _Order, write: Callable[[Callable[[], str]], str]) -> None:
        if order.over:
            return
        try:
            with self._watch.over(lambda: self._give_up(order)) as transfer:

                def stopped() -> str:
                    transfer.moved()
                    return "the agent ends" if self._closed else order.stopped

                failure = stopped() or write(stopped)
        except Exception as error:
            logger.exception("%s was not made durable", order.digest)
            failure = str(error) or type(error).__name__
        with self._lock:
            self._hangs = ""
        self._forget(order)
        order.answer(failure)

    def _give_up(self, order: _Order) -> None:
        """Nothing has moved for too long; called again and again. All that waits would wait as long."""
        with self._lock:
            if self._closed or self._hangs or order not in self._orders:
                return
            reason = f"the disk hangs: it took nothing for {self._limit:g} s, and said no error; look at its mount"
            self._hangs, orders, self._orders = reason, self._orders, []
            for one in orders:
                one.stopped = one.stopped or reason
        for one in orders:
            one.answer(reason)

    def _forget(self, order: _Order) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._orders.remove(order)
