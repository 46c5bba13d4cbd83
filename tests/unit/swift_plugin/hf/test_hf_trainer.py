"""An elastic Trainer in this process: its losses, and what a drain, a kill and a resume make of its history."""

from __future__ import annotations

import copy
import inspect
import json
import math
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    XLNetConfig,
    XLNetLMHeadModel,
)
from transformers.trainer_callback import DefaultFlowCallback, ExportableState, PrinterCallback
from transformers.trainer_utils import get_last_checkpoint
from transformers.training_args import OptimizerNames

from dalsegno import elastic
from dalsegno.elastic import Drained, ElasticSampler
from dalsegno.elastic.checkpoint import inventory
from dalsegno.elastic.training import entry
from dalsegno.swift_plugin.hf import evaluating, refusals
from dalsegno.swift_plugin.hf.options import Options
from dalsegno.swift_plugin.hf.trainer import elastic_class

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

LENGTH, BATCH = 22, 6  # data epochs of 4 steps, the last of 4 samples


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of 8 tokens, of which different numbers count."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 16, (8,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: index % 6] = -100
        return {"input_ids": tokens, "labels": labels}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class At(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Does something at the end of a step."""

    def __init__(self, step: int, what: Any) -> None:
        self.step, self.what = step, what

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            self.what()


@pytest.fixture(autouse=True)
def own_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(entry, "_sessions", [])
    # ms-swift, where a test has imported it, puts callbacks of its own there for every Trainer of the process.
    monkeypatch.setattr("transformers.trainer.DEFAULT_CALLBACKS", [DefaultFlowCallback])
    monkeypatch.setattr("transformers.trainer.PrinterCallback", PrinterCallback)
    yield
    close()


def close() -> None:
    for one in entry._sessions:
        one.close()
    entry._sessions.clear()


def make(
    directory: Path,
    *callbacks: Any,
    micro: int = 2,
    fixed: bool = False,
    base: type[Any] = Trainer,
    model: Any = None,
    data: Any = None,
    by_samples: bool = False,
    **arguments: Any,
) -> Any:
    """A Trainer with the session of this directory."""
    close()
    own = elastic.session(directory / "checkpoints")
    own._exchange._interval = 0.0  # agree in every step, however fast they are
    given = {
        "output_dir": str(directory / "out"),
        "per_device_train_batch_size": micro,
        "max_steps": 12,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 5,
        "seed": 3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **arguments,
    }
    trainer = elastic_class(base)(
        model=model or make_model(),
        args=TrainingArguments(**given),
        train_dataset=Tokens() if data is None else data,
        eval_dataset=torch.utils.data.Subset(Tokens(), range(5)),
        callbacks=list(callbacks),
    )
    trainer.become_elastic(Options(BATCH, fixed, by_samples))
    return trainer


def drain() -> None:
    entry._sessions[0]._notice.given = True


def train(trainer: Any) -> list[dict[str, Any]]:
    """Trains; the log history without what depends on time."""
    trainer.train()
    timed = ("runtime", "per_second", "total_flos")
    return [
        {key: value for key, value in line.items() if not key.endswith(timed)} for line in trainer.state.log_history
    ]


def interrupted(directory: Path, step: int, **arguments: Any) -> list[dict[str, Any]]:
    """The history of a run that drains at the end of this step, and is started again."""
    with pytest.raises(Drained):
        train(make(directory, At(step, drain), **arguments))
    assert inventory(directory / "checkpoints")[-1].step == step
    return train(make(directory, **arguments))


def without_end(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All but the line of the end, whose means are those of one start."""
    return [line for line in history if "train_loss" not in line]


def test_losses_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """Means over the tokens of the global batch, whatever it is cut into; the learning rate falls linearly."""
    model, data = make_model(), Tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    wanted = []
    for step, batch in zip(range(12), ElasticSampler(LENGTH, BATCH, seed=3), strict=False):
        samples = [data[i] for i in batch.sample_ids]
        tokens, labels = (torch.stack([sample[key] for sample in samples]) for key in ("input_ids", "labels"))
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (12 - step) / 12
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    for micro in (1, 2, 4, 6):
        found = train(make(tmp_path / str(micro), micro=micro))
        losses = [line["loss"] for line in found if "loss" in line]
        assert losses == pytest.approx(wanted, rel=1e-5), micro


class Classified(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences, each of one class."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 16, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens[0] % 3}


def test_a_mean_over_samples_is_the_same_however_it_is_cut(tmp_path: Path) -> None:
    """Bert takes any keywords, is not interested in the number of items, and returns a mean."""
    config = BertConfig(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )

    def model() -> Any:
        torch.manual_seed(2)
        return BertForSequenceClassification(config)

    wanted = []
    with torch.no_grad():
        for _, batch in zip(range(4), ElasticSampler(LENGTH, BATCH, seed=3), strict=False):
            samples = [Classified()[i] for i in batch.sample_ids]
            together = {key: torch.stack([one[key] for one in samples]) for key in samples[0]}
            wanted.append(model()(**together).loss.item())
    for micro in (1, 2, 4):
        found = train(make(tmp_path / str(micro), micro=micro, model=model(), data=Classified(), learning_rate=0.0))
        losses = [line["loss"] for line in found if "loss" in line][:4]
        assert losses == pytest.approx(wanted, rel=1e-5), micro


class First(Tokens):
    """Of each sequence the first position alone counts, which a loss that shifts its labels leaves out."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = super().__getitem__(index)["input_ids"]
        return {"input_ids": tokens, "labels": torch.cat([tokens[:1] % 3, torch.full((7,), -100)])}


class Earlier(Trainer):  # type: ignore[misc]  # transformers is not typed
    """As in versions that do not say whether a loss shifts its labels."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        del self._loss_shifts_labels


class EarlierYet(Trainer):  # type: ignore[misc]  # transformers is not typed
    """As in those that say it of encoder-decoders, too."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._loss_shifts_labels = True


@pytest.mark.parametrize("base", [Earlier, EarlierYet])
def test_labels_that_no_loss_shifts_all_count(tmp_path: Path, base: type[Any]) -> None:
    """Whatever this version says of it: of such data nothing was trained, without a word."""
    sizes: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(2)
    if base is Earlier:
        model: Any = BertForTokenClassification(BertConfig(**sizes, num_hidden_layers=1, num_labels=3))
    else:
        config = T5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0)
        config.decoder_start_token_id = 0
        model = T5ForConditionalGeneration(config)
    trainer = make(tmp_path, model=model, data=First(), base=base, max_steps=3)
    found = train(trainer)
    assert all(line["loss"] > 0 for line in found if "loss" in line)
    batch = trainer.elastic_run.batch
    assert batch is not None
    assert batch.tokens == batch.n


@pytest.mark.parametrize("kind", [GPT2LMHeadModel, XLNetLMHeadModel])
def test_labels_are_shifted_as_a_model_does_whose_name_tells_no_loss(tmp_path: Path, kind: type[Any]) -> None:
    """GPT-2 takes that of causal models: the first position counted, and a slice weighed more or less with its size."""
    sizes: dict[str, Any] = {"vocab_size": 16, "n_layer": 1, "n_head": 2}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    if kind is GPT2LMHeadModel:
        dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config: Any = GPT2Config(**sizes, **dropped, n_positions=16, n_embd=16)
    else:
        config = XLNetConfig(**sizes, d_model=16, d_inner=16, dropout=0.0, summary_last_dropout=0.0)
    found = []
    for micro in (1, 6):
        torch.manual_seed(2)
        history = train(make(tmp_path / str(micro), micro=micro, model=kind(config)))
        found.append([line["loss"] for line in history if "loss" in line])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


class Named(Tokens):
    """The labels have another name."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = super().__getitem__(index)
        return {"input_ids": found["input_ids"], "target": found["labels"]}


class Targeted(Trainer):  # type: ignore[misc]  # transformers is not typed
    """A mean over tokens."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["target"].flatten())
        return (loss, {}) if return_outputs else loss


def test_labels_of_another_name_are_counted(tmp_path: Path) -> None:
    """As label_names has it: the mean over tokens is the same however it is cut."""
    found = []
    for micro in (1, 6):
        trainer = make(tmp_path / str(micro), micro=micro, base=Targeted, data=Named(), label_names=["target"])
        found.append([line["loss"] for line in train(trainer) if "loss" in line])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_loss_of_ones_own_is_a_mean_too(tmp_path: Path) -> None:
    class Own(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss = model(input_ids=inputs["input_ids"]).logits.square().mean()
            return (loss, {}) if return_outputs else loss

    found = []
    for micro in (1, 2, 6):
        history = train(make(tmp_path / str(micro), micro=micro, base=Own, by_samples=True))
        found.append([line["loss"] for line in history if "loss" in line])
    assert found[0] == pytest.approx(found[2], rel=1e-5)
    assert found[1] == pytest.approx(found[2], rel=1e-5)


def test_a_run_that_died_after_its_last_save_makes_no_further_step(tmp_path: Path) -> None:
    """In the middle of a data epoch."""
    with pytest.raises(KeyboardInterrupt):
        train(make(tmp_path, Die("on_train_end"), max_steps=10))
    trainer = make(tmp_path, max_steps=10)
    found = train(trainer)
    assert trainer.state.global_step == 10
    assert [line["step"] for line in found if "loss" in line] == list(range(1, 11))
    assert [one.step for one in inventory(tmp_path / "checkpoints")] == [5, 10]


@pytest.mark.parametrize("step", [3, 4, *(pytest.param(step, marks=pytest.mark.full) for step in (5, 8))])
def test_a_drain_changes_nothing(tmp_path: Path, step: int) -> None:
    """In the middle of a data epoch, at its end, and where a save is due anyway."""
    assert without_end(interrupted(tmp_path / "a", step)) == without_end(train(make(tmp_path / "b")))


def test_a_log_over_several_steps_spans_a_drain(tmp_path: Path) -> None:
    found = interrupted(tmp_path / "a", 6, logging_steps=4)
    wanted = train(make(tmp_path / "b", logging_steps=4))
    losses = [[line["loss"] for line in one if "loss" in line] for one in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(losses[0]) == 3


def test_a_log_at_a_data_epochs_end_is_as_without_a_drain(tmp_path: Path) -> None:
    """It is the next start's, and says of the step what the step was."""
    found = without_end(interrupted(tmp_path / "a", 4, logging_strategy="epoch"))
    wanted = without_end(train(make(tmp_path / "b", logging_strategy="epoch")))
    assert [one.keys() for one in found] == [one.keys() for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert "grad_norm" in found[0]


@pytest.mark.parametrize("unit", [pytest.param("steps", marks=pytest.mark.full), "epoch"])
@pytest.mark.parametrize("step", [4, pytest.param(8, marks=pytest.mark.full)])
def test_an_evaluation_that_a_drain_leaves_out_is_made_by_what_resumes(tmp_path: Path, step: int, unit: str) -> None:
    """Due at the step of the drain, or at the data epoch's end that it is: once, with the same result; the best too."""
    often = {"eval_strategy": unit, "save_strategy": unit, "eval_steps": 4, "save_steps": 4}
    best = {"metric_for_best_model": "loss", "load_best_model_at_end": True}
    found = interrupted(tmp_path / "a", step, **often, **best)
    wanted = train(make(tmp_path / "b", **often, **best))
    assert without_end(found) == without_end(wanted)
    assert [line["step"] for line in found if "eval_loss" in line] == [4, 8, 12]


def test_the_best_model_is_there_at_the_end(tmp_path: Path) -> None:
    """The first evaluation's, saved by an earlier start."""
    often = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "load_best_model_at_end": True}
    best = {"metric_for_best_model": "loss", "greater_is_better": True}
    with pytest.raises(Drained):
        train(make(tmp_path, At(6, drain), **often, **best))
    trainer = make(tmp_path, **often, **best)
    train(trainer)
    assert trainer.state.best_global_step == 4
    saved = load_file(tmp_path / "out" / "checkpoint-4" / "model.safetensors")
    weights = trainer.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in saved.items())
    last = load_file(tmp_path / "out" / "checkpoint-12" / "model.safetensors")
    assert not all(torch.equal(weights[name], value) for name, value in last.items())


class Predicting(TrainerCallback):  # type: ignore[misc]
    """Does something once, at the second batch of the evaluation of a step."""

    def __init__(self, step: int, what: Any) -> None:
        self.step, self.what, self.batches = step, what, 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.batches += 1
            if self.batches == 2:
                self.what()


@pytest.mark.parametrize("unit", ["steps", pytest.param("epoch", marks=pytest.mark.full)])
@pytest.mark.parametrize("step", [4, *(pytest.param(step, marks=pytest.mark.full) for step in (8, 12))])
def test_a_leave_cuts_an_evaluation_short(tmp_path: Path, step: int, unit: str) -> None:
    """It takes longer than a notice: the step is saved at once, and evaluated where the run goes on."""
    often = {"eval_strategy": unit, "save_strategy": unit, "eval_steps": 4, "save_steps": 4}
    best = {"metric_for_best_model": "loss", "load_best_model_at_end": True, "per_device_eval_batch_size": 1}
    leaving = Predicting(step, drain)
    with pytest.raises(Drained):
        train(make(tmp_path / "a", leaving, **often, **best))
    assert leaving.batches <= 3  # of 5
    assert inventory(tmp_path / "a" / "checkpoints")[-1].step == step
    found = train(make(tmp_path / "a", **often, **best))
    assert without_end(found) == without_end(train(make(tmp_path / "b", **often, **best)))
    assert [line["step"] for line in found if "eval_loss" in line] == [4, 8, 12]


def test_the_last_checkpoint_tells_of_an_evaluation_that_was_cut_short(tmp_path: Path) -> None:
    """It was saved before that, and nothing is trained behind it: the step is saved once more."""
    often = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "metric_for_best_model": "loss"}
    with pytest.raises(Drained):
        train(make(tmp_path / "a", Predicting(12, drain), **often, per_device_eval_batch_size=1))
    found, wanted = {}, {}
    for name, state in (("a", found), ("b", wanted)):
        trainer = make(tmp_path / name, **often, per_device_eval_batch_size=1)
        train(trainer)
        assert Path(trainer.state.best_model_checkpoint).is_dir()
        state.update(json.loads((tmp_path / name / "out/checkpoint-12/trainer_state.json").read_text()))
    assert [line["step"] for line in found["log_history"] if "eval_loss" in line] == [4, 8, 12]
    assert found["best_global_step"] == wanted["best_global_step"] == 12
    assert found["best_metric"] == wanted["best_metric"]


