"""What the collate function draws is told of, and a look leaves it as it was."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dalsegno.elastic import Batches, BatchPlan, ElasticSampler
from dalsegno.elastic.data.looking import Inspected, look_at_collate
from dalsegno.elastic.rank import rng

SAMPLES = [torch.arange(6.0) + row for row in range(3)]
GLOBAL = np.random.default_rng(5)


def by_global(rows: list[Any]) -> Any:
    return torch.stack(rows) * float(GLOBAL.random())


class Masks:
    """Makes its generator when it is first used, as a collator of transformers does."""

    def __init__(self) -> None:
        self.generator: Any = None
        self.calls, self.left = 0, list[Any]()

    def __call__(self, rows: list[Any]) -> Any:
        self.generator = self.generator or torch.Generator().manual_seed(5)
        self.calls += 1
        self.left.extend(rows)
        return torch.stack(rows) * torch.rand(6, generator=self.generator)


class Seeding:
    """Seeds its own generator for each micro-batch."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __call__(self, rows: list[Any]) -> Any:
        self.generator.manual_seed(int(rows[0][0]))
        return torch.stack(rows) * torch.rand(6, generator=self.generator)

    def method(self, rows: list[Any], *, more: Any = None) -> Any:
        return torch.stack(rows) * torch.rand(6, generator=self.generator)


def closing_over(own: Any) -> Callable[[list[Any]], Any]:
    return lambda rows: torch.stack(rows) * own.random()


OWN: dict[str, Callable[[], Any]] = {
    "an attribute, made late": Masks,
    "one within another": lambda: Wrapper(Masks()),
    "a method": lambda: Seeding().method,
    "a partial": lambda: functools.partial(Seeding().method, more=3),
    "a closure over NumPy's": lambda: closing_over(np.random.default_rng(3)),
    "a closure over Python's": lambda: closing_over(random.Random(3)),
    "the system's": lambda: closing_over(random.SystemRandom()),
    "a global variable": lambda: by_global,
}


class Wrapper:
    def __init__(self, data_collator: Any) -> None:
        self.data_collator = data_collator

    def __call__(self, rows: list[Any]) -> Any:
        return self.data_collator(list(rows))


@pytest.mark.parametrize("kind", list(OWN))
def test_a_generator_of_its_own_is_seen_and_put_back(kind: str) -> None:
    """Wherever it is held. What the function makes next is what it makes first where nobody looks."""
    GLOBAL.bit_generator.state = np.random.default_rng(5).bit_generator.state
    collate, other, seen = OWN[kind](), OWN[kind](), Inspected()
    look_at_collate(collate, SAMPLES, 4, seen)
    assert seen == Inspected(collate_own=True)
    if kind == "a global variable":
        assert GLOBAL.bit_generator.state == np.random.default_rng(5).bit_generator.state
    elif kind != "the system's":
        assert torch.equal(collate(SAMPLES), other(SAMPLES))


def test_attributes_and_rows_are_as_they_were() -> None:
    """Also what it keeps of the rows for later; and the rows are copies, as many as a micro-batch has."""
    collate, seen = Masks(), Inspected()
    collate.left = left = ["before"]
    look_at_collate(collate, SAMPLES, 4, seen)
    assert (collate.generator, collate.calls, collate.left) == (None, 0, ["before"])
    assert collate.left is left
    taken: list[int] = []

    def taking(rows: list[Any]) -> Any:
        return taken.append(len(rows)) or [row.pop("x") for row in rows]  # type: ignore[func-returns-value]

    rows = [{"x": 1}, {"x": 2}]
    sizes = SimpleNamespace(made=0)
    look_at_collate(lambda given: (setattr(sizes, "made", sizes.made + len(given)), taking(given))[1], rows, 5, seen)
    assert rows == [{"x": 1}, {"x": 2}]
    look_at_collate(lambda given: 1 / 0, rows, 5, again := Inspected())
    assert again == Inspected()


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(())), random.random, np.random.rand])
def test_draws_from_global_generators(draw: Callable[[], float]) -> None:
    """They are no own ones, and are left as they were."""
    before, seen = rng.cpu_state(), Inspected()
    look_at_collate(lambda rows: torch.stack(rows) * draw(), SAMPLES, 2, seen)
    assert seen == Inspected(collate_draws=True)
    assert rng.cpu_state()[0] == before[0]
    assert torch.equal(rng.cpu_state()[1], before[1])


@pytest.mark.parametrize("collate", [torch.stack, Seeding(), torch.utils.data.default_collate])
def test_what_does_not_draw_is_silent(collate: Any) -> None:
    look_at_collate(collate, SAMPLES, 2, seen := Inspected())
    assert seen == Inspected()


class Session:
    rank, step, resume = 0, 0, None

    def __init__(self) -> None:
        self.known = dict[str, Any]()
        self.examination = self

    def gather(self, message: Any) -> list[Any]:
        return [message]

    def learn(self, **facts: Any) -> None:
        self.known.update(facts)


def learned(data: Any, collate: Any, workers: int = 0, *, fixed: bool = False) -> tuple[bool, bool]:
    """Whether a collate function draws, and whether from its own generator."""
    stream = isinstance(data, Stream)
    sampler = ElasticSampler(None if stream else len(data), 4, seed=4, shuffle=False)
    plan = BatchPlan(4, 1, 2, fixed_micro_batch=fixed)
    options = {"num_workers": workers}
    made: Batches[Any] = Batches(data, sampler, plan, 0, collate=collate, seed=7, loader_options=options)
    session: Any = Session()
    made.check_samples(session)
    assert not session.known["data_draws"]
    assert not session.known["data_draws_own"]
    return session.known["collate_draws"], session.known["collate_own"]


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter([torch.arange(6.0) + row for row in range(8)])


def globally(rows: list[Any]) -> Any:
    return torch.stack(rows) * torch.rand(6)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [SAMPLES * 4, Stream()], ids=["map", "stream"])
def test_a_run_learns_it(data: Any, workers: int) -> None:
    """From whoever makes the micro-batches. With fixed ones and a seed the global generators are set for each."""
    assert learned(data, None, workers) == (False, False)
    assert learned(data, Masks(), workers) == learned(data, Masks(), workers, fixed=True) == (False, True)
    assert learned(data, globally, workers) == (True, False)
    assert learned(data, globally, workers, fixed=True) == (False, False)
