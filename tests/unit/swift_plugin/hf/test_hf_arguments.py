"""A run that resumes with other arguments of its Trainer: what becomes of them, and the line that says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainingArguments

from dalsegno.elastic import Drained
from dalsegno.elastic.rank.agreement import Refusal
from dalsegno.swift_plugin.hf import arguments
from dalsegno.swift_plugin.hf.checkpoints import Unfinished
from tests.unit.swift_plugin.hf import test_hf_trainer as hf

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

own_session = hf.own_session

FIRST = {"weight_decay": 0.1, "data_seed": 3, "warmup_steps": 2}
FOLLOWS = "(behind the next step the learning rate follows the new schedule, from the saved base rate)"
AS_SAVED = "(no effect: the optimizer and its scheduler go on with what was saved)"
AT_ONCE = "(the new value counts from the next step on)"
# Of the steps from 7 on, in hundredths.
WAS = [0.6, 0.5, 0.4, 0.3, 0.2, 0.1]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines about other arguments."""
    lines: list[str] = []
    monkeypatch.setattr(arguments, "remark", lambda text, *values: lines.append(text % values))
    return lines


def drained(directory: Path, **given: Any) -> None:
    """A run that stands at step 6 of 12."""
    with pytest.raises(Drained):
        hf.train(hf.make(directory, hf.At(6, hf.drain), **{**FIRST, **given}))


def rates(history: list[dict[str, Any]]) -> list[float]:
    """The learning rates behind step 6, in hundredths."""
    return [100 * line["learning_rate"] for line in history if "learning_rate" in line][6:]


CASES: dict[str, tuple[dict[str, Any], str, list[float]]] = {
    "several": (
        {"max_steps": 10, "max_grad_norm": 0.5, "learning_rate": 1e-3},
        f"max_steps was 12 and is 10 {FOLLOWS}; learning_rate was 0.01 and is 0.001 {AS_SAVED}; "
        f"max_grad_norm was 1.0 and is 0.5 {AT_ONCE}",
        [0.6, 0.375, 0.25, 0.125],
    ),
    "optimizer": (
        {"weight_decay": 0.3, "adam_beta1": 0.5},
        f"weight_decay was 0.1 and is 0.3, adam_beta1 was 0.9 and is 0.5 {AS_SAVED}",
        WAS,
    ),
    "fewer steps": ({"max_steps": 6}, "max_steps was 12 and is 6 (the run has made them, and ends)", []),
}
RARER: dict[str, tuple[dict[str, Any], str, list[float]]] = {
    "type": (
        {"lr_scheduler_type": "constant"},
        f"lr_scheduler_type was linear and is constant {FOLLOWS}",
        [0.6, 1.0, 1.0, 1.0, 1.0, 1.0],
    ),
    "warm-up": (
        {"warmup_steps": 10},
        f"warmup_steps was 2 and is 10 {FOLLOWS}",
        [0.6, 0.7, 0.8, 0.9, 1.0, 0.5],
    ),
    "name": (
        {"optim": "adamw_torch"},
        "optim was adamw_torch_fused and is adamw_torch (the new one is given what the other had saved, which may not "
        "fit)",
        WAS,
    ),
    "seed": (
        {"seed": 4},
        "seed was 3 and is 4 (random generators go on as saved; if the number of ranks changes, the new seed counts)",
        WAS,
    ),
}


@pytest.mark.parametrize(
    ("change", "line", "wanted"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.full) for name, case in RARER.items()),
    ],
)
def test_one_line_says_what_becomes_of_other_arguments(
    tmp_path: Path, said: list[str], change: dict[str, Any], line: str, wanted: list[float]
) -> None:
    """It is true: so are the learning rates, and what the optimizer has."""
    drained(tmp_path)
    groups: list[dict[str, Any]] = []
    trainer = hf.make(tmp_path, **{**FIRST, **change})
    trainer.add_callback(hf.At(7, lambda: groups.extend(trainer.optimizer.param_groups)))
    found = hf.train(trainer)
    assert said == [f"step 6 was saved with other arguments of the Trainer: {line}"]
    assert rates(found) == pytest.approx(wanted)
    assert [(one["weight_decay"], one["betas"][0]) for one in groups] in ([], [(0.1, 0.9), (0.0, 0.9)])


