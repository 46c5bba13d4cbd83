"""A crash of a Hugging Face Trainer with DDP that costs no step: whoever is left saves the last boundary by itself.

Memory checkpoints are so far apart that the newest is older than anything a survivor holds.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.test_hf_trainer import trainer_state
from tests.integration.test_hf_trainer import training as of_hf
from tests.integration.test_memory import Clusters, end, jobs, together, wait_durable
from tests.integration.test_survivors import FLAGS, FREE, PACE, STEPS, stood_still
from tests.support.jobs.cluster import Cluster, Training, Undisturbed
from tests.support.jobs.faults import run_directory

pytestmark = [pytest.mark.timeout(300), pytest.mark.executed]

__all__ = ["jobs"]


def training(*extra: str, every: int = 1000, steps: int = STEPS) -> Training:
    """Its own saves come behind the end, or each ``every`` steps."""
    one = of_hf(*extra, steps=steps)
    return Training(one.script, steps, every, extra=one.extra, needs_agent=True, preloaded=one.preloaded)


def scene(jobs: Clusters, one: Training, stands: str = "before", free: int = FREE) -> tuple[Cluster, int]:
    """Two nodes, which stand still in the middle of a step; returns their job and epoch."""
    told = {"DALSEGNO_TEST_STEPS": str(free), "DALSEGNO_TEST_STANDS": stands}
    return together(jobs, "a", "b", training=one, script_flags=FLAGS, agent_environment=told)


def in_output(job: Cluster) -> dict[str, dict[str, Any]]:
    """The Trainer's states where people look for them, by checkpoint."""
    found = (job.directory / "out").glob("checkpoint-*/trainer_state.json")
    return {path.parent.name: json.loads(path.read_text()) for path in found}


@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_killed_in_the_middle_of_a_step(jobs: Clusters, undisturbed: Undisturbed, killed: int) -> None:
    """Whichever it is, also the one that would write the checkpoint: what is saved is a normal one of the Trainer's."""
    job, first = scene(jobs, training())
    last = stood_still(job, first)
    job.kill_node(job.member(killed))
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == last
    wait_durable(job, last)
    place = next(run_directory(job).glob(f"step-{last}.*")) / f"checkpoint-{last}"
    state = json.loads((place / "trainer_state.json").read_text())
    assert state["global_step"] == last
    assert [line["step"] for line in state["log_history"] if "loss" in line] == list(range(1, last + 1))
    assert state["is_world_process_zero"]
    assert len(load_file(place / "model.safetensors")) > 10
    for name in ("config.json", "training_args.bin", "optimizer.pt", "scheduler.pt"):
        assert (place / name).stat().st_size
    end(job, undisturbed)
    job.assert_lost({})


def test_a_worker_killed_before_it_gave_its_gradients(jobs: Clusters) -> None:
    """The other one waits for them in its backward pass, which fails. Losses that nobody has logged are not lost."""
    flags, sparse = ("--quiet-time=60",), training("--log-every=7", "--fixed-micro-batch")
    job = jobs(nnodes="1:2", training=sparse, script_flags=FLAGS, agent_flags=flags, agent_environment=PACE)
    job.start("a")
    job.start("b", environment={"DALSEGNO_TEST_STANDS": "backward"})
    job.wait_for(lambda: any(job.holds.glob("standing-*")), "b to stand still")
    time.sleep(0.5)  # until a waits for it in its backward pass
    os.kill(job.worker_pid(job.node("b")), signal.SIGKILL)
    job.wait_line(f"2 nodes, resumed at step {STEPS // 2 + FREE // 3}")  # a step has three backward passes
    job.finish()
    alone = jobs(nnodes="1", training=sparse, script_flags=(), agent_environment={})
    alone.start("a")
    alone.finish()
    logs = [
        [line["loss"] for line in trainer_state(one, STEPS)["log_history"] if "loss" in line] for one in (job, alone)
    ]
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)
    assert len(logs[0]) == STEPS // 7


@pytest.mark.parametrize(
    "every", [pytest.param(STEPS // 2, marks=pytest.mark.full), pytest.param(STEPS, id="the last step's")]
)
def test_a_node_killed_in_an_evaluation(jobs: Clusters, undisturbed: Undisturbed, every: int) -> None:
    """The next world makes it, with the save that comes behind it: no checkpoint is missing, and the best one stays."""
    one = training(f"--evaluate-every={every}", every=every)
    job, _ = scene(jobs, one, "evaluation", free=1)
    job.wait_step(every)
    job.wait_standing()
    job.kill_node(job.node("b"))
    job.wait_line(f"1 node began from step {every}")  # with the evaluation, in which it stands still, too
    end(job, undisturbed)
    job.assert_lost({})
    states = in_output(job)
    assert {f"checkpoint-{step}" for step in range(every, STEPS + 1, every)} <= states.keys()
    last = states[f"checkpoint-{STEPS}"]
    assert [line["step"] for line in last["log_history"] if "eval_loss" in line] == list(range(every, STEPS + 1, every))
    best = last["best_model_checkpoint"]
    assert Path(best).parent.parent == run_directory(job)
    assert (Path(best) / "model.safetensors").is_file()


def test_a_node_killed_while_the_trainer_saves(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """A checkpoint that waits for the disk: it is still to be made."""
    one = training("--evaluate-every=20", every=20)  # the first is the best one
    job = jobs(nnodes="1:2", agent_flags=("--quiet-time=60",), training=one, script_flags=FLAGS, agent_environment={})
    job.start("a")
    job.start("b", hold="saved-20")
    first = job.wait_world(2, 3)
    job.wait_hold("saved-20", job.node("b"))
    time.sleep(0.5)  # until a waits for it
    job.kill_node(job.node("b"))
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == 20
    end(job, undisturbed)
    job.assert_lost({})
    assert in_output(job).keys() == {"checkpoint-20", "checkpoint-40"}


def test_a_worker_killed_behind_its_optimizers_step(jobs: Clusters) -> None:
    """The other one has made that step, too, and waits for it: nothing is lost where no log is due."""
    flags, sparse = ("--quiet-time=60",), training("--log-every=7")
    job = jobs(nnodes="1:2", training=sparse, script_flags=FLAGS, agent_flags=flags, agent_environment=PACE)
    job.start("a")
    job.start("b", environment={"DALSEGNO_TEST_STANDS": "behind"})
    job.wait_for(lambda: any(job.holds.glob("standing-*")), "b to stand still")
    time.sleep(0.5)  # until a waits for it
    os.kill(job.worker_pid(job.node("b")), signal.SIGKILL)
    job.wait_line(f"2 nodes, resumed at step {STEPS // 2 + FREE + 1}")
    job.finish()


def test_a_crash_where_a_training_stops_in_a_data_epoch(jobs: Clusters) -> None:
    """Its last save comes with the end of that data epoch, which is there at once."""
    epochs = {"DALSEGNO_TEST_ARGUMENTS": json.dumps({"save_strategy": "epoch"}), "DALSEGNO_TEST_STEPS": "1000"}
    one, flags = training(steps=35), ("--quiet-time=60",)
    job = jobs(nnodes="1:2", agent_flags=flags, training=one, script_flags=FLAGS, agent_environment=epochs)
    job.start("a")
    job.start("b", hold="saved-35")
    job.wait_world(2, 3)
    job.wait_hold("saved-35", job.node("b"))
    time.sleep(0.5)  # until a waits for it
    job.kill_node(job.node("b"))
    job.finish()
    assert "checkpoint-35" in in_output(job)