class Asks(TrainerCallback):  # type: ignore[misc]
    """For a save at this step, as an order does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_save or state.global_step == self.step


def test_the_last_checkpoint_tells_of_its_data_epochs_evaluation(tmp_path: Path) -> None:
    """The step was saved, and the world ended in the evaluation at the data epoch's end, which comes before a save."""
    often = {"eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "loss"}

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(make(tmp_path, Asks(12), Predicting(12, die), **often, per_device_eval_batch_size=1))
    assert inventory(tmp_path / "checkpoints")[-1].step == 12
    train(make(tmp_path, **often, per_device_eval_batch_size=1))
    found = json.loads((tmp_path / "out/checkpoint-12/trainer_state.json").read_text())
    assert [line["step"] for line in found["log_history"] if "eval_loss" in line] == [4, 8, 12]
    assert found["best_global_step"] == 12


def test_a_leave_in_an_evaluation_that_was_owed(tmp_path: Path) -> None:
    """The next one who resumes there makes it."""
    often = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "per_device_eval_batch_size": 1}
    for leaving in (Predicting(4, drain), Predicting(4, drain)):
        with pytest.raises(Drained):
            train(make(tmp_path / "a", leaving, **often))
    found = train(make(tmp_path / "a", **often))
    assert without_end(found) == without_end(train(make(tmp_path / "b", **often)))


