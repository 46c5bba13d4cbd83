"""The mirror of a pod: what becomes of the run and its milestones when that process ends."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.hub.client import Hub
from tests.support.hub.scene import REPO
from tests.support.jobs.pods import Pod, relayed

pytestmark = [pytest.mark.full, pytest.mark.timeout(280)]


def mirrors(pod: Pod) -> list[psutil.Process]:
    """Those of the pod that run."""
    found = []
    for one in psutil.Process(pod.process.pid).children():
        if one.status() != psutil.STATUS_ZOMBIE and "dalsegno.relay.milestones.mirror" in one.cmdline():
            found.append(one)
    return found


def test_a_mirror_that_was_killed_is_started_again(tmp_path: Path, hub: Hub) -> None:
    """As by a machine without memory: training goes on, and so do milestones. After a notice none is started."""
    environment = hub.pod_environment(tmp_path / "hub-home")
    with relayed(tmp_path, "--pace=0.2", steps=1000, hf={"repo": REPO, "interval_seconds": 3}) as run:
        pod = run.pod("a", **environment)
        first = run.wait(lambda: run.events("hf_synced"), "a milestone", 120.0)[-1]
        (one,) = mirrors(pod)
        one.send_signal(signal.SIGKILL)
        run.wait(lambda: [e for e in run.events("hf_synced") if e["step"] > first["step"]], "the next", 120.0)
        assert len(mirrors(pod)) == 1
        pod.notice()
        noticed = time.monotonic()
        run.wait(lambda: run.events("sigterm"), "the notice")
        while pod.process.poll() is None and time.monotonic() < noticed + 60:
            later = [each for each in mirrors(pod) if each.create_time() > run.events("sigterm")[0]["time"] + 1]
            assert later == []
            time.sleep(0.1)  # why: what must not happen has no event
        assert pod.process.wait(60) in (75, 76), run.said()
