"""When a rank may save by itself what lies on a card: what is waited for, read and copied there, and in which order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from dalsegno.elastic.checkpoint import Position
from dalsegno.elastic.training import survival
from dalsegno.elastic.training.held_state import HeldState
from dalsegno.elastic.training.pace import Pace
from dalsegno.elastic.training.session import BareSession
from dalsegno.elastic.training.survival import Survival
from dalsegno.elastic.training.training_state import TrainingState
from tests.unit.elastic.training.test_survival import OPTIONS, Loop


class FakeCards:
    """Cards that do at once what they are asked, until they hang, or have lost a peer."""

    def __init__(self) -> None:
        self.waits, self.fetched = 0, 0
        self.is_aside = False
        self.done = True
        self.lost: Exception | None = None
        self.hangs = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.can_wait = True

    def asked(self) -> list[Any]:
        return [self]

    def wait(self) -> None:
        self.waits += 1
        if not self.goes_on.is_set():
            self.hangs.set()
        assert self.goes_on.wait(30)
        if self.lost is not None:
            raise self.lost

    def have_done(self, events: list[Any]) -> bool:
        return self.done

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        self.is_aside = True
        yield
        self.is_aside = False

    def fetch(self, files: Any) -> Any:
        self.fetched += 1
        return files


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> FakeCards:
    """The state lies on them, and to wait for them costs nothing."""
    made = FakeCards()
    monkeypatch.setattr(survival, "_end", lambda: None)
    monkeypatch.setattr(HeldState, "cards", lambda held, known: made)
    monkeypatch.setattr(Pace, "may_wait", True)
    return made


def test_a_thread_saves_from_a_card_for_which_the_main_one_waits(cards: FakeCards) -> None:
    """What the host had asked for behind that would have been an optimizer's step with gradients that never came."""
    loop = Loop()
    loop.step(4)
    before = loop.model.weight.detach().clone()
    cards.goes_on.clear()
    main = threading.Thread(target=loop.step)
    main.start()
    assert cards.hangs.wait(30)
    loop.survival._unheard()
    assert loop.saved == [(4, Position(0, 4))]
    assert torch.equal(loop.model.weight, before)
    cards.goes_on.set()
    main.join(30)


def test_an_optimizer_does_not_step_with_what_a_lost_peer_has_left(cards: FakeCards) -> None:
    loop = Loop()
    loop.step(4)
    before = loop.model.weight.detach().clone()
    cards.lost = torch.distributed.DistBackendError("a peer is lost")
    with pytest.raises(torch.distributed.DistBackendError):
        loop.step()
    assert torch.equal(loop.model.weight, before)
    assert loop.survival.peer_lost(True) is None  # NCCL's watchdog would end a process that stays.
    assert not loop.saved
    loop.lost()
    assert loop.saved == [(4, Position(0, 4))]


