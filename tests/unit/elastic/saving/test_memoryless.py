"""Functions that may be called out of turn, and such as would remember it. None of them is called to find out."""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dalsegno.elastic.saving.memoryless import is_memoryless

settings = argparse.Namespace(warm=3)
milestones, table, count = [1, 2], {1: 2.0}, 0


history: list[int] = []
kept = {1}


def adds_to_it(what: list[int]) -> None:
    what += [1]


def plots(step: int) -> float:
    history.append(step)  # as of numpy there is a function of this name
    return 0.5 * (1 + np.cos(step / 100))


def notes(step: int) -> float:
    kept.add(step)
    return np.exp(-len(kept))


def adds_elsewhere(step: int) -> float:
    adds_to_it(history)
    return len(history)


def adds_to_given(what: list[int], step: int) -> float:
    what += [step]
    return len(what)


def doubles(step: int, what: list[float] = [1.0]) -> float:  # noqa: B006 - as a script does
    what *= 2
    return len(what)


def adds_to_class(step: int) -> float:
    what = Config.steps
    what += [step]
    return 1.0


def adds_to_either(step: int) -> float:
    what: Any = history or 1.0
    what += [step]
    return 1.0


def hits(what: Any) -> float:
    return what.hit() + harmless.hit()


class Config:
    warm, steps = 4, [3, 6]

    @property
    def late(self) -> int:
        history.append(1)
        return 1

    @classmethod
    def counts(cls) -> int:
        history.append(1)
        return 1


class LargeConfig(Config):
    scale = np.float64(3)


class Descriptor:
    def __get__(self, instance: Any, owner: type) -> int:
        history.append(1)
        return 1


class Sly:
    warm = Descriptor()


class Meta(type):
    @property
    def warm(cls) -> int:
        history.append(1)
        return 1


class WithMeta(metaclass=Meta):
    pass


number = np.float32(3)


class Harmless:
    def hit(self) -> float:
        return 1.0


class Hit:
    def hit(self) -> float:
        history.append(1)
        return 1.0


harmless, hit = Harmless(), Hit()


def accumulates(step: float) -> float:
    step += 1
    step /= 10
    return step * math.exp(-step)


def counts_globally(step: int) -> float:
    global count  # as a script does
    count += 1
    return 1.0 / count


def closures() -> dict[str, Callable[[int], Any]]:
    calls, warm, steps, own = 0, 4, [3, 6], argparse.Namespace(warm=4)

    def counts(step: int) -> float:
        nonlocal calls
        calls += 1
        return calls

    def adds(step: int) -> float:
        alias = steps
        alias += [step]
        return len(steps)

    def decays(step: int) -> float:
        factor = 1.0
        for one in steps:
            if step >= one:
                factor *= 0.1
        return factor

    return {
        "counts": counts,
        "counts inside": lambda step: counts(step),
        "adds": adds,
        "appends": lambda step: steps.append(step) or 1.0,  # type: ignore[func-returns-value]
        "warms": lambda step: step / warm,
        "decays": decays,
        "sums": lambda step: sum(0.1 for one in steps if step >= one) / own.warm,
        "decays inside": lambda step: decays(step) * 2,
    }


class Warm:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps) * self.half(step)

    def half(self, step: int) -> float:
        return 0.5


class Remembers:
    def __init__(self) -> None:
        self.calls, self.seen, self.random, self.values = 0, [0], random.Random(0), iter([1.0] * 9)

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.99**self.calls

    def sees(self, step: int) -> float:
        self.seen.append(step)
        return 1.0

    def draws(self, step: int) -> float:
        return self.random.random()

    def passes(self, step: int) -> float:
        self.helps(self.seen)
        return 1.0

    def helps(self, what: list[int]) -> None:
        what += [1]

    def takes(self, step: int) -> float:
        return next(self.values)

    def calls_itself(self, step: int) -> float:
        return self(step)


class Holds:
    def __init__(self, inner: Callable[[int], float]) -> None:
        self.inner = inner

    def __call__(self, step: int) -> float:
        return self.inner(step)


