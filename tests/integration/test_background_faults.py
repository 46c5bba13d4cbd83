"""Saves in the background under real agents: a leave, a kill and a disk error while one is being written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dalsegno.protos import control_pb2
from tests.support.jobs.cluster import Cluster, Training, Undisturbed
from tests.support.jobs.faults import UNLIMITED, limit_files, run_directory

pytestmark = pytest.mark.timeout(300)

Clusters = Callable[..., Cluster]
# One world from the start: a rank whose write is held does not drain for another node.
JOB: dict[str, Any] = {
    "training": Training(steps=60, save_every=10),
    "nnodes": "1:2",
    "agent_flags": ["--quiet-time=30"],
    "agent_environment": {"DALSEGNO_TEST_BACKGROUND": "1"},
}
# Bytes: less than the smaller of the two ranks' parts, more than logs grow to.
TOO_SMALL = 200_000


def seals(job: Cluster, step: int, epoch: int) -> list[Path]:
    """Manifests of this step that were written in this epoch."""
    return list(run_directory(job).glob(f"step-{step}.e{epoch}.*/MANIFEST.json"))


def test_a_leave_waits_for_the_write_that_is_under_way(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """SIGTERM while step 10 is being written: nobody leaves before it is sealed, and then the drain's own step."""
    job = clusters(**JOB)
    a, b = job.start("a", "b", hold="writing-10")
    epoch = job.wait_world(2)
    for node in (a, b):
        job.wait_hold("writing-10", node)
    job.wait_step(13)
    job.leave(b)
    job.wait_status(lambda status: status.phase == control_pb2.PHASE_DRAINING, "draining")
    workers = [job.worker_pid(a), job.worker_pid(b)]
    last = job.poll()[-1].step
    assert not seals(job, 10, epoch)
    job.release()
    job.wait_exit(b)
    after = job.wait_world(1, after=epoch)
    assert job.change(after).resumed >= last
    assert job.worker_pid(a) not in workers
    assert seals(job, 10, epoch)
    assert seals(job, job.change(after).resumed, epoch)
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


@pytest.mark.parametrize("killed", ["a", pytest.param("b", marks=pytest.mark.full)])
def test_a_node_killed_while_a_save_is_written(clusters: Clusters, undisturbed: Undisturbed, killed: str) -> None:
    """Rank 0, which would seal it, or another: what is half written is no checkpoint; back to the last commit."""
    job = clusters(**JOB)
    nodes = job.start("a", "b", hold="writing-20")
    epoch = job.wait_world(2)
    job.wait_status(lambda status: status.head.step == 10, "the commit of step 10")
    for node in nodes:
        job.wait_hold("writing-20", node)
    job.wait_step(23)
    job.kill_node(job.node(killed))
    after = job.wait_world(1, after=epoch)
    job.release()
    assert job.assert_crash(after).resumed == 10
    assert not seals(job, 20, epoch)
    job.finish()
    assert {one.epoch for one in job.sealed() if one.step > 10} == {after}
    job.assert_lost({after: range(13, 40)})
    job.assert_undisturbed(undisturbed)


@pytest.mark.parametrize("full", ["b", pytest.param("a", marks=pytest.mark.full)])
def test_one_ranks_disk_error_costs_that_save_only(clusters: Clusters, undisturbed: Undisturbed, full: str) -> None:
    """On rank 0 or another: all hear of it while they train, none stops, the last commit stands, the next one comes."""
    job = clusters(**JOB)
    a, b = job.start("a", "b", hold="writing-20")
    epoch = job.wait_world(2)
    workers = [job.worker_pid(a), job.worker_pid(b)]
    for node in (a, b):
        job.wait_hold("writing-20", node)
    limit_files([job.worker_pid(job.node(full))], TOO_SMALL)
    job.release()
    line = r"warning: saving step-20\..* failed \(.*File too large.*\): the next save tries again, commits stand"
    job.wait_line(line)
    limit_files(workers, UNLIMITED)
    status = job.wait_status(lambda status: status.head.step > 20, "the next commit")
    assert status.head.epoch == epoch
    assert not seals(job, 20, epoch)
    assert [job.worker_pid(a), job.worker_pid(b)] == workers
    job.finish()
    assert job.epoch() == epoch
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)
