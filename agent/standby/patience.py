"""Waiting for what another process says, without the time in which this process itself was stopped."""

from __future__ import annotations

import threading
import time

__all__ = ["waited"]

# Between two looks. Longer between the last two: this process itself stood still, and has not heard what was said.
_LOOK_SECONDS, _STOOD_STILL = 1.0, 1.0


def waited(event: threading.Event, seconds: float) -> bool:
    """Waits until the event is set. False: it was not within so many seconds.

    Those in which this process stands still (Ctrl-Z, SIGSTOP) do not count.
    """
    left, look = seconds, min(_LOOK_SECONDS, seconds / 4)
    while left > 0:
        began = time.monotonic()
        if event.wait(look):
            return True
        passed = time.monotonic() - began
        # No more than it was to take: where this process stands still, nothing of that counts.
        left -= min(passed, look)
        if left <= 0 and passed >= look + _STOOD_STILL and event.wait(look):
            return True
    return event.is_set()
