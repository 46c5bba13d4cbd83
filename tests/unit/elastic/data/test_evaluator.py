"""The evaluator and its counts: sums before ratios, the same whatever the batches and ranks, and what is refused."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, IterableDataset

from dalsegno.elastic import Counts, Evaluator
from dalsegno.elastic.data import counts, evaluator
from dalsegno.elastic.data.counts import Totals
from dalsegno.elastic.data.evaluator import Interrupted, shares, to_device


class Threads:
    """Stands for ``torch.distributed``: each rank is a thread. Notes what each of them calls, and with what shapes."""

    ReduceOp = dist.ReduceOp

    def __init__(self, world_size: int) -> None:
        self.world_size, self.calls = world_size, [[] for _ in range(world_size)]  # type: ignore[var-annotated]
        self._local, self._barrier = threading.local(), threading.Barrier(world_size, timeout=20)
        self._tensors: list[Tensor] = [torch.empty(0)] * world_size

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.world_size

        def one(rank: int) -> None:
            self._local.rank = rank
            try:
                results[rank] = work(rank)
            # A rank that fails must not leave the others waiting; the test looks at what it got.
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return results

    def _meet(self, name: str, tensor: Tensor) -> list[Tensor]:
        rank = self._local.rank
        self.calls[rank].append((name, tuple(tensor.shape), tensor.dtype))
        self._tensors[rank] = tensor.clone()
        self._barrier.wait()
        found = list(self._tensors)
        self._barrier.wait()
        return found

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        met = torch.stack(self._meet("all_reduce", tensor))
        tensor.copy_(met.sum(0) if op == dist.ReduceOp.SUM else met.amax(0))

    def all_gather(self, parts: list[Tensor], tensor: Tensor, group: Any = None) -> None:
        for part, found in zip(parts, self._meet("all_gather", tensor), strict=True):
            part.copy_(found)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self, group: Any = None) -> int:
        return self.world_size

    def get_rank(self) -> int:
        return int(self._local.rank)

    def get_backend_config(self, group: Any = None) -> str:
        return "cpu:gloo,cuda:gloo"


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Threads]:
    def make(world_size: int) -> Threads:
        threads = Threads(world_size)
        monkeypatch.setattr(counts, "dist", threads)
        monkeypatch.setattr(evaluator, "dist", threads)
        return threads

    return make


class Numbers(Dataset[Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index + 1))


class Stream(IterableDataset[Tensor]):
    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Tensor]:
        return (self.numbers[index] for index in range(len(self.numbers)))


def measure(model: Any, data: Tensor) -> dict[str, Any]:
    """The mean of 1 / n: no mean of means equals it. And every sample's number, to see that each came once."""
    return {
        "mean": (1.0 / data.double(), len(data)),
        "even": ((data % 2 == 0).sum(), len(data)),
        "seen": torch.bincount(data.long(), minlength=64),
        "biggest": float(len(data)),
    }


def wanted(length: int) -> dict[str, float]:
    numbers = range(1, length + 1)
    return {
        "mean": sum(1 / n for n in numbers) / length,
        "even": sum(n % 2 == 0 for n in numbers) / length,
        "biggest": float(length),
    }


