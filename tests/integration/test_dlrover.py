"""DLRover's own client library under this agent: its scripts run as they are, through every change of the world."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from dalsegno.agent.dlrover.claims import sweep
from tests.support.jobs import dlrover_users as users
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import LEFT, LEFT_UNSAVED, Cluster, Node

pytestmark = pytest.mark.timeout(300)
Clusters = Callable[..., Cluster]


@pytest.fixture
def flash(clusters: Clusters) -> Callable[..., Cluster]:
    """Makes jobs of `flash_worker.py`."""

    def make(*extra: str, **options: Any) -> Cluster:
        return clusters(
            training=users.FlashTraining(extra=extra), hooked=False, universal="", step_time=0.05, **options
        )

    return make


def test_a_crash_resumes_from_memory(flash: Callable[..., Cluster]) -> None:
    """A worker is killed: the next one goes on from the last step in memory, and nothing is left behind at the end."""
    job = flash()
    (node,) = job.start("a")
    users.wait_steps(job, 0)
    heard = job.wait_status(lambda status: status.step > 0 and not status.unheard, "a step in memory")
    assert math.isnan(heard.loss), "nobody has told it"
    users.crash(job, 0)
    users.wait_steps(job, 1)
    made = max(step for step in users.sums(job) if step <= users.worlds(job)[1].first + 1)
    assert users.worlds(job)[1].first >= made - 1 > 0
    users.finish(job)
    users.assert_one_history(job)
    assert any("steps are heard" in line or "1 node" in line for line in node.said())


@pytest.mark.full
def test_growth_crash_leave_and_kill(flash: Callable[..., Cluster]) -> None:
    """DDP: a node joins, its worker is killed, it leaves, another joins and is killed: no step in memory is lost."""
    job = flash(agent_flags=["--grow-wait=1"])
    job.start("a")
    last = users.wait_steps(job, 0)
    (b,) = job.start("b")
    last = max(last, users.wait_steps(job, 0))
    users.wait_steps(job, 1)
    grown = users.worlds(job)[1]
    assert (grown.size, grown.nodes, grown.workers) == (2, 2, 4)
    assert grown.first >= last
    last = users.wait_steps(job, 1, 12)
    users.crash(job, 1)
    users.wait_steps(job, 2)
    assert users.worlds(job)[2].first >= last - 1
    last = users.wait_steps(job, 2, 12)
    # The other node has all of it, but this one cannot know whether that stays.
    job.leave(b, LEFT_UNSAVED)
    users.wait_steps(job, 3)
    assert (users.worlds(job)[3].size, users.worlds(job)[3].first >= last - 1) == (1, True)
    (c,) = job.start("c")
    last = users.wait_steps(job, 4, 12)
    job.kill_node(c)
    users.wait_steps(job, 5)
    assert sweep(), "on this machine its keeper has died with it"
    assert (users.worlds(job)[5].size, users.worlds(job)[5].first >= last - 1) == (1, True)
    users.finish(job)
    users.assert_one_history(job)


@pytest.mark.full
def test_what_is_spread_is_saved_by_all_or_none(flash: Callable[..., Cluster]) -> None:
    """FSDP on two nodes: a crash resumes from memory, a leave from what both wrote, a kill from the last such save."""
    job = flash("--fsdp", nnodes="2:2")
    a, b = job.start("a", "b")
    last = users.wait_steps(job, 0, 12)
    c = users.crash_and_leave(job, last, b)
    saved = users.worlds(job)[2].first
    users.wait_steps(job, 2, 12)
    # Its keeper lives for a moment longer, and removes what it has left on this machine.
    job.kill_agent(c)
    job.start("d")
    users.wait_steps(job, 3)
    assert users.worlds(job)[3].first == saved, "nobody has the part of the node that was killed"
    assert a.alive
    users.finish(job)
    users.assert_one_history(job)


@pytest.mark.full
def test_a_growth_of_what_is_spread_keeps_the_nodes_that_it_had(flash: Callable[..., Cluster]) -> None:
    """FSDP: DLRover's class cannot load at another number of ranks. The run goes back, and the newcomer is a spare."""
    job = flash("--fsdp", nnodes="2:3", agent_flags=["--grow-wait=1", "--max-restarts=0"])
    a, _ = job.start("a", "b")
    first = users.wait_steps(job, 0, 12)
    (c,) = job.start("c")
    job.wait_line("with 3 nodes the script failed at its start: the run goes on with 2, and c is a spare", a)
    job.wait_line("c is a spare: with 3 nodes the script failed", c)
    last = users.wait_steps(job, 1, 12)
    again = users.worlds(job)[-1]
    assert (again.size, again.nodes, again.first >= first) == (2, 2, True)
    # The spare takes the place of one that leaves.
    job.leave(job.node("b"), LEFT)
    users.wait_steps(job, 2, 12)
    moved = users.worlds(job)[-1]
    assert (moved.size, moved.first >= last - 1) == (2, True)
    users.finish(job)
    users.assert_one_history(job)


def savers_of(job: Cluster, node: Node) -> list[int]:
    """The processes of this node's savers."""
    return [pid for pid in job.processes(node) if "dlrover.companion" in processes.command_line(pid)]


def saver_of(job: Cluster, node: Node) -> int:
    """The process of this node's saver."""
    (saver,) = savers_of(job, node)
    return saver