def test_a_boundary_of_a_card_counts_once_it_is_done_and_its_step_began_behind_its_gradients(
    cards: FakeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop()
    loop.step(4)
    cards.done = False
    loop.lost()
    cards.done = True
    monkeypatch.setattr(Pace, "may_wait", False)
    loop.step()
    loop.lost()
    monkeypatch.setattr(Pace, "may_wait", True)
    cards.can_wait = False
    loop.step()
    loop.lost()
    assert not loop.saved
    assert loop.may[-1]  # It waits again where that costs little again.
    cards.can_wait = True
    loop.step()
    loop.lost()
    assert [step for step, _ in loop.saved] == [7]


def test_a_process_with_a_state_on_a_card_does_not_stay_behind_a_crash(cards: FakeCards) -> None:
    loop = Loop()
    loop.session.survivor.may_stay = loop.session.survivor.anywhere = True
    loop.step(4)
    loop.survival._told()
    assert loop.saved


def test_where_it_cannot_be_asked_whether_a_peer_is_lost_nothing_is_saved(
    cards: FakeCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(held: HeldState, known: object) -> None:
        raise ValueError("nccl of this version does not say so")

    monkeypatch.setattr(HeldState, "cards", cannot)
    loop = Loop()
    loop.step(4)
    assert not loop.may[-1]
    loop.lost()
    assert not loop.saved


def test_the_copy_is_left_to_who_tells_the_agent_first(cards: FakeCards, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent gives a rank one second for its word. A copy of some GB takes longer, and each rank would make one."""
    loop, given = Loop(), list[Any]()

    def save(content: Any, files: Any, generators: bytes, *, stays: bool, fetch: Callable[[Any], Any]) -> None:
        assert not cards.fetched
        given.append(fetch(files["model.pt"]))

    monkeypatch.setattr(loop.session.survivor, "save", save)
    loop.step(4)
    loop.lost()
    assert (len(given), cards.fetched) == (1, 1)


def test_what_lies_in_the_hosts_memory_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, given = Loop(), list[Any]()
    monkeypatch.setattr(loop.session.survivor, "save", lambda *_, stays, fetch: given.append(fetch))
    loop.step(4)
    loop.lost()
    assert given == [None]


class Reads:
    """A part that asks the card for a value when its state is wanted, as torch's GradScaler does."""

    stepped_alike = True

    def __init__(self, cards: FakeCards) -> None:
        self._cards = cards
        self.aside = list[bool]()

    def state_dict(self) -> dict[str, Any]:
        self.aside.append(self._cards.is_aside)
        return {"scale": 2.0}


def test_a_state_is_read_past_what_hangs_on_the_card(cards: FakeCards) -> None:
    """In the stream of the training the reading thread would wait for the collective that never ends."""
    loop = Loop()
    loop.step(4)
    reads = Reads(cards)
    loop.part.state_dict = lambda: {**reads.state_dict(), "value": 1}  # type: ignore[method-assign]
    loop.step(8)
    assert not any(reads.aside), "the training reads its own state in its own stream"
    reads.aside.clear()
    loop.lost()
    assert loop.saved
    assert reads.aside
    assert all(reads.aside)
    assert not cards.is_aside


def test_nothing_is_read_before_the_card_is_done_with_the_boundary(cards: FakeCards) -> None:
    """Past the training's stream that would be what the step before it has left."""
    loop = Loop()
    reads = Reads(cards)
    loop.part.state_dict = reads.state_dict  # type: ignore[method-assign]
    loop.step(4)
    reads.aside.clear()
    cards.done = False
    loop.lost()
    assert not loop.saved
    assert not reads.aside


def test_each_look_knows_the_cards_of_the_one_before(cards: FakeCards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each would take another one of torch's few streams."""
    known = list[Any]()

    def found(held: HeldState, before: Any) -> FakeCards:
        known.append(before)
        return cards

    monkeypatch.setattr(HeldState, "cards", found)
    Loop().step(4)
    assert known == [None, cards, cards]


class Adversarial(Loop):
    """Two optimizers in each step, the second one behind a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        # What steps second, and what happens in front of it.
        self.other = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.then = list[Callable[[], None]]()
        state = TrainingState(
            cast(BareSession, self.session), model=self.model, optimizer=self.optimizer, other=self.other
        )
        self.survival = Survival(cast(BareSession, self.session), state.write, OPTIONS, wanted=True)

    def end(self) -> None:
        for call in self.then:
            call()
        self.model(torch.ones(1, 2)).sum().backward()
        self.other.step()
        super().end()


def test_each_optimizer_of_a_step_waits_for_its_own_gradients(cards: FakeCards) -> None:
    loop = Adversarial()
    loop.step(4)
    cards.waits = 0
    loop.step()
    assert cards.waits == 2
    before = loop.model.weight.detach().clone()

    def lose() -> None:
        before.copy_(loop.model.weight)
        cards.lost = torch.distributed.DistBackendError("a peer is lost")

    loop.then.append(lose)
    with pytest.raises(torch.distributed.DistBackendError):
        loop.step()
    assert torch.equal(loop.model.weight, before)
    loop.lost()
    assert not loop.saved


def test_a_boundary_counts_if_all_its_optimizers_began_behind_their_gradients(cards: FakeCards) -> None:
    loop = Adversarial()
    loop.step(4)
    loop.then.append(lambda: setattr(cards, "can_wait", False))
    loop.step()
    loop.lost()
    assert not loop.saved
    loop.then.clear()
    cards.can_wait = True
    loop.step()
    loop.lost()
    assert [step for step, _ in loop.saved] == [6]