@pytest.mark.slow
@settings(max_examples=60)
@given(
    length=st.integers(0, 40),
    batch=st.integers(1, 12),
    world=st.integers(1, 6),
    stream=st.booleans(),
)
def test_metrics_do_not_depend_on_batches_or_ranks(length: int, batch: int, world: int, stream: bool) -> None:
    """Any length, batch size and world: each sample once, the same metrics, the same calls on every rank."""
    with pytest.MonkeyPatch.context() as patch:
        threads = Threads(world)
        patch.setattr(counts, "dist", threads)
        patch.setattr(evaluator, "dist", threads)
        model, passes = nn.Identity(), [0] * world

        def counted(model: Any, data: Tensor) -> dict[str, Any]:
            passes[threads.get_rank()] += 1
            return measure(model, data)

        def finish(totals: Totals) -> dict[str, float]:
            assert totals.counts["seen"].tolist() == [0.0] + [1.0] * length + [0.0] * (63 - length)
            return totals.metrics()

        dataset: Any = Stream(Numbers(length)) if stream else Numbers(length)
        # The generators are the process's, and here the ranks share one process.
        patch.setattr(evaluator.rng, "restore", lambda state: None)
        found = threads.run(
            lambda rank: Evaluator(dataset, counted, batch_size=batch, finish=finish).run(model, device="cpu")
        )
    assert all(metrics == found[0] for metrics in found)
    assert found[0] == (pytest.approx(wanted(length), rel=1e-12) if length else {})
    assert all(calls == threads.calls[0] for calls in threads.calls)
    # As many forward passes on every rank: in a sharded model each is a collective.
    assert len(set(passes)) == 1
    assert passes[0] == -(-length // (batch * world))


@given(size=st.integers(0, 60), batch=st.integers(1, 12), world=st.integers(1, 5))
def test_shares_of_a_round(size: int, batch: int, world: int) -> None:
    """Together all of it, in order, none above the batch size, sizes that differ by at most one."""
    if size > batch * world:
        with pytest.raises(ValueError, match="cannot have"):
            shares(size, batch, world, 0)
        return
    parts = [shares(size, batch, world, rank) for rank in range(world)]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(size))
    lengths = [part.stop - part.start for part in parts]
    assert max(lengths) <= batch
    assert max(lengths) - min(lengths) <= 1
    assert [part.filler for part in parts] == [length == 0 for length in lengths]


def test_ranks_with_scalars_tensors_or_nothing_make_the_same_calls(ranks: Callable[[int], Threads]) -> None:
    """One rank has plain numbers only, one has nothing, one has tensors and a name of its own."""
    given: list[dict[str, Any]] = [
        {"loss": (3, 2), "errors": 1},
        {},
        {"loss": (torch.tensor([1.0, 6.0]), torch.tensor([True, True, False, True])), "late": (torch.tensor(5), 10)},
    ]
    threads = ranks(3)

    def work(rank: int) -> dict[str, float]:
        held = Counts()
        held.add(given[rank])
        return held.reduce().metrics()

    found = threads.run(work)
    assert found == [{"loss": 2.0, "errors": 1.0, "late": 0.5}] * 3
    assert [name for name, _, _ in threads.calls[0]] == ["all_gather", "all_gather", "all_reduce"]
    assert threads.calls[0][-1][2] == torch.float64
    assert threads.calls[0] == threads.calls[1] == threads.calls[2]


def test_nothing_gives_nothing(ranks: Callable[[int], Threads]) -> None:
    """No samples: no metrics and no division; a ratio over nothing is left out, beside others that are there."""
    assert ranks(2).run(lambda rank: Counts().reduce().metrics()) == [{}, {}]
    held = Counts()
    held.add({"tokens": (0.0, 0), "loss": (1.0, 2)})
    assert ranks(1).run(lambda rank: held.reduce().metrics()) == [{"loss": 0.5}]


def test_ranks_that_disagree_all_say_so(ranks: Callable[[int], Threads]) -> None:
    """A ratio on one rank and a count on another is an error on both, and nobody waits."""
    given: list[dict[str, Any]] = [{"hits": (1, 2)}, {"hits": torch.ones(3)}]

    def work(rank: int) -> Any:
        held = Counts()
        held.add(given[rank])
        return held.reduce()

    for error in ranks(2).run(work):
        assert isinstance(error, ValueError)
        assert "'hits' is a count of shape [3] on rank 1, and 'hits' is a ratio before" in str(error)


