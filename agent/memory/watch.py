"""Ends transfers that do not move: a peer that stands still, or whose cable was pulled, says nothing."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["STALL_SECONDS", "StallWatch", "WatchedCall"]

# Without a byte.
STALL_SECONDS = 30.0
# Between two looks. Longer between two of them: this process itself stood still, which says nothing about peers.
_LOOK_SECONDS, _STOOD_STILL = 1.0, 5.0


class WatchedCall:
    """One call under way.

    Attributes:
        stalled: it was ended because nothing moved.
    """

    def __init__(self, cancel: Callable[[], object], unwanted: Callable[[], bool], limit: float) -> None:
        self.cancel, self.unwanted, self.limit = cancel, unwanted, limit
        self.moved_at = time.monotonic()
        self.stalled = False

    def moved(self) -> None:
        """A byte has moved, or is held back on purpose."""
        self.moved_at = time.monotonic()


class StallWatch:
    """One thread for all transfers of an agent; it runs while there are any. Thread-safe."""

    def __init__(self, stall_seconds: float = STALL_SECONDS) -> None:
        self._limit = stall_seconds
        self._look = min(_LOOK_SECONDS, stall_seconds / 4)
        self._changed = threading.Condition()
        self._transfers: set[WatchedCall] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    @contextlib.contextmanager
    def over(
        self,
        cancel: Callable[[], object],
        unwanted: Callable[[], bool] = lambda: False,
        seconds: float = math.inf,
    ) -> Iterator[WatchedCall]:
        """Around a call, which `cancel` ends from any thread. Where this is closed it is ended at once.

        Args:
            cancel: see above.
            unwanted: asked at each look; where it is so, the call is ended as well.
            seconds: without a byte, if that is less than for all.
        """
        transfer = WatchedCall(cancel, unwanted, min(seconds, self._limit))
        try:
            with self._changed:
                self._transfers.add(transfer)
                if self._closed:
                    cancel()
                elif self._thread is None:
                    thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
                    thread.start()  # if it cannot, the next call tries again
                    self._thread = thread
            yield transfer
        finally:
            with self._changed:
                self._transfers.discard(transfer)

    def close(self) -> None:
        """Ends all transfers, and those that begin later."""
        with self._changed:
            self._closed = True
            transfers = list(self._transfers)
            self._changed.notify_all()
        for transfer in transfers:
            transfer.cancel()

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait(self._look)
                if self._closed or not self._transfers:
                    self._thread = None
                    return
                transfers = list(self._transfers)
            now = time.monotonic()
            stood_still, last = now - last > self._look + _STOOD_STILL, now
            for transfer in transfers:
                if stood_still:
                    transfer.moved()
                elif now - transfer.moved_at > transfer.limit:
                    transfer.stalled = True
                if transfer.stalled or transfer.unwanted():
                    transfer.cancel()
