"""A plain Hugging Face Trainer under real agents: its world changes size, and nobody can tell from its losses."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.cluster import HF, Cluster, Training, Undisturbed, change_worlds

pytestmark = [pytest.mark.timeout(600), pytest.mark.executed]

Clusters = Callable[..., Cluster]


def training(*extra: str, steps: int = 60) -> Training:
    """Data epochs of 10 steps, the last of which is short: 152 samples, 16 at a time."""
    flags = ("--max-micro-batch-size=3", "--samples=152", *extra)
    return Training(HF, steps, 10, extra=flags, needs_agent=True, preloaded="tests.support.forks.preloaded_hf")


def trainer_state(job: Cluster, step: int) -> dict[str, Any]:
    """What the Trainer itself saved, found where people look for it."""
    found: dict[str, Any] = json.loads(
        (job.directory / "out" / f"checkpoint-{step}" / "trainer_state.json").read_text()
    )
    return found


def assert_trainers_own(job: Cluster) -> None:
    """The last checkpoint is a normal one of the Trainer's: its history has every step once."""
    state = trainer_state(job, job.training.steps)
    logged = [line["step"] for line in state["log_history"] if "loss" in line]
    assert logged == list(range(1, job.training.steps + 1))
    assert state["global_step"] == state["max_steps"] == job.training.steps
    # The last prune may come after the workers' end.
    places = sorted((job.directory / "out").glob("checkpoint-*"))
    linked = {place.name for place in places if (place / "model.safetensors").exists()}
    assert linked == {f"checkpoint-{one.step}" for one in job.sealed()}


@pytest.mark.full
def test_ddp_through_changes_of_the_world(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """DDP, with evaluations, the best model and data epochs that end in a short batch."""
    job = clusters(training=training("--evaluate-every=10", "--save-total-limit=2"), nnodes="1:3")
    change_worlds(job)
    job.assert_undisturbed(undisturbed)
    assert_trainers_own(job)
    state = trainer_state(job, job.training.steps)
    evaluated = [line["step"] for line in state["log_history"] if "eval_loss" in line]
    assert evaluated == list(range(10, job.training.steps + 1, 10))
    best = min((line["eval_loss"], line["step"]) for line in state["log_history"] if "eval_loss" in line)
    assert state["best_metric"] == best[0]
    assert state["best_global_step"] == best[1]
    assert Path(state["best_model_checkpoint"]).is_dir()
    # Two beside the best, and what was retired last: the Trainer's limit is the run's.
    assert len(job.sealed()) <= 4


@pytest.mark.parametrize(
    ("stage", "universal"),
    [
        pytest.param(1, "gate", marks=pytest.mark.full),
        pytest.param(2, "gate", marks=pytest.mark.full),
        pytest.param(3, "gate", marks=pytest.mark.full),
        pytest.param(1, "", marks=pytest.mark.full),
        pytest.param(2, "", marks=pytest.mark.full),
        pytest.param(3, "", marks=pytest.mark.full),
    ],
)
def test_zero_through_changes_of_the_world(
    clusters: Clusters, undisturbed: Undisturbed, stage: int, universal: str
) -> None:
    """DeepSpeed below the Trainer, through universal files or re-sharded."""
    zero = training(f"--zero-stage={stage}", "--evaluate-every=10", steps=50)
    job = clusters(training=zero, nnodes="1:3", universal=universal)
    change_worlds(job)
    job.assert_undisturbed(undisturbed)
    assert_trainers_own(job)
    how = {change.how for change in job.changes().values()}
    assert ("universal" if universal else "re-sharded") in how, how


@pytest.mark.full
def test_a_static_graph_through_changes_of_the_world(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """The Trainer itself would put off its first backward pass, which torch does not survive."""
    job = clusters(training=training("--static-graph"), nnodes="1:3")
    job.open("a")
    job.start("b", "c")
    job.wait_world(3, steps=3, after=1)
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_dropout_with_fixed_micro_batches(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """The generators are set for each micro-batch: the same masks at every world size."""
    dropped = training("--dropout=0.2", "--fixed-micro-batch", steps=30)
    job = clusters(training=dropped, nnodes="1:3")
    job.open("a")
    job.start("b", "c")
    job.wait_world(3, steps=3, after=1)
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_logs_that_span_a_change(clusters: Clusters) -> None:
    """With a log every 7 steps the mean is that of all seven, whatever came between."""
    sparse = training("--log-every=7", steps=28)
    job = clusters(training=sparse, nnodes="1:2", step_time=0.3)
    job.start("a")
    job.wait_line("from step 0")
    job.start("b")
    job.wait_line("2 nodes, resumed")
    job.finish()
    alone = clusters(training=sparse, nnodes="1:1", step_time=0.0)
    alone.start("a")
    alone.finish()
    losses = [
        [line["loss"] for line in trainer_state(one, 28)["log_history"] if "loss" in line] for one in (job, alone)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 4


@pytest.mark.full
def test_a_worker_that_dies_while_it_saves_leaves_nothing(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Killed with its part written and not sealed: the run goes on from the checkpoint before."""
    job = clusters(training=training(steps=40), nnodes="1:2", agent_flags=("--quiet-time=60",))
    job.start("a", hold="saved-20")
    job.start("b")
    job.wait_world(2)
    job.wait_hold("saved-20", job.node("a"))
    os.kill(job.worker_pid(job.node("b")), signal.SIGKILL)
    job.wait_line("resumed at step 10")
    job.release()
    job.finish()
    job.assert_undisturbed(undisturbed)
    assert_trainers_own(job)


@pytest.mark.full
@pytest.mark.parametrize("zero", [(), ("--zero-stage=2",)], ids=["ddp", "zero2"])
def test_the_node_of_rank_0_dies_while_it_saves(
    clusters: Clusters, undisturbed: Undisturbed, zero: tuple[str, ...]
) -> None:
    """The one that writes the Trainer's own files: the other goes on from the checkpoint before, and a third joins."""
    job = clusters(
        training=training("--evaluate-every=10", *zero, steps=40), nnodes="2:2", agent_flags=("--quiet-time=60",)
    )
    job.start("a", "b", hold="saved-20")
    job.wait_world(2)
    first = job.member(0)
    job.wait_hold("saved-20", first)
    job.kill_node(first)
    job.release()
    job.start("c")
    job.wait_line(r"resumed at step 10\b")
    job.finish()
    job.assert_undisturbed(undisturbed)
    assert_trainers_own(job)
