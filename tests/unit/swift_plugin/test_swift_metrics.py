"""What ms-swift logs of pairs: a micro-batch that is computed only to keep a rank company counts nowhere."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dalsegno.swift_plugin.hf.options import Options
from dalsegno.swift_plugin.hf.trainer import ElasticTrainer

swift_hooks: Any = None


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Imports ms-swift, which takes seconds, where one of these tests runs, and not wherever they are collected."""
    name = "dalsegno.swift_plugin.swift_hooks"
    globals()["swift_hooks"] = pytest.importorskip(name, reason="the extra `swift` is not installed")


class Mean:
    """As ms-swift's."""

    def __init__(self) -> None:
        self.state, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.state, self.count = self.state + value, self.count + 1


class Theirs:
    """As ms-swift's trainers of pairs: a metric is gathered, another one is added up, and a third is new."""

    def store_metrics(self, metrics: Any, train_eval: str = "train") -> None:
        self.stored[train_eval].append(metrics)

    def compute_loss(self, values: torch.Tensor) -> torch.Tensor:
        self.custom_metrics["train"]["reward"].update(float(values.mean()))
        self.custom_metrics["train"]["new" if len(values) == 1 else "reward"].update(1.0)
        self.store_metrics({"chosen": float(self._gathered(values).mean())})
        return values.mean()


def made(monkeypatch: pytest.MonkeyPatch, *, pairs: bool = True) -> Any:
    monkeypatch.setattr(ElasticTrainer, "compute_loss", Theirs.compute_loss)
    monkeypatch.setattr(ElasticTrainer, "store_metrics", Theirs.store_metrics, raising=False)
    trainer = object.__new__(swift_hooks._SwiftTrainer)
    trainer.options, trainer.stored = Options(mean_over_samples=pairs), defaultdict(list)
    trainer.custom_metrics = {"train": defaultdict(Mean), "eval": defaultdict(Mean)}
    trainer.elastic_run = SimpleNamespace(micro=None)
    return trainer


def step(trainer: Any, *micros: tuple[bool, list[float]]) -> None:
    for filler, values in micros:
        trainer.elastic_run.micro = SimpleNamespace(filler=filler)
        trainer.compute_loss(torch.tensor(values))
    trainer.elastic_run.micro = None


def test_a_repeated_pair_is_in_no_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = made(monkeypatch)
    step(trainer, (False, [1.0, 3.0]), (True, [9.0]))
    assert trainer.stored == {"train": [{"chosen": 2.0}]}
    assert {name: vars(one) for name, one in trainer.custom_metrics["train"].items()} == {
        "reward": {"state": 3.0, "count": 2}
    }
    trainer.compute_loss(torch.tensor([5.0]))  # of an evaluation
    assert trainer.stored["train"] == [{"chosen": 2.0}, {"chosen": 5.0}]


def test_what_other_ranks_have_beside_a_repeated_pair_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def gather(values: torch.Tensor) -> torch.Tensor:
        given.append(len(values))
        return torch.cat([values, torch.tensor([4.0, 6.0])])

    monkeypatch.setattr("swift.rlhf_trainers.dpo_trainer.new_gather_function", gather)
    trainer = made(monkeypatch)
    step(trainer, (True, [9.0]))
    assert (given, trainer.stored["train"]) == ([0], [{"chosen": 5.0}])


def test_a_repeated_pair_keeps_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over pairs without any label is no number. Of tokens none may count."""
    batch = {"labels": torch.tensor([[1, 2]])}
    assert made(monkeypatch)._silenced(batch)["labels"].tolist() == [[1, 2]]
    assert made(monkeypatch, pairs=False)._silenced(batch)["labels"].tolist() == [[-100, -100]]


def test_the_last_checkpoint_is_one_that_was_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not one whose save has just failed; and one that a world before has saved, until this one has saved its first."""
    trainer = made(monkeypatch)
    moved: list[str] = []
    trainer.args, trainer.state = SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(global_step=8)
    trainer.elastic_run = SimpleNamespace(save_failed=False, writing=None)

    def theirs(self: Any) -> None:
        self.state.last_model_checkpoint = str(tmp_path / f"checkpoint-{self.state.global_step}")

    def move(self: Any, barrier: bool) -> None:
        moved.append(Path(self.state.last_model_checkpoint).name)

    monkeypatch.setattr(ElasticTrainer, "_save_checkpoint", theirs)
    monkeypatch.setattr(ElasticTrainer, "_update_last_checkpoint_symlink", move, raising=False)
    trainer.linked(4)
    trainer.linked(6)
    assert vars(trainer.state) == {"global_step": 8}
    trainer.elastic_run.save_failed = True
    trainer._save_checkpoint()
    assert vars(trainer.state) == {"global_step": 8}
    trainer.elastic_run.save_failed = False
    trainer._save_checkpoint()
    trainer.linked(4)
    trainer.state.global_step, trainer.elastic_run.save_failed = 10, True
    trainer._save_checkpoint()
    assert Path(trainer.state.last_model_checkpoint).name == "checkpoint-8"
    assert moved == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
