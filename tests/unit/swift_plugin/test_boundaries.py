"""What a boundary of the session makes of a Trainer's step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")

from transformers import TrainerControl

from dalsegno.elastic.rank.exchange import Boundary
from dalsegno.swift_plugin.hf.boundaries import Boundaries


def at(boundary: Boundary, **control: bool) -> tuple[TrainerControl, Any]:
    """The Trainer's control and our run, behind a step that ends with this boundary."""
    position = SimpleNamespace(data_epoch=1, samples=3)
    run = SimpleNamespace(
        stepped=lambda: boundary, draining=False, loader=SimpleNamespace(position=position, endless=False)
    )
    told = TrainerControl(**control)
    Boundaries(SimpleNamespace(elastic_run=run)).on_step_end(None, SimpleNamespace(num_train_epochs=2), told)
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
