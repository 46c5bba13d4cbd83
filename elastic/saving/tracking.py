"""The metric by which a run's best checkpoint is chosen."""

from __future__ import annotations

from ..checkpoint import Best, Ref, Tracked
from ..rank.collective import Collective
from .saving import Saver


class Tracking:
    """The tracked metric of one session.

    Args:
        collective: The session's group.
        saver: None: there is no directory to save to, and so no checkpoint that could be the best one.

    Attributes:
        tracked: None: nothing is.
    """

    def __init__(self, collective: Collective, saver: Saver | None) -> None:
        self._collective, self._saver = collective, saver
        self.tracked: Tracked | None = None
        # The best value if nothing is saved.
        self._unsaved: Best | None = None
        # The value that ``improved`` was given, its step, and whether the step is therefore worth a checkpoint.
        self._measured: tuple[int, float, bool] | None = None

    @property
    def best(self) -> Best | None:
        """The best checkpoint; None if nothing is saved."""
        return None if self._saver is None else self._saver.bests.best

    @property
    def name(self) -> str | None:
        """Name of the tracked metric, for people; None: nothing is tracked."""
        return None if self.tracked is None else f"{self.tracked.metric} ({self.tracked.mode})"

    def track(self, tracked: Tracked) -> None:
        """Tracks this metric from now on."""
        self.tracked = tracked
        if self._saver is not None:
            self._saver.bests.tracked = tracked

    def improved(self, value: float, step: int) -> bool:
        """Whether ``step`` is the best so far. Collective; rank 0's value decides.

        Raises:
            RuntimeError: Nothing is tracked.
        """
        tracked = self._check()
        if self._saver is None:
            return self._improves_unsaved(tracked, value, together=True)
        better = self._saver.improves(value)
        self._measured = (step, value, better)
        return better

    def measured(self, value: float, saved: Ref | None, *, together: bool) -> bool:
        """As `improved`, for a step that is done. If the step is ``saved``, that checkpoint is credited.

        Args:
            together: All ranks call this, and rank 0's value decides; otherwise each rank's own value does.

        Raises:
            RuntimeError: Nothing is tracked.
        """
        tracked = self._check()
        if self._saver is None:
            return self._improves_unsaved(tracked, value, together=together)
        if together:
            value = float(self._collective.broadcast(value))
        best = tracked.improves(value, self._saver.bests.standing())
        if best and saved is not None:
            self._saver.credit(saved.name, value)
        return best

    def is_worth_saving(self, step: int) -> bool:
        """Whether ``improved`` said so of this step, on all ranks."""
        return self._measured is not None and self._measured[0] == step and self._measured[2]

    def metric_of(self, step: int) -> float | None:
        """The value that ``improved`` was given for this step."""
        return self._measured[1] if self._measured is not None and self._measured[0] == step else None

    def _check(self) -> Tracked:
        if self.tracked is None:
            raise RuntimeError("nothing is tracked: call session.track(metric) first")
        return self.tracked

    def _improves_unsaved(self, tracked: Tracked, value: float, *, together: bool) -> bool:
        if together:
            value = float(self._collective.broadcast(value))
        better = tracked.improves(value, self._unsaved)
        if better:
            self._unsaved = Best("", tracked.metric, tracked.mode, value)
        return better
