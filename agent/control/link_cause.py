"""Says why the master is not heard in mid-run, where that is a matter of TLS and somebody has to mend it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

__all__ = ["LinkCause"]

# Between two looks. A certificate is renewed by hand, so nobody waits for the line.
_LOOK_SECONDS = 2.0


class LinkCause:
    """Looks for the cause while the master is away, and tells it once for each time that it is.

    Args:
        hopeless: why no address will ever answer; "" where that is not known. May block; called by one thread at once.
        say: tells people; called on that thread.
        every_seconds: between two looks.
    """

    def __init__(
        self, hopeless: Callable[[], str], say: Callable[[str], None], every_seconds: float = _LOOK_SECONDS
    ) -> None:
        self._hopeless, self._say, self._every = hopeless, say, every_seconds
        self._lock = threading.Lock()
        # Ends the present thread; None: there is none.
        self._over: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def changed(self, up: bool, refused: bool) -> None:
        """The master is heard (again), or no longer. A refused token has a line of its own."""
        away = not up and not refused
        with self._lock:
            if self._over is not None and not away:
                self._over.set()
                self._over = None
            elif self._over is None and away:
                over = threading.Event()
                thread = threading.Thread(target=self._look, args=(over, self._thread), name="link-cause", daemon=True)
                with contextlib.suppress(RuntimeError):  # without room for a thread nothing is said
                    thread.start()
                    self._over, self._thread = over, thread

    def close(self) -> None:
        """Nobody is told any more."""
        self.changed(up=True, refused=False)

    def _look(self, over: threading.Event, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        while not over.wait(self._every):
            cause = self._hopeless()
            if cause and not over.is_set():
                self._say(cause)
                return
