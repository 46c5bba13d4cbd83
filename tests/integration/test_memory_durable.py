"""What the ranks save to memory and the agents bring to the disk, with real agents: while the ranks train on.

In its second half each world makes a few steps and stands still until something happens to it: so a test knows what is
in memory and what on the disk when that happens.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.memory.place import remove_leftovers, root_of_user
from dalsegno.elastic.checkpoint import verify
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import TRAIN, Cluster, Node, Training, Undisturbed
from tests.support.jobs.faults import deaf, held_writings, makers, noted_makers, run_directory

pytestmark = pytest.mark.timeout(300)

Clusters = Callable[..., Cluster]

STEPS, MEMORY_EVERY, FREE = 40, 5, 3
# The last memory checkpoint before each world stands still.
HELD = STEPS // 2


@pytest.fixture
def jobs(clusters: Clusters) -> Iterator[Clusters]:
    """Makes jobs of two nodes with memory checkpoints, every `save_every` steps one for the disk."""
    made: list[Cluster] = []

    def make(save_every: int, **options: Any) -> Cluster:
        training = Training(steps=STEPS, save_every=save_every, **options.pop("training", {}))
        given = {
            "training": training,
            "nnodes": "1:2",
            "step_time": 0.02,
            "universal": False,
            "script_flags": (f"--memory-every={MEMORY_EVERY}",),
            "agent_flags": ("--memory-replicas=1", "--quiet-time=60", "--keep-checkpoints=0"),
            "agent_environment": {"DALSEGNO_TEST_STEPS": str(FREE), **noted_makers()},
            # What is forked begins without `sitecustomize`.
            "executed": 4,
        }
        made.append(clusters(**{**given, **options}))
        return made[-1]

    yield make
    for job in made:
        job.close()
        remove_leftovers(root_of_user())


def steps_on_disk(job: Cluster) -> set[int]:
    return {one.step for one in job.sealed()}


def wait_durable(job: Cluster, step: int) -> None:
    """Until a step is on the disk, and what is there is what was sealed."""
    job.wait_for(lambda: step in steps_on_disk(job), f"step {step} on the disk")
    manifest = next(one for one in job.sealed() if one.step == step)
    verify(run_directory(job) / manifest.name, manifest, threads=1)


def wait_committed(job: Cluster, step: int) -> None:
    """Until the master has recorded a step that is on the disk."""
    job.wait_status(lambda reply: reply.head.step >= step and not reply.head.in_memory, f"the commit of step {step}")


def kill_all(job: Cluster, *nodes: Node) -> None:
    """All nodes and the master at once, as a power cut does."""
    job.kill_master()
    for node in nodes:
        job.kill_node(node)


def end(job: Cluster, undisturbed: Undisturbed) -> None:
    job.finish()
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
@pytest.mark.parametrize(
    "training",
    [
        pytest.param({}, id="ddp"),
        pytest.param({"script": TRAIN, "extra": ("--zero-stage=1",)}, id="zero1", marks=pytest.mark.full),
    ],
)
def test_the_agents_write_what_the_ranks_save(jobs: Clusters, undisturbed: Undisturbed, training: Any) -> None:
    """Between two changes no rank touches the disk: the agents do, and only the last step is the ranks' own."""
    job = jobs(10, training=training)
    job.open("a", "b")
    wait_durable(job, HELD)
    wait_committed(job, HELD)
    assert (run_directory(job) / "latest.json").exists()
    end(job, undisturbed)
    assert makers(job)["worker"] == {STEPS}
    assert {HELD} <= makers(job)["agent"] <= {10, HELD, 30}
    assert {HELD, STEPS} <= steps_on_disk(job) <= {10, HELD, 30, STEPS}
    job.assert_lost({})