def test_sums_are_kept_in_float64() -> None:
    """2**24 + 1 ones as float32 would stop at 2**24; and small losses are not lost beside a large one."""
    held = Counts()
    held.add({"n": torch.tensor([2.0**24]), "loss": (torch.tensor([1e9]), 1)})
    for _ in range(3):
        held.add({"n": torch.tensor([1.0]), "loss": (torch.tensor([1e-3]), 0)})
    totals = held.reduce()
    assert totals.counts["n"].item() == 2**24 + 3
    assert totals.ratios["loss"][0] == pytest.approx(1e9 + 3e-3, abs=1e-6)


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for the device: values that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += "_local_scalar_dense" in str(function)
        return function(*args, **(kwargs or {}))


def test_batches_are_added_without_reading_the_device() -> None:
    """However many batches: adding them never reads a value; the mode would see it if it did."""
    held = Counts()
    with Reads() as seen:
        for _ in range(50):
            held.add({"loss": (torch.rand(4), torch.ones(4) > 0), "hits": torch.ones(3), "n": 4})
        assert seen.reads == 0
        torch.ones(1).item()
        assert seen.reads == 1


@pytest.mark.parametrize("value", ["text", None, (1, 2, 3), (1, "x"), torch.ones(1, dtype=torch.complex64)])
def test_what_is_no_number_is_refused(value: Any) -> None:
    """The line names the metric."""
    with pytest.raises(TypeError, match="'loss' must be a number"):
        Counts().add({"loss": value})


def test_a_name_means_one_thing() -> None:
    """A count that changes its shape with the batch would not be the same sum."""
    held = Counts()
    held.add({"losses": torch.ones(4)})
    with pytest.raises(ValueError, match=r"shape \[4\] before, and now 'losses' is a count of shape \[3\]"):
        held.add({"losses": torch.ones(3)})


def test_model_and_generators_are_left_as_they_were() -> None:
    """Modes module by module, the random state, and no gradients; inside, evaluation mode."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    model.train()
    model[1].eval()
    torch.manual_seed(7)
    before = torch.get_rng_state()

    def look(model: Any, data: Tensor) -> dict[str, Any]:
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        return {"draw": (torch.rand(len(data)), len(data))}

    runs = [Evaluator(Numbers(5), look, batch_size=2).run(model) for _ in range(2)]
    assert runs[0] == runs[1]
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == [True, True, False]
    assert torch.is_grad_enabled()


def test_it_can_be_interrupted_between_batches() -> None:
    """Asked before every third batch; the model's mode comes back all the same."""
    asked: list[int] = []
    model = nn.Linear(1, 1)

    def interrupt() -> bool:
        asked.append(1)
        return len(asked) == 3

    with pytest.raises(Interrupted):
        Evaluator(Numbers(20), measure, batch_size=1, interrupt_every=3).run(model, interrupt=interrupt)
    assert model.training


def test_workers_load_the_same() -> None:
    """With DataLoader processes: the same samples."""
    evaluator = Evaluator(Numbers(9), measure, batch_size=2, loader_options={"num_workers": 2})
    assert evaluator.run(nn.Identity()) == pytest.approx(wanted(9))


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"interrupt_every": 0}, {"loader_options": {"shuffle": True}}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    """At once, not in the middle of a run."""
    with pytest.raises(ValueError, match=r"at least 1|cannot have"):
        Evaluator(Numbers(3), measure, **options)
    with pytest.raises(ValueError, match="read by each rank itself"):
        Evaluator(Stream(Numbers(3)), measure, loader_options={"num_workers": 2})


def test_data_of_any_structure_is_moved() -> None:
    """Tensors in dicts, lists, tuples and named tuples; everything else stays."""
    from typing import NamedTuple

    class Pair(NamedTuple):
        x: Tensor
        name: str

    moved = to_device(
        {"a": [torch.ones(1)], "b": (torch.ones(1), 3), "c": Pair(torch.ones(1), "n")}, torch.device("meta")
    )
    assert moved["a"][0].is_meta
    assert moved["b"][0].is_meta
    assert moved["b"][1] == 3
    assert moved["c"].x.is_meta
    assert isinstance(moved["c"], Pair)


class Graph(dict[str, Any]):
    """Knows itself where its parts belong."""

    def to(self, device: torch.device) -> Graph:
        return Graph({"nodes": self["nodes"].to(device), "sizes": self["sizes"]})


