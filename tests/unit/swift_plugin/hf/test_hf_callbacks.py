"""What callbacks of somebody's own count or change, through a leave and a resume."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from dalsegno.elastic import Drained
from dalsegno.elastic.rank.agreement import Refusal
from dalsegno.swift_plugin import hf as plugin
from dalsegno.swift_plugin.hf import held
from dalsegno.swift_plugin.hf.forgetting import forgetful
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


def test_who_saves_nothing_hears_no_advice_for_loops_of_ones_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`session.finish()` is not the script's: its arguments say what is saved."""
    with pytest.raises(Drained):
        hf.train(hf.make(tmp_path, hf.At(3, hf.drain), save_strategy="no"))
    trainer = hf.make(tmp_path, save_strategy="no")
    hf.train(trainer)
    assert trainer.state.global_step == 12
    assert "the training is finished at step" not in caplog.text


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
    at_its_end = hf.make(tmp_path / "b", EndsEpoch(8))
    hf.train(at_its_end)
    assert at_its_end.state.global_step == 12


def test_a_trainer_that_is_elastic_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call says so."""
    trainer = hf.make(tmp_path)
    monkeypatch.setattr("dalsegno.swift_plugin.hf.plain.under_dlrover_run", lambda: True)
    monkeypatch.setattr("dalsegno.elastic.training.entry.tell_of_refusals", lambda: None)
    with pytest.raises(ValueError, match="this Trainer is elastic already"):
        plugin.elastic(trainer)


class Rows(TrainerCallback):  # type: ignore[misc]
    """Has an array."""

    def __init__(self) -> None:
        self.rows = torch.zeros(3).numpy()


class Slotted:
    """Has no dictionary, and fails when it is looked at."""

    __slots__ = ("callback",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_callbacks_that_show_that_they_count_are_named() -> None:
    """At the start; not what fails when it is looked at."""
    broken = TrainerCallback()
    broken.one = Slotted()
    handler = SimpleNamespace(callbacks=[Rows(), Halves(), Slotted(), broken, Seen()])
    assert forgetful(SimpleNamespace(callback_handler=handler, counting={})) == ("Rows", "Halves")


class Tokens(Trainer):  # type: ignore[misc]
    """Counts tokens as trl's trainers do: in itself, for its logs."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._total_train_tokens = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._total_train_tokens += inputs["input_ids"].numel()
        return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "num_tokens": self._total_train_tokens}, *args, **kwargs)


def test_the_tokens_that_a_trainer_counts_go_on(tmp_path: Path) -> None:
    """Behind a leave, and behind what a kill goes back to, as in a run that nothing disturbs."""
    wanted = hf.without_end(hf.train(hf.make(tmp_path / "a", base=Tokens)))
    with pytest.raises(Drained):
        hf.train(hf.make(tmp_path / "b", hf.At(3, hf.drain), base=Tokens))
    with pytest.raises(KeyboardInterrupt):
        hf.train(hf.make(tmp_path / "b", hf.At(8, lambda: hf.exit_at(8, 8)), base=Tokens))
    assert hf.without_end(hf.train(hf.make(tmp_path / "b", base=Tokens))) == wanted


class Property(Seen):
    """Its argument cannot be set."""

    def __init__(self) -> None:
        self._seen = 0

    seen = property(lambda self: self._seen)  # type: ignore[assignment]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seen += 1

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seen += 1


class Folder(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Its argument is a path that it saves as text."""

    def __init__(self) -> None:
        self.folder = Path("x")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.folder = self.folder.parent / f"x{state.global_step}"

    on_prediction_step = on_step_end

    def state(self) -> dict[str, Any]:
        return {"args": {"folder": str(self.folder)}, "attributes": {}}


class Pair(Folder):
    """Its argument is a pair, which a file has as a list."""

    def __init__(self) -> None:
        self.pair = (0, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pair = (*self.pair[:1], state.global_step)
        assert hash(self.pair)

    on_prediction_step = on_step_end

    def state(self) -> dict[str, Any]:
        return {"args": {"pair": self.pair}, "attributes": {}}


@pytest.mark.parametrize("kind", [Property, Folder, Pair])
def test_an_argument_that_is_no_plain_attribute_begins_anew(tmp_path: Path, kind: Any) -> None:
    """It ends neither the leave in an evaluation nor the run that resumes."""
    evaluates = {"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 1}
    with pytest.raises(Drained):
        hf.train(hf.make(tmp_path, kind(), hf.Predicting(8, hf.drain), **evaluates))
    saved = json.loads((tmp_path / "out/checkpoint-8/trainer_state.json").read_text())
    assert saved["stateful_callbacks"][kind.__name__]["attributes"] == {}
    hf.train(hf.make(tmp_path, kind(), **evaluates))


@pytest.mark.parametrize("kind", [Property, Folder])
def test_such_an_argument_that_a_checkpoint_has_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: Any
) -> None:
    """Another version has saved it as an attribute."""
    with monkeypatch.context() as patch:
        patch.setattr(held, "_state", lambda trainer, one: {**one.state(), "attributes": dict(one.state()["args"])})
        with pytest.raises(Drained):
            hf.train(hf.make(tmp_path, kind(), hf.At(3, hf.drain)))
    hf.train(hf.make(tmp_path, kind()))
    name = "seen" if kind is Property else "folder"
    assert f"{kind.__name__}: {name} cannot be set as it was saved" in capsys.readouterr().out


class Stubborn(Seen):
    """Takes no smaller count."""

    def __setattr__(self, name: str, value: Any) -> None:
        if value < self.__dict__.get(name, 0):
            raise RuntimeError("no way back")
        super().__setattr__(name, value)


def test_an_attribute_that_cannot_be_taken_back_stays(tmp_path: Path) -> None:
    """The save of a leave is worth more."""
    evaluates = {"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 1}
    with pytest.raises(Drained):
        hf.train(hf.make(tmp_path, Stubborn(), hf.Predicting(8, hf.drain), **evaluates))


class Fixed(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Nothing of it may be set, and nothing changes."""

    @property
    def most(self) -> int:
        return 3

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"most": self.most}}


def test_what_cannot_be_set_ends_no_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An attribute of a state that is a property."""
    with pytest.raises(Drained):
        hf.train(hf.make(tmp_path, Fixed(), hf.At(3, hf.drain)))
    hf.train(hf.make(tmp_path, Fixed()))
    assert "Fixed: most cannot be set as it was saved" in capsys.readouterr().out


def test_the_last_data_epoch_may_end_early(tmp_path: Path) -> None:
    """The training ends there, and what is saved there says so: a resume does not go on."""
    trainer = hf.make(tmp_path, EndsEpoch(10), save_steps=10)
    trainer.train()
    assert trainer.state.global_step == 10
    saved = json.loads((tmp_path / "out/checkpoint-10/trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["TrainerControl"]["args"]["should_training_stop"]
    again = hf.make(tmp_path, save_steps=10)
    hf.train(again)
    assert again.state.global_step == 10
