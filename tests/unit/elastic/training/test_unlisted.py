"""What a model has in it and no `state_dict()` lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dalsegno.elastic.training.unlisted import Unlisted


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self._seen, self.mode, self.limit = nn.Linear(2, 2), 0, 0, "a", None
        self.register_buffer("warm", torch.zeros(()), persistent=False)
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.register_buffer("kept", torch.zeros(()))
        self.beside = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self._seen += len(x)
        self.warm += 1
        self.kept += 1
        return self.linear(x) * self.mask[0]


class Saves(Counting):
    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


def test_what_changes_is_found() -> None:
    """Wherever it lies in the model; not what stays, nor what is saved, nor a move to train or eval."""
    model = nn.Sequential(Counting())
    looked = Unlisted(model)
    model.eval()
    assert looked.changed_buffers() == {}
    assert looked.changed_attributes() == ()
    model(torch.ones(3, 2))
    assert list(looked.changed_buffers()) == ["0.warm"]
    assert looked.changed_attributes() == ("0.calls", "0._seen")
    model[0].beside += 1
    assert looked.changed_attributes() == ("0.calls", "0._seen", "0.beside")


def test_a_buffer_that_was_replaced() -> None:
    """By another one of the same name; by the same values it is as it was."""
    model = Counting()
    looked = Unlisted(model)
    model.mask, model.warm = torch.ones(4), torch.tensor(1e8 + 8)
    assert list(looked.changed_buffers()) == ["warm"]
    model.double()
    assert sorted(looked.changed_buffers()) == ["mask", "warm"]


def test_buffers_come_back_where_they_fit() -> None:
    model, again = Counting(), Counting()
    model(torch.ones(1, 2))
    Unlisted(again).load({"warm": model.warm, "mask": torch.zeros(5), "gone": torch.zeros(1)})
    assert again.warm == 1
    assert again.mask.tolist() == [1.0] * 4


class Queue(nn.Module):
    """Makes what it keeps in its first batch, or lets it grow."""

    def __init__(self, kind: str, first: int = 0) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.ones(2))
        if kind != "absent":
            self.register_buffer("rows", torch.zeros(first, 2) if kind == "grows" else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = getattr(self, "rows", None)
        rows = x if rows is None else torch.cat([rows, x])
        if self.kind == "absent":
            self.register_buffer("rows", rows, persistent=False)
        else:
            self.rows = rows
        return x * self.weight


@pytest.mark.parametrize("kind", ["none", "grows", "absent"])
def test_buffers_that_come_or_grow_come_back(kind: str) -> None:
    """Again and again; and not in a model that is made in another way."""
    model = nn.Sequential(Queue(kind))
    looked = Unlisted(model)
    assert looked.changed_buffers() == {}
    for rows in (1, 3, 4):
        model(torch.full((1 if rows != 3 else 2, 2), float(rows)))
        saved = looked.changed_buffers()
        model = nn.Sequential(Queue(kind))
        looked = Unlisted(model)
        looked.load(saved)
        assert model[0].rows.shape == (rows, 2)
        assert "0.rows" not in model.state_dict()
    assert model[0].rows[:, 0].tolist() == [1.0, 3.0, 3.0, 4.0]
    other = nn.Sequential(Queue("grows", 7))
    Unlisted(other).load(saved)
    assert other[0].rows.shape == (7, 2)


def test_modules_that_save_what_they_count_are_left_alone() -> None:
    model = Saves()
    looked = Unlisted(model)
    model(torch.ones(1, 2))
    assert looked.changed_attributes() == ()


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Counting()
    looked = Unlisted(model)
    looked.tell()
    assert caplog.messages == []
    model(torch.ones(1, 2))
    looked.tell()
    looked.tell()
    (line,) = caplog.messages
    assert line.startswith("Counting.calls, Counting._seen changed while the model trained, and are in no checkpoint")


def test_buffers_that_nobody_saves_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Counting()
    looked = Unlisted(model)
    looked.tell_unsaved()
    assert caplog.messages == []
    model(torch.ones(1, 2))
    for _ in range(6):
        looked.tell_unsaved()
    buffers, attributes = caplog.messages
    assert buffers.startswith("warm changed while the model trained, and is in no checkpoint")
    assert buffers.endswith("leave persistent=False out where it is registered")
    assert attributes.startswith("Counting.calls, Counting._seen changed")


def test_a_buffer_that_changes_late_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Attributes are looked at in the first saves only; each save compares the buffers, until one was named."""
    model = Counting()
    looked = Unlisted(model)
    for _ in range(9):
        looked.tell_unsaved()
    model(torch.ones(1, 2))
    looked.tell_unsaved()
    (line,) = caplog.messages
    assert line.startswith("warm changed while the model trained")


def test_a_buffer_is_named_behind_an_attribute(caplog: pytest.LogCaptureFixture) -> None:
    model = Counting()
    looked = Unlisted(model)
    model.calls += 1
    looked.tell_unsaved()
    model.warm += 1
    looked.tell_unsaved()
    attribute, buffer = caplog.messages
    assert attribute.startswith("Counting.calls changed")
    assert buffer.startswith("warm changed")


def test_a_buffer_that_was_replaced_by_one_in_its_place() -> None:
    """Python gives the number of an object that is gone to the next one: that is not the same buffer."""
    model = Counting()
    looked = Unlisted(model)
    for _ in range(200):
        del model.warm
        model.register_buffer("warm", torch.full((), 7.0), persistent=False)
        assert list(looked.changed_buffers()) == ["warm"]


@pytest.mark.parametrize("kind", ["sparse", "csr", "conjugate", "negative", "nested", "inference"])
def test_tensors_of_unusual_kinds_are_left_alone(kind: str) -> None:
    """Nobody can see whether they change."""
    with torch.inference_mode(kind == "inference"):
        value = torch.eye(3)
    odd = {
        "sparse": lambda: value.to_sparse(),
        "csr": lambda: value.to_sparse_csr(),
        "conjugate": lambda: value.to(torch.complex64).conj(),
        "negative": lambda: value.to(torch.complex64).conj().imag,
        "nested": lambda: torch.nested.nested_tensor([value, value[:2]]),
        "inference": lambda: value,
    }[kind]()
    model = nn.Linear(2, 2)
    model.register_buffer("odd", odd, persistent=False)
    model.beside = odd
    unlisted = Unlisted(model)
    assert unlisted.changed_buffers() == {}
    assert unlisted.changed_attributes() == ()
