"""The order is a shuffle: chi-squares over positions, neighbours and whole orders, at lengths of every kind.

Seeds are fixed, so a result never changes by itself. A statistic is given as a standard normal number (Wilson and
Hilferty, PNAS 17, 1931); a shuffle stays within `LIMIT`, and the last tests show what does not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from dalsegno.elastic.data.permutation import Permutation

LIMIT = 4.5
FEW = [2, 3, 4, 5, 6, 7, 13, 16, 31, 64, 100, 256, 257, 300, 512]
MANY = [99_991, 100_000, 2**17 - 1, 2**17, 2**17 + 1]
BLOCKS = 64

Array = np.ndarray[Any, np.dtype[Any]]


def score(chi_square: float, freedom: int) -> float:
    spread = 2 / (9 * freedom)
    return float(((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def chi_square(counts: Array, expected: Any) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def orders(length: int, trials: int, version: int = 2) -> Array:
    """One order for each of many seeds: (trials, length)."""
    return np.array([Permutation(length, seed, 0, version=version).slice(0, length) for seed in range(trials)])


@cache
def sample(length: int) -> Array:
    return orders(length, min(20_000, max(2_000, 300_000 // length)))


def position_score(found: Array) -> float:
    """Every index is at every position equally often."""
    trials, n = found.shape
    counts = np.bincount((found + n * np.arange(n)).ravel(), minlength=n * n)
    # One permutation fills each row *and* column once: the sum is n / (n - 1) times a chi-square of (n - 1)^2.
    return score(chi_square(counts, trials / n) * (n - 1) / n, (n - 1) ** 2)


def pair_score(found: Array) -> float:
    """Every index is followed by every other one equally often."""
    trials, n = found.shape
    counts = np.bincount((found[:, :-1] * n + found[:, 1:]).ravel(), minlength=n * n).reshape(n, n)
    # An index has one successor at most, so its cells vary less than free ones: together as (n - 1)^2 of them.
    return score(chi_square(counts[~np.eye(n, dtype=bool)], trials / n), (n - 1) ** 2)


def whole_score(found: Array) -> float:
    """Every order of a few indices comes equally often."""
    trials, n = found.shape
    seen = dict.fromkeys(itertools.permutations(range(n)), 0)
    for order in map(tuple, found.tolist()):
        seen[order] += 1
    return score(chi_square(np.array(list(seen.values())), trials / len(seen)), len(seen) - 1)


def block_score(first: Array, second: Array, n: int) -> float:
    """Two numbers below n each have nothing to do with one another: their blocks meet equally often."""
    width = -(-n // BLOCKS)
    sizes = np.bincount(np.arange(n) // width, minlength=BLOCKS)
    counts = np.bincount(first // width * BLOCKS + second // width, minlength=BLOCKS * BLOCKS)
    expected = len(first) * np.outer(sizes, sizes).ravel() / n**2
    return score(chi_square(counts, expected), (BLOCKS - 1) ** 2)


def difference_score(values: Array, n: int) -> float:
    """The steps from one index to the next go everywhere."""
    steps = (values[1:] - values[:-1]) % n
    width = -(-n // 1000)
    sizes = np.bincount(np.arange(1, n) // width)
    counts = np.bincount(steps // width, minlength=len(sizes))
    return score(chi_square(counts, sizes * len(steps) / (n - 1)), len(sizes) - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "length", [pytest.param(length, marks=[pytest.mark.full] if length > 256 else []) for length in FEW]
)
def test_every_sample_comes_everywhere_equally_often(length: int) -> None:
    """Over many seeds no position prefers an index."""
    assert abs(position_score(sample(length))) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize(
    "length", [pytest.param(length, marks=[pytest.mark.full] if length > 256 else []) for length in FEW]
)
def test_every_pair_of_neighbours_comes_equally_often(length: int) -> None:
    """Over many seeds no index prefers a successor."""
    assert abs(pair_score(sample(length))) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 3, 4, 5, 6])
def test_all_orders_of_a_few_samples_come_equally_often(length: int) -> None:
    """Nothing at all is preferred where that can be counted."""
    assert abs(whole_score(sample(length))) < LIMIT


def large_scores(make: Callable[[int], Array], n: int) -> dict[str, float]:
    first, second = make(0), make(1)
    inverse = np.empty_like(first)
    inverse[first] = np.arange(n)
    return {
        "position": block_score(np.arange(n), first, n),
        "neighbours": block_score(first[:-1], first[1:], n),
        "two apart": block_score(first[:-2], first[2:], n),
        "steps": difference_score(first, n),
        "same position in two data epochs": block_score(first, second, n),
        "same sample in two data epochs": block_score(inverse, np.argsort(second), n),
    }


def ours(n: int, seed: int) -> Callable[[int], Array]:
    return lambda data_epoch: np.array(Permutation(n, seed, data_epoch).slice(0, n))


@pytest.mark.parametrize("length", MANY)
@pytest.mark.parametrize("seed", [0, 1])
def test_one_large_order_looks_like_a_shuffle(length: int, seed: int) -> None:
    """Within one order, and between those of two data epochs, positions, neighbours and steps show no pattern."""
    for name, value in large_scores(ours(length, seed), length).items():
        assert abs(value) < LIMIT, name


@pytest.mark.slow
@pytest.mark.parametrize("length", [1000, 1024])
def test_samples_that_stay_or_stay_together_are_as_rare_as_by_chance(length: int) -> None:
    """Fixed points, and samples followed by the next one of the data set, are one each on average."""
    found = orders(length, 1000)
    for hits in ((found == np.arange(length)).sum(), ((found[:, 1:] - found[:, :-1]) == 1).sum()):
        assert abs(hits - 1000) < LIMIT * math.sqrt(1000)


def rotation(n: int) -> Callable[[int], Array]:
    return lambda data_epoch: (np.arange(n) + 7919 * (data_epoch + 1)) % n


def multiplication(n: int) -> Callable[[int], Array]:
    """Position times a constant near the golden section: evenly spread, and no shuffle."""
    factor = next(f for f in range(int(n * 0.618), n) if math.gcd(f, n) == 1)
    return lambda data_epoch: (np.arange(n) * factor + data_epoch) % n


def shuffled_buffer(n: int) -> Callable[[int], Array]:
    """Samples move only within a window, as a shuffle buffer moves them."""

    def make(data_epoch: int) -> Array:
        generator = np.random.default_rng(data_epoch)
        parts = [generator.permutation(np.arange(at, min(n, at + n // 10))) for at in range(0, n, n // 10)]
        return np.concatenate(parts)

    return make


@pytest.mark.parametrize("make", [rotation, multiplication, shuffled_buffer])
def test_what_is_no_shuffle_is_seen(make: Callable[[int], Callable[[int], Array]]) -> None:
    """Each way of not shuffling fails at least two of the statistics, by far."""
    n = 100_000
    assert sum(value > 10 * LIMIT for value in large_scores(make(n), n).values()) >= 2


def test_a_network_of_two_rounds_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rounds would not do, at any length."""
    whole = Permutation.__init__

    def weak(self: Permutation, length: int, *key: int | str, version: int = 2) -> None:
        whole(self, length, *key, version=1)
        del self._keys[2:]

    monkeypatch.setattr(Permutation, "__init__", weak)
    assert max(abs(value) for value in large_scores(ours(100_000, 0), 100_000).values()) > 2 * LIMIT
    assert pair_score(orders(64, 1000)) > 2 * LIMIT


@pytest.mark.slow
def test_the_network_alone_is_seen_at_tiny_lengths() -> None:
    """Why short orders are tables: a network over 16 numbers makes some orders of 6 more often than others."""
    assert whole_score(orders(6, 14_000, version=1)) > LIMIT


def test_a_sample_that_is_seen_too_rarely_is_seen() -> None:
    """The scores over positions and neighbours can fail: one order in twenty is left as it was."""
    found = sample(64).copy()
    found[::20] = np.arange(64)
    assert position_score(found) > 10 * LIMIT
    assert pair_score(found) > 10 * LIMIT
