"""All nodes of a job and its master end at once; the same commands are given again."""

from __future__ import annotations

import pytest

from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import Undisturbed

from .test_membership import Clusters, any_number, end, together

pytestmark = pytest.mark.timeout(300)


def test_after_a_power_cut_the_same_commands_gather_as_at_a_first_start(
    clusters: Clusters, undisturbed: Undisturbed
) -> None:
    """Nobody waits for a --node-timeout, although no connection told the next master that its agents are gone."""
    job, first = together(clusters, "a", "b", agent_flags=("--quiet-time=60", "--node-timeout=120"))
    job.wait_world(2, steps=15, after=first - 1)
    master = job.master_pid()
    assert master is not None
    # First the master, so that it does not hear of anybody's end; and at once all, so that nobody starts the next one.
    processes.send([master, *(pid for node in job.nodes for pid in job.processes(node))])
    for node in list(job.nodes):
        job.kill_node(node)
    cut = job.epoch()
    started = job.start("a", "b")
    second = job.wait_world(2, steps=3, after=cut)
    assert second == cut + 1, "no smaller world in between"
    assert not any("waiting for its node" in node.text() for node in started)
    end(job, undisturbed, {second: any_number(job)})