def test_a_leave_in_an_evaluation_whose_save_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on, and the evaluation is made; the next try, after a pause, saves."""
    often = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 100, "per_device_eval_batch_size": 1}
    leaving = Predicting(4, drain)
    trainer = make(tmp_path / "a", leaving, **often)
    real, tries = trainer._save, []

    def failing(*args: Any, **kwargs: Any) -> None:
        tries.append(trainer.state.global_step)
        if len(tries) == 1:
            raise OSError(28, "No space left on device")
        real(*args, **kwargs)

    monkeypatch.setattr(trainer, "_save", failing)
    monkeypatch.setattr("dalsegno.elastic.training.session.DRAIN_PAUSE_SECONDS", 0.0)
    entry._sessions[0]._drain_pause = 0.3
    trainer.add_callback(At(6, lambda: time.sleep(0.4)))
    with pytest.raises(Drained):
        train(trainer)
    assert (tries[0], len(tries)) == (4, 2)
    assert leaving.batches <= 3 + 5  # it was not cut short once more
    found = train(make(tmp_path / "a", **often))
    assert without_end(found) == without_end(train(make(tmp_path / "b", **often)))


def test_an_evaluation_is_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each batch: however long all of it takes, it is no stall."""
    seen = []
    monkeypatch.setattr("dalsegno.elastic.Session.busy", lambda self: seen.append(self.step))
    train(make(tmp_path, eval_strategy="steps", eval_steps=4, max_steps=4, per_device_eval_batch_size=1))
    assert seen[:5] == [4] * 5


@pytest.mark.parametrize("where", ["metrics", "end"])
def test_what_comes_behind_the_last_batch_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Slow metrics, and a slow callback at the end of the training: signs come meanwhile, and none behind them."""
    told, threads = threading.Event(), list[str]()
    monkeypatch.setattr(evaluating, "SIGN_SECONDS", 0.01)

    def busy(session: Any) -> None:
        threads.append(threading.current_thread().name)
        if threads[-1] == "dalsegno-alive":
            told.set()

    def slow(*given: Any, **also: Any) -> dict[str, float]:
        told.clear()
        assert told.wait(30)
        return {"x": 1.0}

    monkeypatch.setattr("dalsegno.elastic.Session.busy", busy)
    ends = At(1, lambda: None)
    trainer = make(tmp_path, ends, eval_strategy="steps", eval_steps=4, max_steps=4, metric_for_best_model="loss")
    if where == "metrics":
        trainer.compute_metrics = slow
    else:
        ends.on_train_end = slow
    trainer.train()
    wait_for_threads("dalsegno-alive")


def wait_for_threads(name: str) -> None:
    """Until none of this name is left."""
    for thread in [one for one in threading.enumerate() if one.name == name]:
        thread.join(30)
        assert not thread.is_alive()


def test_a_system_without_threads_ends_no_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no signs then, as if nobody gave any."""

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    with evaluating.Alive(lambda: None).under_way():
        pass


