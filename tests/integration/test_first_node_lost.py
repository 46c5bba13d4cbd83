"""The node that takes what a script without a session saves is lost before it has taken the last of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.agent.storage.layouts import number_of_file
from dalsegno.elastic.checkpoint import inventory
from tests.support.jobs.cluster import Cluster, Training, Undisturbed
from tests.support.jobs.faults import run_directory

from .test_membership import Clusters

pytestmark = pytest.mark.timeout(300)
WORKERS = Path(__file__).resolve().parents[1] / "support" / "workers"
LAYOUTS, DEEPSPEED = WORKERS / "plain_layouts.py", WORKERS / "plain_deepspeed.py"
SAVE_EVERY = 20


def a_job(clusters: Clusters, most: int) -> Cluster:
    """Its first world has all nodes: it opens as soon as they are there."""
    training = Training(script=LAYOUTS, steps=80, save_every=SAVE_EVERY, extra=("--layout=nanogpt",))
    job = clusters(training=training, hooked=False, universal="", step_time=0.2, nnodes=f"1:{most}")
    job.agent_flags = ["--quiet-time=30"]
    job.script_flags = ["--save-dir=${save_dir}", "--init_from=${resume_dir:+resume}"]
    return job


def whole_save_that_nobody_took(job: Cluster, epoch: int) -> int:
    """Until the script has just written its file; returns the step in it."""
    path = run_directory(job) / f"e{epoch}" / "ckpt.pt"
    before = number_of_file(path) if path.exists() else 0

    def look() -> int | None:
        number = number_of_file(path) if path.exists() else None
        return number if number is not None and number != before else None

    return job.wait_for(look, "the next save of the script")


def taken(job: Cluster) -> int:
    return max((one.step for one in inventory(run_directory(job))), default=0)


def assert_others_go_on_from(job: Cluster, first: int, step: int, undisturbed: Undisturbed) -> None:
    """Kills node 0, agent and workers, before it has taken the save of this step."""
    job.kill_node(job.member(0))
    assert taken(job) < step, "the first node was too quick for this test"
    alone = job.wait_world(1, after=first)
    assert job.first_step(alone) == step + 1
    job.finish()
    job.assert_undisturbed(undisturbed)


def test_a_survivor_takes_what_the_first_node_had_not_taken(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Node 0 dies in the second after a save, agent and workers: the others go on from this save."""
    job = a_job(clusters, 2)
    job.start("a", "b")
    first = job.wait_world(2, steps=1)
    step = whole_save_that_nobody_took(job, first)
    assert_others_go_on_from(job, first, step, undisturbed)


@pytest.mark.full
def test_the_next_start_takes_what_a_lone_node_had_not_taken(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """The only node is killed in the second after a save: the same command goes on from this save."""
    job = a_job(clusters, 1)
    (node,) = job.start("a")
    first = job.wait_world(1, steps=1)
    step = whole_save_that_nobody_took(job, first)
    job.kill_node(node)
    assert taken(job) < step, "the node was too quick for this test"
    job.start("a")
    second = job.wait_world(1, after=first)
    assert job.first_step(second) == step + 1
    job.finish()
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_what_is_taken_late_is_converted_like_any_other(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """ZeRO's partitions of two ranks, for the one that is left."""
    training = Training(script=DEEPSPEED, steps=100, save_every=SAVE_EVERY, extra=("--zero-stage=1",))
    job = clusters(training=training, hooked=False, step_time=0.2, nnodes="1:2")
    job.agent_flags, job.script_flags = ["--quiet-time=30", "--deepspeed-load-universal"], ["--save-dir=${save_dir}"]
    job.start("a", "b")
    first = job.wait_world(2, steps=1)
    latest = run_directory(job) / f"e{first}" / "latest"
    before = latest.read_text() if latest.exists() else ""
    tag = job.wait_for(
        lambda: text if latest.exists() and (text := latest.read_text()) not in ("", before) else None, "the next save"
    )
    step = int(tag.removeprefix("global_step"))
    assert_others_go_on_from(job, first, step, undisturbed)
