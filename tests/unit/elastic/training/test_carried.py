"""Gradients that an optimizer uses behind the boundary where they were are named once; dropped ones are not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

from dalsegno.elastic.rank.clearing import Unstepped
from dalsegno.elastic.training.carried import LOOKS, CarriedGradients
from dalsegno.elastic.training.whole_steps import WholeSteps


class Training:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.watch: CarriedGradients | None = CarriedGradients(say=self._say)
        self.model = nn.Linear(2, 2)
        self.optimizer: Optimizer = Adam(self.model.parameters())
        self.later = Adam(self.model.parameters())
        self.step = 0

    def _say(self, text: str, *values: object) -> None:
        self.said.append(text % values)

    def backward(self, factor: float = 1.0) -> None:
        (self.model(torch.ones(1, 2)).sum() * factor).backward()

    def end(self) -> None:
        self.step += 1
        if self.watch is not None:
            self.watch.boundary(self.step)


def usual(one: Training) -> None:
    one.optimizer.zero_grad()
    one.backward()
    one.optimizer.step()
    one.end()


def every(count: int) -> Callable[[Training], None]:
    def loop(one: Training) -> None:
        one.backward()
        if one.step % count == count - 1:
            one.optimizer.step()
            one.optimizer.zero_grad()
        one.end()

    return loop


def without_every_second(one: Training, factor: float) -> None:
    one.optimizer.zero_grad()
    one.backward(factor if one.step % 2 else 1.0)
    if one.step % 2 == 0:
        one.optimizer.step()
    one.end()


def left_out(one: Training) -> None:
    """A scaler leaves steps out that are not finite."""
    without_every_second(one, float("inf"))


def stands_out(one: Training) -> None:
    """The script drops what it does not like."""
    without_every_second(one, 1.0)


def nothing(one: Training) -> None:
    if one.step % 2 == 0:
        one.backward()
        one.optimizer.step()
        one.optimizer.zero_grad()
    one.end()


def zeros(one: Training) -> None:
    one.backward()
    if one.step % 2 == 0:
        one.optimizer.step()
    one.optimizer.zero_grad(set_to_none=False)
    one.end()


def in_turn(one: Training) -> None:
    """Two optimizers, as of two players."""
    one.backward()
    SGD(one.model.parameters(), lr=0.1).step() if one.step % 2 else one.optimizer.step()
    one.model.zero_grad()
    one.end()


@pytest.mark.parametrize("loop", [usual, left_out, stands_out, nothing, zeros, in_turn])
def test_what_is_not_carried_is_not_named(loop: Callable[[Training], None]) -> None:
    one = Training()
    for _ in range(20):
        loop(one)
    assert not one.said


@pytest.mark.parametrize("count", [2, 5])
def test_what_is_carried_is_named_once(count: int) -> None:
    one = Training()
    for _ in range(30):
        every(count)(one)
    assert len(one.said) == 1
    assert "the end of step 1," in one.said[0]


def test_a_loop_that_is_over_says_nothing() -> None:
    one = Training()
    every(2)(one)
    one.watch = None
    gc.collect()
    every(2)(one)
    assert not one.said


def test_what_is_never_seen_to_step_is_not_waited_for_long() -> None:
    """Whole steps in a CUDA graph, or weights that are changed by hand."""
    one = Training()
    watch = CarriedGradients([one.optimizer], say=one._say)
    here = []
    for step in range(1, LOOKS + 9):
        one.backward()
        watch.boundary(step)
        here.append(watch.here)
    assert here == [True] * (LOOKS - 1) + [False] * 9
    (said,) = one.said
    assert said.startswith("an optimizer has made no step for 64 batches, although its weights have gradients")


def in_every(count: int) -> Callable[[Training], None]:
    """One optimizer steps behind each batch, the other one, of other weights, behind every so many."""
    other = nn.Linear(2, 2)
    rare = Adam(other.parameters())

    def loop(one: Training) -> None:
        one.optimizer.zero_grad()
        (one.model(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum().backward()
        one.optimizer.step()
        if one.step % count == count - 1:
            rare.step()
            rare.zero_grad()
        one.end()

    return loop


def with_unused(count: int) -> Callable[[Training], None]:
    """The first weights are used for nothing, only so that each has a gradient."""
    unused = nn.Linear(2, 2)

    def loop(one: Training) -> None:
        if one.step == 0:
            one.optimizer = Adam([*unused.parameters(), *one.model.parameters()])
        (one.model(torch.ones(1, 2)).sum() + 0 * sum(weight.sum() for weight in unused.parameters())).backward()
        if one.step % count == count - 1:
            one.optimizer.step()
            one.optimizer.zero_grad()
        one.end()

    return loop


@pytest.mark.parametrize("loop", [in_every(3), with_unused(3)])
def test_what_is_carried_is_seen_beside_what_is_not(loop: Callable[[Training], None]) -> None:
    one = Training()
    for _ in range(12):
        loop(one)
    assert len(one.said) == 1
    assert one.watch is not None
    here = []
    for _ in range(6):
        loop(one)
        here.append(one.watch.here)
    assert here == [True, True, False] * 2


def by_turns(*, front: bool, both: bool = False) -> Callable[[Training], None]:
    """Two networks in turn, as torch's tutorials train one.

    Args:
        front: Gradients are cleared before the backward pass, not behind the step.
        both: The second one's loss goes through the first one, as in a GAN.
    """
    other = nn.Linear(2, 2)
    second = Adam(other.parameters())

    def loop(one: Training) -> None:
        turn = one.step % 2 == 0
        optimizer = one.optimizer if turn else second
        if front:
            optimizer.zero_grad()
        out = one.model(torch.ones(1, 2)) if turn or both else torch.ones(1, 2)
        (out if turn else other(out)).sum().backward()
        optimizer.step()
        if not front:
            optimizer.zero_grad()
        one.end()

    return loop


def retired(one: Training) -> None:
    """An optimizer steps five times, then another one trains the same weights."""
    optimizer = one.optimizer if one.step < 5 else one.later
    optimizer.zero_grad()
    one.backward()
    optimizer.step()
    one.end()


@pytest.mark.parametrize("loop", [by_turns(front=True), by_turns(front=False), retired, usual, in_turn])
@pytest.mark.parametrize("idle", [False, True])
def test_what_an_optimizer_has_used_puts_nothing_off(loop: Callable[[Training], None], idle: bool) -> None:
    """Also not for one that has the same weights, and does nothing yet."""
    one = Training()
    if idle:
        one.watch = CarriedGradients([Adam(one.model.parameters()), one.optimizer], say=one._say)
    assert one.watch is not None
    for _ in range(40):
        loop(one)
        assert not one.watch.here
    assert not one.said


def test_what_is_dropped_puts_something_off_once() -> None:
    """Of a GAN: the generator's loss leaves gradients with the discriminator, which clears them before its turn."""
    one = Training()
    assert one.watch is not None
    loop, here = by_turns(front=True, both=True), []
    for _ in range(12):
        loop(one)
        here.append(one.watch.here)
    assert here == [False, True] + [False] * 10
    assert not one.said


