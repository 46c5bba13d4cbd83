"""Whether data are the same, of what a few samples say; and how samples are looked at."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dalsegno.elastic import Batches, BatchPlan, ElasticSampler
from dalsegno.elastic.data.looking import Inspected, Inspection, look_at
from dalsegno.elastic.data.prints import Likeness, print_of
from dalsegno.elastic.data.same_data import MOST, compared, merged
from dalsegno.elastic.rank import rng
from dalsegno.elastic.rank.agreement import Unlike

LOOK = Inspection((0, 5, 9), 3, 10.0)


def told(*numbers: int, varies: bool = False) -> dict[str, Any]:
    return {"prints": {f"sample {n}": print_of(value) for n, value in enumerate(numbers)}, "varies": varies}


def test_ranks_are_compared_with_each_other_and_with_the_checkpoint() -> None:
    """By what at least two can say; nothing where a data set is random."""
    saved = told(1, 2)["prints"]
    assert compared([told(1, 2), told(1, 2)], saved) == (Likeness.SAME, "")
    other = compared([told(1, 2), told(1), told(1, 3)], {})
    assert other.likeness is Likeness.OTHER
    assert "sample 1 is not the same on rank 0 and rank 2" in other.text
    assert "check_data=False" in other.text
    changed = compared([told(1, 3)], saved, "step-3.e1.0")
    assert "these are not the data of step-3.e1.0: sample 1 is another one" in changed.text
    assert compared([told(1, 2), told(3, varies=True)], saved).likeness is Likeness.SAME
    assert compared([told(), told(1)], {}).likeness is Likeness.SAME


def test_the_run_keeps_what_it_began_with() -> None:
    assert merged([told(), told(4)], {"sample 0": "before", "sample 7": "x"}) == {
        "sample 0": "before",
        "sample 7": "x",
    }
    assert merged([told(), told(4)], {}) == told(4)["prints"]
    assert merged([told(1, varies=True)], {"sample 7": "x"}) == {"sample 7": "x"}
    assert len(merged([told(*range(20))], {})) == MOST


def generators() -> tuple[Any, ...]:
    state = rng.cpu_state()
    return state[0], state[1].tolist(), state[2][1].tolist(), state[2][2]


DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.randn(())),
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
}


@pytest.mark.parametrize("kind", list(DRAWS))
def test_what_is_drawn_is_compared_with_nothing_and_leaves_no_trace(kind: str) -> None:
    """With any of the global generators: the training begins with them as if nobody had looked."""
    np.random.seed(3)
    before = generators()
    seen = look_at(None, lambda index: index + DRAWS[kind](), LOOK)
    assert seen == Inspected(draws=True, varies=True)
    assert generators() == before
    assert look_at(None, lambda index: (DRAWS[kind](), index)[1], LOOK).draws
    assert not look_at(None, lambda index: index, LOOK).draws


def test_generators_of_a_data_sets_own_are_put_back() -> None:
    """Also those of its transform, and of a data set in it."""

    class Transform:
        def __init__(self) -> None:
            self.own = {"a": np.random.default_rng(1), "b": np.random.RandomState(2)}

    class Inner:
        def __init__(self) -> None:
            self.generator, self.transforms, self.me = torch.Generator().manual_seed(0), [Transform()], self

    class Outer:
        def __init__(self) -> None:
            self.dataset, self.random = Inner(), random.Random(4)

        def draw(self, index: int = 0) -> list[float]:
            own = self.dataset.transforms[0].own
            return [
                float(torch.rand((), generator=self.dataset.generator)),
                self.random.random(),
                float(own["a"].random()),
                float(own["b"].rand()),
            ]

    data = Outer()
    assert look_at(data, data.draw, LOOK) == Inspected(draws=True, varies=True, own=True)
    assert data.draw() == Outer().draw()


def test_a_look_takes_no_time_and_raises_nothing() -> None:
    """Not more than one reading beyond its time; a sample that cannot be read is the training's affair."""
    asked: list[int] = []
    assert look_at(None, asked.append, Inspection((0, 1), 3, -1.0)) == Inspected()
    assert asked == []

    def read(index: int) -> int:
        if index == 5:
            raise KeyError(index)
        return index

    assert list(look_at(None, read, LOOK).prints) == ["sample 0"]


