"""The one small vector by which all ranks act at the same step boundary.

It is issued when an optimizer step begins and waited for when the step ends, so the step hides its cost. It travels
every k steps. It carries k: the smallest number that any rank proposes to keep exchanges about 50 ms apart. Between two
exchanges no rank learns anything new. So each rank also says how many batches it has ahead, and the next exchange comes
before the first rank runs out: nobody enters a step for which a peer has no data. A drain does not wait for an
exchange: see `hurry`. Nor does one rank alone, which has nobody to tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
        exchanged: Whether the vector travelled with this step. If not, the other flags are False, except perhaps drain,
            and save where there is one rank.
        drain: Some rank was told to save here and stop.
        save: Somebody has ordered that this step be saved. Each order says so once.
        save_failed: Some rank could not write its part of a save in flight.
        saving: Some rank's part of one was not over yet.
        carries: Some rank has said that its gradients are carried over boundaries, in this step or before.
        end: Some rank has no next batch.
        master_seen: Some rank's agent has heard the master lately.
    """

    step: int
    exchanged: bool = False
    drain: bool = False
    save: bool = False
    save_failed: bool = False
    saving: bool = False
    carries: bool = False
    end: bool = False
    master_seen: bool = False


@dataclass(frozen=True)
class Flags:
    """One rank's part of the vector, apart from what `Exchange` itself adds."""

    drain: bool = False
    save_failed: bool = False
    saving: bool = False
    carries: bool = False
    master_seen: bool = False
    # Number of the last order to save and train on; 0: none.
    save_order: int = 0


class Exchange:
    """Runs the vector beside the steps. Main thread only.

    Args:
        collective: The session's group.
        interval: Seconds that two exchanges should be apart.
        before: Called before the first step begins, before all know whether there is one, and before the end.
    """

    def __init__(
        self,
        collective: Collective,
        *,
        interval: float = INTERVAL_SECONDS,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._collective, self._interval, self._before = collective, interval, before
        self._hurry: Hurry | None = None
        self._next: int | None = None
        self._pending: Pending | None = None
        self._step: int | None = None
        self._seconds: float | None = None
        self._ordered, self._carries = 0, False
        # What this rank was told before the step, if there is no other.
        self._own = Flags()

    def meet(self, ahead: int) -> int:
        """Before the first step: the least number of batches that any rank has, so that nobody begins a step alone."""
        self._before()
        return -self._collective.max([-ahead])[0]

    def begin(self, step: int, flags: Flags, ahead: int) -> None:
        """Begins step ``step``.

        Args:
            step: One more than the step before.
            flags: What this rank has to tell the others.
            ahead: Batches that this rank has after this step's.

        Raises:
            RuntimeError: The step before has not ended.
            Refusal: Another rank has finished the training.
        """
        if self._step is not None:
            raise RuntimeError(f"step {step} begins before step {self._step} has ended")
        self._step = step
        if self._next is None:
            self._before()
            self._next = step
            # One for all loops: with two a rank would answer a call twice, and once with a step that it has left.
            self._hurry = self._hurry or open_hurry(self._collective)
        if self._hurry is not None:
            self._hurry.begin(step, call=flags.drain and step != self._next)
        self._own = flags if self._collective.world_size == 1 else Flags()
        if step == self._next:
            told = [flags.drain, flags.save_failed, flags.saving, flags.carries, flags.master_seen, flags.save_order]
            vector = [*told, -ahead, -self._propose()]
            self._pending = self._collective.start_max([int(value) for value in vector])

    def end(self, seconds: float) -> Boundary:
        """Ends the step and says what all ranks agreed on.

        Args:
            seconds: How long the step took on this rank, from which the next k is proposed.

        Raises:
            RuntimeError: No step has begun.
        """
        if self._step is None:
            raise RuntimeError("no step has begun")
        step, self._step = self._step, None
        # Shorten the distance quickly and stretch it slowly: one short step must not postpone the next exchange.
        old = self._seconds
        self._seconds = seconds if old is None else max(seconds, 0.5 * (old + seconds))
        hurried = self._hurry is not None and self._hurry.end()
        if self._pending is None:
            own = self._own
            return Boundary(step, drain=hurried or own.drain, save=self._is_new(own.save_order), carries=self._carries)
        drain, save_failed, saving, carries, master_seen, save_order, ahead, apart = self._pending.wait()
        self._pending, self._carries = None, self._carries or bool(carries)
        self._next = step + max(1, min(-ahead, -apart))
        told = {"save_failed": bool(save_failed), "saving": bool(saving), "carries": self._carries}
        told["master_seen"] = bool(master_seen)
        return Boundary(step, True, bool(drain) or hurried, self._is_new(save_order), end=ahead == 0, **told)

    def _is_new(self, order: int) -> bool:
        """The master takes an order back only once it has heard of the checkpoint."""
        new, self._ordered = order > self._ordered, max(order, self._ordered)
        return new

    def abandon(self) -> None:
        """Gives up the step that has begun, because the script left its loop. The next step exchanges anew."""
        self._step, self._pending, self._next = None, None, None

    def finish(self) -> None:
        """No further step begins on this rank.

        Raises:
            Refusal: Another rank is in a step that this one has not begun.
        """
        self._before()
        if self._hurry is not None:
            self._hurry.finish()

    def apart(self) -> str:
        """Why no rank may go on, if one has finished the training and another trains on; else nothing."""
        return "" if self._hurry is None else self._hurry.apart()

    def close(self) -> None:
        """Ends the exchange: no further step begins."""
        if self._hurry is not None:
            self._hurry.close()

    @property
    def under_way(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._step is not None

    def _propose(self) -> int:
        if self._seconds is None:
            return 1
        return max(1, min(MAX_STEPS_APART, math.ceil(self._interval / max(self._seconds, 1e-6))))
