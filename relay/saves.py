"""Whether the trainer saves as often as `interval_seconds` says: people are told once where it does not."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ("SaveWatch",)

# In intervals: what comes a little late is no news.
_LATE = 1.25


class SaveWatch:
    """One timer, from a start or a save to the next save.

    It never asks by `save_signal`, because many trainers end on that.

    Args:
        interval_seconds: how often the run is to be saved.
        say: tells people; called once at most, on a thread of its own.
    """

    def __init__(self, interval_seconds: float, say: Callable[[str], None]) -> None:
        self._seconds, self._say = interval_seconds, say
        self._timer: threading.Timer | None = None
        self._said = False

    def begin(self) -> None:
        """The trainer starts, or something of it was saved: the next save is awaited from now on."""
        self.end()
        if not self._said:
            self._timer = threading.Timer(min(self._seconds * _LATE, threading.TIMEOUT_MAX), self._late)
            self._timer.daemon = True
            try:
                self._timer.start()
            except RuntimeError:  # no room for a thread: a line less, and training goes on
                self._timer = None

    def end(self) -> None:
        """No save is awaited any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._said = True
        self._say(
            f"nothing was saved for {self._seconds * _LATE:.0f} s (interval_seconds: {self._seconds:g}): a machine "
            "that vanishes takes all of that with it; have the trainer save more often, or raise interval_seconds"
        )
