"""Which of a script's checkpoints is the best, by a metric that the script notes itself. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dalsegno.elastic.checkpoint import Best, Tracked

__all__ = ["BestRule", "best_step", "has_own_number"]


@dataclass(frozen=True)
class BestRule:
    """What makes a script's checkpoint the best one.

    Attributes:
        tracked: the metric.
        metrics_file: where the script notes it; below `${save_dir}` unless it is absolute.
    """

    tracked: Tracked
    metrics_file: str


def best_step(
    pairs: Iterable[tuple[int, float]], tracked: Tracked, standing: tuple[int, float] | None = None
) -> tuple[int, float] | None:
    """The step of the best checkpoint, and its value; None: there is none.

    The one that stands stays as long as none is better by more than `min_delta`. The others are compared in the order
    of their steps, whenever their values came.

    Args:
        pairs: steps of checkpoints that are there, and their values. A step's last value counts.
        tracked: what is better.
        standing: the best so far. If `pairs` has its step, too, its value is that one.
    """
    values = {step: value for step, value in pairs if math.isfinite(value)}
    best = standing if standing is None else (standing[0], values.pop(standing[0], standing[1]))
    for step in sorted(values):
        before = None if best is None else Best("before", tracked.metric, tracked.mode, best[1])
        if tracked.improves(values[step], before):
            best = step, values[step]
    return best


def has_own_number(step: int, numbers: Mapping[str, int | None]) -> bool:
    """Whether a step is a number of the script's. Another one, which we gave, is no step of its metrics file.

    Args:
        step: of a checkpoint.
        numbers: of its series.
    """
    return step in numbers.values()
