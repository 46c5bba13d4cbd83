"""A process that runs its script before its place in a world is known, as its session sees it.

The agent that started the process holds back what must wait for the place. The session is used only later, so what the
script does between `session()` and that may be done ahead, too. Neither side imports the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Ahead", "begin", "running"]


class Ahead(Protocol):
    """A process's life ahead of a world."""

    @property
    def over(self) -> bool:
        """Whether it has its place."""
        ...

    def meet(self, need: str) -> None:
        """Waits for the place. ``need``: why, for people."""
        ...

    def first(self, call: Callable[[], None]) -> None:
        """Calls this on the main thread as soon as there is a place, before anything else that has waited for it."""
        ...


_running: list[Ahead] = []


def begin(ahead: Ahead) -> None:
    """This process runs ahead from here on."""
    _running[:] = [ahead]


def running() -> Ahead | None:
    """This process's life ahead; None: it has its place."""
    return _running[0] if _running and not _running[0].over else None