def test_who_hangs_in_an_evaluation_is_not_alive_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a thread that says so stay behind."""
    monkeypatch.setattr(evaluating, "SIGN_SECONDS", 0.01)
    monkeypatch.setattr(evaluating, "MOST_SECONDS", 0.1)
    with evaluating.Alive(lambda: None).under_way():
        wait_for_threads("dalsegno-alive")


@pytest.mark.skipif(
    "_initial_global_step" not in inspect.getsource(Trainer),
    reason="this transformers divides the losses since the start by all steps",
)
def test_the_mean_loss_at_the_end_is_of_the_steps_of_its_start(tmp_path: Path) -> None:
    found = interrupted(tmp_path / "a", 11, logging_steps=50)
    wanted = train(make(tmp_path / "b", logging_steps=1))
    assert found[-1]["train_loss"] == pytest.approx(wanted[-2]["loss"], rel=1e-6)


class Own(Trainer):  # type: ignore[misc]
    """A loss that knows no labels to be left out."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"]).logits[:, -1]
        loss = -logits.log_softmax(-1).gather(1, inputs["labels"][:, -1:]).mean()
        return (loss, {}) if return_outputs else loss


def test_a_repeated_sample_keeps_its_labels_where_the_mean_is_over_samples(tmp_path: Path) -> None:
    """A short last batch, of which a slice has no sample of its own."""
    losses = [
        [line["loss"] for line in train(make(tmp_path / str(micro), micro=micro, base=Own, by_samples=True))[:-1]]
        for micro in (1, 6)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_checkpoint_that_was_sealed_and_not_linked_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who saved it died in between, also after the last step."""
    with monkeypatch.context() as patched:
        patched.setattr("dalsegno.swift_plugin.hf.checkpoints.link", lambda place, source, step: exit_at(step, 10))
        with pytest.raises(KeyboardInterrupt):
            train(make(tmp_path, max_steps=10))
    train(make(tmp_path, max_steps=10))
    assert (tmp_path / "out" / "checkpoint-10" / "trainer_state.json").exists()


def exit_at(step: int, last: int) -> None:
    if step == last:
        raise KeyboardInterrupt


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from (Tokens()[index] for index in range(LENGTH))


def test_a_stream_whose_length_cannot_be_asked_for(tmp_path: Path) -> None:
    """Torch's `ChainDataset` has a `__len__`, which fails. The Trainer knows that."""
    assert len(train(make(tmp_path, data=torch.utils.data.ChainDataset([Stream()]), max_steps=2))) == 3


@pytest.mark.parametrize("change", [{"save_strategy": "epoch"}, {"eval_strategy": "epoch"}])
def test_epochs_of_a_stream_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    make(tmp_path, data=Stream())
    with pytest.raises(ValueError, match="without a length, which has no epochs: set it to steps"):
        make(tmp_path, data=Stream(), **change)


class Die(TrainerCallback):  # type: ignore[misc]
    """Dies where one of the Trainer's events is told of."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self.die)

    def die(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


def test_a_death_between_a_save_and_the_end_of_its_data_epoch(tmp_path: Path) -> None:
    """The evaluation of the step was made before, and is not made again; what the epoch's end brings is."""
    often = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4}
    with pytest.raises(KeyboardInterrupt):
        train(make(tmp_path / "a", Die("on_epoch_end"), **often))
    assert [one.step for one in inventory(tmp_path / "a" / "checkpoints")] == [4]
    assert without_end(train(make(tmp_path / "a", **often))) == without_end(train(make(tmp_path / "b", **often)))


def test_a_training_that_was_stopped_stays_stopped(tmp_path: Path) -> None:
    """Decided by an evaluation, saved with it, and then everything died."""
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    best = {"metric_for_best_model": "loss", "load_best_model_at_end": True, "greater_is_better": True}
    with pytest.raises(KeyboardInterrupt):
        train(make(tmp_path, EarlyStoppingCallback(2), Die("on_train_end"), **often, **best))
    trainer = make(tmp_path, EarlyStoppingCallback(2), **often, **best)
    train(trainer)
    assert trainer.state.global_step == 6


@pytest.mark.full
def test_early_stopping_survives(tmp_path: Path) -> None:
    """Its patience, and a stop that the evaluation left out by a drain decides."""
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    best = {"metric_for_best_model": "loss", "load_best_model_at_end": True, "greater_is_better": True}
    wanted = without_end(train(make(tmp_path / "all", EarlyStoppingCallback(2), **often, **best)))
    stop = wanted[-1]["step"]
    assert stop == 6, "the loss falls: the first evaluation should stay the best"
    for step in range(1, stop + 1):
        with pytest.raises(Drained):
            train(make(tmp_path / str(step), EarlyStoppingCallback(2), At(step, drain), **often, **best))
        found = train(make(tmp_path / str(step), EarlyStoppingCallback(2), **often, **best))
        assert without_end(found) == wanted, step


