"""How a worker waits for its place in the next world instead of ending.

The agent that started the process knows how it hears of a place, and its session knows when it may wait for one.
Neither imports the other, so the one leaves here what the other finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

__all__ = ["Wait", "offer", "offered"]


class Wait(Protocol):
    """Waits for a place, with this process's variables and output set to it."""

    def __call__(self, holds: Mapping[str, str], *, broken: bool = False) -> bool:
        """Returns whether there is a place; if not, this process is to end as one that has drained.

        Args:
            holds: The checkpoint that this process's state is equal to, as in the variables of a world that resumes
                from it. Only such a world has a place for it.
            broken: Its world has broken. For the agent it has failed.
        """
        ...


_offered: list[Wait] = []


def offer(wait: Wait) -> None:
    """Lets this process's session wait in this way."""
    _offered[:] = [wait]


def offered() -> Wait | None:
    """How this process waits for its next place; None: it ends instead."""
    return _offered[0] if _offered else None
