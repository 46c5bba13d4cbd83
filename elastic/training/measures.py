"""The metric by which a run's best checkpoint is chosen, as a script calls it: a part of the session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..checkpoint import Best, Ref, Tracked

if TYPE_CHECKING:
    from ..rank.exchange import Exchange
    from ..rank.meetings import Meetings
    from ..saving.tracking import Tracking
    from .saves import Saves


class Measures:
    """What is said of the tracked metric, and what follows from it. Main thread only."""

    meetings: Meetings
    saves: Saves
    tracking: Tracking
    _exchange: Exchange

    if TYPE_CHECKING:  # The session's. An abstract class's objects could not change their class, see `unopened`.

        @property
        def step(self) -> int: ...

        @property
        def can_save(self) -> bool: ...

        def settle(self) -> Ref | None: ...

    @property
    def best(self) -> Best | None:
        """The best checkpoint so far by the tracked metric, never pruned, alike on all ranks; None: none is saved."""
        return self.tracking.best

    def track(self, metric: str, *, mode: str = "min", min_delta: float = 0.0) -> None:
        """Tracks a metric: from now on the best checkpoint by it is known, kept, and noted in ``best.json``.

        The best checkpoint as of the resume point still counts, if its metric and mode are the same.

        Args:
            metric: Its name. Values come from ``improved``, or with a save.
            mode: ``"min"`` or ``"max"``.
            min_delta: How much better a value must be.

        Raises:
            ValueError: ``mode`` is another one, or ``min_delta`` is negative.
        """
        self.tracking.track(Tracked(metric, mode, min_delta))

    def improved(self, value: float) -> bool:
        """Whether the present step is the best so far by the tracked metric; if so it is saved at its end. Collective.

        Rank 0's value decides, for all ranks. It is compared with the best checkpoint's or, if there is no directory
        and so no checkpoint, with the best value so far.

        Raises:
            RuntimeError: Nothing is tracked.
        """
        if self.meetings.over and not self.can_save:
            return self.tracking.measured(value, None, together=False)
        # A call in the loop's body is about the step that has begun, which is counted when it ends.
        return self.tracking.improved(value, self.step + self._exchange.under_way)

    def measured(self, value: float) -> bool:
        """Takes the tracked metric of the last step that is done, if it was not computed before. Collective.

        Rank 0's value decides, for all ranks. After the end of training it is each rank's own, and not collective.

        Returns:
            Whether it is the best so far. If the step is saved already (as the resume point is), later checkpoints name
            it; otherwise save it now, with this metric.

        Raises:
            RuntimeError: Nothing is tracked.
        """
        if not self.meetings.over:
            self.settle()
        return self.tracking.measured(value, self.saves.of(self.step), together=not self.meetings.over)

    @property
    def worth_saving(self) -> bool:
        """Whether ``improved`` said so of the step that has just ended, on all ranks."""
        return self.tracking.is_worth_saving(self.step)
