"""Which names in a function's code draw random numbers, and which only look like it."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import gauss, sample, shuffle
from typing import Any

import numpy as np
import pytest
import torch
from torch import normal, poisson

from dalsegno.elastic.training.draws import drawn_in


def uniform(x: Any) -> Any:
    """Somebody's own function."""
    return x


class Own:
    def __init__(self) -> None:
        self.normal = self.sample = self.integers = lambda x=None: x

    def forward(self, x: Any) -> Any:
        return self.normal(x) + self.sample() + [self.integers(part) for part in x]

    def drawing(self, x: Any) -> Any:
        return self.posterior(x).sample() + self.rng.integers(3)  # type: ignore[attr-defined]

    def posterior(self, x: Any) -> Any:
        return torch.distributions.Normal(x, 1.0)


def over_lines(x: Any, rng: Any) -> Any:
    later = lambda: [  # noqa: E731  # a function inside
        rng.normal(
            x.mean(),
            **{"scale": 1.0},
        )
        .clip(0, 1)
        .sum()
    ]
    return later()


DRAWING: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
    (lambda x: torch.normal(x, 1.0), ("normal",)),
    (lambda x: normal(x, 1.0), ("normal",)),
    (lambda x: poisson(x), ("poisson",)),
    (lambda x: gauss(x, 1.0), ("gauss",)),
    (lambda x: shuffle(x), ("shuffle",)),
    (lambda x: sample(x, 2), ("sample",)),
    (lambda x: torch.binomial(x, x), ("binomial",)),
    (lambda x: torch.bernoulli(x), ("bernoulli",)),
    (lambda x: torch.multinomial(x, 2), ("multinomial",)),
    (lambda x: torch.randint_like(x, 2), ("randint_like",)),
    (lambda x: torch.nn.functional.fractional_max_pool2d(x, 2, 3), ("fractional_max_pool2d",)),
    (lambda x: torch.distributions.Normal(x, 1.0).sample(), ("sample",)),
    (lambda x: torch.distributions.Normal(x, 1.0).rsample((3,)), ("rsample",)),
    (lambda x, rng: rng.normal(x), ("normal",)),
    (lambda x, rng: rng.integers(0, 3, size=x), ("integers",)),
    (lambda x, rng: rng.standard_normal(x), ("standard_normal",)),
    (lambda x, rng: rng.gauss(x, 1.0) + rng.betavariate(x, 1.0), ("gauss", "betavariate")),
    (lambda x, rng: rng.permutation(x) + rng.choice(x), ("permutation", "choice")),
    (lambda x, rng: x + rng.uniform(*x).mean(), ("uniform",)),
    (over_lines, ("normal",)),
    (Own.drawing, ("sample", "integers")),
    *(
        (eval(f"lambda x: x.{name}_()"), (f"{name}_",))
        for name in ("normal", "log_normal", "uniform", "cauchy", "exponential", "geometric", "random", "bernoulli")
    ),
]


@pytest.mark.parametrize(("function", "names"), DRAWING, ids=lambda one: str(one) if isinstance(one, tuple) else "")
def test_draws_are_known_by_their_names(function: Callable[..., Any], names: tuple[str, ...]) -> None:
    """Those of torch, of Python's random and of NumPy's generators, however they are called."""
    assert drawn_in(function) == names


SILENT: list[Callable[..., Any]] = [
    lambda normal, uniform: normal(uniform),
    lambda x: x.normal + x.sample,
    lambda x: x.normal.dot(x) + x.integers[0](x) + (x.normal + 1)(x),
    lambda x: x.shuffle or x.choices or x.poisson,
    lambda x: x.sample(torch.zeros(2)) + x.sample(*x),
    lambda x: x.normals() + x.exponential_moving_average(),
    lambda x: x.normalize(x.geometric),
    lambda x: uniform(x),
    lambda x: torch.nn.functional.grid_sample(x, x),
    lambda x: x.gamma(x) + x.beta(x),
    Own.forward,
]


@pytest.mark.parametrize("function", SILENT)
def test_everyday_names_are_no_draws(function: Callable[..., Any]) -> None:
    """Variables, attributes, what ``self`` calls, a function of one's own, places that are sampled."""
    assert drawn_in(function) == ()


@pytest.mark.parametrize(
    ("owner", "but"),
    [
        (random.Random, set()),
        (np.random.Generator, {"beta", "gamma", "laplace", "logistic", "power", "f", "wald", "zipf", "bytes"}),
        (np.random.RandomState, {"beta", "gamma", "laplace", "logistic", "power", "f", "wald", "zipf", "bytes"}),
    ],
)
def test_all_that_generators_draw_with_is_known(owner: type, but: set[str]) -> None:
    """But for names that are everyday ones of other functions."""
    no_draws = {"bit_generator", "spawn", "VERSION", "gauss_next"}
    no_draws |= {"seed", "get_state", "set_state", "getstate", "setstate"}
    called = {name for name in dir(owner) if not name.startswith("_")} - no_draws
    unknown = set()
    for name in called - {"sample"}:
        scope: dict[str, Any] = {}
        exec(f"def draw(x): return x.{name}(1)", scope)
        if drawn_in(scope["draw"]) != (name,):
            unknown.add(name)
    assert unknown <= but
