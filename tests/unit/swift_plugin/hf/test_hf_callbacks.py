"""What callbacks of somebody's own count or change, through a leave and a resume."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from dalsegno.elastic import Drained
from dalsegno.elastic.rank.agreement import Refusal
from dalsegno.swift_plugin import hf as plugin
from tests.unit.swift_plugin.hf import test_hf_trainer as hf

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

own_session = hf.own_session


class Scheduled(Trainer):  # type: ignore[misc]  # transformers is not typed
    """With a scheduler that makes each rate from the one before."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        return self.lr_scheduler


class Halves(TrainerCallback):  # type: ignore[misc]
    """Halves the rate behind a step."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.rates[state.global_step] = optimizer.param_groups[0]["lr"]

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if state.global_step == 4:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5


def test_a_rate_that_is_set_by_hand_stays(tmp_path: Path) -> None:
    """The optimizer's own state has it; the scheduler knows only what it has set itself."""
    whole, first, second = Halves(), Halves(), Halves()
    wanted = hf.train(hf.make(tmp_path / "a", whole, base=Scheduled))
    with pytest.raises(Drained):
        hf.train(hf.make(tmp_path / "b", first, hf.At(4, hf.drain), base=Scheduled))
    found = hf.train(hf.make(tmp_path / "b", second, base=Scheduled))
    assert {**first.rates, **second.rates} == whole.rates
    assert hf.without_end(found) == hf.without_end(wanted)


@dataclasses.dataclass
class Seen(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Saves what it counts as its argument, as TrainerControl does. Not hashable."""

    seen: int = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen += 1

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen += 100

    def state(self) -> dict[str, Any]:
        return {"args": {"seen": self.seen}, "attributes": {}}


def test_what_is_counted_in_an_argument_goes_on(tmp_path: Path) -> None:
    """At each of two resumes."""
    for step in (3, 7):
        with pytest.raises(Drained):
            hf.train(hf.make(tmp_path, Seen(), hf.At(step, hf.drain)))
    last = Seen()
    hf.train(hf.make(tmp_path, last))
    assert last.seen == 12


def test_what_an_evaluation_counts_in_an_argument_is_taken_back(tmp_path: Path) -> None:
    """A leave cuts it short, and the run that resumes makes it as a whole."""
    evaluates = {"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 1}
    whole, last = Seen(), Seen()
    hf.train(hf.make(tmp_path / "a", whole, **evaluates))
    with pytest.raises(Drained):
        hf.train(hf.make(tmp_path / "b", Seen(), hf.Predicting(8, hf.drain), **evaluates))
    hf.train(hf.make(tmp_path / "b", last, **evaluates))
    assert last.seen == whole.seen == 12 + 3 * 5 * 100


def test_an_argument_that_the_script_changes_counts(tmp_path: Path) -> None:
    """It is no count: nobody has changed it in the training."""
    arguments = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    arguments |= {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    with pytest.raises(Drained):
        hf.train(hf.make(tmp_path, EarlyStoppingCallback(3, 10.0), hf.At(3, hf.drain), **arguments))
    stopping = EarlyStoppingCallback(1, 10.0)
    trainer = hf.make(tmp_path, stopping, **arguments)
    hf.train(trainer)
    assert stopping.early_stopping_patience == 1
    assert trainer.state.global_step == 4


class Tolerant(Trainer):  # type: ignore[misc]
    """Goes on where an evaluation fails."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().evaluate(*args, **kwargs)
        except Exception:
            return {"eval_loss": 9.9}


def test_a_leave_is_no_failure_of_an_evaluation(tmp_path: Path) -> None:
    """Nobody's ``except Exception`` takes it for one: the evaluation is made where the run goes on."""
    evaluates = {"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 1, "base": Tolerant}
    with pytest.raises(Drained):
        hf.train(hf.make(tmp_path / "a", hf.Predicting(4, hf.drain), **evaluates))
    found = hf.train(hf.make(tmp_path / "a", **evaluates))
    assert hf.without_end(found) == hf.without_end(hf.train(hf.make(tmp_path / "b", **evaluates)))


class EndsEpoch(TrainerCallback):  # type: ignore[misc]
    """Ends a data epoch at this step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step == self.step


def test_a_data_epoch_that_ends_early_is_refused(tmp_path: Path) -> None:
    """In that step, and as what another start would not change; at its end it ends in any case."""
    trainer = hf.make(tmp_path / "a", EndsEpoch(6), save_steps=100)
    with pytest.raises(Refusal, match="should_epoch_stop"):
        trainer.train()
    assert trainer.state.global_step == 6
    hf.train(hf.make(tmp_path / "b", EndsEpoch(8)))


def test_a_trainer_that_is_elastic_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call says so."""
    trainer = hf.make(tmp_path)
    monkeypatch.setattr("dalsegno.swift_plugin.hf.plain.under_dlrover_run", lambda: True)
    monkeypatch.setattr("dalsegno.elastic.training.entry.tell_of_refusals", lambda: None)
    with pytest.raises(ValueError, match="this Trainer is elastic already"):
        plugin.elastic(trainer)


class Average(TrainerCallback):  # type: ignore[misc]
    """Averages the weights, past the versions that torch counts."""

    def __init__(self, model: Any) -> None:
        self.average = copy.deepcopy(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for own, trained in zip(self.average.parameters(), model.parameters(), strict=True):
            own.data.lerp_(trained.data, 0.1)


class Best(TrainerCallback):  # type: ignore[misc]
    """Has no best value at first."""

    def __init__(self) -> None:
        self.best = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.best = logs.get("loss", self.best)


class Meter:
    """Of somebody's own."""

    def __init__(self) -> None:
        self.total = 0.0


class Metered(TrainerCallback):  # type: ignore[misc]
    """Counts in an object."""

    def __init__(self) -> None:
        self.meter = Meter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.total += 1


class Rows(TrainerCallback):  # type: ignore[misc]
    """Has an array."""

    def __init__(self) -> None:
        self.rows = torch.zeros(3).numpy()


class Refers(TrainerCallback):  # type: ignore[misc]
    """Keeps nothing of its own that changes."""

    def __init__(self, model: Any) -> None:
        self.model, self.head, self.teacher = model, model.lm_head, copy.deepcopy(model)
        self.settings, self.trainer, self.on, self.said = Meter(), None, False, ""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on, self.said = True, "x"


class Hidden(Seen):
    """Counts in an argument that is no attribute."""

    def __init__(self) -> None:
        self._seen = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seen += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"hidden": self._seen}, "attributes": {}}


def test_what_turns_out_to_count_is_told_of_at_the_first_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, a value that was None, an object; not what is the Trainer's, or stays as it was. Once in a run."""
    model = hf.make_model()
    refers = Refers(model)
    callbacks = [Average(model), Best(), Metered(), Rows(), refers, Hidden()]
    trainer = hf.make(tmp_path, *callbacks, hf.At(7, hf.drain), model=model)
    refers.trainer = trainer
    with pytest.raises(Drained):
        trainer.train()
    told = capsys.readouterr().out
    assert "not saved: Rows, At: without state() of ExportableState they begin anew" in told
    late = "not saved: Average, Best, Metered: without state() of ExportableState they begin anew at each start"
    assert told.count(late) == 1
    assert "not saved: Hidden.hidden: an argument that is no attribute begins anew" in told
    assert "Refers" not in told
    hf.train(hf.make(tmp_path, Best()))
    assert "not saved" not in capsys.readouterr().out
