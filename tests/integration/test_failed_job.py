"""A job that failed for good: the same command takes the run up again where it was committed last."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import Cluster, Training, Undisturbed
from tests.support.jobs.faults import run_directory

pytestmark = pytest.mark.timeout(300)

# A job that ended in failure; docs/contracts.md.
FAILED = 1


@pytest.mark.parametrize("master", ["alive", pytest.param("dead", marks=pytest.mark.full)])
def test_same_command_after_a_failure(clusters: Callable[..., Cluster], undisturbed: Undisturbed, master: str) -> None:
    """Its budget is spent. Again, also with another --nnodes and a master that must be started anew: it resumes."""
    job = clusters(training=Training(steps=30, save_every=5), nnodes="1:1", agent_flags=["--max-restarts=0"])
    (first,) = job.start("a")
    first.expected = None
    epoch = job.wait_world(1)
    head = job.wait_status(lambda status: status.head.step >= 10, "a commit").head
    processes.send([job.worker_pid(first)], signal.SIGKILL)
    first.expected = FAILED
    job.wait_exit(first)
    if master == "dead":
        pid = job.master_pid()
        assert pid is not None
        processes.send([pid])
        job.nnodes = "1:2"
    job.start("a")
    epoch = job.wait_world(1, after=epoch)
    assert job.change(epoch).resumed >= head.step
    assert not run_directory(job, "run-0002").exists()
    job.finish()
    job.assert_undisturbed(undisturbed)
