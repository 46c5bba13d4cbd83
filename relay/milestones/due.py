"""When a milestone is due: by time, by a metric that improved, or because it was reported. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dalsegno.elastic.checkpoint import Best, Tracked
from dalsegno.elastic.checkpoint.metrics import Record

__all__ = ("MilestonePace", "Rules", "begun", "done", "due", "failed", "observed", "passed", "reported")

INTERVAL, IMPROVEMENT, REPORT = "interval", "improvement", "report"
# Between two tries where no interval says so.
RETRY_SECONDS = 600.0


@dataclass(frozen=True)
class Rules:
    """When milestones are made.

    Attributes:
        interval_seconds: between two of them; None: not by time.
        tracked: the metric whose improvement makes one; None: not by improvement.
    """

    interval_seconds: float | None
    tracked: Tracked | None

    @property
    def retry_seconds(self) -> float:
        """From the beginning of a try that failed to the next one."""
        return RETRY_SECONDS if self.interval_seconds is None else self.interval_seconds


@dataclass(frozen=True)
class MilestonePace:
    """How far it is to the next milestone. It lies on the volume, so that the next pod goes on with it.

    Attributes:
        waited_seconds: since the last try began, while a mirror ran; None: there was no try. Clocks of two pods are
            never compared.
        best: the best value so far; None: none.
        wish: why one is due whatever the time, or "".
        wish_step: the checkpoint must be of this step or a later one.
        rest_seconds: until the next try may begin, after one that failed.
    """

    waited_seconds: float | None = None
    best: float | None = None
    wish: str = ""
    wish_step: int = 0
    rest_seconds: float = 0.0


def passed(pace: MilestonePace, seconds: float) -> MilestonePace:
    """The pace after so many more seconds."""
    waited = None if pace.waited_seconds is None else pace.waited_seconds + seconds
    return replace(pace, waited_seconds=waited, rest_seconds=max(0.0, pace.rest_seconds - seconds))


def observed(pace: MilestonePace, rules: Rules, records: Iterable[Record]) -> MilestonePace:
    """The trainer noted these values, oldest first. One that improves by more than ``min_delta`` makes a wish."""
    tracked = rules.tracked
    if tracked is None:
        return pace
    for record in records:
        best = None if pace.best is None else Best("earlier", tracked.metric, tracked.mode, pace.best)
        if math.isfinite(record.value) and tracked.improves(record.value, best):
            pace = replace(pace, best=record.value, wish=IMPROVEMENT, wish_step=record.step or 0)
    return pace


def reported(pace: MilestonePace, step: int = 0) -> MilestonePace:
    """The session reported an improvement, with the checkpoint of this step."""
    return replace(pace, wish=REPORT, wish_step=step)


def due(pace: MilestonePace, rules: Rules, step: int) -> str:
    """Why a checkpoint of this step is to become a milestone; "" if it is not."""
    if pace.rest_seconds > 0:
        return ""
    if pace.wish and step >= pace.wish_step:
        return pace.wish
    if rules.interval_seconds is None:
        return ""
    return INTERVAL if pace.waited_seconds is None or pace.waited_seconds >= rules.interval_seconds else ""


def begun(pace: MilestonePace) -> MilestonePace:
    """A try has begun: the next period counts from here."""
    return replace(pace, waited_seconds=0.0, rest_seconds=0.0)


def done(pace: MilestonePace, step: int) -> MilestonePace:
    """The checkpoint of this step is a milestone. A wish for a later step stays."""
    return replace(pace, wish="", wish_step=0) if pace.wish_step <= step else pace


def failed(pace: MilestonePace, rules: Rules, reason: str) -> MilestonePace:
    """The try came to nothing. It is made again in the next period, for the same reason."""
    waited = pace.waited_seconds or 0.0
    wished = pace if pace.wish else replace(pace, wish=reason, wish_step=0)
    return replace(wished, rest_seconds=max(0.0, rules.retry_seconds - waited))
