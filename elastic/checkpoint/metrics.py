"""A trainer's metrics: JSON lines that it may still be writing. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

__all__ = ("Record", "records")

# A line that is longer is no line of metrics.
LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Record:
    """A value of the metric, and the step that it was measured at; None: not known."""

    value: float
    step: int | None


def records(text: bytes, metric: str) -> tuple[list[Record], int]:
    """The values of a metric, oldest first.

    Lines that are no JSON object, lack the metric, or have no finite number there are left out: trainers note other
    things in the same file.

    Args:
        text: a part of the file, from the beginning of a line.
        metric: the key; its parts may be nested objects, as in ``eval.loss``.

    Returns:
        The values, and how many bytes were read: up to the last newline. A line without one is still being written.
    """
    end = text.rfind(b"\n") + 1
    found = []
    for line in text[:end].splitlines():
        if metric.split(".")[-1].encode() not in line or len(line) > LONGEST_LINE:
            continue
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            continue
        value, step = _number(_at(raw, metric)), _step(raw)
        if value is not None:
            found.append(Record(value, step))
    return found, end


def _at(raw: object, metric: str) -> object:
    if isinstance(raw, dict) and metric in raw:
        return raw[metric]
    for part in metric.split("."):
        raw = raw.get(part) if isinstance(raw, dict) else None
    return raw


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _step(raw: object) -> int | None:
    for key in ("step", "global_step"):
        number = _number(raw.get(key)) if isinstance(raw, dict) else None
        if number is not None and number >= 0:
            return int(number)
    return None
