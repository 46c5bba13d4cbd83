"""Work off the main thread, one piece after the other, on a thread of its own with a bounded queue."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable

__all__ = ["Line"]

# Nobody orders more than a few at a time: more is a mistake, or something that hangs.
_MOST_WAITING = 64

logger = logging.getLogger(__name__)


class Line:
    """Thread-safe. What fails is logged, and the next one goes on.

    Args:
        name: of its thread.
        prepare: called on that thread first.
    """

    def __init__(self, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        self._prepare = prepare
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> bool:
        """Never waits. False: it is closed, or too much is waiting already."""
        if self._closing.is_set():
            return False
        try:
            self._work.put_nowait(work)
        except queue.Full:
            logger.error("%s: too much is waiting, something is not done", self._thread.name)
            return False
        return True

    def close(self, timeout_seconds: float) -> None:
        """What has not begun is dropped; what is under way has so many seconds."""
        self._closing.set()
        # Where there is no room for that, it looks at `_closing` after what it is at.
        with contextlib.suppress(queue.Full):
            self._work.put_nowait(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            self._prepare()
        except Exception:
            logger.exception("%s: it goes on unprepared", self._thread.name)
        while (work := self._work.get()) is not None and not self._closing.is_set():
            try:
                work()
            except Exception:
                logger.exception("%s: something went wrong", self._thread.name)