@pytest.mark.full
def test_all_nodes_die_at_once(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """What was only in memory is gone; the same command goes on from what the agents have written."""
    job = jobs(15)
    first = job.open("a", "b")
    job.wait_step(HELD + FREE)
    wait_committed(job, 15)
    kill_all(job, *job.alive())
    job.start("a", "b")
    second = job.wait_world(2, after=first)
    assert job.first_step(second) == 16
    end(job, undisturbed)
    assert makers(job)["worker"] == {STEPS}


@pytest.mark.full
@pytest.mark.parametrize("with_master", [False, True])
def test_a_writer_is_killed_in_the_middle(jobs: Clusters, undisturbed: Undisturbed, with_master: bool) -> None:
    """A part of the step is missing on the disk: it is no commit, and the other node goes on from its memory.

    Behind the first step of the next world it writes the rest. The same if the master dies at that moment, too.
    """
    job = jobs(HELD)
    job.start("a")
    job.start("b", environment=held_writings())
    first = job.wait_world(2)
    job.wait_for(lambda: list(job.holds.glob("writing-*")), "b held while it writes")
    job.wait_for(lambda: list(run_directory(job).glob(f"step-{HELD}.*/*")), "the part of a")
    job.wait_standing()
    assert not job.sealed()
    if with_master:
        job.kill_master()
    job.kill_node(job.node("b"))
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == HELD
    wait_durable(job, HELD)
    wait_committed(job, HELD)
    end(job, undisturbed)
    job.assert_lost({second: range(1, FREE + 2)})


def best_of(job: Cluster) -> tuple[int, int]:
    """The step of the newest checkpoint, and that of the best one, which is on the disk as a whole."""
    sealed = {one.name: one for one in job.sealed()}
    last = max(sealed.values(), key=lambda one: (one.epoch, one.step))
    assert last.best is not None
    verify(run_directory(job) / last.best.name, sealed[last.best.name], threads=1)
    assert json.loads((run_directory(job) / "best.json").read_text())["name"] == last.best.name
    return last.step, sealed[last.best.name].step


@pytest.mark.full
@pytest.mark.parametrize("with_master", [False, True])
def test_the_best_outlives_the_death_of_who_was_writing_it(
    jobs: Clusters, undisturbed: Undisturbed, with_master: bool
) -> None:
    """It is in memory alone, and the run goes on from a later step: the next world brings it to the disk.

    No rank has written it, and newer commits do not make it one of those that may go. A master that dies as soon as the
    next world stands leaves that to the one after it.
    """
    environment = {"DALSEGNO_TEST_STEPS": str(FREE), "DALSEGNO_TEST_BEST": "10", **noted_makers()}
    flags = ("--memory-replicas=1", "--quiet-time=60", "--keep-checkpoints=1")
    job = jobs(10, agent_environment=environment, agent_flags=flags)
    job.start("a")
    job.start("b", environment=held_writings())
    first = job.wait_world(2)
    job.wait_for(lambda: list(job.holds.glob("writing-*")), "b held while it writes")
    job.wait_for(lambda: list(run_directory(job).glob("step-10.*/*")), "the part of a")
    job.wait_standing()
    assert not job.sealed()
    job.kill_node(job.node("b"))
    if with_master:
        job.wait_line("epoch 2: ", job.node("a"))
        job.kill_master()
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == HELD
    wait_durable(job, HELD)
    wait_durable(job, 10)
    end(job, undisturbed)
    assert best_of(job) == (STEPS, 10)
    assert makers(job)["worker"] == {STEPS}


@pytest.mark.full
def test_a_best_that_all_nodes_took_with_them_leaves_the_one_before(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """A power cut while it is being written: the run has the best of what it goes on from."""
    environment = {"DALSEGNO_TEST_STEPS": str(FREE), "DALSEGNO_TEST_BEST": "10", **noted_makers()}
    job = jobs(5, agent_environment=environment)
    job.start("a")
    job.start("b", environment=held_writings(after="step-5."))
    job.wait_world(2)
    job.wait_for(lambda: list(job.holds.glob("writing-*")), "b held while it writes")
    wait_committed(job, 5)
    job.wait_standing()
    kill_all(job, *job.alive())
    del job.agent_environment["DALSEGNO_TEST_BEST"]  # No step is as good any more.
    job.start("a", "b")
    second = job.wait_world(2, after=1)
    assert job.first_step(second) == 6
    end(job, undisturbed)
    assert best_of(job) == (STEPS, 5)


@pytest.mark.full
def test_a_node_that_cannot_write(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """Its buddy, who has its part, writes that, too; and a line says so."""
    job = jobs(HELD)
    job.start("a")
    job.start("b", environment=held_writings("fails"))
    job.wait_world(2)
    job.wait_line(r"b could not write step-20\S* to the disk: .*no space left")
    wait_durable(job, HELD)
    wait_committed(job, HELD)
    end(job, undisturbed)
    job.assert_lost({})


@pytest.mark.full
def test_nodes_that_cannot_reach_each_other(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """It is said once, at whose console; a step that each has a part of comes to the disk, and the run goes on from it.

    A worker crashes: both agents have their parts of the last memory checkpoint, and neither gets the other's.
    """
    job = jobs(100, nnodes="2:2")
    job.start("a", "b", environment=deaf())
    first = job.wait_world(2)
    job.wait_step(HELD + FREE)
    job.wait_line(r"no replica of this node's memory checkpoints comes to 127\.0\.0\.1:\d+: .*firewall")
    job.wait_standing()
    processes.send([job.worker_pid(job.node("b"))], signal.SIGKILL)
    job.wait_line(r"cannot be gathered: part \d \(127\.0\.0\.1:\d+: .*firewall")
    job.wait_line(r"cannot fetch step-\d+\S* from the memory of other nodes: each node writes its part to the disk")
    second = job.wait_world(2, after=first)
    assert job.change(second).resumed >= HELD
    assert [one.step for one in job.sealed()] == [job.change(second).resumed]
    end(job, undisturbed)
    for name in ("a", "b"):
        said = "\n".join(job.node(name).said())
        assert said.count("no replica of this node's memory checkpoints comes to") == 1


def leftovers(job: Cluster) -> list[Path]:
    """Directories of checkpoints without a manifest."""
    return [path for path in run_directory(job).glob("step-*") if not (path / "MANIFEST.json").exists()]


@pytest.mark.full
def test_what_a_newer_commit_overtakes_is_given_up(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """A node does not come to write its part before the training ends: nothing of it is left on the disk."""
    job = jobs(HELD)
    job.start("a")
    job.start("b", environment=held_writings())
    job.wait_world(2)
    job.wait_for(lambda: list(job.holds.glob("writing-*")), "b held while it writes")
    job.wait_for(lambda: list(run_directory(job).glob(f"step-{HELD}.*/*")), "the part of a")
    end(job, undisturbed)
    assert steps_on_disk(job) == {STEPS}
    assert not leftovers(job)
