"""Shards in memory: FSDP2 with torch's checkpoint, where each node has only its own, and two nodes lost at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dalsegno.agent.memory.turnstile import LARGE_BYTES
from tests.integration.test_bring_your_script import WORKERS, Worker
from tests.integration.test_memory import EVERY, FREE, HELD, STEPS, Clusters, end, jobs, memory_of, wait_durable
from tests.support.jobs.cluster import LEFT_UNSAVED, PATIENCE, Cluster, Training, Undisturbed

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]

__all__ = ["jobs"]

SHARDS = Worker(WORKERS / "dcp_worker.py", STEPS, 1000)
OF_A_TRAINER = Worker(WORKERS / "loopless_worker.py", STEPS, 1000, extra=("--strategy=fsdp",))


def world(jobs: Clusters, names: str, replicas: int = 1, training: Training = SHARDS) -> tuple[Cluster, int]:
    flags = ("--quiet-time=60", f"--memory-replicas={replicas}")
    job = jobs(nnodes=f"1:{len(names)}", agent_flags=flags, training=training)
    return job, job.open(*names)


def wait_copies(job: Cluster, copies: int, step: int = HELD) -> None:
    """Until each node's part of a step is in so many memories, and the world stands still behind it."""
    job.wait_step(step + FREE)
    job.wait_standing()
    nodes = job.alive()

    def look() -> bool:
        found = [part for node in nodes for part in memory_of(node, job).glob(f"step-{step}.e*.parts/*.json")]
        names = [part.name for part in found]
        return all(names.count(f"{part}.json") == copies for part in range(len(nodes)))

    job.wait_for(look, f"{copies} copies of step {step}")


@pytest.mark.parametrize("training", [SHARDS, OF_A_TRAINER], ids=["dcp", "trainer"])
def test_a_kill_a_join_and_a_leave(jobs: Clusters, undisturbed: Undisturbed, training: Training) -> None:
    """A script's own `save=`, and a Trainer: what a change goes on from was never on the disk."""
    job, first = world(jobs, "abc", training=training)
    wait_copies(job, 2)
    job.kill_node(job.node("b"))
    second = job.wait_world(2, after=first)
    assert job.change(second).resumed == HELD
    job.start("d")
    third = job.wait_world(3, after=second)
    job.leave(job.node("c"))
    fourth = job.wait_world(2, after=third)
    assert fourth > third
    end(job, undisturbed)
    job.assert_lost({second: range(1, EVERY + FREE + 1)})


@pytest.mark.parametrize("names", ["abc", "abcd"])
def test_two_at_once_of_which_others_have_copies(jobs: Clusters, undisturbed: Undisturbed, names: str) -> None:
    """Two replicas: whichever two nodes die."""
    job, first = world(jobs, names, replicas=2)
    wait_copies(job, 3)
    for rank in (1, 2):
        job.kill_node(job.member(rank))
    second = job.wait_world(len(names) - 2, after=first)
    assert job.change(second).resumed == HELD
    wait_durable(job, HELD)
    end(job, undisturbed)
    job.assert_lost({second: range(1, EVERY + FREE + 1)})


def test_a_pair_that_had_the_only_copies(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """A node and its buddy, of three: the run goes on from the disk."""
    job, first = world(jobs, "abc", training=Worker(WORKERS / "dcp_worker.py", STEPS, 15))
    wait_copies(job, 2)
    wait_durable(job, 15)
    pair = [job.member(1), job.member(2)]
    for node in pair:
        os.kill(node.pid, signal.SIGSTOP)
    for node in pair:
        job.kill_node(node)
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == 15
    end(job, undisturbed)
    job.assert_lost({second: range(1, STEPS)})


def test_a_pair_that_leaves_at_once(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """A node and its buddy: who stays fetches first what only leavers have, and these wait for that."""
    job, first = world(jobs, "abcd")
    wait_copies(job, 2)
    for rank in (1, 2):
        job.leave(job.member(rank))
    second = job.wait_world(2, after=first)
    end(job, undisturbed)
    job.assert_lost({})
    assert second > first


@pytest.mark.parametrize("anew", [False, True])
def test_what_a_leaver_wrote_is_found_by_who_stays(jobs: Clusters, undisturbed: Undisturbed, anew: bool) -> None:
    """No node has room for another one's part, and who stays says and hears nothing until the other one is gone.

    `anew`: the master has forgotten what the leaver said, or has never heard of the step.
    """
    flags = ("--quiet-time=15", "--memory-budget=1KB", "--drain-timeout=6", "--node-timeout=60")
    job = jobs(nnodes="1:2", agent_flags=flags, training=SHARDS)
    first = job.open("a", "b")
    job.wait_step(HELD + FREE)
    job.wait_standing()
    stays, leaves = job.member(0), job.member(1)

    def own() -> set[Path]:
        return set(memory_of(stays, job).glob("step-*.parts/0.json"))

    before = own()
    job.leave(leaves, expected=LEFT_UNSAVED)
    job.wait_for(lambda: own() - before, "the drain's step")
    os.kill(stays.pid, signal.SIGSTOP)
    leaves.process.wait(PATIENCE)
    master = job.master_pid()
    assert master is not None
    if anew:
        os.kill(master, signal.SIGKILL)
    os.kill(stays.pid, signal.SIGCONT)
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed >= HELD + FREE
    end(job, undisturbed)
    job.assert_lost({})


def test_large_parts_reach_all_nodes(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """Each is handed to one node at a time, and passed on by those that have it."""
    large = Worker(WORKERS / "dcp_worker.py", STEPS, 1000, extra=("--width=1900",))
    job, first = world(jobs, "abcd", training=large)
    wait_copies(job, 2)
    files = memory_of(job.node("a"), job).glob(f"step-{HELD}.e*/**/*.distcp")
    assert min(file.stat().st_size for file in files) > LARGE_BYTES
    job.leave(job.node("b"))
    second = job.wait_world(3, after=first)
    job.kill_node(job.node("c"))
    third = job.wait_world(2, after=second)
    job.start("e")
    job.wait_world(3, after=third)
    end(job, undisturbed)
    job.assert_lost({third: range(EVERY + FREE + 1)})


def test_parts_that_come_more_slowly_than_steps_are_saved(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """All nodes send parts of the same step, and keep it: the loss of a node costs what came since, not the run."""
    training = Worker(WORKERS / "dcp_worker.py", 200, 1000, extra=("--width=400",))
    flags = ("--quiet-time=60", "--memory-replicas=1", "--memory-bandwidth=1MB")
    job = jobs(
        nnodes="1:3",
        agent_flags=flags,
        training=training,
        step_time=0.1,
        script_flags=("--memory-every=1",),
        agent_environment={},
    )
    first = job.open(*"abc")

    def copied() -> int:
        """The newest step that outlives a node."""
        status = job.status()
        if status is None:
            return 0
        return max(status.replicated.step, status.held.step if status.held_copies > 1 else 0)

    job.wait_for(lambda: copied() > 5, "a second step that outlives a node", 60)
    before = copied()
    job.kill_node(job.node("b"))
    second = job.wait_world(2, after=first)
    assert job.change(second).resumed >= before
    job.finish()
    job.assert_undisturbed(undisturbed)
    said = [line for node in job.nodes for line in node.text().splitlines() if "made faster than they reach" in line]
    assert said
