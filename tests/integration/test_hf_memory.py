"""A Hugging Face Trainer's memory checkpoints, written while it trains on: no change goes on from the disk."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from safetensors.torch import load_file

from tests.integration.test_hf_trainer import trainer_state
from tests.integration.test_hf_trainer import training as of_hf
from tests.integration.test_memory import (
    EVERY,
    FREE,
    HELD,
    STEPS,
    Clusters,
    end,
    jobs,
    together,
    wait_durable,
    wait_held,
)
from tests.support.jobs.attacks import Attacks
from tests.support.jobs.cluster import Training, Undisturbed
from tests.support.jobs.faults import run_directory

pytestmark = [pytest.mark.timeout(300), pytest.mark.executed]

__all__ = ["jobs"]


def training(*extra: str) -> Training:
    """Its own saves come behind the end."""
    one = of_hf(*extra, steps=STEPS)
    return Training(one.script, STEPS, 1000, extra=one.extra, needs_agent=True, preloaded=one.preloaded)


WAYS = [
    pytest.param((), id="ddp"),
    *(pytest.param((f"--zero-stage={stage}",), id=f"zero{stage}", marks=pytest.mark.full) for stage in (1, 2, 3)),
]


@pytest.mark.parametrize("extra", WAYS)
def test_a_killed_node(jobs: Clusters, undisturbed: Undisturbed, extra: tuple[str, ...]) -> None:
    """The other one goes on from memory, and then brings the step to the disk: a normal checkpoint of the Trainer's."""
    job, first = together(jobs, "a", "b", training=training(*extra))
    wait_held(job, job.alive())
    assert not job.sealed()
    job.kill_node(job.member(0))  # the one that writes most of it
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == HELD
    wait_durable(job, HELD)
    place = next(run_directory(job).glob(f"step-{HELD}.*")) / f"checkpoint-{HELD}"
    assert json.loads((place / "trainer_state.json").read_text())["global_step"] == HELD
    assert len(load_file(place / "model.safetensors")) > 10
    assert (place / "config.json").exists()
    end(job, undisturbed)
    job.assert_lost({second: range(1, EVERY + FREE + 1)})


@pytest.mark.full
@pytest.mark.parametrize("extra", WAYS)
def test_a_killed_worker_a_join_and_a_leave(jobs: Clusters, undisturbed: Undisturbed, extra: tuple[str, ...]) -> None:
    """A crash on a single node, and planned changes, which drain into memory."""
    job = jobs(nnodes="1:2", training=training(*extra))
    first = job.open("a")
    wait_held(job, job.alive())
    os.kill(job.worker_pid(job.node("a")), signal.SIGKILL)
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == HELD
    job.start("b")
    third = job.wait_world(2, after=second)
    wait_durable(job, job.change(third).resumed)
    job.leave(job.node("b"))
    fourth = job.wait_world(1, after=third)
    wait_durable(job, job.change(fourth).resumed)
    end(job, undisturbed)
    job.assert_lost({second: range(1, EVERY + FREE + 1)})


def test_what_the_trainer_saves_comes_to_the_disk_from_memory(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """It is put where people look for it, and the Trainer's limit holds."""
    own = of_hf("--save-total-limit=2", steps=STEPS)
    job = jobs(nnodes="1:2", training=own, agent_environment={}, step_time=0.1)
    first = job.open("a")
    job.start("b")
    job.wait_world(2, after=first)
    job.wait_step(25)
    # Where the join came behind step 20, what it drained into may have taken its place.
    places = [job.directory / "out" / f"checkpoint-{step}" / "trainer_state.json" for step in range(20, 26)]
    job.wait_for(lambda: any(place.exists() for place in places), "a checkpoint in the output directory")
    place = next(place for place in places if place.exists())
    assert place.parent.name == f"checkpoint-{json.loads(place.read_text())['global_step']}"
    end(job, undisturbed)
    job.assert_lost({})
    assert {one.step for one in job.sealed()} >= {STEPS}
    assert len(job.sealed()) <= 3
    linked = {path.parent.name for path in (job.directory / "out").glob("checkpoint-*/trainer_state.json")}
    assert f"checkpoint-{STEPS}" in linked
    # Neither does the last prune leave a link to nothing behind.
    assert not [path for path in (job.directory / "out").rglob("*") if path.is_symlink() and not path.exists()]


def test_what_memory_has_no_room_for_comes_to_the_disk(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """Also of a Trainer with two ranks on the node, of which one alone finds that: the other one would be in its
    collectives. The first step fits, and no other beside it."""
    flags = ("--nproc-per-node=2", "--memory-budget=2MB", "--keep-checkpoints=0")
    job = jobs(nnodes="1", training=of_hf(steps=STEPS), agent_flags=flags, agent_environment={})
    job.start("a")
    end(job, undisturbed)
    job.assert_lost({})
    (said,) = [line for line in job.nodes[0].text().splitlines() if "the ranks save to the disk" in line]
    assert "of --memory-budget are in use" in said
    found = re.search(r"saving step (\d+) in memory failed", said)
    assert found is not None, said
    assert {int(found[1]), STEPS} <= {one.step for one in job.sealed()}


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(6))
def test_anything_at_any_moment(jobs: Clusters, undisturbed: Undisturbed, seed: int) -> None:
    """Of steps, logs, evaluations and saves, while nodes, agents, ranks and masters are killed or stopped."""
    steps, wanted = 120, 8
    one = of_hf(f"--evaluate-every={5 * (seed % 3)}", steps=steps)
    flags = ("--max-restarts=1000",)
    job = jobs(nnodes="1:3", training=one, agent_environment={}, step_time=0.15, agent_flags=flags)
    attacks = Attacks(job, seed, size=2)
    attacks.begin()
    begun = max(line.step for line in job.poll())
    ways = [attacks.worker, attacks.agent, attacks.node, attacks.leave, attacks.master, attacks.stop, attacks.pair]
    try:
        while len(attacks.said) < wanted and max(line.step for line in job.poll()) < (begun + steps) // 2:
            attacks.one(ways)
    finally:
        print("\n".join(attacks.said))
    job.finish()
    job.assert_undisturbed(undisturbed)
    logged = [line["step"] for line in trainer_state(job, steps)["log_history"] if "loss" in line]
    assert logged == list(range(1, steps + 1))
