"""Ranks that evaluate other data, or otherwise: all refuse in one line before a batch, and nobody waits for another."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from dalsegno.elastic import Evaluator
from dalsegno.elastic.data import counts, evaluated_alike, evaluated_samples, evaluator
from dalsegno.elastic.data.evaluated_samples import NOTHING, EvaluatedSamples
from dalsegno.elastic.data.evaluator import Interrupted
from dalsegno.elastic.rank.agreement import Refusal, Trouble, Unlike
from dalsegno.elastic.rank.together import Together
from tests.unit.elastic.data.test_evaluator import Numbers, Stream, Threads, measure, wanted


class Ranks(Threads):
    """The default group's ranks, and the session's group beside it: both are waited in for two seconds at most."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self._barrier = threading.Barrier(world_size, timeout=2)
        self._session = threading.Barrier(world_size, timeout=2)
        self.passes = [0] * world_size

    def leaving(self) -> bool:
        """As a session's: collective over a group of its own."""
        self._session.wait()
        return False

    def measure(self, model: Any, data: Tensor) -> dict[str, Any]:
        self.passes[self.get_rank()] += 1
        return measure(model, data)

    def evaluate(self, make: Callable[[int], dict[str, Any]], **run: Any) -> list[Any]:
        """What each rank's evaluation returns or raises; ``make`` gives what it is made with."""

        def one(rank: int) -> dict[str, float]:
            told = make(rank)
            made = Evaluator(told.pop("dataset"), self.measure, **{"batch_size": 4, **told})
            return made.run(nn.Identity(), device="cpu", **run)

        return self.run(one)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Ranks]:
    def make(world_size: int) -> Ranks:
        threads = Ranks(world_size)
        monkeypatch.setattr(counts, "dist", threads)
        monkeypatch.setattr(evaluator, "dist", threads)
        # The generators are the process's, and here the ranks share one process.
        monkeypatch.setattr(evaluator.rng, "restore", lambda state: None)
        return threads

    return make


def refused(found: list[Any], kind: type[Exception] = Unlike) -> str:
    """The line that all ranks end with."""
    assert [type(one) for one in found] == [kind] * len(found), found
    (line,) = {str(one) for one in found}
    assert "\n" not in line
    return line


@pytest.mark.parametrize("lengths", [(40, 36), (40, 20), (40, 0), (41, 40)])
@pytest.mark.parametrize("asked", [False, True])
def test_other_lengths(ranks: Callable[[int], Ranks], lengths: tuple[int, int], asked: bool) -> None:
    """As many rounds or fewer, none at all: no rank computes a batch, and the line says who has what."""
    world = ranks(2)
    options = {"interrupt": world.leaving} if asked else {}
    found = world.evaluate(lambda rank: {"dataset": Numbers(lengths[rank]), "interrupt_every": 2}, **options)
    assert f"length of the data set is {lengths[0]} on rank 0, {lengths[1]} on rank 1" in refused(found)
    assert world.passes == [0, 0]


@pytest.mark.parametrize(("option", "asked"), [("batch_size", False), ("batch_size", True), ("interrupt_every", True)])
def test_other_options(ranks: Callable[[int], Ranks], option: str, asked: bool) -> None:
    """Ranks with other batches would be dealt the same samples; and would not ask at the same batches."""
    world = ranks(2)
    options = {"interrupt": world.leaving} if asked else {}
    found = world.evaluate(lambda rank: {"dataset": Numbers(40), option: (2, 4)[rank]}, **options)
    assert f"{option} is 2 on rank 0, 4 on rank 1" in refused(found)
    assert world.passes == [0, 0]


def test_what_has_no_effect_may_differ(ranks: Callable[[int], Ranks]) -> None:
    """How often nobody is asked."""
    found = ranks(2).evaluate(lambda rank: {"dataset": Numbers(9), "interrupt_every": 1 + rank})
    assert found == [pytest.approx(wanted(9))] * 2


