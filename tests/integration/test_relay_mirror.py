"""The mirror of a pod: what becomes of the run and its milestones when that process ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.hub.client import Hub
from tests.support.hub.scene import REPO, milestones_on
from tests.support.jobs.local_processes import is_alive
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


def test_a_notice_while_the_hub_holds_an_upload(tmp_path: Path, hub: Hub) -> None:
    """The upload is cancelled at once, and nobody waits for the hub; the next pod goes on with it."""
    environment = hub.pod_environment(tmp_path / "hub-home")
    more = {"hf": {"repo": REPO, "interval_seconds": 3600}}
    with relayed(tmp_path, "--end-when-asked", "--pace=0.1", "--save-every=20", steps=5000, **more) as run:
        hub.fault("PUT /_lfs/", "hold", times=-1)
        a = run.pod("a", **environment)
        run.wait(lambda: [one for one in hub.asked("PUT /_lfs/") if not one.get("status")], "an upload that is held")
        (mirror,) = mirrors(a)
        uploads = [mirror, *mirror.children(recursive=True)]
        assert len(uploads) > 1
        begun = [one.name for one in (run.root / "hf" / "snapshots").iterdir()]
        trainer = run.steps()[-1].pid
        # What it takes to cancel the upload does not hide behind the trainer's end.
        os.kill(trainer, signal.SIGSTOP)
        a.notice()
        run.wait(lambda: run.state()["status"] == "PREEMPTED", "state.json", 1.0)
        run.wait(lambda: not any(is_alive(one.pid) for one in uploads), "the end of the upload", 10.0)
        assert a.process.poll() is None, "the trainer has not saved yet"
        os.kill(trainer, signal.SIGCONT)
        assert a.process.wait(20) == 75, run.said()
        assert not run.events("hf_synced")
        run.wait(lambda: run.commander.run()["state"] == "PREEMPTED" and not run.commander.run()["holder"], "it", 5.0)
        hub.clear()
        b = run.pod("b", **environment)
        synced = run.wait(lambda: run.events("hf_synced"), "the milestone", 120.0)
        b.notice()
        assert b.process.wait(30) == 75, run.said()
        first, second = run.epochs().values()
        assert second[0].step == first[-1].step + 1, "a step was lost on notice"
        run.assert_one_history(second[-1].step)
        assert [one["revision"] for one in milestones_on(hub, tmp_path)] == [one["revision"] for one in synced]
        assert [one["checkpoint"] for one in synced] == begun, "it was not the one that a had begun"


@pytest.mark.parametrize(
    ("request_line", "word"),
    [
        pytest.param("PUT /_lfs/", "PUT /_lfs/", id="uploading"),
        pytest.param("GET .*/tree/", "/tree/", id="between payload and manifest"),
        pytest.param("POST .*/commit/main", "/commit/main", id="committing"),
    ],
)
def test_a_pod_that_is_killed_in_an_upload(tmp_path: Path, hub: Hub, request_line: str, word: str) -> None:
    """The next one makes the same milestone, once and whole, and trains on from the last save."""
    environment = hub.pod_environment(tmp_path / "hub-home")
    more = {"hf": {"repo": REPO, "interval_seconds": 3600}}
    with relayed(tmp_path, "--end-when-asked", "--pace=0.1", "--save-every=20", steps=5000, **more) as run:
        hub.fault(request_line, "hold", times=-1)
        a = run.pod("a", **environment)
        run.wait(lambda: [one for one in hub.asked(word) if not one.get("status")], "a request that is held")
        begun = [one.name for one in (run.root / "hf" / "snapshots").iterdir()]
        a.vanish()
        saved = run.checkpoints()[-1]
        assert milestones_on(hub, tmp_path) == []
        hub.clear()
        b = run.pod("b", **environment)
        (synced,) = run.wait(lambda: run.events("hf_synced"), "the milestone", 120.0)
        assert [synced["checkpoint"]] == begun
        run.wait_step(saved + 3, epoch=2)
        b.notice()
        assert b.process.wait(30) == 75, run.said()
        assert [one["revision"] for one in milestones_on(hub, tmp_path)] == [synced["revision"]]
        assert [one["revision"] for one in run.commander.run()["milestones"]] == [synced["revision"]]
        _, second = run.epochs().values()
        # What the killed pod had saved last, and not taken yet, is taken by the next one.
        assert second[0].step - 1 == run.events("resume")[-1]["step"] >= saved
        run.assert_one_history(second[-1].step)