def test_data_that_can_move_themselves_do() -> None:
    """Torch refuses a PackedSequence whose sizes are on a card; a class of dictionaries stays what it is."""
    meta = torch.device("meta")
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device({"packed": packed, "graph": Graph(nodes=torch.ones(2), sizes=torch.ones(1))}, meta)
    assert moved["packed"].data.is_meta
    assert moved["packed"].batch_sizes.device.type == "cpu"
    assert moved["graph"]["nodes"].is_meta
    assert not moved["graph"]["sizes"].is_meta
    counted = to_device(defaultdict(list, rows=torch.ones(2)), meta)
    assert counted["rows"].is_meta
    assert counted["others"] == []
    assert not packed.data.is_meta


class Frozen(dict[str, Any]):
    """Cannot be set."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("'Frozen' object does not support item assignment")


class Shared(dict[str, Any]):
    """Is its own copy."""

    def __copy__(self) -> Shared:
        return self


class Made(dict[str, Any]):
    """Is made with arguments, which a copy does not know."""

    def __new__(cls, origin: str, **values: Any) -> Made:
        return super().__new__(cls)

    def __init__(self, origin: str, **values: Any) -> None:
        super().__init__(**values)


class Attributes(dict[str, Any]):
    """Its items are its attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__dict__ = self


@pytest.mark.parametrize("given", [Frozen(x=torch.ones(1), n=3), Shared(x=torch.ones(1), n=3)])
def test_dictionaries_that_cannot_be_copied_and_set(given: Any) -> None:
    """A plain one takes their place, and nothing is done to them."""
    moved = to_device(given, torch.device("meta"))
    assert type(moved) is dict
    assert (list(moved), moved["x"].is_meta, moved["n"]) == (["x", "n"], True, 3)
    assert not given["x"].is_meta


def test_a_dictionary_that_is_made_with_arguments() -> None:
    """As above."""
    moved = to_device(Made("here", x=torch.ones(1)), torch.device("meta"))
    assert type(moved) is dict
    assert moved["x"].is_meta


def test_a_dictionary_whose_items_are_attributes() -> None:
    """One is not moved without the other."""
    given = Attributes(x=torch.ones(1))
    moved = to_device(given, torch.device("meta"))
    assert moved.x is moved["x"]
    assert moved.x.is_meta
    moved.y = 1
    assert moved["y"] == 1
    assert not given.x.is_meta


class Items(dict[str, Any]):
    """Fails for an attribute that is no item with another error than attributes do."""

    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("more", [{}, {"to": print}])
def test_a_dictionary_that_fails_for_a_name_that_it_lacks(more: dict[str, Any]) -> None:
    """It has no ``to`` of its own, also where an item is called so."""
    moved = to_device(Items(x=torch.ones(1), **more), torch.device("meta"))
    # Python 3.10 asks the object itself how it is copied, so a plain dictionary comes back.
    assert type(moved) is (Items if sys.version_info >= (3, 11) else dict)
    assert moved["x"].is_meta


def test_data_that_move_themselves_in_place() -> None:
    """Their ``to`` returns nothing."""

    class InPlace(dict[str, Any]):
        def to(self, device: torch.device) -> None:
            self["x"] = self["x"].to(device)

    given = InPlace(x=torch.ones(1))
    assert to_device([given], torch.device("meta"))[0] is given
    assert given["x"].is_meta


def test_an_error_of_a_move_is_that_of_the_move() -> None:
    """It is none of the dictionary's."""

    class Immovable:
        def to(self, device: torch.device) -> None:
            raise TypeError("no room")

    with pytest.raises(TypeError, match="no room"):
        to_device(Attributes(x=Immovable()), torch.device("meta"))


def test_what_can_be_read_only_once_is_refused() -> None:
    """The second evaluation would have nothing, and say so to nobody."""
    with pytest.raises(ValueError, match="only once"):
        Evaluator(iter([torch.zeros(1)]), lambda model, data: {})
