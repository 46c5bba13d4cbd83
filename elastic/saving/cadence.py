"""When memory checkpoints are due: every so many steps, or as often as costs little. Pure.

``"auto"`` measures what the loop waits for a save, and what the steps beside which it is written take longer than
others do. The next one comes so many steps later that this is `SHARE` of them. What is rare, and falls on a step beside
one save (an evaluation), is no part of what saves cost: the median of the last few counts.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

AUTO = "auto"
SHARE = 0.02
MOST_STEPS = 1000
# The first steps of a process take longer than any other.
FIRST_STEPS = 3
# So many steps say how long a step takes.
WINDOW = 32
# So many saves say what one costs.
COSTS = 5
# After failures in a row at most so many times the distance.
MOST_PATIENCE = 64


def checked(every: int | str) -> int | str:
    """``every``, if it is a cadence.

    Raises:
        ValueError: It is not.
    """
    if every == AUTO or (isinstance(every, int) and not isinstance(every, bool) and every >= 0):
        return every
    raise ValueError(f"memory_every is a number of steps, 0 (off) or {AUTO!r}, not {every!r}")


class Cadence:
    """The cadence of one loop. All ranks ask and tell it the same, apart from `measure` and `began`.

    Args:
        every: Steps between two, or ``"auto"``.
    """

    def __init__(self, every: int | str) -> None:
        self._auto, self._every = every == AUTO, 0 if every == AUTO else int(every)
        self._seen, self._next = 0, 0
        self._patience = 1
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._waited = self._beside = 0.0
        self._count_beside = 0
        self._costs: deque[float] = deque(maxlen=COSTS)

    def measure(self, seconds: float, *, saving: bool) -> None:
        """A step took so long; ``saving``: a memory checkpoint was written beside it."""
        self._seen += 1
        if saving:
            self._beside += seconds
            self._count_beside += 1
        elif self._seen > 1:
            self._steps.append(seconds)

    def began(self, seconds: float) -> None:
        """For the save that has begun (or is done) the loop waited so long."""
        self._waited, self._beside, self._count_beside = seconds, 0.0, 0

    def due(self, step: int) -> bool:
        """Behind this step."""
        if self._auto:
            return self._seen >= FIRST_STEPS and step >= self._next
        return self._every > 0 and step % self._every == 0 and step >= self._next

    def proposal(self, *, failed: bool) -> int:
        """How far apart two should be, by what this rank has measured of the last one; ``failed``: it is gone."""
        if not self._auto or not self._steps:
            return max(1, self._every)
        step = max(statistics.median(self._steps), 1e-6)
        # What a step beside the save waited for its end is in that, too.
        cost = self._waited + max(0.0, self._beside - self._count_beside * step)
        if failed and self._costs:
            # Without room it costs nothing, and the next one that succeeds costs as before.
            cost = max(cost, statistics.median_low(self._costs))
        if self._costs or not failed:
            self._costs.append(cost)
        # Of two the smaller one: at the beginning, too, what is rare is not taken for the rule.
        cost = statistics.median_low(self._costs or [cost])
        return max(1, min(MOST_STEPS, math.ceil(cost / (SHARE * step))))

    def ended(self, saved_step: int, step: int, apart: int, *, failed: bool) -> None:
        """The save of ``saved_step`` ended, as is known behind ``step``.

        Args:
            apart: The largest `proposal` of all ranks.
            failed: It is gone: the next one waits longer each time, as what was missing may be so for long.
        """
        self._patience = min(2 * self._patience, MOST_PATIENCE) if failed else 1
        self._next = saved_step + apart * self._patience if failed or self._auto else 0
        self._next = max(self._next, step + 1 if self._auto else 0)
