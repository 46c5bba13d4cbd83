"""Which checkpoint is the best by a metric that the run tracks. Pure; rank 0 asks, and tells the others.

Each manifest names the best checkpoint *as of itself*. So the best one survives restarts together with the resume
point. A run that goes back to an earlier checkpoint also goes back to the best one of that time, and forgets a later
one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MODES = ("min", "max")


@dataclass(frozen=True)
class Best:
    """The best checkpoint of a run as of the manifest that says so.

    Attributes:
        name: Its directory; may be the manifest's own.
        metric, mode: What was tracked.
        value: The metric's value.
    """

    name: str
    metric: str
    mode: str
    value: float

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode!r} of the best checkpoint: 'min' or 'max' was expected")
        if not math.isfinite(self.value):
            raise ValueError(f"the best checkpoint's metric must be finite, not {self.value}")

    def beats(self, other: Best | None) -> bool:
        """Whether it is better than another one, or that one is of another metric."""
        if other is None or (other.metric, other.mode) != (self.metric, self.mode):
            return True
        return self.value < other.value if self.mode == "min" else self.value > other.value


@dataclass(frozen=True)
class Tracked:
    """What the run wants to be best at.

    Attributes:
        metric: Its name, for people and for noticing that another metric is tracked now.
        mode: ``"min"``: smaller is better; ``"max"``: larger is.
        min_delta: How much better than the best a value must be; 0: any improvement counts.
    """

    metric: str
    mode: str = "min"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode!r} of metric {self.metric}: 'min' or 'max' was expected")
        if not (math.isfinite(self.min_delta) and self.min_delta >= 0):
            raise ValueError(
                f"min_delta of metric {self.metric} is {self.min_delta}: a number of at least 0 was expected"
            )

    def improves(self, value: float | None, best: Best | None) -> bool:
        """Whether a checkpoint with ``value`` would be the best. A value that is not a finite number never is."""
        if value is None or not math.isfinite(value):
            return False
        if best is None or (best.metric, best.mode) != (self.metric, self.mode):
            return True
        gain = best.value - value if self.mode == "min" else value - best.value
        return gain > self.min_delta
