"""Which loaders of an evaluation are compared between the ranks: those that deal one data set to all of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

pytest.importorskip("accelerate", reason="needs the extra hf")
import transformers
from accelerate.data_loader import prepare_data_loader

from dalsegno.elastic.data import counts
from dalsegno.elastic.rank.agreement import Unlike
from dalsegno.swift_plugin.hf import evaluating
from dalsegno.swift_plugin.hf.evaluating import check_alike
from dalsegno.swift_plugin.hf.trainer import elastic_class
from tests.unit.elastic.data.test_evaluator import Threads

CPU = torch.device("cpu")
TRAINER = SimpleNamespace(args=SimpleNamespace(device=CPU))


class Rows(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


def prepared(length: int, rank: int, batch_size: int = 4, **options: Any) -> Any:
    """As accelerate makes it of a script's loader."""
    told = {"num_processes": 2, "process_index": rank, "put_on_device": False, **options}
    return prepare_data_loader(DataLoader(range(length), batch_size=batch_size), **told)  # type: ignore[arg-type]


def meet(monkeypatch: pytest.MonkeyPatch, make: Callable[[int], Any]) -> list[Any]:
    """What the comparison comes to on each of two ranks."""
    threads = Threads(2)
    monkeypatch.setattr(counts, "dist", threads)
    return threads.run(lambda rank: check_alike(TRAINER, make(rank)))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda rank: prepared((40, 36)[rank], rank), "length of the data set is 40 on rank 0, 36 on rank 1"),
        (lambda rank: prepared(40, rank, (4, 8)[rank]), "batch_size is 4 on rank 0, 8 on rank 1"),
    ],
)
def test_what_is_dealt_must_be_the_same(monkeypatch: pytest.MonkeyPatch, make: Any, line: str) -> None:
    found = meet(monkeypatch, make)
    assert [type(one) for one in found] == [Unlike, Unlike], found
    assert line in str(found[0]) == str(found[1])


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: prepared(41, rank),
        lambda rank: prepared(9, rank, even_batches=False),
        lambda rank: prepared((40, 1)[rank], rank, dispatch_batches=True, put_on_device=True, device=CPU),
        lambda rank: DataLoader(range((5, 4)[rank]), batch_size=4),  # type: ignore[arg-type]
        lambda rank: DataLoader(Rows(), batch_size=4),
        lambda rank: prepared(40, rank) if rank else [1, 2],
    ],
    ids=["same", "uneven", "rank 0 reads", "of each rank", "iterable", "list"],
)
def test_what_may_differ(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Loaders that deal nothing, and what rank 0 alone reads."""
    assert meet(monkeypatch, make) == [None, None]


class Calls(transformers.Trainer):  # type: ignore[misc]  # transformers is not typed
    """Does something of its own, and then what transformers does."""

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        return super().evaluation_loop(["another loader"], *args, **kwargs)


class Alone(transformers.Trainer):  # type: ignore[misc]
    """Has a loop of its own, which meets nobody."""

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        return "its own"


@pytest.mark.parametrize(
    ("base", "found", "compared"),
    [
        (transformers.Trainer, "theirs", ["loader"]),
        (transformers.Seq2SeqTrainer, "theirs", ["loader"]),
        (Calls, "theirs", ["another loader"]),
        (Alone, "its own", []),
    ],
)
def test_only_what_transformers_evaluates_is_compared(
    monkeypatch: pytest.MonkeyPatch, base: Any, found: str, compared: list[str]
) -> None:
    """A loop of a script's own may be rank 0's alone, which waited for the others for ever."""
    seen: list[str] = []
    monkeypatch.setattr(transformers.Trainer, "evaluation_loop", lambda self, loader, description: "theirs")
    monkeypatch.setattr(evaluating, "check_alike", lambda trainer, loader: seen.extend(loader))
    cls = elastic_class(base)
    assert cls.evaluation_loop(cls.__new__(cls), ["loader"], description="Evaluation") == found
    assert seen == compared


def held_out(data: Any, kind: Any = SimpleNamespace, **options: Any) -> Any:
    """A Trainer that will evaluate these."""
    told = {"eval_strategy": "steps", "eval_batch_size": 4, "world_size": 2, "device": CPU, **options}
    made = kind()
    made.args, made.eval_dataset = SimpleNamespace(**told), data
    config = SimpleNamespace(dispatch_batches=told.pop("dispatch_batches", None))
    made.accelerator = SimpleNamespace(dataloader_config=config)
    return made


class OwnLoader(SimpleNamespace):
    def get_eval_dataloader(self) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda rank: held_out(range((40, 36)[rank])), "length of the data set is 40 on rank 0, 36 on rank 1"),
        (
            lambda rank: held_out({"a": range(4), "b": range((40, 36)[rank])}),
            "length of the data set b is 40 on rank 0, 36 on rank 1",
        ),
        (
            lambda rank: held_out(range(40), eval_batch_size=(4, 8)[rank]),
            "batch size of evaluations is 4 on rank 0, 8 on rank 1",
        ),
        (lambda rank: held_out(range((40, 36)[rank]), eval_strategy="no"), ""),
        (lambda rank: held_out(range((40, 36)[rank]), OwnLoader), ""),
        (lambda rank: held_out(range((40, 1)[rank]), dispatch_batches=True), ""),
        (lambda rank: held_out(range(40) if rank else None), ""),
        (lambda rank: held_out(Rows()), ""),
    ],
    ids=["length", "one of several", "batches", "not evaluated", "own loader", "rank 0 reads", "none here", "stream"],
)
def test_what_is_known_before_the_first_step(monkeypatch: pytest.MonkeyPatch, make: Any, line: str) -> None:
    """The steps until the first evaluation were for nothing."""
    threads = Threads(2)
    monkeypatch.setattr(counts, "dist", threads)
    found = threads.run(lambda rank: evaluating.check_held_out(make(rank)))
    if line:
        assert [type(one) for one in found] == [Unlike, Unlike], found
        assert line in str(found[0]) == str(found[1])
    else:
        assert found == [None, None]
