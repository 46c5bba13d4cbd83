"""What a learning rate schedule's own state does not contain: its functions, and the fact that it exists.

For ``LambdaLR`` torch saves only its position, not the function. And a schedule that was not given to us begins anew at
each start.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from .memoryless import is_memoryless

# Steps at which the functions of schedules are compared.
_STEPS = (*range(4), *(n * 10**e for e in range(6) for n in (5, 10, 20)))
# Attributes in which torch's and Accelerate's schedules hold others.
_INNER = ("_schedulers", "schedulers", "scheduler", "lr_scheduler", "_scheduler")
_ROUNDING = 1e-6
_DEPTH, _ITEMS = 4, 64

Factors = dict[str, list[list[float | None]]]


def factors(schedule: Any) -> Factors:
    """Values of a schedule's functions at a few steps far apart, by the place of each schedule in it and by group.

    None if a function fails or returns no number, or if it may have a memory: then it is not called.
    """
    return {
        place: [
            [_factor(function, step) for step in _STEPS] if is_memoryless(function) else [None] * len(_STEPS)
            for function in functions
        ]
        for place, functions in _functions(schedule, "schedule", 0)
    }


def unchanged(before: Factors, now: Factors) -> Factors:
    """Those of ``now`` that are as they were. A function of more than the step says nothing about another start."""
    return {place: values for place, values in now.items() if before.get(place) == values}


def check_factors(saved: Factors, now: Factors) -> None:
    """Compares a schedule's functions with those of the checkpoint's schedule.

    Raises:
        ValueError: They differ.
    """
    for place in saved.keys() & now.keys():
        for was, is_ in zip(saved[place], now[place], strict=False):
            for step, one, other in zip(_STEPS, was, is_, strict=False):
                if one is None or other is None or math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=1e-12):
                    continue
                raise ValueError(
                    f"the scheduler's function is another one than the checkpoint's: at its step {step} that gave "
                    f"{one:.6g}, and this gives {other:.6g}, so the learning rate would leave its curve. Restore it, "
                    "start a new run, or, if that is intended, give s.state, s.engine or Trainer (or else "
                    "TrainingState.load or elastic.deepspeed.restore) other_schedule=True"
                )


def left_out(optimizer: Any, known: Iterable[Any]) -> list[Any]:
    """Schedules of this process that act on ``optimizer``, and that nothing in ``known`` contains."""
    held = [one for thing in known for one in _in(thing, 0, set())]
    # A walk over all objects takes a moment; a script that has given a schedule is spared it.
    if any(vars(one).get("optimizer") is optimizer for one in held) or not _acting(optimizer, held):
        return []
    gc.collect()  # a schedule that the script has dropped may still exist
    found = _acting(optimizer, held)
    inside = {id(one) for outer in found for one in _in(outer, 0, set()) if one is not outer}
    return [one for one in found if id(one) not in inside]


def place_of(schedule: Any) -> list[Any]:
    """Class and number of steps of a schedule that was left out, for checkpoints."""
    return [type(schedule).__name__, getattr(schedule, "last_epoch", None)]


def has_moved(schedule: Any, rates: list[float]) -> bool:
    """Whether a schedule that is not in the checkpoint may be at the resumed step: it set these rates last."""
    last = rates_of(getattr(schedule, "_last_lr", None) or rates)
    return all(math.isclose(one, other, rel_tol=_ROUNDING) for one, other in zip(last, rates, strict=False))


def rates_of(values: Iterable[Any]) -> list[float]:
    """The values, some of which may be tensors, as plain numbers."""
    return [float(value) for value in values]


def _acting(optimizer: Any, held: list[Any]) -> list[Any]:
    # In most trainings nothing does. A schedule's attributes are a dictionary, or lie in the schedule itself.
    of_it = gc.get_referrers(optimizer)
    if not any(isinstance(one, LRScheduler) or (type(one) is dict and "last_epoch" in one) for one in of_it):
        return []
    known = set(map(id, held))
    return [
        one
        for one in gc.get_objects()
        if issubclass(type(one), LRScheduler) and vars(one).get("optimizer") is optimizer and id(one) not in known
    ]


def _functions(schedule: Any, place: str, depth: int) -> Iterator[tuple[str, list[Any]]]:
    if depth > _DEPTH:
        return
    functions = getattr(schedule, "lr_lambdas", None)
    if isinstance(functions, list | tuple):
        yield place, [function for function in functions if callable(function)]
    for name in _INNER:
        inner = getattr(schedule, name, None)
        for number, one in enumerate(inner if isinstance(inner, list | tuple) else [inner]):
            if one is not None:
                yield from _functions(one, f"{place}.{number}", depth + 1)


def _factor(function: Any, step: int) -> float | None:
    try:
        value = float(function(step))
    except Exception:  # for instance a table that is shorter
        return None
    return value if math.isfinite(value) else None


def _in(thing: Any, depth: int, known: set[int]) -> Iterator[Any]:
    """Schedules that something holds, including itself."""
    if depth > _DEPTH or id(thing) in known:
        return
    known.add(id(thing))
    if isinstance(thing, LRScheduler):
        yield thing
    if isinstance(thing, Mapping | list | tuple):
        items = thing.values() if isinstance(thing, Mapping) else thing
        inside = [item for item, _ in zip(items, range(_ITEMS), strict=False)]
    else:
        inside = [value for name, value in getattr(thing, "__dict__", {}).items() if name != "optimizer"]
    for item in inside:
        if not isinstance(item, Tensor | str | bytes | int | float | type | None):
            yield from _in(item, depth + 1, known)
