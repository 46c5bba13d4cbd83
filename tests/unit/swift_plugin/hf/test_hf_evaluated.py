"""Which loaders of an evaluation are compared between the ranks: those that deal one data set to all of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

pytest.importorskip("accelerate", reason="needs the extra hf")
from accelerate.data_loader import prepare_data_loader

from dalsegno.elastic.data import counts
from dalsegno.elastic.rank.agreement import Unlike
from dalsegno.swift_plugin.hf.evaluating import check_alike
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
