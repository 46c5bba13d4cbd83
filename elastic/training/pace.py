"""Whether the host waits for its cards before each optimizer step, and what that has shown.

It waits where that costs little: a card idles from the end of its backward pass until the host has asked it for the
optimizer's work, which takes a few milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Pace"]

# More of a step than this part of it is not waited for.
MOST_SHARE = 0.02
# The newest steps count for so much of the means.
NEWEST = 0.2
# So many steps are looked at before it waits.
FIRST_STEPS = 3


class Pace:
    """Of one loop.

    Attributes:
        came: Before each of the last step's optimizers began, its gradients had come.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.came = False
        # Optimizers of this step that have begun theirs, and those that were waited for.
        self._begun = self._waited = 0
        # Seconds that a step takes, and that an optimizer's step takes the host.
        self._step = self._optimizer = 0.0
        self._steps = 0
        self._boundary_at: float | None = None
        self._began_at: float | None = None
        self._in_step = 0.0

    @property
    def may_wait(self) -> bool:
        """Whether waiting costs little of a step."""
        return self._steps >= FIRST_STEPS and self._optimizer <= MOST_SHARE * self._step

    def begins(self) -> None:
        """An optimizer begins its step."""
        self._begun += 1
        self._began_at = self._clock()

    def waited(self) -> None:
        """All gradients until now have come; that optimizer steps now."""
        self._waited += 1
        self._began_at = self._clock()

    def stepped(self) -> None:
        """An optimizer's step has been asked for."""
        if self._began_at is not None:
            self._in_step += self._clock() - self._began_at
            self._began_at = None

    def boundary(self, *, again: bool) -> None:
        """A step is done; ``again``: the same as at the last call, behind which nothing has stepped."""
        if again and not self._begun:
            return
        now, self.came = self._clock(), 0 < self._begun == self._waited
        self._begun = self._waited = 0
        if self._boundary_at is not None:
            self._step = _mean(self._step, now - self._boundary_at)
            self._optimizer = _mean(self._optimizer, self._in_step)
            self._steps += 1
        self._boundary_at, self._began_at, self._in_step = now, None, 0.0


def _mean(mean: float, newest: float) -> float:
    return newest if not mean else (1 - NEWEST) * mean + NEWEST * newest
