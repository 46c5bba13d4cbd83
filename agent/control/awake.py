"""How long something has lasted, without the time in which this process itself was stopped."""

from __future__ import annotations

import time

__all__ = ["AwakeTime"]

# The most seconds between two looks that count: what is done between them takes less, unless this process stands still.
_MOST_SECONDS = 5.0


class AwakeTime:
    """Seconds since it was made, for a patience. Those do not count in which this process was stopped (Ctrl-Z).

    Nobody was asked in them. Whoever uses it looks often: of a time between two looks 5 seconds count at most.
    """

    def __init__(self) -> None:
        self._looked_at = time.monotonic()
        self._seconds = 0.0

    def seconds(self) -> float:
        """How many there are by now."""
        now = time.monotonic()
        self._seconds += min(now - self._looked_at, _MOST_SECONDS)
        self._looked_at = now
        return self._seconds
