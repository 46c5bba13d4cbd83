"""What a session reports as its best, through the agent and the mirror to a milestone on the hub."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import Manifest
from tests.support.hub.client import Hub
from tests.support.hub.scene import REPO, milestones_on
from tests.support.jobs.pods import relayed
from tests.support.pages.sources import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(280)]
WORKER = ROOT / "tests" / "support" / "workers" / "session_worker.py"


@pytest.mark.parametrize(
    ("every", "more"),
    [
        pytest.param(1000, ("--step-time=0.5",), id="the newest"),
        # A mirror looks every 2 s: dozens of saves are newer by then.
        pytest.param(1, ("--step-time=1", "--slow-from=40"), id="passed over"),
    ],
)
def test_a_reported_improvement_becomes_a_milestone(
    tmp_path: Path, hub: Hub, every: int, more: tuple[str, ...]
) -> None:
    """No interval and no metrics file asks for one: it is the session's own report that makes it, and that once."""
    log = tmp_path / "log"
    log.mkdir()
    worker = [sys.executable, str(WORKER), f"--log={log}", f"--save-every={every}", "--improves-at=13", "--steps=55"]
    settings = {
        "command": [*worker, *more, "--checkpoint-dir=${save_dir}"],
        "resume_flag": None,
        "save_signal": None,
        "hf": {"repo": REPO, "interval_seconds": None, "on_improve": {"metric": "score", "mode": "max"}},
    }
    with relayed(tmp_path, **settings) as run:
        pod = run.pod("a", **hub.pod_environment(tmp_path / "hub-home"))
        found = run.wait(lambda: [one for one in run.events("hf_synced") if one["step"] >= 13], "its milestone", 120.0)
        assert every == 1 or found[0]["step"] == 13
        assert pod.process.wait(120) == 0, run.said()
        told = run.events("hf_synced")
        # The first step is the best one, too, until there is a better one.
        assert len(told) <= 2, told
        shown = run.commander.run()["milestones"]
        assert [one["revision"] for one in reversed(shown)] == [one["revision"] for one in told]
        assert [one["revision"] for one in milestones_on(hub, tmp_path)] == [one["revision"] for one in told]
        (best,) = run.root.glob("ckpt/.store/my-run/*/step-13.*")
        assert Manifest.read(best).best is not None, "it is kept"