def test_one_rank_that_nobody_can_interrupt(ranks: Callable[[int], Ranks]) -> None:
    """It would not come to the session's group."""
    world = ranks(2)

    def one(rank: int) -> dict[str, float]:
        asks = {"interrupt": world.leaving} if rank else {}
        return Evaluator(Numbers(9), world.measure).run(nn.Identity(), device="cpu", **asks)

    assert "whether interrupt is given is False on rank 0, True on rank 1" in refused(world.run(one))


class Unreadable(Numbers):
    """Cannot say how long it is, on one rank."""

    def __init__(self, error: Exception) -> None:
        super().__init__(9)
        self._error = error

    def __len__(self) -> int:
        raise self._error


@pytest.mark.parametrize(("error", "kind"), [(KeyError("rows"), Refusal), (FileNotFoundError("index.bin"), Trouble)])
def test_one_rank_that_cannot_say_its_length(ranks: Callable[[int], Ranks], error: Exception, kind: Any) -> None:
    """The others hear of it, and what was raised; of a file a restart may mend it."""
    world = ranks(3)
    found = world.evaluate(lambda rank: {"dataset": Unreadable(error) if rank == 1 else Numbers(9)})
    assert f"what is to be evaluated cannot say its length: {type(error).__name__}: {error} (rank 1)" in refused(
        found, kind
    )
    assert found[1].__cause__ is error
    assert world.passes == [0, 0, 0]


def test_one_rank_alone_compares_nothing(ranks: Callable[[int], Ranks]) -> None:
    """No collective, and its own error as it is."""
    world = ranks(1)
    assert world.evaluate(lambda rank: {"dataset": Numbers(9)}) == [pytest.approx(wanted(9))]
    (error,) = world.evaluate(lambda rank: {"dataset": Unreadable(KeyError("rows"))})
    assert isinstance(error, KeyError)
    assert world.calls == [[]]


def test_it_costs_as_many_collectives_for_any_number_of_batches(ranks: Callable[[int], Ranks]) -> None:
    """One gather before the first batch."""
    calls = []
    for length in (4, 400):
        world = ranks(2)
        world.evaluate(lambda rank, length=length: {"dataset": Numbers(length % 60 + 1)})
        calls.append([name for name, _, _ in world.calls[0]])
    assert calls[0] == calls[1]
    assert calls[0].count("all_gather") == 4


def test_an_evaluation_that_was_cut_short_begins_anew(ranks: Callable[[int], Ranks]) -> None:
    """All ranks leave it at the same batch, and none is left in a collective."""
    world = ranks(2)
    asked = [0, 0]

    def one(rank: int) -> Any:
        def interrupt() -> bool:
            asked[rank] += 1
            return world.leaving() or asked[rank] == 2

        made = Evaluator(Numbers(40), world.measure, batch_size=4, interrupt_every=2)
        with pytest.raises(Interrupted):
            made.run(nn.Identity(), device="cpu", interrupt=interrupt)
        return made.run(nn.Identity(), device="cpu", interrupt=interrupt)

    assert world.run(one) == [pytest.approx(wanted(40))] * 2
    assert world.passes == [2 + 5] * 2


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.numbers)


def test_streams_that_know_their_length(ranks: Callable[[int], Ranks]) -> None:
    """As of any other data set."""
    world = ranks(2)
    found = world.evaluate(lambda rank: {"dataset": Sized(Numbers((40, 36)[rank]))})
    assert "length of the data set is 40 on rank 0, 36 on rank 1" in refused(found)
    assert world.passes == [0, 0]


@pytest.mark.parametrize("lengths", [(40, 36), (36, 40), (40, 20), (40, 32), (40, 0), (16, 40)])
@pytest.mark.parametrize("asked", [False, True])
def test_streams_without_a_length(ranks: Callable[[int], Ranks], lengths: tuple[int, int], asked: bool) -> None:
    """Where one ends, or where all do: also if the others are about to ask whether to leave."""
    world = ranks(2)
    options = {"interrupt": world.leaving} if asked else {}
    found = world.evaluate(lambda rank: {"dataset": Stream(Numbers(lengths[rank])), "interrupt_every": 2}, **options)
    line = refused(found)
    short = min(lengths)
    assert re.search(rf"\b{short}( \(its end\))? on rank {lengths.index(short)}", line), line


