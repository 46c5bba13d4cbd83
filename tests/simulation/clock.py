"""Simulated time: a heap of callbacks, run in order of time, then of scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Timer:
    """One callback to come; `cancel` makes it a no-op."""

    __slots__ = ("args", "call")

    def __init__(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.call: Callable[..., None] | None = call
        self.args = args

    def cancel(self) -> None:
        self.call = None


class Clock:
    """Seconds since the schedule began. Nothing else in the simulator knows a time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._number = 0

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> Timer:
        """Runs `call(*args)` in `delay` seconds (at least 0)."""
        timer = Timer(call, args)
        self._number += 1
        heapq.heappush(self._heap, (self.now + max(0.0, delay), self._number, timer))
        return timer

    def step(self) -> bool:
        """Runs the next callback. False when none is left."""
        while self._heap:
            at, _, timer = heapq.heappop(self._heap)
            if timer.call is None:
                continue
            self.now = at
            self.events += 1
            timer.call(*timer.args)
            return True
        return False