@pytest.mark.parametrize("fewer", [{"max_steps": 5}, {"max_steps": -1, "num_train_epochs": 1}])
def test_fewer_steps_than_were_made_are_refused(tmp_path: Path, said: list[str], fewer: dict[str, Any]) -> None:
    """A typo finished the run for good. An epoch has 4 steps."""
    drained(tmp_path)
    wants = 4 if "num_train_epochs" in fewer else 5
    with pytest.raises(Refusal, match=f"the run is at step 6, and the script wants {wants} steps: give at least 6, or"):
        hf.train(hf.make(tmp_path, **{**FIRST, **fewer}))
    assert said == []
    hf.train(hf.make(tmp_path, **FIRST))


def test_it_is_said_once(tmp_path: Path, said: list[str]) -> None:
    """What is saved next has the other value."""
    drained(tmp_path)
    with pytest.raises(Drained):
        hf.train(hf.make(tmp_path, hf.At(8, hf.drain), **FIRST, max_steps=10))
    hf.train(hf.make(tmp_path, **FIRST, max_steps=10))
    assert len(said) == 1


def test_epochs_are_named_where_they_say_how_many_steps_there_are(tmp_path: Path, said: list[str]) -> None:
    """Of 4 steps each; where max_steps says it, nobody asks for them."""
    drained(tmp_path, max_steps=-1, num_train_epochs=3)
    found = hf.train(hf.make(tmp_path, **FIRST, max_steps=-1, num_train_epochs=2))
    assert said == [f"step 6 was saved with other arguments of the Trainer: num_train_epochs was 3 and is 2 {FOLLOWS}"]
    assert rates(found) == pytest.approx([0.6, 1 / 6])


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param({"micro": 2}, {"micro": 3, "gradient_accumulation_steps": 5}, id="cut"),
        pytest.param({"num_train_epochs": 3}, {"max_steps": -1, "num_train_epochs": 3}, id="as many"),
        pytest.param({}, {}, id="same", marks=pytest.mark.full),
        pytest.param({"num_train_epochs": 3}, {"num_train_epochs": 7}, id="epochs", marks=pytest.mark.full),
    ],
)
def test_nothing_is_said_where_the_curve_is_the_same(
    tmp_path: Path, said: list[str], first: dict[str, Any], then: dict[str, Any]
) -> None:
    drained(tmp_path, **first)
    assert rates(hf.train(hf.make(tmp_path, **FIRST, **then))) == pytest.approx(WAS)
    assert said == []