@pytest.mark.parametrize("lengths", [(40, 36), (40, 32), (40, 0), (16, 40)])
@pytest.mark.parametrize("every", [None, 3])
def test_streams_of_a_model_whose_ranks_compute_together(
    ranks: Callable[[int], Ranks], lengths: tuple[int, int], every: int | None
) -> None:
    """Each forward pass of a sharded model waits for the others': a rank that is at its end would meet it there."""
    world = ranks(2)

    def computes(model: Any, data: Tensor) -> dict[str, Any]:
        world.all_reduce(torch.ones(7))
        return world.measure(model, data)

    def one(rank: int) -> Any:
        made = Evaluator(Stream(Numbers(lengths[rank])), computes, batch_size=4, interrupt_every=every or 8)
        return made.run(nn.Identity(), device="cpu", interrupt=world.leaving if every else None)

    assert "number of samples read of the iterable data set is" in refused(world.run(one))
    assert world.passes[0] == world.passes[1] <= min(lengths) / 8


def test_streams_that_are_the_same(ranks: Callable[[int], Ranks]) -> None:
    """With somebody who asks, too; of any length."""
    for length in (0, 1, 15, 16, 17, 40):
        world = ranks(2)
        made = {"dataset": Stream(Numbers(length)), "interrupt_every": 2}
        found = world.evaluate(lambda rank, made=made: dict(made), interrupt=world.leaving)
        assert found == [pytest.approx(wanted(length)) if length else {}] * 2


def test_a_batch_of_a_stream_costs_one_collective(ranks: Callable[[int], Ranks]) -> None:
    """Of two numbers, as long as the ranks read the same; and its end another one. One rank alone meets nobody."""
    calls = []
    for batches in (1, 5):
        world = ranks(2)
        world.evaluate(lambda rank, batches=batches: {"dataset": Stream(Numbers(8 * batches))})
        calls.append([(name, shape) for name, shape, _ in world.calls[0]])
    one = ("all_reduce", (2,))
    assert [made.count(one) for made in calls] == [2, 6]
    assert [made for made in calls[1] if made != one] == [made for made in calls[0] if made != one]
    alone = ranks(1)
    alone.evaluate(lambda rank: {"dataset": Stream(Numbers(20))})
    assert alone.calls == [[]]


class Read(Stream):
    """Numbers of a stream, as this rank reads them."""

    def __init__(self, length: int, read: Callable[[list[Tensor]], list[Tensor]]) -> None:
        super().__init__(Numbers(length))
        self._read, self.readings = read, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.readings += 1
        return iter(self._read(list(super().__iter__())))


def differing(
    world: Ranks, read: Callable[[int, list[Tensor]], list[Tensor]], *, check: bool | None = None, **run: Any
) -> tuple[list[Any], list[Read]]:
    """What each rank's evaluation gives where it reads the same numbers in its own way, and the streams."""
    streams = [Read(40, functools.partial(read, rank)) for rank in range(world.world_size)]
    made = {"check_data": check, "interrupt_every": 1}
    return world.evaluate(lambda rank: {"dataset": streams[rank], **made}, **run), streams


@pytest.mark.parametrize("asked", [False, True])
def test_streams_that_are_split_by_rank(ranks: Callable[[int], Ranks], asked: bool) -> None:
    """As ``split_dataset_by_node`` does: equally long, and each rank measured half of its own half."""
    world = ranks(2)
    options = {"interrupt": world.leaving} if asked else {}
    found, _ = differing(world, lambda rank, numbers: numbers[rank::2], **options)
    line = refused(found)
    assert "sample 0 is not the same on rank 0 and rank 1, so some samples would be measured twice" in line
    assert world.passes == [3, 3]


