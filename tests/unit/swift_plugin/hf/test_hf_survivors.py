"""What a rank would save by itself after a crash is what the Trainer itself saves, file by file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from dalsegno.elastic.saving.writing import write_files
from dalsegno.elastic.training.unchanged import UnclearError, is_due
from dalsegno.swift_plugin.hf import survivors
from dalsegno.swift_plugin.hf.checkpoints import PROGRESS
from dalsegno.swift_plugin.hf.run import ElasticRun
from dalsegno.swift_plugin.hf.survivors import Survivors, TrainersState
from tests.unit.swift_plugin.hf import test_hf_memory
from tests.unit.swift_plugin.hf import test_hf_trainer as hf

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

own_session, memory = hf.own_session, test_hf_memory.memory


class Watching:
    """In place of ``Survival``: this process is a world of its own, where there is nobody to survive.

    Attributes:
        marks: What was noted last of each step, but for evaluations that are due: `owed`.
        all: All that was noted, with its step.
    """

    made: Watching

    def __init__(self, session: Any, save: Any, options: Any, *, wanted: bool, files: Any) -> None:
        self.wanted, self.state, self.files = wanted, save, files
        self.looks = 0
        self.marks: dict[int, Any] = {}
        self.owed: dict[int, Any] = {}
        self.all: list[tuple[int, Any]] = []
        Watching.made = self

    def mark(self, step: int, position: Any, beside: Any) -> None:
        self.all.append((step, beside))
        if beside is None:
            self.marks.pop(step, None)
        else:
            (self.owed if beside.unfinished.evaluation else self.marks)[step] = beside

    @property
    def looks_next(self) -> bool:
        return is_due(self.looks + 1)

    def look(self, position: Any, beside: Any) -> None:
        self.looks += 1


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(self: ElasticRun, trainer: Any) -> None:
        state = TrainersState(trainer)
        assert state.can_be_watched
        self._survivors = Survivors(trainer, state, self.session, self.loader)

    monkeypatch.setattr(ElasticRun, "watch", watch)
    monkeypatch.setattr(survivors, "Survival", Watching)
    monkeypatch.setattr(survivors, "_broadcast", lambda content: content)


class Survives(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Writes what is held in the middle of each step, when an optimizer is about to step."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if step not in Watching.made.marks:
            return
        with contextlib.suppress(UnclearError):
            Watching.made.state.copy()  # as it is compared first
            files = Watching.made.files(step, Watching.made.marks[step])
            place = self.directory / str(step)
            place.mkdir(parents=True)
            write_files(place, files)


class Told(TrainerCallback):  # type: ignore[misc]
    """Looks at what is saved."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


def tensors_of(path: Path) -> Any:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=False)


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


def compare(memory: Path, held: Path, steps: list[int]) -> None:
    """The checkpoints of these steps, by the Trainer and by a survivor."""
    for step in steps:
        (theirs,) = memory.glob(f"step-{step}.e*/{PROGRESS}")
        saved, own = theirs.parent, held / str(step)
        paths = {str(path.relative_to(saved)) for path in saved.glob("checkpoint-*/*") if "rng" not in path.name}
        assert paths == {str(path.relative_to(own)) for path in own.glob("checkpoint-*/*")}
        assert len(paths) >= 6
        found, wanted = (json.loads((place / PROGRESS).read_text()) for place in (own, saved))
        assert found.pop("loss") == pytest.approx(wanted.pop("loss"), rel=1e-6)
        assert found == wanted
        for path in paths:
            if path.endswith((".safetensors", ".pt")):
                assert_same(tensors_of(own / path), tensors_of(saved / path))
            elif path.endswith(".json"):
                found, wanted = (json.loads((place / path).read_text()) for place in (own, saved))
                # They are summed in units of 2**10.
                assert found.pop("total_flos", 0) == pytest.approx(wanted.pop("total_flos", 0), abs=2**14)
                forget_control(found), forget_control(wanted)
                assert found == wanted


def forget_control(state: Any) -> None:
    """What a step begins with is set anew in each."""
    control = state.get("stateful_callbacks", {}).get("TrainerControl", {}).get("args", {})
    for name in ("should_log", "should_save", "should_evaluate", "should_epoch_stop"):
        control.pop(name, None)


WAYS: list[Any] = [
    pytest.param({}, id="plain"),
    pytest.param({"logging_steps": 5}, id="between logs"),
    pytest.param({"num_train_epochs": 2, "max_steps": -1, "logging_strategy": "epoch"}, id="epochs"),
    pytest.param(
        {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss", "save_strategy": "no"},
        id="evaluations",
    ),
    pytest.param(
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 5}, id="plateau"
    ),
    pytest.param({"include_num_input_tokens_seen": True, "weight_decay": 0.1}, id="tokens"),
]