def test_a_checkpoint_that_does_not_tell_says_nothing(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of older versions."""
    with monkeypatch.context() as older:
        older.setattr("dalsegno.swift_plugin.hf.trainer.hyperparameters", lambda trainer: {})
        drained(tmp_path)
    hf.train(hf.make(tmp_path, **FIRST, learning_rate=1e-3))
    assert said == []


def test_one_rank_says_it(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    drained(tmp_path)
    trainer = hf.make(tmp_path, **FIRST, max_steps=10)
    monkeypatch.setattr(trainer.elastic_run.session, "rank", 1)
    trainer._init_training_state(10, 4, 3, trainer.elastic_run.resume_directory, None)
    assert said == []


def test_more_steps_for_a_training_that_was_stopped(tmp_path: Path, said: list[str]) -> None:
    """By its callback: it makes none of them."""
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "metric_for_best_model": "loss"}
    best = {"load_best_model_at_end": True, "greater_is_better": True}
    hf.train(hf.make(tmp_path, EarlyStoppingCallback(2), **often, **best))
    trainer = hf.make(tmp_path, EarlyStoppingCallback(2), **often, **best, max_steps=20, learning_rate=1.0)
    hf.train(trainer)
    assert trainer.state.global_step == 6
    assert said == [
        "step 6 was saved with other arguments of the Trainer: max_steps was 12 and is 20 (no effect: the training was "
        "stopped at this step)"
    ]


def of(tmp_path: Path, *, scheduler: Any = None, optimizer: Any = None, deepspeed: Any = None, **given: Any) -> Any:
    """A Trainer as far as it is looked at, which stands at step 6 of 12."""
    args = TrainingArguments(str(tmp_path), use_cpu=True, **{"max_steps": 12, **given})
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config=deepspeed))
    return SimpleNamespace(
        args=args,
        state=SimpleNamespace(global_step=6, max_steps=args.max_steps),
        lr_scheduler=scheduler,
        _created_lr_scheduler=False,
        optimizer=optimizer,
        is_deepspeed_enabled=deepspeed is not None,
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)),
        elastic_run=SimpleNamespace(stopped=False),
    )


# Nobody asks for the number of epochs where max_steps says how many steps there are.
OTHER: dict[str, Any] = {
    "max_steps": 20,
    "num_train_epochs": 9,
    "learning_rate": 1.0,
    "warmup_steps": 5,
    "weight_decay": 0.5,
}
STEPS, RATE, WARMUP, DECAY = (
    "max_steps was 12 and is 20",
    "learning_rate was 5e-05 and is 1.0",
    "warmup_steps was 0 and is 5",
    "weight_decay was 0.0 and is 0.5",
)
PLATEAU: dict[str, Any] = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2}


@pytest.mark.parametrize(
    ("of_both", "first", "then", "line"),
    [
        ({"scheduler": object()}, {}, OTHER, f"{STEPS} (the run ends there); {RATE}, {DECAY} {AS_SAVED}"),
        ({"scheduler": object(), "optimizer": object()}, {}, OTHER, f"{STEPS} (the run ends there)"),
        (
            {"deepspeed": {"scheduler": {"type": "WarmupDecayLR"}}},
            {},
            OTHER,
            f"{STEPS}, {RATE}, {WARMUP} (DeepSpeed's scheduler takes the new value); {DECAY} {AS_SAVED}",
        ),
        ({"deepspeed": {}}, {}, OTHER, f"{STEPS}, {WARMUP} {FOLLOWS}; {RATE}, {DECAY} {AS_SAVED}"),
        (PLATEAU, {}, OTHER, f"{STEPS} (the run ends there); {RATE}, {DECAY} {AS_SAVED}"),
        (
            {},
            {},
            PLATEAU,
            "lr_scheduler_type was linear and is reduce_lr_on_plateau (the new one is given what the other had saved, "
            "which may not fit)",
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr"},
            {"lr_scheduler_kwargs": {"min_lr": 0.1}},
            {"lr_scheduler_kwargs": {"min_lr": 0.2}},
            f"lr_scheduler_kwargs was {{'min_lr': 0.1}} and is {{'min_lr': 0.2}} {FOLLOWS}",
        ),
    ],
    ids=["own scheduler", "own both", "DeepSpeed's", "its engine", "plateau", "to plateau", "options"],
)
def test_whose_schedule_it_is_counts(
    tmp_path: Path,
    said: list[str],
    of_both: dict[str, Any],
    first: dict[str, Any],
    then: dict[str, Any],
    line: str,
) -> None:
    """The script's own asks no arguments. DeepSpeed's is made anew (tried with ZeRO 1 to 3), and its rate with it."""
    saved = arguments.hyperparameters(of(tmp_path, **{**of_both, **first}))
    arguments.say_what_changed(of(tmp_path, **{**of_both, **then}), saved)
    assert said == [f"step 6 was saved with other arguments of the Trainer: {line}"]


def test_what_is_noted_is_the_same_once_it_is_read(tmp_path: Path) -> None:
    """Whatever the arguments are: what JSON does not know counts by its class."""
    trainer = of(tmp_path, lr_scheduler_kwargs={"min_lr": torch.float16, "of": (1, 2)})
    found = arguments.hyperparameters(trainer)
    assert found["lr_scheduler_kwargs"] == {"min_lr": "dtype", "of": [1, 2]}
    assert found["optim"] == "adamw_torch_fused"
    assert arguments.hyperparameters(of(tmp_path, lr_scheduler_kwargs={}))["lr_scheduler_kwargs"] is None
    unfinished = Unfinished(hyperparameters=found)
    unfinished.write(tmp_path)
    assert Unfinished.read(tmp_path) == unfinished
