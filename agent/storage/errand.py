"""Work beside the agent's main thread whose end somebody waits for: it is told, whatever becomes of the work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.protos.shortage import shortage

__all__ = ["Errand", "reason_of", "spawned", "submitted"]

logger = logging.getLogger(__name__)


class Errand:
    """Does work once. If that raises, or no thread can be had for it, people and the decisions are told.

    The decisions begin the next errand of a kind when they have heard of the last one's end. So they hear of it even
    where a disk, a library or the memory of this machine does what nobody has thought of.

    Args:
        what: for people, what was being done.
        work: delivers its result, last of all.
        failed: delivers that there is none, and why, in its place.
        say: warns people of a thing, in one line.
    """

    def __init__(
        self,
        what: str,
        work: Callable[[], None],
        failed: Callable[[str], None],
        say: Callable[[str, str], None],
    ) -> None:
        self._what, self._work, self._failed, self._say = what, work, failed, say
        self._lock, self._begun = threading.Lock(), False

    def __call__(self) -> None:
        """Does it, on any thread."""
        if self._begins():
            try:
                self._work()
            except Exception as error:
                self._tell(error)

    def give_up(self, error: Exception) -> None:
        """No thread can be had. One may come to it later all the same: then it does nothing."""
        if self._begins():
            self._tell(error)

    def _begins(self) -> bool:
        with self._lock:
            begun, self._begun = self._begun, True
        return not begun

    def _tell(self, error: Exception) -> None:
        why = reason_of(error)
        logger.error("%s failed", self._what, exc_info=error)
        try:
            thing = f"{self._what}: {type(error).__name__}"
            self._say(thing, f"{self._what} failed in this agent: {why}")
        finally:
            try:
                self._failed(why)
            except Exception:
                # Nobody else would hear of it: a pool keeps what its work raises to itself.
                logger.exception("the end of %s cannot be told", self._what)


def reason_of(error: Exception) -> str:
    """What people are told of an error that nobody has thought of, in one line."""
    return shortage(error) or printable(f"{type(error).__name__}: {error}")


def submitted(pool: ThreadPoolExecutor, errand: Errand) -> Future[None] | None:
    """Has a pool do it. None: there is no thread for it."""
    try:
        return pool.submit(errand)
    except RuntimeError as error:
        errand.give_up(error)
        return None


def spawned(name: str, errand: Errand) -> None:
    """Does it on a thread of its own, because it may take for ever."""
    try:
        threading.Thread(target=errand, name=name, daemon=True).start()
    except RuntimeError as error:
        errand.give_up(error)