class Counter(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Counts steps, each for so much."""

    def __init__(self, each: int = 1) -> None:
        self.each, self.count = each, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += self.each

    def state(self) -> dict[str, Any]:
        return {"args": {"each": self.each}, "attributes": {"count": self.count}}


def counters_saved(directory: Path, step: int) -> Any:
    (path,) = (directory / "checkpoints").glob(f"step-{step}.*/checkpoint-{step}/trainer_state.json")
    return json.loads(path.read_text())["stateful_callbacks"].get("Counter")


def test_callbacks_of_one_class_go_on_each_by_itself(tmp_path: Path) -> None:
    """Behind several saves, of which each has one entry for each callback; and where one more or less resumes."""
    often, new = {"save_steps": 1}, Counter()
    with pytest.raises(Drained):
        train(make(tmp_path, Counter(), Counter(10), At(3, drain), **often))
    assert [one["attributes"]["count"] for one in counters_saved(tmp_path, 3)] == [3, 30]
    one, other = Counter(), Counter(10)
    with pytest.raises(Drained):
        train(make(tmp_path, one, other, new, At(5, drain), **often))
    assert (one.count, other.count, new.count) == (5, 50, 2)
    assert [one["attributes"]["count"] for one in counters_saved(tmp_path, 5)] == [5, 50, 2]
    last = Counter()
    train(make(tmp_path, last, **often, max_steps=7))
    assert counters_saved(tmp_path, 7)["attributes"] == {"count": last.count}


def test_a_callback_with_a_state_may_be_new_where_a_run_resumes(tmp_path: Path) -> None:
    """The Trainer looks for its state when it saves, and the resume point has none."""
    with pytest.raises(Drained):
        train(make(tmp_path, At(3, drain)))
    train(make(tmp_path, Counter()))
    assert counters_saved(tmp_path, 12)["attributes"] == {"count": 9}


def test_callbacks_of_one_class_load_the_newest_of_what_earlier_versions_saved(tmp_path: Path) -> None:
    """They left the states of a run's beginning, and of all earlier saves, in front of the newest."""
    callbacks = Counter(), Counter(10)
    trainer = make(tmp_path, *callbacks)
    saved = [{"attributes": {"count": count}} for count in (0, 0, 1, 10, 2, 20)]
    trainer.state.stateful_callbacks = {"Counter": saved, "TrainerControl": {"args": {"should_training_stop": True}}}
    trainer._load_callback_state()
    assert [one.count for one in callbacks] == [2, 20]
    assert trainer.elastic_run.stopped


def test_a_kill_goes_back_to_the_last_save(tmp_path: Path) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(make(tmp_path / "a", At(8, die)))
    found = train(make(tmp_path / "a"))
    assert without_end(found) == without_end(train(make(tmp_path / "b")))


class LoadsByItself(Trainer):  # type: ignore[misc]
    """Has its own way to load what it has saved."""

    loaded: str | None = None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        LoadsByItself.loaded = checkpoint
        super()._load_optimizer_and_scheduler(checkpoint)


@pytest.mark.parametrize("base", [Trainer, LoadsByItself])
def test_the_optimizer_resumes_as_it_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: type[Any]
) -> None:
    """All of its state, in memory of its own; a class that loads by itself is asked."""
    monkeypatch.setattr(LoadsByItself, "loaded", None)
    with pytest.raises(Drained):
        train(make(tmp_path, At(6, drain), base=base))
    (path,) = (tmp_path / "checkpoints").glob("step-6.*/checkpoint-6/optimizer.pt")
    saved = torch.load(path, weights_only=True)
    found: list[dict[str, Any]] = []

    def look() -> None:
        # Nothing is mapped any more: what is not copied would be gone.
        path.write_bytes(bytes(path.stat().st_size))
        found.append(copy.deepcopy(trainer.optimizer.state_dict()))

    trainer = make(tmp_path, At(7, look), base=base)
    train(trainer)
    torch.testing.assert_close(found[0]["state"], saved["state"], rtol=0, atol=0)
    assert found[0]["param_groups"] == saved["param_groups"]
    assert LoadsByItself.loaded == (None if base is Trainer else str(path.parent))


class SavesItsScale(Trainer):  # type: ignore[misc]
    """As with fp16, which needs a card."""

    def _save_scaler(self, output_dir: str) -> None:
        Path(output_dir, "scaler.pt").write_bytes(b"scale")


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("trainer-progress.json", Trainer),
        ("checkpoint-6/model.safetensors", Trainer),
        ("checkpoint-6/optimizer.pt", Trainer),
        ("checkpoint-6/optimizer.pt", LoadsByItself),
        ("checkpoint-6/scheduler.pt", Trainer),
        ("checkpoint-6/scaler.pt", SavesItsScale),
    ],
)
def test_what_a_node_does_not_see_does_not_begin_anew(tmp_path: Path, name: str, base: type[Any]) -> None:
    """The Trainer passes over it: this rank's optimizer would be another than that of the others."""
    with pytest.raises(Drained):
        train(make(tmp_path, At(6, drain), base=base))
    trainer = make(tmp_path, base=base)
    (path,) = (tmp_path / "checkpoints").glob(f"step-6.*/{name}")
    path.unlink()
    with pytest.raises(OSError, match=f"{name} is not here, although the checkpoint's manifest lists it"):
        train(trainer)


def test_dropout_with_fixed_micro_batches_survives_a_drain(tmp_path: Path) -> None:
    def dropping(directory: Path, *callbacks: Any) -> Any:
        trainer = make(directory, *callbacks, fixed=True)
        trainer.model.model.layers[0].register_forward_hook(
            lambda layer, args, out: torch.nn.functional.dropout(out, 0.3, layer.training)
        )
        return trainer

    with pytest.raises(Drained):
        train(dropping(tmp_path / "a", At(7, drain)))
    assert without_end(train(dropping(tmp_path / "a"))) == without_end(train(dropping(tmp_path / "b")))


@pytest.mark.parametrize("fixed", [False, True])
def test_dropout_is_told_of_where_a_change_draws_other_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fixed: bool
) -> None:
    """Not with fixed micro-batches, for which the Trainer's seed sets the generators."""
    trainer = make(tmp_path, fixed=fixed, max_steps=1)
    trainer.model.model.layers.append(torch.nn.Dropout(0.1))
    run = trainer.elastic_run
    run.session.examination.learn(max_world_size=4)
    run.learn(trainer, trainer.model, None)
    run.session.examination.end()
    told = capsys.readouterr().out
    assert "training: strategy ddp" in told
    assert ("Dropout: each rank draws its own random numbers" in told) is not fixed


class _Alone(TrainerCallback):  # type: ignore[misc]
    """Counts for itself."""

    def __init__(self) -> None:
        self.bad = 0


class _Shows(TrainerCallback):  # type: ignore[misc]
    """Has nothing that grows."""

    def __init__(self) -> None:
        self.name, self.on = "x", True


