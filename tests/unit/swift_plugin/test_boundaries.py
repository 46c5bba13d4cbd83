"""What a boundary of the session makes of a Trainer's step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")

from transformers import TrainerControl

from dalsegno.elastic.rank.exchange import Boundary
from dalsegno.swift_plugin.hf.boundaries import Boundaries


class Asked:
    """As much of a session as a boundary asks for; notes what is compared, and how often an end is."""

    def __init__(self) -> None:
        self.compared, self.ends = list[Any](), 0

    def compare(self, alike: Any) -> None:
        self.compared.append(alike)

    def check_ends(self) -> None:
        self.ends += 1


def made(boundary: Boundary) -> tuple[Boundaries, Any]:
    """The callback, and our run, which stands at this boundary."""
    loader = SimpleNamespace(position=SimpleNamespace(data_epoch=1, samples=3), endless=False)
    run = SimpleNamespace(stepped=lambda: boundary, draining=False, loader=loader, session=Asked())
    return Boundaries(SimpleNamespace(elastic_run=run)), run


def at(boundary: Boundary, **control: bool) -> tuple[TrainerControl, Any]:
    """The Trainer's control and our run, behind a step that ends with this boundary."""
    callback, run = made(boundary)
    told = TrainerControl(**control)
    callback.on_step_end(None, SimpleNamespace(num_train_epochs=2), told)
    return told, run


def test_a_save_by_order_is_the_trainers_own() -> None:
    """It saves at the end of this step as if its save_steps said so; without an order nothing changes."""
    assert at(Boundary(3, True, save=True))[0].should_save
    assert not at(Boundary(3, True))[0].should_save
    assert at(Boundary(3, True), should_save=True)[0].should_save


def test_a_drain_is_for_later() -> None:
    """The Trainer still has to evaluate and to save; at its end there is nothing to drain."""
    assert at(Boundary(3, True, drain=True))[1].draining
    assert not at(Boundary(3, True, drain=True, end=True))[1].draining
    assert not at(Boundary(3, True, drain=True), should_training_stop=True)[1].draining
    assert not at(Boundary(3, True, drain=True), should_epoch_stop=True)[1].draining


@pytest.mark.parametrize("stops", [False, True])
def test_a_drain_is_one_of_all_ranks(stops: bool) -> None:
    """A rank that ends the training alone would not come to the save. Asked only where there is a drain."""
    drain = at(Boundary(3, True, drain=True), should_training_stop=stops)[1]
    assert [list(one.values()) for one in drain.session.compared] == [[stops]]
    for other in (Boundary(3, True), Boundary(3, True, save=True), Boundary(3, True, drain=True, end=True)):
        assert at(other, should_training_stop=stops)[1].session.compared == []


@pytest.mark.parametrize("stops", [False, True])
def test_who_ends_the_training_asks_whether_all_do(stops: bool) -> None:
    """Behind the last step, before the evaluation and the save that may follow."""
    callback, run = made(Boundary(3, True))
    callback.on_epoch_end(None, SimpleNamespace(num_train_epochs=2), TrainerControl(should_training_stop=stops))
    assert (run.session.ends, run.epoch_ended) == (int(stops), True)