class Alone:
    """A session of one rank, or of several that are said to have told something."""

    rank, step, resume = 0, 0, None

    def __init__(self, others: list[dict[str, Any]] | None = None) -> None:
        self.others, self.asked, self.known = others or [], 0, dict[str, Any]()
        self.examination = self

    def gather(self, message: Any) -> list[Any]:
        self.asked += 1
        return [message, *self.others]

    def learn(self, **facts: Any) -> None:
        self.known.update(facts)


class Rows(torch.utils.data.Dataset[Any]):
    """Counts what is read."""

    def __init__(self, add: float = 0.0) -> None:
        self.add, self.read = add, list[int]()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.arange(3.0) + index + self.add


def batches(data: Any, length: int | None = 12, **options: Any) -> Batches[Any]:
    sampler = ElasticSampler(length, 4, seed=4, shuffle=length is not None)
    return Batches(data, sampler, BatchPlan(4, 1, 4), 0, data_epochs=1, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_look_by_whoever_reads_and_then_every_sample_once(workers: int) -> None:
    """In the loader's processes where there are any; they go on with the first batch."""
    data = Rows()
    made = batches(data, loader_options={"num_workers": workers})
    session = Alone()
    made.check_samples(session)
    made.check_samples(session)
    assert session.asked == 1
    assert [name for name, _ in made.cut.samples] == ["sample 0", "sample 11", "sample 6"]
    if workers:
        assert data.read == []
    else:
        assert data.read == [0, 0, 6, 6, 11, 11]
    seen: list[float] = []
    for batch in made:
        for micro in batch.micro_batches:
            seen += micro.data[:, 0].tolist()
    assert sorted(seen) == list(range(12))


def test_other_data_are_refused_after_a_longer_look() -> None:
    """Once more, and more often, before anybody is refused."""
    there = {"prints": {"sample 0": print_of(torch.arange(3.0) + 1)}, "varies": False, "draws": False}
    data, session = Rows(), Alone([there])
    with pytest.raises(Unlike, match="sample 0 is not the same on rank 0 and rank 1"):
        batches(data).check_samples(session)
    assert session.asked == 2
    assert data.read.count(0) == 2 + 12
    session = Alone([there])
    batches(data, check_data=False).check_samples(session)
    assert session.asked == 0


class Rarely(Rows):
    """Draws from a generator of the system's own, so that two readings are often the same."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) * (1.0 if len(self.read) < 8 else random.SystemRandom().random())


def test_what_looks_the_same_twice_and_is_random_is_not_refused() -> None:
    there = {"prints": {"sample 0": print_of(torch.arange(3.0) * 0.3)}, "varies": False, "draws": False}
    session = Alone([there])
    batches(Rarely()).check_samples(session)
    assert session.asked == 2
    assert session.known["data_draws_own"]


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __init__(self, *, again: bool = True, add: float = 0.0) -> None:
        self.again, self.add, self.begun = again, add, 0

    def __iter__(self) -> Any:
        self.begun += 1
        if self.begun > 1 and not self.again:
            return iter([])
        return (torch.arange(3.0) + index + self.add for index in range(12))


@pytest.mark.parametrize("workers", [0, 2])
def test_of_a_stream_the_first_samples_are_looked_at_as_they_come(workers: int) -> None:
    """It is not read twice: that may not be possible. Each reader tells what it sees."""
    data = Stream(again=False)
    made = batches(data, None, loader_options={"num_workers": workers})
    made.check_samples(Alone())
    assert [name for name, _ in made.cut.samples] == ["sample 0", "sample 1", "sample 2"]
    seen: list[float] = []
    for batch in made:
        for micro in batch.micro_batches:
            seen += micro.data[:, 0].tolist()
    assert seen == list(range(12))
    assert data.begun == (0 if workers else 1)


def test_a_stream_of_other_samples_is_refused_unless_it_varies(caplog: pytest.LogCaptureFixture) -> None:
    """Only then it is read once more; what is then another is random, or in an order at random: that is said."""
    there = {"prints": {"sample 1": print_of(torch.arange(3.0) + 5)}, "varies": False, "draws": False}
    with pytest.raises(Unlike, match="sample 1 is not the same on rank 0 and rank 1"):
        batches(Stream(), None).check_samples(Alone([there]))

    class Shuffled(Stream):
        def __iter__(self) -> Any:
            self.add += 1
            return super().__iter__()

    assert not caplog.messages
    batches(Shuffled(), None).check_samples(Alone([there]))
    (line,) = caplog.messages
    assert "sample 1 is not the same on rank 0 and rank 1" in line
    assert "where it shuffles, give it a seed" in line