def test_callbacks_that_save_nothing_of_what_they_count_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not those that save it, nor those of transformers: the progress bar, early stopping, tables."""
    trainer = make(tmp_path, _Alone(), _Shows(), Counter(), EarlyStoppingCallback(3), PrinterCallback(), max_steps=1)
    trainer.elastic_run.learn(trainer, trainer.model, None)
    trainer.elastic_run.session.examination.end()
    told = capsys.readouterr().out
    assert "not saved: _Alone: without state() of ExportableState they begin anew at each start" in told
    assert not any(f"{name}," in told for name in ("_Shows", "Counter", "EarlyStoppingCallback", "ProgressCallback"))


def test_a_filler_adds_nothing_even_if_it_is_not_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data epochs end with 4 samples for 6 slices of one: two slices repeat a sample, and count for nothing."""
    wanted = train(make(tmp_path / "a", micro=6))
    plain = Trainer.compute_loss

    def strange(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, model, inputs, *args, **kwargs)
        return found * math.nan if bool((inputs["labels"] == -100).all()) else found

    monkeypatch.setattr(Trainer, "compute_loss", strange)
    found = train(make(tmp_path / "b", micro=1))
    losses = [[line["loss"] for line in one if "loss" in line] for one in (wanted, found)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_trainer_deletes_nothing_and_its_limit_is_the_runs(tmp_path: Path) -> None:
    train(make(tmp_path, save_steps=2, save_total_limit=2))
    kept = [one.step for one in inventory(tmp_path / "checkpoints")]
    assert kept == [10, 12]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-10", "checkpoint-12"]
    state = json.loads((tmp_path / "out" / "checkpoint-12" / "trainer_state.json").read_text())
    assert state["global_step"] == 12


@pytest.mark.parametrize(
    "part", ["save_model", "_save", "_save_rng_state", "_save_optimizer_and_scheduler", "save_to_json"]
)
def test_a_save_that_fails_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    """Whichever part of it one rank does alone: the Trainer's collectives that follow are reached all the same."""
    owner = TrainerState if part == "save_to_json" else Trainer
    whole, failures, reached = getattr(owner, part), [OSError(28, "No space left on device")], []

    def full_once(self: Any, *args: Any, **kwargs: Any) -> None:
        if failures:
            raise failures.pop()
        whole(self, *args, **kwargs)

    def rotate(*args: Any, **kwargs: Any) -> None:
        reached.append(True)

    monkeypatch.setattr(owner, part, full_once)
    monkeypatch.setattr("transformers.trainer.rotate_checkpoints", rotate)
    train(make(tmp_path, save_steps=4))
    assert [one.step for one in inventory(tmp_path / "checkpoints")] == [8, 12]
    assert not (tmp_path / "out" / "checkpoint-4").exists()
    assert "No space left on device" in caplog.text
    assert len(reached) == 3


def test_the_last_step_is_saved_with_its_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its save fails at first; what is tried again must not have the best model's, which are loaded at the end."""
    often = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "load_best_model_at_end": True}
    best = {"metric_for_best_model": "loss", "greater_is_better": True}  # the first one
    train(make(tmp_path / "b", **often, **best))
    whole = Trainer._save

    def full(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step == 12 and not failed:
            failed.append(True)
            raise OSError(28, "No space left on device")
        whole(self, *args, **kwargs)

    failed: list[bool] = []
    monkeypatch.setattr(Trainer, "_save", full)
    monkeypatch.setattr("dalsegno.elastic.training.saves.LAST_SAVE_PAUSE_SECONDS", 0.0)
    train(make(tmp_path / "a", **often, **best))
    weights = [load_file(tmp_path / name / "out" / "checkpoint-12" / "model.safetensors") for name in ("a", "b")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


class Noisy(Tokens):
    """Draws from the global generator whenever it is asked."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = super().__getitem__(index)
        return {**found, "input_ids": (found["input_ids"] + torch.randint(0, 2, (8,))) % 16}


def test_what_is_drawn_while_samples_are_made_goes_on(tmp_path: Path) -> None:
    """The generators are put back before the first sample of a run that resumes, in a world that has not changed."""
    with pytest.raises(Drained):
        train(make(tmp_path / "a", At(6, drain), data=Noisy(), dataloader_num_workers=0))
    found = train(make(tmp_path / "a", data=Noisy()))
    assert without_end(found) == without_end(train(make(tmp_path / "b", data=Noisy())))


class Counted(TrainerCallback):  # type: ignore[misc]
    """Counts as ms-swift's early stopping does: when it is told of a save, and saves nothing."""

    def __init__(self) -> None:
        self.saves: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saves.append(state.global_step)


class Hears(Counted):
    """Counts for nobody."""


@pytest.mark.parametrize("step", [3, *(pytest.param(step, marks=pytest.mark.full) for step in (4, 5))])
def test_a_callback_that_counts_saves_counts_those_that_were_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Not a drain's own save; that of a step where one is due anyway, once. Others hear of each such step, too."""
    monkeypatch.setattr("dalsegno.swift_plugin.hf.trainer.ElasticTrainer.counting", {"Counted": ("saves",)})
    first, others = Hears(), Hears()
    with pytest.raises(Drained):
        train(make(tmp_path, Counted(), first, At(step, drain), save_steps=4))
    last = Counted()
    train(make(tmp_path, last, others, save_steps=4))
    assert last.saves == [4, 8, 12]
    assert first.saves + others.saves == [4, 8, 12]


def test_a_batch_that_ranks_share_is_refused(tmp_path: Path) -> None:
    """The global batch would be as many times too large as there are ranks; with a size that is given it is known."""
    split = make(tmp_path, accelerator_config={"split_batches": True})
    with pytest.raises(ValueError, match=r"split_batches.*give hf\.elastic\(\.\.\., global_batch_size="):
        refusals.refuse_shared_batch(split.args, Options())
    refusals.refuse_shared_batch(make(tmp_path).args, Options())


@pytest.mark.parametrize("optim", ["lomo", "adalomo"])
def test_an_optimizer_that_steps_in_each_backward_pass_is_refused(tmp_path: Path, optim: str) -> None:
    """Its steps would be as many as a world has micro-batches."""
    trainer = make(tmp_path)
    trainer.args.optim = OptimizerNames(optim)
    with pytest.raises(ValueError, match=f"optim={optim}, which steps in each backward pass"):
        refusals.refuse(trainer)


def test_a_path_to_resume_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resumes by itself"):
        make(tmp_path).train(resume_from_checkpoint="somewhere")


@pytest.mark.parametrize(("version", "ranks", "refused"), [("5.17", 2, True), ("5.17", 1, False), ("5.18", 2, False)])
def test_a_transformers_that_cannot_resume_in_several_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, ranks: int, refused: bool
) -> None:
    """On CPUs only; before anything was trained that could not go on."""
    trainer = make(tmp_path)
    monkeypatch.setattr("dalsegno.swift_plugin.hf.refusals._version", lambda: tuple(map(int, version.split("."))))
    with pytest.raises(RuntimeError, match=r"install transformers>=5\.18") if refused else nullcontext():
        refusals.refuse_world(trainer, ranks)


def adapted(config: Any) -> Any:
    return peft.get_peft_model(make_model(), config)


LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(**LORA),
        peft.LoraConfig(**LORA, bias="all"),
        peft.LoraConfig(**LORA, use_dora=True),
        peft.LoraConfig(**LORA, modules_to_save=["lm_head", "input_layernorm"]),
        peft.LoraConfig(**LORA, trainable_token_indices=[1, 2]),
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        peft.LNTuningConfig(target_modules=["input_layernorm"]),
    ],
    ids=["lora", "bias", "dora", "modules_to_save", "tokens", "ia3", "prompt", "prefix", "norms"],
)
def test_adapters_are_in_what_peft_saves(tmp_path: Path, config: Any) -> None:
    make(tmp_path, model=adapted(config))


