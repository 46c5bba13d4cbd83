"""Lets a signal wake the main thread, whichever thread the kernel gives it to.

Python runs handlers on the main thread alone, between two of its instructions. Of two signals at once the kernel may
give both to another thread; then nothing interrupts a main thread that waits in a system call, and it never hears them.
The same is true of one signal that comes just before the call.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from dalsegno.protos.shortage import starting

__all__ = ("Waking",)

# It is sent to the main thread alone. Nobody uses it here, and it means nothing to whoever does not handle it.
_WAKE = signal.SIGURG
# Seconds between two tries to wake it, and how many there are.
_PAUSE_SECONDS, _TRIES = 0.05, 100


class Waking:
    """While open, handlers run soon after their signals. Main thread only."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._before: Any = None
        self._before_fd = -1
        # How often the main thread was woken. A plain number: handlers may interrupt each other, and take no lock.
        self._woken = 0
        self._thread = threading.Thread(target=self._run, name="waking", daemon=True)

    def __enter__(self) -> Waking:
        with starting("the thread that passes signals on"):
            self._thread.start()
        self._before = signal.signal(_WAKE, self._wake)
        self._before_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._before_fd)
        self._writer.close()
        self._thread.join()
        signal.signal(_WAKE, self._before)
        self._reader.close()

    def _wake(self, number: int, frame: FrameType | None) -> None:
        """Handlers of signals with smaller numbers have run by now."""
        self._woken += 1

    def _run(self) -> None:
        while numbers := self._reader.recv(64):
            if all(number == _WAKE for number in numbers):
                continue
            before = self._woken
            for _ in range(_TRIES):
                signal.pthread_kill(self._main, _WAKE)
                time.sleep(_PAUSE_SECONDS)  # why: a handler sets no event, see `_woken`
                if self._woken != before:
                    break