def forgetful() -> list[Any]:
    return [
        *(closures()[name] for name in ("warms", "decays", "sums", "decays inside")),
        *(Warm(3), Warm(3).half, Holds(Warm(3)), math.cos),
        functools.partial(lambda step, warm: step / warm, warm=3),
        lambda step: 0.5**step,
        lambda step, warm=3: step / warm,
        lambda step: math.cos(step) * math.pi,
        lambda step: np.cos(step),
        lambda step: min(1, step / settings.warm),
        lambda step: table.get(step, 1.0),
        lambda step: milestones[step],
        lambda step: bisect.bisect_right(milestones, step),
        lambda step: np.interp(step, milestones, [1.0, 0.5]) * np.clip(step, 0, 1) * np.pi,
        lambda step: hits(harmless),
        functools.partial(lambda inner, step: inner(step), Warm(3)),
        accumulates,
        lambda step: step / Config.warm,
        lambda step: step / LargeConfig.warm * LargeConfig.scale,
        lambda step: sum(step >= one for one in Config.steps),
        lambda step: step / number,
    ]


def mindful() -> list[Any]:
    one = Remembers()
    return [
        *(closures()[name] for name in ("counts", "counts inside", "adds", "appends")),
        *(one, one.sees, one.draws, one.takes, one.calls_itself, Holds(one), one.seen.append),
        *(counts_globally, iter([1]).__next__, functools.lru_cache(Warm(3)), torch.nn.Linear(1, 1)),
        functools.partial(lambda step, seen: seen.pop(), seen=[1]),
        lambda step, seen=[]: seen.append(step) or len(seen),  # as a script does
        lambda step: one(step),
        lambda step: random.random(),
        lambda step: np.random.random(),
        lambda step: np.random.rand(),
        lambda step: torch.rand(1).item(),
        lambda step: bisect.insort(milestones, step) or 1.0,  # type: ignore[func-returns-value]
        lambda step: setattr(settings, "warm", step) or 1.0,  # type: ignore[func-returns-value]
        lambda step: milestones.pop(),
        *(plots, notes, adds_elsewhere, doubles, adds_to_either, one.passes),
        functools.partial(adds_to_given, history),
        functools.partial(lambda add, step: add(step), history.append),
        functools.partial(adds_to_given, what=history),
        lambda step: np.save("never.npy", step) or 1.0,  # type: ignore[func-returns-value]
        lambda step: hits(hit),
        lambda step: Config.steps.append(step) or 1.0,  # type: ignore[func-returns-value]
        *(lambda step: Config.counts(), lambda step: Config().warm, lambda step: Config().late),
        *(lambda step: Sly.warm, lambda step: WithMeta.warm, adds_to_class, lambda step: (Config or history).warm),
        lambda step: history.__iadd__([step]) and len(history),
        lambda step: list.append(history, step) or 1.0,  # type: ignore[func-returns-value]
    ]


@pytest.mark.parametrize("number", range(len(forgetful())))
def test_what_only_reads_may_be_called(number: int) -> None:
    """Plain numbers and settings, also those of an object, and of functions that it calls."""
    assert is_memoryless(forgetful()[number])


@pytest.mark.parametrize("number", range(len(mindful())))
def test_what_may_remember_is_not_called(number: int) -> None:
    """It counts, keeps, draws or takes, itself or in what it calls; or nobody can tell."""
    assert not is_memoryless(mindful()[number])
    assert count == 0


def test_schedules_of_transformers_may_be_called() -> None:
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    for make in (
        transformers.get_linear_schedule_with_warmup,
        transformers.get_cosine_schedule_with_warmup,
        transformers.get_polynomial_decay_schedule_with_warmup,
    ):
        (function,) = make(optimizer, 3, 10).lr_lambdas
        assert is_memoryless(function)


def test_large_data_is_not_read_through() -> None:
    """It would take seconds in each save: nobody can tell, then, also where each part is small."""
    data, short = [[1] * 1000] * 20, [[1] * 100] * 20
    assert not is_memoryless(lambda step: step / len(data))
    assert is_memoryless(lambda step: step / len(short))


class Counts:
    """Compares itself, and is shown, with a trace."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __eq__(self, other: object) -> bool:
        self.seen.append(1)
        return True

    __hash__ = None  # type: ignore[assignment]


class Shown:
    def __str__(self) -> str:
        history.append(1)
        return ""


@dataclasses.dataclass
class Made:
    warm: int = 3


counts, shown, made = Counts(), Shown(), Made()


def test_what_an_operator_or_a_format_calls_counts_too() -> None:
    """A class of the script's may remember there; what a dataclass makes does not."""
    assert not is_memoryless(lambda step: 1.0 if counts == step else 0.5)
    assert not is_memoryless(lambda step: len(f"{shown}{step}"))
    assert is_memoryless(lambda step: min(1.0, step / made.warm))
