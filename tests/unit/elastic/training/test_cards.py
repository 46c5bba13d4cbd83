"""When the host waits for its cards, and what it asks of their communicators. The cards themselves: `tests/gpu`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from dalsegno.elastic.saving.staging import HostBuffers
from dalsegno.elastic.training.cards import cards_of, lost_over_cards
from dalsegno.elastic.training.pace import FIRST_STEPS, Pace


class Training:
    """Steps on a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pace = Pace(lambda: self.now)

    def step(
        self,
        seconds: float,
        optimizer: float,
        times: int = 1,
        optimizers: int = 1,
        unseen: Sequence[int] = (),
    ) -> None:
        """``unseen``: the optimizers in front of which it does not wait."""
        for _ in range(times):
            self.now += seconds - optimizer
            for number in range(optimizers):
                self.pace.begins()
                if number not in unseen and self.pace.may_wait:
                    self.pace.waited()
                self.now += optimizer / optimizers
                self.pace.stepped()
            self.pace.boundary(again=False)


def test_it_waits_where_a_step_is_long_beside_its_optimizers() -> None:
    training = Training()
    training.step(0.5, 0.004, FIRST_STEPS)
    assert (training.pace.may_wait, training.pace.came) == (False, False)
    training.step(0.5, 0.004, 2)
    assert (training.pace.may_wait, training.pace.came) == (True, True)


@pytest.mark.parametrize("optimizers", [1, 3])
def test_it_does_not_where_the_card_would_idle_for_long(optimizers: int) -> None:
    training = Training()
    training.step(0.05, 0.004, 50, optimizers)
    assert not training.pace.may_wait
    assert not training.pace.came
    training.step(2.0, 0.004, 20, optimizers)
    assert training.pace.came


@pytest.mark.parametrize("unseen", [[0], [1], [2], [0, 1, 2]])
def test_all_gradients_have_come_if_each_optimizer_was_waited_for(unseen: list[int]) -> None:
    """Each may have a backward pass of its own."""
    training = Training()
    training.step(1.0, 0.001, FIRST_STEPS + 2, 3)
    assert training.pace.came
    training.step(1.0, 0.001, 1, 3, unseen)
    assert not training.pace.came
    training.step(1.0, 0.001, 1, 3)
    assert training.pace.came


def test_a_boundary_that_is_noted_again_is_the_same() -> None:
    training = Training()
    training.step(1.0, 0.001, FIRST_STEPS + 2)
    training.now += 30.0
    training.pace.boundary(again=True)
    assert training.pace.came
    training.pace.begins()  # An optimizer that was not waited for.
    training.pace.boundary(again=True)
    assert not training.pace.came
    training.step(1.0, 0.001)
    assert training.pace.came
    training.pace.boundary(again=False)  # A step without an optimizer's.
    assert not training.pace.came


def test_a_state_in_host_memory_lies_on_no_card() -> None:
    assert cards_of([torch.ones(2), torch.ones(3)]) is None


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="type meta"):
        cards_of([torch.ones(2), torch.ones(2, device="meta")])


class FakeStreams:
    """What torch would give for cards, and which of them a thread is in."""

    def __init__(self) -> None:
        self.made = list[tuple[torch.device, int]]()
        self.current = list[Any]()
        self.cards = list[torch.device]()

    def make(self, device: torch.device, priority: int = 0) -> Any:
        self.made.append((device, priority))
        return SimpleNamespace(device=device, wait_stream=lambda other: None, synchronize=lambda: None)

    @contextlib.contextmanager
    def within(self, stream: Any) -> Iterator[None]:
        assert self.cards, "leaving it would make a context on the first card"
        self.current.append(stream)
        yield
        self.current.remove(stream)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        self.cards.append(device)
        yield
        self.cards.remove(device)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    found = FakeStreams()
    monkeypatch.setattr(torch.cuda, "Stream", found.make)
    monkeypatch.setattr(torch.cuda, "stream", found.within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", found.on)
    return found


def on_cards(*numbers: int) -> list[Any]:
    return [SimpleNamespace(device=torch.device("cuda", number)) for number in numbers]


def test_cards_stay_the_same_ones_while_the_state_lies_there(streams: FakeStreams) -> None:
    """torch deals its 32 streams in turn: of many one would be that in which NCCL hangs."""
    first = cards_of(on_cards(1, 0, 1))
    assert cards_of(on_cards(0, 1), first) is first
    second = cards_of(on_cards(1), first)
    assert second is not first
    assert cards_of([torch.ones(1)], second) is None
    assert [(device.index, priority) for device, priority in streams.made] == [(0, -1), (1, -1), (1, -1)]


def test_copies_go_through_the_cards_own_streams(streams: FakeStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = cards_of(on_cards(0, 1))
    assert cards is not None
    found = list[Any]()

    def copy(buffers: HostBuffers, content: Any) -> Any:
        assert streams.current == cards._own
        found.extend(buffers._stream(torch.device("cuda", number)) for number in (0, 1))
        return content

    monkeypatch.setattr(HostBuffers, "copy", copy)
    assert cards.fetch({"a": 1}) == {"a": 1}
    assert (found, len(streams.made)) == (cards._own, 2)
    assert not streams.current


class Backend:
    def __init__(self, name: str, error: str | None) -> None:
        self.name = lambda: name
        if error is not None:
            self.get_error = lambda: SimpleNamespace(name=error)


def group(backend: Backend | None) -> Any:
    def found(device: torch.device) -> Backend:
        assert device.type == "cuda"
        if backend is None:
            raise RuntimeError("no backend for this device")
        return backend

    return SimpleNamespace(_get_backend=found)


@pytest.mark.parametrize(
    ("backends", "found"),
    [
        ([], ""),
        ([None, Backend("gloo", None)], ""),
        ([Backend("nccl", "SUCCESS")], ""),
        ([Backend("nccl", "SUCCESS"), None, Backend("nccl", "COMM_ERROR")], "nccl says COMM_ERROR"),
    ],
)
def test_all_communicators_over_cards_are_asked(
    monkeypatch: pytest.MonkeyPatch, backends: list[Backend | None], found: str
) -> None:
    monkeypatch.setattr(distributed_c10d, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed_c10d, "_world", SimpleNamespace(pg_map=[group(one) for one in backends]))
    assert lost_over_cards() == found


def test_one_that_cannot_be_asked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed_c10d, "_world", SimpleNamespace(pg_map=[group(Backend("nccl", None))]))
    with pytest.raises(ValueError, match="does not say whether a peer is lost"):
        lost_over_cards()


def test_without_a_group_nobody_is_lost() -> None:
    assert lost_over_cards() == ""
