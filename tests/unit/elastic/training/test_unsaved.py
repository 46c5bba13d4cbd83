"""A run with nowhere to save, or nothing to save with: it trains all the same, and no option of saving breaks it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dalsegno.elastic import Evaluator, Tracked, Trainer, background
from dalsegno.elastic.rank.identity import Identity
from dalsegno.elastic.training import entry
from dalsegno.elastic.training.session import BareSession

STEPS = 6


@contextmanager
def opened(run_dir: Path | None = None, **identity: Any) -> Iterator[BareSession]:
    """A session in a world of one, outside `dlrover-run`."""
    handler = signal.getsignal(signal.SIGTERM)
    session = entry._open(BareSession, Identity(run_dir=run_dir, **identity), 0, True)
    try:
        yield session
    finally:
        session.close()
        signal.signal(signal.SIGTERM, handler)


def never(path: Path) -> None:
    raise AssertionError(f"called with {path}")


def state() -> dict[str, object]:
    raise AssertionError("called")


@pytest.mark.parametrize("save", [never, background(state)])
@pytest.mark.parametrize("every", [0, 1, 2])
def test_without_a_directory_the_training_goes_to_its_end(
    save: object, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the cadence of saves nor a new best asks for one; one line says that nothing will be saved."""
    with opened() as session, caplog.at_level(logging.WARNING):
        session.track("loss")
        made = []
        for number in session.steps(range(100), max_steps=STEPS, save=save, save_every=every):
            made.append(number)
            session.improved(1.0 - 0.1 * number)
        assert (made, session.step) == (list(range(STEPS)), STEPS)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "nothing will be saved" in line
    assert "checkpoint_dir" in line


def test_without_a_directory_the_best_is_known_but_not_worth_saving() -> None:
    """`improved` and `measured` tell the truth; a loop of one's own is not asked to save where it cannot."""
    with opened() as session:
        session.track("loss", min_delta=0.1)
        said = []
        for value in (3.0, 2.95, 2.0, 2.5, float("nan")):
            session.begin_step()
            said.append(session.improved(value))
            session.end_step()
            assert not session.worth_saving
        assert said == [True, False, True, False, False]
        assert session.measured(1.0)
        assert not session.measured(1.0)
        assert session.best is None


def test_without_a_directory_a_mistake_is_one_all_the_same() -> None:
    """A script that tracks nothing hears of it where it is tried out, not where it first runs with a directory."""
    with opened() as session:
        with pytest.raises(RuntimeError, match="nothing is tracked"):
            session.improved(1.0)
        with pytest.raises(RuntimeError, match="nothing is tracked"):
            session.measured(1.0)


def test_a_directory_and_nothing_to_save_with(tmp_path: Path) -> None:
    """A new best is then nobody's to save; steps between saves without a save are a mistake, said at once."""
    with opened(tmp_path) as session:
        session.track("loss")
        with pytest.raises(ValueError, match=r"save_every=2.*save="):
            session.steps(range(100), max_steps=STEPS, save_every=2)
        for number in session.steps(range(100), max_steps=STEPS):
            session.improved(-float(number))
        assert session.step == STEPS
        assert session.best is None


def test_a_save_that_is_left_out_where_there_is_no_directory() -> None:
    """`save=save if s.can_save else None` may keep its `save_every`."""
    with opened() as session:
        assert len(list(session.steps(range(100), max_steps=STEPS, save_every=2))) == STEPS


@pytest.mark.parametrize("in_background", [False, True])
def test_a_trainer_without_a_directory_fits(in_background: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of its options of saving; what it fitted has metrics, and no best checkpoint."""
    monkeypatch.setattr(entry, "_sessions", [])
    trainer = Trainer(
        nn.Linear(4, 1),
        torch.randn(20, 4),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, rows: model(rows).square().mean(),
        global_batch_size=4,
        max_micro_batch_size=2,
        max_steps=STEPS,
        save_every=2,
        save_in_background=in_background,
        keep=1,
        evaluator=Evaluator(torch.randn(6, 4), lambda model, rows: {"loss": (model(rows).square(), len(rows))}),
        evaluate_every=1,
        track=Tracked("loss"),
        progress=False,
    )
    fitted = trainer.fit()
    assert (fitted.step, fitted.best) == (STEPS, None)
    assert fitted.metrics["loss"] >= 0
