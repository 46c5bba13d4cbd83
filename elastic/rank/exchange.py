"""The one small vector by which all ranks act at the same step boundary.

Issued when an optimizer step begins and waited for when it ends, so its cost hides behind the step. It travels every k
steps, where k comes with it: the smallest that any rank proposes to keep exchanges about 50 ms apart. In between no
rank learns anything new, so each rank says with it how many batches it has ahead, and the next exchange comes before
the first one runs out: nobody enters a step that a peer has no data for. A drain does not wait for it: see `hurry`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .collective import Collective, Pending
from .hurry import Hurry, open_hurry

INTERVAL_SECONDS = 0.05
MAX_STEPS_APART = 64


@dataclass(frozen=True)
class Boundary:
    """What all ranks know alike at the end of one step.

    Attributes:
        step: The step that ended.
        exchanged: Whether the vector travelled with this step. If not, the rest is False; a drain may come without it.
        drain: Some rank was told to save here and stop.
        save_failed: Some rank could not write its part of a save in flight.
        end: Some rank has no next batch.
        master_seen: Some rank's agent has heard the master lately.
    """

    step: int
    exchanged: bool = False
    drain: bool = False
    save_failed: bool = False
    end: bool = False
    master_seen: bool = False


@dataclass(frozen=True)
class Flags:
    """One rank's part of the vector, apart from what the exchange knows itself."""

    drain: bool = False
    save_failed: bool = False
    master_seen: bool = False


class Exchange:
    """Runs the vector beside the steps. Main thread only.

    Args:
        collective: The session's group.
        interval: Seconds that exchanges should be apart.
    """

    def __init__(self, collective: Collective, *, interval: float = INTERVAL_SECONDS) -> None:
        self._collective, self._interval = collective, interval
        self._hurry: Hurry | None = None
        self._next: int | None = None
        self._pending: Pending | None = None
        self._step: int | None = None
        self._seconds: float | None = None

    def meet(self, ahead: int) -> int:
        """Before the first step: the number of batches that every rank has, so that nobody begins alone."""
        return -self._collective.max([-ahead])[0]

    def begin(self, step: int, flags: Flags, ahead: int) -> None:
        """Begins step ``step``.

        Args:
            step: One more than the step before.
            flags: What this rank has to say.
            ahead: Batches that this rank has after this step's.

        Raises:
            RuntimeError: The step before was not ended.
        """
        if self._step is not None:
            raise RuntimeError(f"step {step} begins before step {self._step} has ended")
        self._step = step
        if self._next is None:
            self._next, self._hurry = step, open_hurry(self._collective)
        if self._hurry is not None:
            self._hurry.begin(step, call=flags.drain and step != self._next)
        if step == self._next:
            vector = [flags.drain, flags.save_failed, flags.master_seen, -ahead, -self._propose()]
            self._pending = self._collective.start_max([int(value) for value in vector])

    def end(self, seconds: float) -> Boundary:
        """Ends the step and says what all ranks agreed on.

        Args:
            seconds: What the step took on this rank; the next proposal for k comes from it.

        Raises:
            RuntimeError: No step has begun.
        """
        if self._step is None:
            raise RuntimeError("no step has begun")
        step, self._step = self._step, None
        # Quick to shorten the distance, slow to stretch it: one short step must not postpone the next exchange.
        old = self._seconds
        self._seconds = seconds if old is None else max(seconds, 0.5 * (old + seconds))
        hurried = self._hurry is not None and self._hurry.end()
        if self._pending is None:
            return Boundary(step, drain=hurried)
        drain, save_failed, master_seen, ahead, apart = self._pending.wait()
        self._pending = None
        self._next = step + max(1, min(-ahead, -apart))
        return Boundary(step, True, bool(drain) or hurried, bool(save_failed), ahead == 0, bool(master_seen))

    def abandon(self) -> None:
        """Gives up the step that has begun: the script left its loop in the middle. The next one exchanges anew."""
        self._step, self._pending, self._next = None, None, None

    def close(self) -> None:
        """No step begins any more."""
        if self._hurry is not None:
            self._hurry.close()

    @property
    def under_way(self) -> bool:
        """A step has begun and not ended."""
        return self._step is not None

    def _propose(self) -> int:
        if self._seconds is None:
            return 1
        return max(1, min(MAX_STEPS_APART, math.ceil(self._interval / max(self._seconds, 1e-6))))