def test_streams_that_may_differ(ranks: Callable[[int], Ranks]) -> None:
    """Unless it is meant; where only a later one of the first samples differs, too."""

    def turned(rank: int, numbers: list[Tensor]) -> list[Tensor]:
        return numbers[:2] + numbers[2:][:: -1 if rank else 1]

    assert "sample 2 is not the same" in refused(differing(ranks(2), turned)[0])
    found, streams = differing(ranks(2), turned, check=False)
    assert [type(one) for one in found] == [dict, dict], found
    assert [one.readings for one in streams] == [1, 1]
    world = ranks(2)
    by = [Read(40, functools.partial(turned, rank)) for rank in range(2)]
    found = world.evaluate(lambda rank: {"dataset": by[rank], "check_data": bool(rank)})
    assert [type(one) for one in found] == [dict, dict], found


def test_random_streams_are_said_once(ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    """Right if samples are augmented; of what is the same nobody reads anything again."""
    said: list[str] = []
    monkeypatch.setattr(evaluated_alike, "remark", lambda text, *values: said.append(text % values))

    def drawn(rank: int, numbers: list[Tensor]) -> list[Tensor]:
        return [number + torch.rand(()) for number in numbers]

    world = ranks(2)
    streams = [Read(40, functools.partial(drawn, rank)) for rank in range(2)]

    def twice(rank: int) -> list[int]:
        made, readings = Evaluator(streams[rank], world.measure, batch_size=4), []
        for _ in range(2):
            made.run(nn.Identity(), device="cpu")
            readings.append(streams[rank].readings)
        return readings

    for first, second in world.run(twice):
        assert second == first + 1
        assert first > 1
    (line,) = said
    assert line.startswith("the ranks have other data: sample 0 is not the same on rank 0 and rank 1, nor when it is")
    assert line.endswith("else samples are measured twice or never")
    found, streams = differing(ranks(2), lambda rank, numbers: numbers)
    assert found == [pytest.approx(wanted(40))] * 2
    assert [one.readings for one in streams] == [1, 1]


class Cursor(Stream):
    """An open file, say: it has one place, which each reading moves back. No sample is twice the same."""

    def __init__(self, rank: int) -> None:
        super().__init__(Numbers(40))
        self._at, self._noise = 0, itertools.count(rank, 2)

    def __iter__(self) -> Iterator[Tensor]:
        self._at = 0
        while self._at < len(self.numbers):
            self._at += 1
            yield torch.tensor([float(self._at), next(self._noise)])


def test_a_stream_with_one_place_is_read_once_more_behind_its_end(ranks: Callable[[int], Ranks]) -> None:
    """It began anew under the evaluation, which measured its first samples twice, without an error."""
    world, streams = ranks(2), [Cursor(0), Cursor(1)]

    def twice(rank: int) -> list[dict[str, float]]:
        made = Evaluator(streams[rank], lambda model, data: world.measure(model, data[:, 0]), batch_size=4)
        return [made.run(nn.Identity(), device="cpu") for _ in range(2)]

    assert world.run(twice) == [[pytest.approx(wanted(40))] * 2] * 2
    assert world.passes == [10, 10]


def test_a_stream_is_read_again_as_it_was(ranks: Callable[[int], Ranks]) -> None:
    """It may ask the model for a sample, whose running statistics would move with it."""
    world, models, seen = ranks(2), [nn.Identity(), nn.Identity()], list[tuple[bool, bool]]()

    class Asks(Cursor):
        def __init__(self, rank: int) -> None:
            super().__init__(rank)
            self.model = models[rank]

        def __iter__(self) -> Any:
            seen.append((self.model.training, torch.is_grad_enabled()))
            return super().__iter__()

    streams = [Asks(0), Asks(1)]

    def once(rank: int) -> dict[str, float]:
        made = Evaluator(streams[rank], lambda model, data: world.measure(model, data[:, 0]), batch_size=4)
        return made.run(models[rank], device="cpu")

    world.run(once)
    assert len(seen) > 2
    assert {*seen} == {(False, False)}


def test_a_model_that_is_split_over_ranks(ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that compute each sample together would be dealt unlike ones, and the metrics would be of neither."""
    groups = [[Together((0, 1), None, "cpu", ["0.weight"], True)], [Together((0, 1), None, "cpu", ["1.weight"], False)]]
    for dataset in (Numbers(9), Stream(Numbers(9))):
        world = ranks(2)
        monkeypatch.setattr(evaluator, "together", lambda _: groups[0])
        line = refused(world.evaluate(lambda rank, dataset=dataset: {"dataset": dataset}), Refusal)
        assert line.startswith("tensor parallelism: 0.weight is sharded over ranks 0, 1, which compute each sample")
        assert world.passes == [0, 0]
        # On one rank alone, and what is only sharded: nobody knows that it computes together.
        monkeypatch.setattr(evaluator, "together", lambda _, world=world: groups[1 - world.get_rank()])
        refused(world.evaluate(lambda rank, dataset=dataset: {"dataset": dataset}), Refusal)
        monkeypatch.setattr(evaluator, "together", lambda _: groups[1])
        assert ranks(2).evaluate(lambda rank, dataset=dataset: {"dataset": dataset}) == [pytest.approx(wanted(9))] * 2


def test_a_stream_beside_a_data_set(ranks: Callable[[int], Ranks]) -> None:
    """They do not end alike."""
    world = ranks(2)
    found = world.evaluate(lambda rank: {"dataset": (Numbers(9), Stream(Numbers(9)))[rank]})
    assert "whether the data set is iterable is False on rank 0, True on rank 1" in refused(found)


def test_tensors_are_data_sets_too(ranks: Callable[[int], Ranks]) -> None:
    """What has a length and positions, and is no class of torch's data sets."""
    found = ranks(2).evaluate(lambda rank: {"dataset": torch.arange(1.0, 10.0)})
    assert found == [pytest.approx(wanted(9))] * 2


class Listed(Numbers):
    """Numbers in the order in which a directory lists them, on each rank another; notes what is read."""

    def __init__(self, length: int, *, turned: bool, drawn: float = 0.0) -> None:
        super().__init__(length)
        self._turned, self._drawn, self.read = turned, drawn, list[int]()

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        at = self.length - 1 - index if self._turned else index
        return super().__getitem__(at) + self._drawn * torch.rand(())


@pytest.mark.parametrize("check", [True, False])
def test_the_same_data_in_another_order(ranks: Callable[[int], Ranks], check: bool) -> None:
    """Refused unless it is meant."""
    world = ranks(2)
    found = world.evaluate(lambda rank: {"dataset": Listed(20, turned=bool(rank)), "check_data": check})
    if not check:
        assert [type(one) for one in found] == [dict, dict], found
        return
    line = refused(found)
    assert "sample 0 is not the same on rank 0 and rank 1, so some samples would be measured twice" in line
    assert line.endswith(
        "leave the dealing to the Evaluator); if that is intended, give check_data=False to the Evaluator"
    )
    assert world.passes == [0, 0]


def fails_to_start(worker: int) -> None:
    """Wants another data set than it finds."""
    raise AttributeError("open")


@pytest.mark.timeout(60)
def test_a_process_looks_where_processes_read() -> None:
    """This one opens nothing that they would share. What they cannot look at is not compared."""
    here, there = Listed(20, turned=True), Listed(20, turned=True)
    seen = EvaluatedSamples(here, {}).told(20, patient=False)
    assert list(seen["prints"]) == ["sample 0", "sample 10", "sample 19"]
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}
    assert EvaluatedSamples(there, options).told(20, patient=False) == seen
    assert (here.read, there.read) == ([0, 0, 10, 10, 19, 19], [])
    broken = EvaluatedSamples(there, {**options, "worker_init_fn": fails_to_start})
    assert broken.told(20, patient=False) == NOTHING
    assert broken.told(20, patient=True) == {"prints": {}, "varies": True}
    # Left to the collector, each would be waited for in the middle of a step, for 5 s.
    assert multiprocessing.active_children() == []


def test_random_data_are_compared_with_nothing(ranks: Callable[[int], Ranks]) -> None:
    """Their samples differ in two readings."""
    found = ranks(2).evaluate(lambda rank: {"dataset": Listed(20, turned=bool(rank), drawn=0.5)})
    assert [type(one) for one in found] == [dict, dict], found


def test_a_look_is_taken_once(ranks: Callable[[int], Ranks]) -> None:
    """Not with each evaluation, nor by one rank alone."""
    for number, reads in ((2, 6), (1, 0)):
        world = ranks(number)
        made = [Listed(20, turned=False) for _ in range(number)]

        def one(rank: int, made: list[Listed] = made, world: Ranks = world) -> list[int]:
            evaluation = Evaluator(made[rank], world.measure, batch_size=20)
            counts = []
            for _ in range(3):
                evaluation.run(nn.Identity(), device="cpu")
                counts.append(len(made[rank].read))
            return counts

        part = 20 // number
        assert world.run(one) == [[reads + part, reads + 2 * part, reads + 3 * part]] * number


def test_samples_that_cannot_be_looked_at(ranks: Callable[[int], Ranks]) -> None:
    """Nothing of it is known then: the evaluation meets that error itself."""

    class Broken(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            raise KeyError(index)

    found = ranks(2).evaluate(lambda rank: {"dataset": Broken(20)})
    assert [type(one) for one in found] == [KeyError, KeyError]


def test_data_that_look_alike_at_first_are_looked_at_longer(ranks: Callable[[int], Ranks]) -> None:
    """Seldom random: two readings in a row may be the same by chance, and of two ranks not."""

    class Seldom(Listed):
        def __getitem__(self, index: int) -> Tensor:
            return super().__getitem__(index) + (0.25 if len(self.read) % 7 == 0 else 0.0)

    world = ranks(2)
    made = [Seldom(20, turned=bool(rank)) for rank in range(2)]
    found = world.evaluate(lambda rank: {"dataset": made[rank]})
    assert [type(one) for one in found] == [dict, dict], found


class Embedded(Numbers):
    """Numbers as a model that is trained sees them; notes in which mode it does."""

    def __init__(self, length: int, model: nn.Module, *, turned: bool) -> None:
        super().__init__(length)
        self._model, self._turned, self.modes = model, turned, set[tuple[bool, bool]]()

    def __getitem__(self, index: int) -> Tensor:
        self.modes.add((self._model.training, torch.is_grad_enabled()))
        number = super().__getitem__(self.length - 1 - index if self._turned else index).reshape(1, 1)
        found: Tensor = self._model(number.expand(2, 4)).sum()
        return found


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("before", [False, True], ids=["run", "check"])
def test_a_look_is_a_part_of_the_evaluation(ranks: Callable[[int], Ranks], before: bool, turned: bool) -> None:
    """Data that call the model: BatchNorm's statistics moved, and dropout made all samples random."""
    models = [nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()) for _ in range(2)]
    data = [Embedded(20, model, turned=turned and bool(rank)) for rank, model in enumerate(models)]
    world = ranks(2)

    def one(rank: int) -> Any:
        made = Evaluator(data[rank], lambda model, data: {"sum": (data, len(data))})
        if before:
            return made.check(models[rank], device="cpu")
        return type(made.run(models[rank], device="cpu"))

    found = world.run(one)
    if turned:
        assert "sample 0 is not the same on rank 0 and rank 1" in refused(found)
    else:
        assert found == [None if before else dict] * 2
    assert [one.modes for one in data] == [{(False, False)}] * 2
    assert all(model.training and model[1].training for model in models)
    assert [float(model[0].running_mean.sum()) for model in models] == [0.0, 0.0]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("made", "line"),
    [
        ({"dataset": [Numbers(40), Numbers(36)]}, "length of the data set is 40 on rank 0, 36 on rank 1"),
        ({"batch_size": [4, 8]}, "batch_size is 4 on rank 0, 8 on rank 1"),
        ({"interrupt_every": [4, 8]}, "interrupt_every is 4 on rank 0, 8 on rank 1"),
        ({"dataset": [Numbers(9), Stream(Numbers(9))]}, "whether the data set is iterable is False on rank 0, True"),
        ({"dataset": [Unreadable(KeyError("rows")), Numbers(9)]}, "cannot say its length: KeyError"),
    ],
)
def test_it_may_be_compared_long_before(ranks: Callable[[int], Ranks], made: dict[str, list[Any]], line: str) -> None:
    """All that is known without a batch; the steps until the first evaluation would be for nothing."""
    world = ranks(2)

    def one(rank: int) -> None:
        told = {"dataset": Numbers(40), **{name: values[rank] for name, values in made.items()}}
        Evaluator(told.pop("dataset"), world.measure, **told).check(nn.Identity(), device="cpu", interruptible=True)

    found = world.run(one)
    assert line in refused(found, type(found[0]))
    assert isinstance(found[0], Refusal)
    assert world.passes == [0, 0]


