"""What `dalsegno render k8s` prints, run by a miniature of Kubernetes (`tests/support/kubernetes`) with real processes.

Pods are killed, evicted, lost with their machines, scaled and restarted, and so are masters. Each time the curve is the
undisturbed run's, and every sample is taken once.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.hosts.hosts import missing
from tests.support.jobs.cluster import LEFT, Training, Undisturbed
from tests.support.kubernetes.kubelet import Kubelet
from tests.support.kubernetes.run import OVERLAYS, Run

MISSING = missing()
pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

TRAINING = Training(steps=300, save_every=5)
# A crash costs no more than one save's steps.
CRASH = range(1, TRAINING.save_every + 1)
DEPLOYMENT = OVERLAYS / "deployment" / "job.yaml"
# The goal is 5 s on a quiet machine; here others share two cores.
START_LIMIT = 90.0


def started(run: Run, pod: Kubelet, epoch: int) -> None:
    """Prints how long it took from a pod's start to its first step, for whoever looks."""
    seconds = run.seconds_to_first_step(pod, epoch)
    print(f"first step {seconds:.1f} s after the start of {pod.pod.name}")
    assert seconds < START_LIMIT


def newest(run: Run, before: list[Kubelet]) -> Kubelet:
    """The one pod that was not there before."""
    (pod,) = run.wait_for(lambda: [pod for pod in run.pods() if pod not in before and pod.started], "a new pod")
    return pod


def complete(run: Run, undisturbed: Undisturbed) -> None:
    """The Job ends with all of its indexes done; the curve is the undisturbed one's."""
    run.hurry()
    assert run.wait_for(lambda: run.trainers.status.state, "end of the Job") == "Complete"
    run.assert_undisturbed(undisturbed)


def test_a_job_completes(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Two nodes of a Job; one is evicted and replaced, which counts for nothing and costs no step; the Job completes."""
    with Run(tmp_path / "run", TRAINING, replicas=2) as run:
        run.apply()
        first = run.wait_world(2)
        before = run.pods()
        run.cluster.evict(before[1])
        run.wait_for(lambda: before[1].pod.phase.is_terminal, "the end of the evicted pod")
        assert before[1].codes == [LEFT]
        last = run.wait_world(2, after=first)
        started(run, newest(run, before), last)
        complete(run, undisturbed)
        assert run.lost() == {}
        assert run.trainers.status.failed == 0
