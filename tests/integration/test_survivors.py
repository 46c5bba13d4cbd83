"""A crash that costs no step: with DDP each rank that is left has all of the last boundary, and saves it by itself.

The last memory checkpoint is many steps old when a node or a worker is killed in the middle of a step.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.integration.test_memory import Clusters, end, jobs, together
from tests.support.jobs.cluster import Cluster, Training, Undisturbed
from tests.support.jobs.faults import freeze

pytestmark = pytest.mark.timeout(300)

__all__ = ["jobs"]

STEPS = 40
# Memory checkpoints are so far apart that the newest is older than anything a survivor holds.
FLAGS = ("--memory-every=15",)
TRAINING = Training(steps=STEPS, save_every=1000)
# Steps that each epoch makes in the second half before it stands still.
FREE = 4


PACE = {"DALSEGNO_TEST_STEPS": str(FREE), "DALSEGNO_TEST_STANDS": "nowhere"}


def scene(jobs: Clusters, stands: str, *names: str) -> tuple[Cluster, int]:
    """A world of these nodes, which stands still in the middle of a step; returns it and its epoch."""
    told = {"DALSEGNO_TEST_STEPS": str(FREE), "DALSEGNO_TEST_STANDS": stands}
    job, first = together(jobs, *names, training=TRAINING, script_flags=FLAGS, agent_environment=told)
    return job, first


def stood_still(job: Cluster, epoch: int) -> int:
    """The last step that this epoch's ranks have ended, once one of them stands in the next one and nothing goes on."""
    job.wait_step(STEPS // 2 + 1)
    # A step may last longer than what follows is still.
    job.wait_for(lambda: any(job.holds.glob(f"standing-{epoch}-*")), "a rank to stand still")
    last, since = 0, time.monotonic()
    while time.monotonic() < since + 0.5:
        now = max(line.step for line in job.poll() if line.epoch == epoch)
        last, since = now, since if now == last else time.monotonic()
        time.sleep(0.05)
    return last


@pytest.mark.parametrize("killed", ["a", pytest.param("b", marks=pytest.mark.full)])
def test_a_node_killed_in_the_middle_of_a_step(jobs: Clusters, undisturbed: Undisturbed, killed: str) -> None:
    """Whichever of the two it is, the other one goes on where both were."""
    job, first = scene(jobs, "before", "a", "b")
    last = stood_still(job, first)
    job.kill_node(job.node(killed))
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == last
    end(job, undisturbed)
    job.assert_lost({})


def test_a_node_killed_before_it_gave_its_gradients(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """The other one waits for them in its backward pass, which then fails."""
    flags = ("--quiet-time=60",)
    job = jobs(nnodes="1:2", training=TRAINING, script_flags=FLAGS, agent_flags=flags, agent_environment=PACE)
    job.start("a")
    job.start("b", environment={"DALSEGNO_TEST_STANDS": "backward"})
    first = job.wait_world(2, 3)
    last = stood_still(job, first)
    job.kill_node(job.node("b"))
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == last
    end(job, undisturbed)
    job.assert_lost({})


@pytest.mark.full
def test_a_node_that_falls_silent(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """No connection is closed: the other one waits for its gradients in a call that never returns."""
    flags = ("--quiet-time=60", "--node-timeout=5")
    job = jobs(nnodes="1:2", training=TRAINING, script_flags=FLAGS, agent_flags=flags, agent_environment=PACE)
    job.start("a")
    job.start("b", environment={"DALSEGNO_TEST_STANDS": "backward"})
    first = job.wait_world(2, 3)
    last = stood_still(job, first)
    b = job.node("b")
    freeze(job, b)
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == last
    job.kill_node(b)
    end(job, undisturbed)
    job.assert_lost({})


def test_a_killed_worker_alone(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """Both nodes stay, and the world that follows has as many ranks; the other one's rank has saved for both."""
    job, first = scene(jobs, "before", "a", "b")
    last = stood_still(job, first)
    os.kill(job.worker_pid(job.node("b")), signal.SIGKILL)
    second = job.wait_world(2, after=first)
    assert job.change(second).resumed == last
    end(job, undisturbed)
    job.assert_lost({})


@pytest.mark.full
def test_two_of_three_nodes_killed(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """All buddies of a part may be gone: one survivor is enough."""
    job, first = scene(jobs, "before", "a", "b", "c")
    last = stood_still(job, first)
    for name in ("a", "c"):
        job.kill_node(job.node(name))
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == last
    end(job, undisturbed)
    job.assert_lost({})


@pytest.mark.full
def test_behind_the_optimizers_step_nothing_is_saved_but_a_whole_step(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """A rank that stands there for long holds no boundary: the run goes back to the last memory checkpoint."""
    job, first = scene(jobs, "behind", "a", "b")
    last = stood_still(job, first)
    job.kill_node(job.node("b"))
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == 15
    end(job, undisturbed)
    job.assert_lost({second: range(1, last)})


@pytest.mark.full
def test_without_room_a_line_says_why_steps_are_lost(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """Nothing else tells of it: the run goes back to an older checkpoint, and soon, although the rank tries again."""
    told = {"DALSEGNO_TEST_STEPS": str(FREE), "DALSEGNO_TEST_STANDS": "before"}
    flags = ("--quiet-time=60", "--memory-budget=1KB")
    job = jobs(nnodes="1:2", training=TRAINING, script_flags=FLAGS, agent_flags=flags, agent_environment=told)
    first = job.open("a", "b")
    last = stood_still(job, first)
    stays, goes = job.member(0), job.member(1)
    job.kill_node(goes)
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed < last
    said = [line for line in stays.text().splitlines() if "has no room to save step" in line]
    assert any(f"rank 0 has no room to save step {last} by itself" in line for line in said), said
    assert "--memory-budget are in use" in said[0]
    end(job, undisturbed)
    job.assert_lost({second: range(1, last + 1)})