def replaced(count: int, *, front: bool = False, by: str = "mean", model: bool = False) -> Callable[[Training], None]:
    """The mean of the gradients is another tensor than their sum; or each sum is a new one.

    Args:
        front: Gradients are cleared before the first batch of a period, not behind the last.
        by: "mean", "sum", or "graph": with `create_graph=True`.
        model: Its method clears them.
    """

    def backward(one: Training) -> None:
        loss = one.model(torch.ones(1, 2)).square().sum()
        if by != "sum":
            loss.backward(create_graph=by == "graph")
            return
        for parameter, gradient in zip(
            one.model.parameters(), torch.autograd.grad(loss, list(one.model.parameters())), strict=True
        ):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def loop(one: Training) -> None:
        clears = one.model if model else one.optimizer
        if front and one.step % count == 0:
            clears.zero_grad()
        backward(one)
        if one.step % count == count - 1:
            for parameter in one.model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.detach() / count
            one.optimizer.step()
            if not front:
                clears.zero_grad()
        one.end()

    return loop


def mean_of_model(count: int) -> Callable[[Training], None]:
    return replaced(count, front=True, model=True)


def mean_in_front(count: int) -> Callable[[Training], None]:
    return replaced(count, front=True)


def sums(count: int) -> Callable[[Training], None]:
    return replaced(count, by="sum")