@pytest.mark.parametrize("arguments", WAYS)
def test_a_survivor_saves_what_the_trainer_saves(
    tmp_path: Path, memory: Path, watching: None, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    given = [Survives(tmp_path / "held")]
    if "metric_for_best_model" in arguments:
        given.append(EarlyStoppingCallback(5))
    hf.train(test_hf_memory.make(tmp_path / "a", monkeypatch, *given, every=2, **arguments))
    compare(memory, tmp_path / "held", [2, 6])  # behind the others a data epoch ends, which only a survivor has done


def test_a_configuration_that_is_changed_is_learnt_anew(
    tmp_path: Path, memory: Path, watching: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the next save all ranks know it; until then nobody saves what was learnt before."""

    def change(to: int) -> None:
        trainer.model.config.bos_token_id = to

    trainer = test_hf_memory.make(
        tmp_path / "a", monkeypatch, hf.At(7, lambda: change(5)), Survives(tmp_path / "held"), every=3
    )
    hf.train(trainer)
    compare(memory, tmp_path / "held", [3, 9])
    assert json.loads((tmp_path / "held/9/checkpoint-9/config.json").read_text())["bos_token_id"] == 5
    assert sorted(int(path.name) for path in (tmp_path / "held").iterdir()) == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]


def test_what_is_changed_again_and_again_is_not_known(
    tmp_path: Path, memory: Path, watching: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survivors, "_MOST_LEARNT", 2)

    def change(to: int) -> None:
        trainer.model.config.bos_token_id = to

    always = [hf.At(step, lambda step=step: change(step)) for step in (2, 3, 4)]
    trainer = test_hf_memory.make(tmp_path / "a", monkeypatch, *always, Survives(tmp_path / "held"), every=1)
    hf.train(trainer)
    assert not (tmp_path / "held").exists()


def test_a_tensor_that_comes_later_is_saved(
    tmp_path: Path, memory: Path, watching: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add() -> None:
        trainer.model.register_buffer("late", torch.ones(3))

    trainer = test_hf_memory.make(tmp_path / "a", monkeypatch, hf.At(5, add), Survives(tmp_path / "held"), every=2)
    hf.train(trainer)
    compare(memory, tmp_path / "held", [2, 6])
    assert "late" in load_file(tmp_path / "held/6/checkpoint-6/model.safetensors")


def test_what_is_due_is_done_by_the_next_world(
    tmp_path: Path, memory: Path, watching: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each moment of a boundary: an evaluation, a save."""
    arguments = {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "logging_steps": 2}
    hf.train(test_hf_memory.make(tmp_path / "a", monkeypatch, Told(), **arguments))
    for step in (3, 6):  # without a log before, and with one
        of_step = [beside.unfinished for one, beside in Watching.made.all if one == step]
        flags = [(one.evaluation, one.untold) for one in of_step]
        assert flags == [(True, True), (False, True), (False, False)]
        assert [one.logged for one in of_step] == [step // 2 * 2] * 3


def test_a_training_that_stops_has_its_data_epochs_end(
    tmp_path: Path, memory: Path, watching: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a data epoch: the save that comes with it is still to be made."""
    trainer = test_hf_memory.make(tmp_path / "a", monkeypatch, save_strategy="epoch", max_steps=7)
    hf.train(trainer)
    ends = [beside.unfinished.epoch_end for step, beside in Watching.made.all if step == 7]
    assert ends[0]
    assert not ends[-1]


def test_a_loss_that_is_no_number_is_not_known(
    tmp_path: Path, memory: Path, watching: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if self.state.global_step == 4 else loss

    given = {"logging_nan_inf_filter": False, "logging_steps": 3, "base": Broken}
    hf.train(test_hf_memory.make(tmp_path / "a", monkeypatch, **given))
    known = {step for step, beside in Watching.made.all if beside is not None}
    assert known == {1, 2, 3, 4}  # what the Trainer sums stays so


@pytest.mark.parametrize("value", [0.0, 2.5, -1e-12, 3.0000000001, 1e5])
def test_sums_are_exact(value: float) -> None:
    unit = survivors._LOSS_UNIT
    told = [sum(parts) for parts in zip(*[survivors._parts(value, unit)] * 3, strict=True)]
    assert survivors._whole(told, unit) == pytest.approx(3 * value, rel=1e-9)
    assert survivors._whole(survivors._parts(float("inf"), unit), unit) is None
