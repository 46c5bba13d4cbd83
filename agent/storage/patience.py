"""How long a look is taken again that found nothing where something was, for somebody who waits for it."""

from __future__ import annotations

import time

__all__ = ["LookPatience"]


class LookPatience:
    """Not thread-safe. Both limits count: looks may come fast, and one may take minutes.

    Args:
        looks: the most that may find nothing, one after the other.
        every: seconds of one of them; for so many at least they may.
    """

    def __init__(self, looks: int, every: float) -> None:
        self._looks, self._seconds = looks, looks * every
        self._vain = 0
        self._since = 0.0

    def renew(self) -> None:
        """Somebody begins to wait."""
        self._vain = 0

    def lasts(self, vain: bool) -> bool:
        """Notes a look. Whether it was in vain, and the next one may be."""
        now = time.monotonic()
        self._since = self._since if vain and self._vain else now
        self._vain = self._vain + 1 if vain else 0
        return vain and (self._vain <= self._looks or now - self._since <= self._seconds)
