"""`--resume-step`, with real agents, workers and masters."""

from __future__ import annotations

import pytest

from tests.support.jobs.cluster import Training, Undisturbed

from .test_membership import Clusters

pytestmark = pytest.mark.timeout(400)

BACK = {"PET_RESUME_STEP": "20"}


@pytest.mark.full
def test_a_start_goes_back_once(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """From step 20, on two nodes that both ask for it; a leave and a start with the same flag go on. The same curve."""
    job = clusters(training=Training(steps=60), agent_flags=["--keep-checkpoints=0", "--quiet-time=60"], nnodes="1:2")
    job.start("a")
    job.start("b")
    job.wait_step(35)
    for node in job.alive():
        job.leave(node)
    job.wait_exit()
    before = {one.name for one in job.sealed()}
    second = job.open("c", "d", environment=BACK)
    assert job.first_step(second) == 21
    said = job.wait_line("goes back to step 20")
    assert "as --resume-step says: " in said
    for node in job.alive():
        job.leave(node)
    job.wait_exit()
    stopped = max(line.step for line in job.poll() if line.epoch == second)
    third = job.open("e", "f", environment=BACK)
    assert job.first_step(third) == stopped + 1, "not again"
    job.wait_line(r"--resume-step has been followed")
    job.finish()
    job.assert_undisturbed(undisturbed)
    assert before <= {one.name for one in job.sealed()}, "kept aside, not deleted"