ADALORA = peft.AdaLoraConfig(**LORA, init_r=4, target_r=2, total_step=12, tinit=1, tfinal=4)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (ADALORA, "AdaLoRA: this cannot be trained elastically; what it has learned .* use lora"),
        (peft.LoraConfig(**LORA, init_lora_weights="pissa_niter_2"), "init_lora_weights=pissa_niter_2, for which"),
    ],
    ids=["adalora", "pissa_niter"],
)
def test_adapters_that_no_other_start_makes_alike_are_refused(tmp_path: Path, config: Any, why: str) -> None:
    """Their shapes have changed; or the base model, by numbers that were drawn."""
    with pytest.raises(ValueError, match=why):
        make(tmp_path, model=adapted(config))


def test_a_frozen_adapter_is_not_looked_at(tmp_path: Path) -> None:
    """Beside one that is trained: no start makes it, or changes it."""
    model = adapted(peft.LoraConfig(**LORA))
    model.peft_config["frozen"] = ADALORA
    make(tmp_path, model=model)


@pytest.mark.parametrize("begins", ["lora_ga", "corda", "pissa"])
def test_adapters_that_begin_with_what_was_measured_are_refused(tmp_path: Path, begins: str) -> None:
    """In the base model, of data; not with a decomposition of the base model alone."""
    model = adapted(peft.LoraConfig(**LORA))
    model.peft_config["default"].init_lora_weights = begins
    with nullcontext() if begins == "pissa" else pytest.raises(ValueError, match=f"init_lora_weights={begins}"):
        make(tmp_path, model=model)


@pytest.mark.parametrize("begins", ["pissa", "olora"])
def test_adapters_that_begin_with_a_decomposition_resume(tmp_path: Path, begins: str) -> None:
    """Whatever is drawn before: the base model is changed alike at each start."""

    def made(seed: int) -> Any:
        model = make_model()
        torch.manual_seed(seed)
        return peft.get_peft_model(model, peft.LoraConfig(**LORA, init_lora_weights=begins))

    wanted = without_end(train(make(tmp_path / "a", model=made(1))))
    with pytest.raises(Drained):
        train(make(tmp_path / "b", At(7, drain), model=made(2)))
    found = without_end(train(make(tmp_path / "b", model=made(3))))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=1e-5)


def test_what_trains_beside_adapters_is_refused(tmp_path: Path) -> None:
    """PEFT saves the adapters only: each change of the world would forget what it has learned."""
    model = adapted(peft.LoraConfig(**LORA))
    model.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    with pytest.raises(ValueError, match=r"the adapters \(base_model\.model\.model\.norm\.weight\).*modules_to_save"):
        make(tmp_path, model=model)


PROMPT: dict[str, Any] = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM", "encoder_hidden_size": 8}


@pytest.mark.parametrize(
    "config",
    [
        peft.PrefixTuningConfig(**PROMPT, prefix_projection=True),
        peft.PromptEncoderConfig(**PROMPT),
        peft.PromptEncoderConfig(**PROMPT, encoder_reparameterization_type="LSTM"),
    ],
    ids=["prefix", "MLP", "LSTM"],
)
def test_a_prompt_encoder_with_layers_is_refused(tmp_path: Path, config: Any) -> None:
    """PEFT saves what it gives out and loads that as its embedding: it fits no resume, or all layers begin anew."""
    model = adapted(config)
    assert set(peft.get_peft_model_state_dict(model)) == {"prompt_embeddings"}
    with pytest.raises(ValueError, match=r"layers of its own \(prompt_encoder\.default\..*take prefix tuning without"):
        make(tmp_path, model=model)


def test_what_is_unfrozen_before_the_training_is_refused(tmp_path: Path) -> None:
    """The line that makes it elastic may come first."""
    trainer = make(tmp_path, model=adapted(peft.LoraConfig(**LORA)))
    trainer.model.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    with pytest.raises(ValueError, match=r"train beside the adapters \(base_model\.model\.model\.norm\.weight\)"):
        trainer.train()


def test_what_no_optimizer_trains_may_be_unfrozen(tmp_path: Path) -> None:
    """The script's own optimizer has the adapters alone."""
    model = adapted(peft.LoraConfig(**LORA))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    model.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)

    class Given(Trainer):  # type: ignore[misc]  # transformers is not typed
        def __init__(self, **given: Any) -> None:
            super().__init__(**given, optimizers=(optimizer, None))

    trainer = make(tmp_path, model=model, base=Given)
    refusals.refuse(trainer)
    optimizer.add_param_group({"params": [model.get_parameter("base_model.model.model.norm.weight")]})
    with pytest.raises(ValueError, match="beside the adapters"):
        refusals.refuse(trainer)


def test_an_original_that_an_adapter_has_a_copy_of_may_be_unfrozen(tmp_path: Path) -> None:
    """Nothing asks it, so it learns nothing that could be lost."""

    def model() -> Any:
        made = adapted(peft.LoraConfig(**LORA, modules_to_save=["lm_head"]))
        made.get_parameter("base_model.model.lm_head.original_module.weight").requires_grad_(True)
        return made

    with pytest.raises(Drained):
        train(make(tmp_path / "a", At(6, drain), model=model()))
    found = train(make(tmp_path / "a", model=model()))
    assert without_end(found) == without_end(train(make(tmp_path / "b", model=model())))


