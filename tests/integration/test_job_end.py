"""After the end of a run: what a late agent, the same command, and --new-run find, with either kind of master."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.protos import control_pb2
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import Cluster, Training, Undisturbed
from tests.support.jobs.faults import Service, run_directory, wait_until

pytestmark = pytest.mark.timeout(300)

SHORT = Training(steps=15, save_every=5)


@pytest.mark.full
def test_finished_job_of_a_service(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """It stays finished: a late agent says so and exits 0, also under a restarted master; --new-run starts over."""
    with Service(tmp_path / "job", SHORT) as job:
        job.start_master()
        job.start("a")
        job.finish()
        job.assert_undisturbed(undisturbed)
        lines = len(job.poll())
        (late,) = job.start("late")
        job.wait_exit(late)
        assert any("finished at step 15" in line for line in late.said()), late.text()
        job.masters[-1].kill()
        job.start_master()
        (later,) = job.start("later")
        job.wait_exit(later)
        assert any("finished at step 15" in line for line in later.said()), later.text()
        assert len(job.poll()) == lines
        job.agent_flags = ["--new-run"]
        job.start("anew")
        status = job.wait_status(lambda status: status.run_id == "run-0002", "the next run")
        assert status.phase != control_pb2.PHASE_SUCCEEDED
        job.finish()
        assert (run_directory(job, "run-0001") / "FINISHED.json").exists()
        assert (run_directory(job, "run-0002") / "FINISHED.json").exists()
        assert job.poll()[lines].step == 1
        job.assert_undisturbed(undisturbed)


def test_the_same_command_after_the_end(clusters: Callable[..., Cluster], undisturbed: Undisturbed) -> None:
    """It trains nothing again, and says what does, whether the embedded master is still there or not."""
    job = clusters(training=SHORT)
    job.start("a")
    job.finish()
    for name in ("late", "later"):
        (late,) = job.start(name)
        job.wait_exit(late)
        assert len([line for line in late.said() if "nothing is left to do; --new-run trains again" in line]) == 1
        assert late.said()[-1] == "the run finished at step 15"
        wait_until(lambda: job.master_pid() is None, "the end of the embedded master")
    assert len(job.poll()) == SHORT.steps
    job.agent_flags = ["--new-run"]
    job.start("anew")
    job.finish()
    assert [(run_directory(job, run) / "FINISHED.json").exists() for run in ("run-0001", "run-0002")] == [True, True]
    assert len(job.poll()) == 2 * SHORT.steps
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_power_cut(clusters: Callable[..., Cluster], undisturbed: Undisturbed) -> None:
    """Agents, workers and the embedded master die at once: the same command resumes the run from its last commit."""
    job = clusters(training=Training(steps=30, save_every=5), agent_flags=["--node-timeout=6"])
    nodes = job.start("a", "b")
    epoch = job.wait_world(2)
    job.wait_status(lambda status: status.head.epoch == epoch and status.head.step >= 10, "a commit")
    master = job.master_pid()
    assert master is not None
    processes.send([master])
    for node in nodes:
        job.kill_node(node)
    job.start("a", "b")
    epoch = job.wait_world(2, after=epoch)
    assert job.change(epoch).resumed >= 10
    assert run_directory(job).exists()
    assert not run_directory(job, "run-0002").exists()
    job.finish()
    job.assert_undisturbed(undisturbed)
