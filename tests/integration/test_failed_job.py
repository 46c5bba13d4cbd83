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


@pytest.mark.parametrize("names", [("a",), pytest.param(("a", "b"), marks=pytest.mark.full)])
def test_what_is_in_memory_alone_outlives_a_failure_for_good(
    clusters: Callable[..., Cluster], undisturbed: Undisturbed, names: tuple[str, ...]
) -> None:
    """The ranks have saved to memory only: the agents bring that to the disk before they end."""
    job = clusters(
        training=Training(steps=40, save_every=1000),
        nnodes=f"1:{len(names)}",
        universal=False,
        script_flags=("--memory-every=5",),
        agent_flags=("--memory-replicas=1", "--max-restarts=0", "--quiet-time=60"),
        agent_environment={"DALSEGNO_TEST_STEPS": "3"},
    )
    nodes = job.start(*names)
    epoch = job.wait_world(len(names))
    held = job.wait_status(lambda status: status.held.step >= 20, "a step in memory").held
    for node in nodes:
        node.expected = FAILED
    processes.send([job.worker_pid(nodes[0])], signal.SIGKILL)
    for node in nodes:
        job.wait_exit(node)
    assert "is in memory only, is on the disk" in nodes[0].text()
    job.start(*names)
    epoch = job.wait_world(len(names), after=epoch)
    assert job.change(epoch).resumed >= held.step
    job.finish()
    job.assert_undisturbed(undisturbed)
