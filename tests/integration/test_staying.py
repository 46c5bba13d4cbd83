"""Processes that stay through planned changes: the same ones train on in the next world, and the curve is the same."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import Cluster, Node, Training, Undisturbed

from .test_membership import AT_ONCE, Clusters, any_number, end, scaled, together

pytestmark = [pytest.mark.timeout(400), pytest.mark.executed]

STAYS = Training(extra=("--stay",))


def worker(job: Cluster, node: Node) -> int:
    """The process that trains on this node now."""
    return job.worker_pid(node)


def waiting(job: Cluster, node: Node, pid: int) -> None:
    """Until this process has left its world and waits for a place."""
    job.wait_for(lambda: not any(Path(p).parent == job.step_log for p in processes.open_files(pid)), f"{node.name} waits")


def test_who_stays_trains_on_through_joins_and_leaves(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """1 to 2 to 3 nodes and back to 2: nobody who stays starts anew, nobody loads, no step is lost."""
    job = clusters(training=STAYS)
    job.open("a")
    (a,) = job.nodes
    first = worker(job, a)
    job.start("b")
    job.wait_world(2, steps=3)
    b = job.node("b")
    second = worker(job, b)
    job.start("c")
    third = job.wait_world(3, steps=3)
    assert (worker(job, a), worker(job, b)) == (first, second)
    job.leave(job.node("c"))
    job.wait_exit(job.node("c"))
    job.wait_world(2, steps=3, after=third)
    assert (worker(job, a), worker(job, b)) == (first, second)
    end(job, undisturbed)


def test_a_crash_starts_all_anew_and_then_they_stay_again(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """A killed worker breaks the world for all; what is started then stays at the next planned change."""
    job, first = together(clusters, "a", "b", training=STAYS, nnodes="1:3")
    a, b = job.nodes
    before = worker(job, a)
    processes.send([worker(job, b)], signal.SIGKILL)
    second = job.wait_world(2, steps=3, after=first)
    after = worker(job, a)
    assert after != before
    job.start("c")
    job.wait_world(3, steps=3, after=second)
    assert worker(job, a) == after
    end(job, undisturbed, lost={second: any_number(job)})


@pytest.mark.full
def test_who_is_left_out_does_not_wait_for_ever(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """`dalsegno scale` makes a node a spare: its process ends, and another one takes the place that it gets again."""
    job, first = together(clusters, "a", "b", training=STAYS)
    pids = {node.name: worker(job, node) for node in job.nodes}
    assert scaled(job, 1).returncode == 0
    second = job.wait_world(1, steps=3, after=first)
    spare = next(node for node in job.nodes if node.name not in job.group_ranks())
    job.wait_for(lambda: not processes.is_alive(pids[spare.name]), "the spare's process ends")
    assert scaled(job, 2).returncode == 0
    job.wait_world(2, steps=3, after=second)
    stayed = next(node for node in job.nodes if node is not spare)
    assert worker(job, stayed) == pids[stayed.name]
    end(job, undisturbed)
