"""A leave in the middle of a Trainer's evaluation: what comes out is what comes out without it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.programs import Programs, programs_of, wait_for

pytest.importorskip("transformers", reason="needs the extra hf")
pytestmark = [pytest.mark.timeout(300), pytest.mark.executed]

TRAINS = """
import json, os, sys, time
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from dalsegno.swift_plugin import hf

way, out, interrupted = sys.argv[1], sys.argv[2], sys.argv[3] == "interrupted"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inside = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)
        )

    def forward(self, x, labels=None):
        if not self.training and interrupted:
            waits(x)
        found = self.inside(x)
        return {"loss": (found - labels).square().mean(), "logits": found}


def rows(count, seed):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return [{"x": one, "labels": one.sum(0, keepdim=True).tanh()} for one in x]


def waits(x):
    # In the set that comes second, at the step of which the test knows: until the leave has come.
    if x[0, 0].item() != LATER or trainer.state.global_step != AT or os.path.exists("told"):
        return
    open("there", "w").close()
    while not os.path.exists("told"):
        time.sleep(0.01)
    time.sleep(0.5)


class Tells(TrainerCallback):
    def on_epoch_end(self, args, state, control, **kwargs):
        self.note("epoch ends", state)

    def on_train_end(self, args, state, control, **kwargs):
        self.note("training ends", state)

    def on_evaluate(self, args, state, control, **kwargs):
        if way == "predicts":
            trainer.predict(second)

    def note(self, what, state):
        with open(f"{out}.events", "a") as file:
            file.write(json.dumps([what, state.global_step]) + chr(10))


class Divides(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs)) / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


first, second = rows(12, 2), rows(40, 3)
LATER = second[0]["x"][0].item()
stops = way == "stops"
AT = 12 if stops else 8
args = TrainingArguments(
    f"{out}.dir", per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=20, seed=5, use_cpu=True,
    report_to="none", disable_tqdm=True, save_steps=4, eval_strategy="steps", eval_steps=4, learning_rate=3e-2,
    logging_strategy="epoch" if stops else "steps", logging_steps=1, load_best_model_at_end=True,
    metric_for_best_model="b_loss" if way == "sets" else "loss", greater_is_better=False, save_total_limit=2,
    lr_scheduler_type="reduce_lr_on_plateau",
    lr_scheduler_kwargs={"patience": 0, "factor": 0.5, "threshold": 1.0, "threshold_mode": "abs"},
)
sets = {"a": first, "b": second} if way == "sets" else second if stops else first
stopping = [EarlyStoppingCallback(2, 10.0)] if stops else []
kind = Divides if way == "divides" else Trainer
trainer = kind(Model(), args, train_dataset=rows(64, 1), eval_dataset=sets, callbacks=[Tells(), *stopping])
hf.elastic(trainer, global_batch_size=8, memory_every=3)
trainer.train()
weights = [one.sum().item() for one in trainer.model.parameters()]
best = [trainer.state.best_metric, trainer.state.best_global_step]
with open(f"{out}.json", "w") as file:
    json.dump({"weights": weights, "logs": trainer.state.log_history, "best": best}, file)
"""
# Of this process's time, or a sum over this start alone.
OWN = ("_runtime", "_per_second", "train_loss", "total_flos", "epoch")


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_of(tmp_path, TRAINS) as made:
        yield made


def result(out: Path) -> dict[str, Any]:
    found = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    logs = [{key: value for key, value in one.items() if not key.endswith(OWN)} for one in found["logs"]]
    events = out.with_suffix(".events").read_text(encoding="utf-8").splitlines()
    return {**found, "logs": logs, "events": [json.loads(line) for line in events]}


@pytest.mark.parametrize("way", ["sets", *(pytest.param(way, marks=pytest.mark.full) for way in ("predicts", "stops"))])
def test_a_leave_in_an_evaluation_changes_nothing(programs: Programs, tmp_path: Path, way: str) -> None:
    """In the second set of two; as a callback predicts; and in one that stops the training, with its epoch's log."""
    script, out = str(tmp_path / "script.py"), tmp_path / "left"
    flags = ("--nnodes=1:2", "--memory-replicas=1", "--quiet-time=3", script, way, str(out), "interrupted")
    left = programs.agent("leaves", *flags)
    wait_for((tmp_path / "there").exists, 120, "the evaluation")
    os.kill(left.pid, signal.SIGTERM)
    wait_for(lambda: "SIGTERM: saving" in programs.log("leaves"), 60, "the agent has heard of it")
    (tmp_path / "told").touch()
    assert left.wait(60) == 75, programs.log("leaves")
    assert programs.agent("goes-on", *flags).wait(120) == 0, programs.log("goes-on")
    assert result(out) == undisturbed(programs, way)


@pytest.mark.full
def test_a_training_step_that_divides_by_the_number_of_slices(programs: Programs) -> None:
    """As transformers' own did once: four slices here. Each one's loss is its part of the step's mean already."""
    assert undisturbed(programs, "divides") == undisturbed(programs, "plain")


def undisturbed(programs: Programs, way: str) -> dict[str, Any]:
    script, out = programs.directory / "script.py", programs.directory / way
    assert programs.agent(way, "--nnodes=1", str(script), way, str(out), "alone", job=way).wait(120) == 0
    return result(out)
