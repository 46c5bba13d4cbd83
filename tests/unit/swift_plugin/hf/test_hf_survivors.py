"""What a rank would save by itself after a crash is what the Trainer itself saves, file by file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import EarlyStoppingCallback, TrainerCallback

from dalsegno.elastic.saving.writing import write_files
from dalsegno.swift_plugin.hf import survivors
from dalsegno.swift_plugin.hf.checkpoints import PROGRESS
from dalsegno.swift_plugin.hf.run import ElasticRun
from dalsegno.swift_plugin.hf.survivors import Survivors
from tests.unit.swift_plugin.hf import test_hf_memory
from tests.unit.swift_plugin.hf import test_hf_trainer as hf

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

own_session, memory = hf.own_session, test_hf_memory.memory


class Watching:
    """In place of ``Survival``: this process is a world of its own, where there is nobody to survive.

    Attributes:
        marks: What was noted last of each step, but for evaluations that are under way: `owed`.
    """

    made: Watching

    def __init__(self, session: Any, save: Any, options: Any, *, wanted: bool, files: Any) -> None:
        self.wanted, self.state, self.files = wanted, save, files
        self.marks: dict[int, Any] = {}
        self.owed: dict[int, Any] = {}
        Watching.made = self

    def mark(self, step: int, position: Any, beside: Any) -> None:
        (self.owed if beside.unfinished.evaluation else self.marks)[step] = beside

    def look(self, position: Any, beside: Any) -> None: ...


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(self: ElasticRun, trainer: Any) -> None:
        self._survivors = Survivors(trainer, self.session, self.loader)

    monkeypatch.setattr(ElasticRun, "watch", watch)
    monkeypatch.setattr(survivors, "Survival", Watching)
    monkeypatch.setattr(survivors, "_broadcast", lambda content: content)


class Survives(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Writes what is held in the middle of each step, when an optimizer is about to step."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if step in Watching.made.marks:
            place = self.directory / str(step)
            place.mkdir(parents=True)
            write_files(place, Watching.made.files(step, Watching.made.marks[step]))


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


def test_an_evaluation_under_way_is_still_to_be_made(
    tmp_path: Path, memory: Path, watching: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the save that comes behind it."""
    arguments = {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 6}
    hf.train(test_hf_memory.make(tmp_path / "a", monkeypatch, **arguments))
    told = {step: beside.unfinished for step, beside in Watching.made.owed.items()}
    assert sorted(told) == [3, 6, 9, 12]
    assert all(one.evaluation and one.logged == step for step, one in told.items())
    assert [step for step, one in told.items() if one.untold and one.tell_of_save] == [6, 12]
