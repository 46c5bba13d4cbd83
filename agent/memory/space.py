"""How much of this node's memory its parts may take."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from dalsegno.protos.room import available_bytes, lacks_memory
from dalsegno.protos.text import megabytes

from .place import HELP

__all__ = ["NoSpaceError", "Space"]


class NoSpaceError(Exception):
    """One line: what there is no room for, why, and what helps."""


class Space:
    """Promises room to what comes. Thread-safe.

    Files on a tmpfs count as memory of the container, and nothing can take them away from it: too many of them, and the
    kernel ends the training. So memory is asked for as well as the file system.

    Args:
        budget: the most bytes that all parts together may have; None: no such limit.
        held: bytes that are here by now.
        free: bytes that the file system has left.
        available: bytes of memory that can still be had.
        make_room: deletes what is here without need.
    """

    def __init__(
        self,
        budget: int | None,
        held: Callable[[], int],
        free: Callable[[], int],
        available: Callable[[], int] = available_bytes,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        self._budget, self._held, self._free, self._available = budget, held, free, available
        self._make_room = make_room
        self._lock = threading.Lock()
        self._coming = 0

    @contextlib.contextmanager
    def promised(self, size: int, what: str) -> Iterator[None]:
        """Keeps room for so many bytes meanwhile. What is written of them counts twice: that errs to the safe side.

        Raises:
            NoSpaceError: there is none.
        """
        with self._lock:
            if problem := self._problem(size):
                self._make_room()
                problem = self._problem(size)
            if problem:
                raise NoSpaceError(f"there is no room for {what} ({megabytes(size)}): {problem}")
            self._coming += size
        try:
            yield
        finally:
            with self._lock:
                self._coming -= size

    def _problem(self, size: int) -> str:
        if self._budget is not None and self._held() + self._coming + size > self._budget:
            return (
                f"the budget is {megabytes(self._budget)}, {megabytes(self._held())} are in use (--memory-budget: a"
                " node holds two steps of its own part, and two of each that it holds for others)"
            )
        if (free := self._free() - self._coming) < size:
            return f"{megabytes(max(0, free))} are left on the file system; {HELP}"
        return lacks_memory(size, self._available() - self._coming)
