"""DLRover's `DeepSpeedCheckpointer` under this agent, with a DeepSpeed from whose states in memory it can load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.jobs import dlrover_users as users
from tests.support.jobs.cluster import LEFT, Cluster

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]
Clusters = Callable[..., Cluster]


@pytest.fixture
def zero(clusters: Clusters) -> Callable[..., Cluster]:
    """Makes jobs of `flash_worker.py --zero`."""

    def make(*extra: str, **options: Any) -> Cluster:
        training = users.FlashTraining(extra=("--zero", *extra))
        # What others are forked from has imported a newer DeepSpeed.
        return clusters(training=training, hooked=False, universal="", step_time=0.05, executed=99, **options)

    return make


def test_crash_leave_and_kill(zero: Callable[..., Cluster]) -> None:
    """A crash and a leave lose no step in memory; a kill goes back to the disk. Nobody writes `latest` in place."""
    job = zero("--disk-every=20", nnodes="2:2")
    a, b = job.start("a", "b")
    (job.step_log / "die-in-latest").touch()
    last = users.wait_steps(job, 0, 30)
    c = users.crash_and_leave(job, last, b)
    last = users.wait_steps(job, 2, 30)
    job.kill_agent(c)
    job.start("d")
    users.wait_steps(job, 3)
    # Nobody has the part of the node that was killed: from the disk, where the leave or a save after it has left it.
    assert users.worlds(job)[2].first <= users.worlds(job)[3].first <= last
    assert a.alive
    assert (job.step_log / "die-in-latest").exists()
    users.finish(job)
    users.assert_one_history(job)


@pytest.mark.parametrize("left", ["", "nowhere"])
def test_a_latest_that_names_nothing_is_mended(zero: Callable[..., Cluster], left: str) -> None:
    """A kill under DLRover's own launcher, or a power cut, leaves one: the next start goes on from the disk."""
    job = zero("--disk-every=10")
    (a,) = job.start("a")
    users.wait_steps(job, 0, 25)
    job.kill_node(a)
    (job.step_log / "latest").write_text(left, encoding="ascii")
    saved = int((job.step_log / "dlrover_latest.txt").read_text(encoding="ascii"))
    (b,) = job.start("b")
    users.wait_steps(job, 1)
    assert users.worlds(job)[1].first == saved >= 20
    job.wait_for(lambda: f"names {saved} now, the last complete checkpoint" in b.text(), "the line that says so")
    users.finish(job)
    users.assert_one_history(job)


def test_growth_and_leave(zero: Callable[..., Cluster]) -> None:
    """With universal files another number of ranks goes on from the last step in memory."""
    flags = ["--grow-wait=1", "--deepspeed-load-universal"]
    job = zero("--disk-every=1000", "--checkpoints=${save_dir}", agent_flags=flags)
    job.start("a")
    last = users.wait_steps(job, 0, 12)
    (b,) = job.start("b")
    users.wait_steps(job, 1)
    grown = users.worlds(job)[1]
    assert (grown.size, grown.nodes, grown.first >= last) == (2, 2, True)
    last = users.wait_steps(job, 1, 12)
    job.leave(b, LEFT)
    users.wait_steps(job, 2)
    assert (users.worlds(job)[2].size, users.worlds(job)[2].first >= last - 1) == (1, True)
    users.end(job)
    users.assert_one_history(job)
