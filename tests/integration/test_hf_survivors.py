"""A crash of a Hugging Face Trainer with DDP that costs no step: whoever is left saves the last boundary by itself.

Memory checkpoints are so far apart that the newest is older than anything a survivor holds.
"""

from __future__ import annotations

import json
import os
import signal
import time

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


def training(*extra: str) -> Training:
    """Its own saves come behind the end."""
    one = of_hf(*extra, steps=STEPS)
    return Training(one.script, STEPS, 1000, extra=one.extra, needs_agent=True, preloaded=one.preloaded)


def scene(jobs: Clusters, *extra: str, stands: str = "before", free: int = FREE) -> tuple[Cluster, int]:
    """Two nodes, which stand still in the middle of a step; returns their job and epoch."""
    told = {"DALSEGNO_TEST_STEPS": str(free), "DALSEGNO_TEST_STANDS": stands}
    return together(jobs, "a", "b", training=training(*extra), script_flags=FLAGS, agent_environment=told)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_killed_in_the_middle_of_a_step(jobs: Clusters, undisturbed: Undisturbed, killed: int) -> None:
    """Whichever it is, also the one that would write the checkpoint: what is saved is a normal one of the Trainer's."""
    job, first = scene(jobs)
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


def test_a_node_killed_in_an_evaluation(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """The next world makes it, and each evaluation is in the history once."""
    job, _ = scene(jobs, "--evaluate-every=5", stands="evaluation", free=1)
    job.wait_step(STEPS // 2)
    job.wait_standing()
    job.kill_node(job.node("b"))
    job.wait_line(f"1 node began from step {STEPS // 2}")  # with the evaluation, in which it stands still, too
    end(job, undisturbed)
    job.assert_lost({})
    history = trainer_state(job, STEPS)["log_history"]
    assert [line["step"] for line in history if "eval_loss" in line] == list(range(5, STEPS + 1, 5))