def sums_in_front(count: int) -> Callable[[Training], None]:
    return replaced(count, front=True, by="sum")


def graphs_in_front(count: int) -> Callable[[Training], None]:
    return replaced(count, front=True, by="graph")


def kept(count: int) -> Callable[[Training], None]:
    """Gradients are set to zero, not taken away."""

    def loop(one: Training) -> None:
        one.backward()
        if one.step % count == count - 1:
            one.optimizer.step()
            one.optimizer.zero_grad(set_to_none=False)
        one.end()

    return loop


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("count", [2, 5, 16, 50])
@pytest.mark.parametrize(
    "loop", [every, replaced, mean_in_front, mean_of_model, sums, sums_in_front, graphs_in_front, kept]
)
def test_each_boundary_that_is_not_whole_is_seen(loop: Callable[[int], Callable[[Training], None]], count: int) -> None:
    """From the first one on, in each process."""
    one = Training()
    one.watch = CarriedGradients([one.optimizer], say=one._say)
    here, step = [], loop(count)
    for _ in range(8 * count):
        step(one)
        here.append(one.watch.here)
    assert here == ([True] * (count - 1) + [False]) * 8
    assert len(one.said) == 1
    assert "the end of step 1," in one.said[0]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("length", [1, 2, 10])
def test_phases_of_two_optimizers_put_something_off_once(length: int, keep: bool) -> None:
    """Both networks are in each loss; the one whose turn it is clears its gradients in front, or sets them to zero."""
    one = Training()
    assert one.watch is not None
    other = nn.Linear(2, 2)
    optimizers, here = (one.optimizer, Adam(other.parameters())), []
    for number in range(20 * length):
        optimizer = optimizers[number // length % 2]
        optimizer.zero_grad(set_to_none=not keep)
        other(one.model(torch.ones(1, 2))).sum().backward()
        optimizer.step()
        one.end()
        here.append(one.watch.here)
    assert here == [True] * (2 * length) + [False] * (18 * length)
    assert not one.said


def test_what_a_closure_clears_is_not_carried() -> None:
    """One network's loss goes through the other one, which is trained behind each fifth batch."""
    one = Training()
    assert one.watch is not None
    other = nn.Linear(2, 2)
    rare, here = LBFGS(other.parameters()), []

    def closure() -> Tensor:
        rare.zero_grad()
        loss: Tensor = other(torch.ones(1, 2)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for number in range(40):
        one.optimizer.zero_grad()
        other(one.model(torch.ones(1, 2))).sum().backward()
        one.optimizer.step()
        if number % 5 == 4:
            rare.step(closure)
        one.end()
        here.append(one.watch.here)
    assert here == [True] * 4 + [False] * 36
    assert not one.said


def test_an_optimizer_that_is_made_anew_is_known_at_once() -> None:
    one = Training()
    assert one.watch is not None
    here = []
    for _ in range(40):
        if one.step % 20 == 0:
            one.optimizer = Adam(one.model.parameters())
        every(4)(one)
        here.append(one.watch.here)
    assert here == [True, True, True, False] * 10


def test_steps_that_a_scaler_leaves_out_say_nothing() -> None:
    """The first ones are, in fp16."""
    one = Training()
    assert one.watch is not None
    here = []
    for _ in range(20):
        one.backward(float("inf") if one.step < 8 else 1.0)
        if one.step % 4 == 3:
            if one.step > 8:
                one.optimizer.step()
            one.optimizer.zero_grad()
        one.end()
        here.append(one.watch.here)
    assert here == [True, True, True, False] * 5


def test_one_that_carries_may_drop_some_or_change_its_habit() -> None:
    one = Training()
    assert one.watch is not None
    here = []
    for _ in range(80):
        one.backward()
        if one.step % 4 == 3:
            if one.step not in (11, 15) and one.step < 40:
                one.optimizer.step()
            one.optimizer.zero_grad()
        one.end()
        here.append(one.watch.here)
    assert here == [True, True, True, False] * 13 + [False] * 28


def test_where_each_boundary_has_some_nothing_is_put_off_for_ever() -> None:
    """Two networks in turn, whose losses leave gradients with each other, and nobody clears what was left."""
    one = Training()
    assert one.watch is not None
    other = nn.Linear(2, 2)
    optimizers, here = (one.optimizer, Adam(other.parameters())), []
    for number in range(100):
        other(one.model(torch.ones(1, 2))).sum().backward()
        optimizer = optimizers[number // 2 % 2]
        optimizer.step()
        optimizer.zero_grad()
        one.end()
        here.append(one.watch.here)
    assert here == [True] * (LOOKS - 1) + [False] * (101 - LOOKS)
    assert len(one.said) == 2
    assert one.said[1].startswith("at each of the last 64 steps some optimizer had gradients that it goes on with")


def test_one_that_has_retired_beside_one_that_carries_puts_nothing_off() -> None:
    one = Training()
    assert one.watch is not None
    here = []
    for _ in range(40):
        optimizer = one.optimizer if one.step < 5 else one.later
        carries = one.step >= 5 and one.step % 2 == 0
        if one.step < 5 or carries:
            optimizer.zero_grad()
        one.backward()
        if not carries:
            optimizer.step()
        one.end()
        here.append(one.watch.here)
    assert here[10:] == [True, False] * 15


def test_one_that_carries_and_steps_no_more_is_not_waited_for_for_ever() -> None:
    one = Training()
    assert one.watch is not None
    for _ in range(8):
        every(4)(one)
    here = []
    for _ in range(2 * LOOKS):
        one.backward()
        one.end()
        here.append(one.watch.here)
    assert here == [True] * (LOOKS - 1) + [False] * (LOOKS + 1)
    assert len(one.said) == 2


@pytest.mark.parametrize("stepped", [False, True])
def test_optimizers_that_nobody_has_named_are_known(stepped: bool) -> None:
    """Where a function saves, as for FSDP2: before the first step of all, and beside one that has stepped."""
    unstepped = Unstepped()
    one, rare = Training(), Adam(nn.Linear(2, 2).parameters())
    # Of another training, which is over.
    model = nn.Linear(2, 2)
    earlier = Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    earlier.step()
    session: Any = SimpleNamespace(saves=Saves(), rank=1, step=1, unstepped=unstepped)
    whole = WholeSteps(session, lambda path: None)
    if stepped:
        one.backward()
        one.optimizer.step()
    whole.boundary(1)
    assert not whole.put_off(False, drain=True)
    for parameter in rare.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    whole.boundary(2)
    assert whole.put_off(False, drain=True)
    rare.step()
    whole.boundary(3)
    assert not whole.put_off(False, drain=True)


class Saves:
    """Of one rank among others: what these say, and when a drain must be done."""

    def __init__(self, others: int = 0, by: float = 1e9) -> None:
        self.others, self.by, self.carries = others, by, False

    def largest(self, value: int) -> int:
        return max(value, self.others)

    def drain_by(self, since: float, most: float) -> float:
        return min(since + most, self.by)


@pytest.mark.parametrize(
    ("others", "by", "drain", "later"),
    [
        (0, 1e12, True, True),
        (0, 1e12, False, True),
        (0, 0.0, True, False),
        (0, 0.0, False, True),
        (2, 1e12, True, False),
    ],
    ids=["a drain", "a save", "too little notice", "a save has time", "another rank has too little notice"],
)
def test_a_drain_waits_as_long_as_each_ranks_notice_allows(others: int, by: float, drain: bool, later: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = Adam(model.parameters())

    class State:
        parts: ClassVar[dict[str, Any]] = {"optimizer": optimizer}

    saves = Saves(others, by)
    session: Any = SimpleNamespace(saves=saves, rank=1, step=1, unstepped=Unstepped())
    whole = WholeSteps(session, State())
    model(torch.ones(1, 2)).sum().backward()
    whole.boundary(1)
    assert whole.put_off(False, drain=drain) is later
    optimizer.step()
    whole.boundary(2)
    saves.others = 0
    assert whole.put_off(False, drain=drain) is False
