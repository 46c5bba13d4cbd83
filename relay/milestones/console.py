"""Lines for people, from a pod and from its mirror. Nobody waits for whoever should read them."""

from __future__ import annotations

import sys

from dalsegno.protos.outlet import Outlet
from dalsegno.protos.shortage import starting
from dalsegno.protos.text import one_line

__all__ = ("PodConsole",)

_LAST_LINES_SECONDS = 2.0


class PodConsole:
    """Standard error, which may be a pipe that nobody reads any more, or that nobody has at the other end.

    Args:
        name: stands before each line.

    Raises:
        CannotStartError: there is no room for a thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        with starting("the thread that shows lines"):
            # If it was closed at the start, its number may be another file's.
            self._outlet = Outlet(None if sys.stderr is None else 2, name)

    def say(self, text: str) -> None:
        """Prints a line, unless nobody reads."""
        self._outlet.put(f"{self._name}: {one_line(text)}\n".encode(errors="replace"))

    def close(self, seconds: float = _LAST_LINES_SECONDS) -> None:
        """Waits until all is shown, at most so long."""
        self._outlet.flush(seconds)
