"""Signals as events: the handler does nothing, a thread reads their numbers from the wake-up descriptor.

A Python signal handler runs between two instructions of the main thread, wherever that is, and must not take a lock;
`signal.set_wakeup_fd` moves the work out of it and also reaches a main thread that waits inside C code.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

__all__ = ["SignalWatch"]


def _nothing(signum: int, frame: FrameType | None) -> None:
    """The number goes through the wake-up descriptor."""


class SignalWatch:
    """While open, calls `deliver(number)` on a thread of its own for each of `signals`. Main thread only."""

    def __init__(self, signals: Sequence[signal.Signals], deliver: Callable[[int], None]) -> None:
        self._wanted = frozenset(int(number) for number in signals)
        self._deliver = deliver
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)

    def __enter__(self) -> SignalWatch:
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in sorted(self._wanted):
            self._before[number] = signal.signal(number, _nothing)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()
        self._thread.join(5.0)
        self._reader.close()

    def _read(self) -> None:
        while data := self._reader.recv(64):
            for number in data:
                if number in self._wanted:
                    self._deliver(number)