def wait_in_memory(job: Cluster, step: int) -> None:
    """Until a saver has a later step in memory than this one, made just before a kill: few are saved meanwhile."""
    job.wait_status(lambda status: status.step > step + 8, f"a step after {step} in memory")


@pytest.mark.full
def test_the_saver_dies(flash: Callable[..., Cluster]) -> None:
    """Another one is started at once, and the workers, which go on, save through it: a crash resumes from there."""
    job = flash()
    (node,) = job.start("a")
    users.wait_steps(job, 0, 12)
    saver = saver_of(job, node)
    # A notice to all processes of the node, as of systemd or Slurm, is not for this one.
    os.kill(saver, signal.SIGTERM)
    users.wait_steps(job, 0, 24)
    assert processes.is_alive(saver)
    os.kill(saver, signal.SIGKILL)
    job.wait_line("was killed by signal 9 \\(SIGKILL\\): another one is started", node)
    last = int(users.notes(job)[-1][1])
    wait_in_memory(job, last)
    users.crash(job, 0)
    users.wait_steps(job, 1, 12)
    assert users.worlds(job)[1].first > last
    users.finish(job)
    users.assert_one_history(job)


@pytest.mark.full
def test_savers_of_two_nodes_die(flash: Callable[..., Cluster]) -> None:
    """FSDP saves on all nodes or on none: it does so again as soon as each node has a saver."""
    job = flash("--fsdp", nnodes="2:2")
    for node in job.start("a", "b"):
        users.wait_steps(job, 0, 12)
        last = int(users.notes(job)[-1][1])
        os.kill(saver_of(job, node), signal.SIGKILL)
        job.wait_line("was killed by signal 9 \\(SIGKILL\\): another one is started", node)
        wait_in_memory(job, last)
    users.crash(job, 0)
    users.wait_steps(job, 1, 12)
    assert users.worlds(job)[1].first > last
    users.finish(job)
    users.assert_one_history(job)


@pytest.mark.full
def test_a_saver_that_keeps_dying_waits_for_the_next_world(flash: Callable[..., Cluster]) -> None:
    """Three times another one follows; the fourth death is said, and the training goes on."""
    job = flash("--disk-every=5")
    (node,) = job.start("a")
    users.wait_steps(job, 0, 12)
    wait_in_memory(job, 0)
    dead: set[int] = set()
    for _ in range(4):
        pid = job.wait_for(lambda: next(iter({*savers_of(job, node)} - dead), None), "another saver")
        os.kill(pid, signal.SIGKILL)
        dead.add(pid)
    job.wait_line("nothing is saved until the next change of the world", node)
    users.crash(job, 0)
    users.wait_steps(job, 1, 12)
    assert users.worlds(job)[1].first > 0, "from the disk"
    users.finish(job)
    users.assert_one_history(job)


@pytest.mark.full
def test_its_checkpoints_become_the_runs(flash: Callable[..., Cluster]) -> None:
    """Below `${save_dir}`: they are committed however often they come, and the job goes on there with no memory."""
    job = flash("--disk-every=10", "--checkpoints=${save_dir}")
    (node,) = job.start("a")
    users.wait_steps(job, 0, 12)
    job.wait_for(lambda: list(job.checkpoints.glob("*/run-*/step-*/MANIFEST.json")), "a commit")
    users.wait_steps(job, 0, 40)
    users.crash(job, 0)
    last = users.wait_steps(job, 1, 12)
    assert users.worlds(job)[1].first >= 40
    job.wait_status(lambda status: status.head.step >= 40, "a commit of the second world")
    job.kill_node(node)
    job.start("b")
    users.wait_steps(job, 2)
    assert last >= users.worlds(job)[2].first >= 40
    users.end(job)
    users.assert_one_history(job)


@pytest.mark.full
def test_what_is_spread_becomes_the_runs_at_a_leave(flash: Callable[..., Cluster]) -> None:
    """FSDP below `${save_dir}`: the run goes on from what all nodes wrote at the end."""
    job = flash("--fsdp", "--disk-every=1000", "--checkpoints=${save_dir}", nnodes="2:2")
    _, b = job.start("a", "b")
    last = users.wait_steps(job, 0, 12)
    job.leave(b, LEFT)
    job.wait_exit(b)
    job.start("c")
    users.wait_steps(job, 1)
    assert users.worlds(job)[1].first >= last - 1
    users.end(job)
    users.assert_one_history(job)


@pytest.mark.full
def test_a_run_survives_more_crashes_than_restarts(flash: Callable[..., Cluster]) -> None:
    """FSDP, with no checkpoint on the run's record: each time it has come further. None waits for an older save."""
    job = flash("--fsdp", "--disk-every=10", nnodes="2:2", agent_flags=["--max-restarts=2"])
    job.start("a", "b")
    for world in range(5):
        last = users.wait_steps(job, world, 12)
        # While a step is written to the disk, no later one is taken into memory.
        job.wait_status(lambda status, last=last: status.step >= last, f"step {last} in memory")
        began = time.monotonic()
        users.crash(job, world % 2)
        users.wait_steps(job, world + 1, 1)
        assert time.monotonic() - began < 30
        assert users.worlds(job)[world + 1].first >= last
    users.finish(job)
    users.assert_one_history(job)
