"""The order in which torch writes tensors, which its versions do not share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dalsegno.elastic.universal import recording
from dalsegno.elastic.universal.recording import recorded, storage_order


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    recording._sorts_as_text.cache_clear()
    yield
    recording._sorts_as_text.cache_clear()


def writes(monkeypatch: pytest.MonkeyPatch, order: list[int]) -> None:
    """Lets torch write in this order."""
    monkeypatch.setattr(recording, "recorded", lambda content: [part for n in order for part in (b"head", n + 1)])


def test_it_is_the_order_of_this_torch() -> None:
    sizes = [part for part in recorded([torch.empty(n + 1, dtype=torch.uint8) for n in range(30)]) if type(part) is int]
    assert sizes == [n + 1 for n in storage_order(30)]


def test_numbers_may_be_sorted_as_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    writes(monkeypatch, sorted(range(11), key=str))
    assert storage_order(12) == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]


def test_an_order_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    writes(monkeypatch, list(reversed(range(11))))
    with pytest.raises(RuntimeError, match="an order that is not known"):
        storage_order(3)