@pytest.mark.parametrize("own", [None, True, False])
@pytest.mark.parametrize("trainers", [None, True, False])
def test_who_says_whether_samples_are_compared(
    ranks: Callable[[int], Ranks], own: bool | None, trainers: bool | None
) -> None:
    """The Evaluator; what it leaves open the Trainer, if it has one."""
    world = ranks(2)

    def one(rank: int) -> Any:
        made = Evaluator(Listed(20, turned=bool(rank)), world.measure, check_data=own)
        if trainers is not None:
            made.check(nn.Identity(), device="cpu", check_data=trainers)
        return made.run(nn.Identity(), device="cpu")

    looks = next(said for said in (own, trainers, True) if said is not None)
    assert {type(found) for found in world.run(one)} == {Unlike if looks else dict}


def opens(worker: int) -> None:
    """As torch's documents have it."""
    info = get_worker_info()
    assert info is not None
    info.dataset.open()  # type: ignore[attr-defined]
    info.dataset.shift = worker  # type: ignore[attr-defined]


class Opened(Listed):
    """Numbers of a file that each process has to open."""

    shift: int | None = None
    _file: int | None = None

    def open(self) -> None:
        self._file = 1

    def __getitem__(self, index: int) -> Tensor:
        assert self._file is not None
        assert self.shift is not None
        return super().__getitem__(index)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_process_that_looks_finds_the_data_set_where_others_do(context: str) -> None:
    """What it opens there stands open; what cannot be opened was compared with nothing, and nobody heard of it."""
    options = {"num_workers": 2, "worker_init_fn": opens, "multiprocessing_context": context}
    seen = EvaluatedSamples(Opened(20, turned=False), options).told(20, patient=False)
    assert list(seen["prints"]) == ["sample 0", "sample 10", "sample 19"]


@pytest.mark.parametrize(("asked", "seconds"), [(False, [1.0, 20.0]), (True, [1.0, 5.0])])
def test_a_look_shows_that_it_is_alive(
    ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch, asked: bool, seconds: list[float]
) -> None:
    """Before it and behind it; and it does not keep a leave waiting."""
    world, came = ranks(2), [list[Any](), list[Any]()]
    look = evaluated_samples.look_at

    def noted(dataset: Any, read: Any, wanted: Any) -> Any:
        came[world.get_rank()].append(wanted.seconds)
        return look(dataset, read, wanted)

    monkeypatch.setattr(evaluated_samples, "look_at", noted)

    def one(rank: int) -> Any:
        made = Evaluator(Listed(20, turned=bool(rank)), world.measure)
        interrupt = world.leaving if asked else None
        return made.run(nn.Identity(), device="cpu", interrupt=interrupt, busy=lambda: came[rank].append("busy"))

    refused(world.run(one))
    assert came == [["busy", seconds[0], "busy", "busy", seconds[1], "busy"]] * 2