@pytest.mark.parametrize("why", ["tied", "switched off"])
def test_an_original_that_computes_something_is_refused(tmp_path: Path, why: str) -> None:
    """It is the embedding, too; or the adapter that has a copy is not asked."""
    plain = make_model()
    if why == "tied":
        plain.lm_head.weight = plain.model.embed_tokens.weight
    model = peft.get_peft_model(plain, peft.LoraConfig(**LORA, modules_to_save=["lm_head"]))
    if why == "switched off":
        model.base_model.disable_adapter_layers()
    model.get_parameter("base_model.model.lm_head.original_module.weight").requires_grad_(True)
    with pytest.raises(ValueError, match="train beside the adapters"):
        make(tmp_path, model=model)


class SyncRefModelCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """As trl's is called."""


class Follows(SyncRefModelCallback):
    """Derived from it by a script."""


def test_a_callback_that_moves_a_reference_model_is_refused(tmp_path: Path) -> None:
    """It does what sync_ref_model does, whenever somebody adds it."""
    refused = pytest.raises(ValueError, match="SyncRefModelCallback, whose reference model is in no checkpoint")
    with refused:
        make(tmp_path / "a", Follows())
    trainer = make(tmp_path / "b")
    trainer.add_callback(SyncRefModelCallback())
    with refused:
        trainer.train()


class BEMACallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """As trl's is called, and the one for reference models that is derived from it."""


def test_a_callback_with_weights_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="BEMACallback, whose average of the weights is in no checkpoint"):
        make(tmp_path, BEMACallback())


def test_a_reference_model_that_follows_is_refused(tmp_path: Path) -> None:
    """trl's callback changes it at each step, and no checkpoint has it."""
    trainer = make(tmp_path)
    trainer.args.sync_ref_model = True
    with pytest.raises(ValueError, match="sync_ref_model, whose reference model is in no checkpoint"):
        refusals.refuse(trainer)


@pytest.mark.parametrize(("name", "alpha", "refused"), [("CPOTrainer", 1.0, True), ("CPOTrainer", 0.0, False)])
def test_means_over_a_micro_batchs_tokens_are_refused(tmp_path: Path, name: str, alpha: float, refused: bool) -> None:
    """Their batches have no labels that tell how many tokens count."""
    trainer = make(tmp_path, base=type(name, (Trainer,), {}), fixed=True)
    trainer.args.cpo_alpha = alpha
    refusals.refuse_losses(trainer, fixed_micro_batch=True)
    with pytest.raises(ValueError, match="mean over the tokens") if refused else nullcontext():
        refusals.refuse_losses(trainer, fixed_micro_batch=False)


class Unweighed(Trainer):  # type: ignore[misc]  # transformers is not typed
    """Its step divides by itself, as such methods did for old versions."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = model(**inputs).loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_training_step_that_nothing_weighs_is_refused(tmp_path: Path) -> None:
    """Its gradients would be larger the fewer ranks there are."""
    trainer = make(tmp_path, base=Unweighed)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(ValueError, match=r"nothing weighs it.*call self\.compute_loss"):
        trainer.train()
    assert all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))


class Tempered(Trainer):  # type: ignore[misc]  # transformers is not typed
    """Trains a temperature of its loss, which is no part of the model."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        return optimizer


def test_parameters_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trains parameters that are not the model's, 1 of them \(shape \(3,\)\)"):
        make(tmp_path, base=Tempered).train()


def test_a_checkpoint_that_is_not_the_runs_is_not_resumed_from(tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-7").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-7" / "trainer_state.json").write_text("{}")
    with pytest.raises(ValueError, match="checkpoint-7 is not the run's"):
        make(tmp_path).train(resume_from_checkpoint=True)


def test_a_link_of_an_earlier_run_is_no_checkpoint_of_another_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new run of a script that resumes from ``get_last_checkpoint(output_dir)``, which finds what the last left.

    One that names an older one has chosen it.
    """
    train(make(tmp_path, max_steps=10))
    (tmp_path / "checkpoints").rename(tmp_path / "earlier")
    for link in [*(tmp_path / "out/checkpoint-5").iterdir(), *(tmp_path / "out/checkpoint-10").iterdir()]:
        target = tmp_path / "earlier" / link.readlink().relative_to(tmp_path / "checkpoints")
        link.unlink()
        link.symlink_to(target)
    found = get_last_checkpoint(str(tmp_path / "out"))
    assert found is not None
    with pytest.raises(ValueError, match="checkpoint-5 is not the run's"):
        refusals.refuse_other_resume(str(tmp_path / "out/checkpoint-5"), tmp_path / "out")
    trainer = make(tmp_path, max_steps=2)
    trainer.train(resume_from_checkpoint=found)
    assert trainer.state.global_step == 2
    lines = [record.getMessage() for record in caplog.records if "earlier run's" in record.getMessage()]
    assert lines == [
        f"resume_from_checkpoint: {found} is an earlier run's, and is not resumed from: this run begins anew"
    ]
    shutil.copytree(found, tmp_path / "out/checkpoint-7")
    with pytest.raises(ValueError, match="checkpoint-7 is not the run's"):
        refusals.refuse_other_resume(found, tmp_path / "out")
    with pytest.raises(ValueError, match="earlier is not the run's"):
        refusals.refuse_other_resume(str(tmp_path / "earlier"), tmp_path / "out")


def test_another_order_of_samples_is_refused(tmp_path: Path) -> None:
    train(make(tmp_path, max_steps=2))
    with pytest.raises(ValueError, match="seed was 3 and is 4"):
        make(tmp_path, max_steps=4, seed=4)


@pytest.mark.parametrize("micro", [4, 16])
def test_the_batch_that_is_told_of_is_the_plans(tmp_path: Path, micro: int) -> None:
    """The log and the samples per second: not a number of whole micro-batches."""
    trainer = make(tmp_path, micro=micro, max_steps=3)
    assert trainer.get_total_train_batch_size(trainer.args) == BATCH
    trainer.train()
    end = trainer.state.log_history[-1]
    assert end["train_samples_per_second"] / end["train_steps_per_second"] == pytest.approx(BATCH, rel=0.05)


def test_one_node_saves_for_all(tmp_path: Path) -> None:
    """They have one directory."""
    assert not make(tmp_path, save_on_each_node=True).args.save_on_each_node
