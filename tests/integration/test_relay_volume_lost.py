"""The volume is lost: the run goes on from its last milestone on the hub, or says why it cannot."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import CheckpointName
from tests.support.hub.client import Hub
from tests.support.hub.scene import REPO
from tests.support.jobs.pods import Run, relayed

pytestmark = [pytest.mark.full, pytest.mark.timeout(280)]


def test_a_lost_volume_is_filled_from_the_last_milestone(tmp_path: Path, hub: Hub) -> None:
    """While the hub is away the pod waits, with a line. Then the run goes back to the milestone, on the same curve."""
    environment = hub.pod_environment(tmp_path / "hub-home")
    with relayed(tmp_path, "--pace=0.15", hf={"repo": REPO, "interval_seconds": 5}, keep_last=2) as run:
        a = run.pod("a", **environment)
        synced = run.wait(lambda: run.events("hf_synced"), "a milestone", 120.0)[-1]
        run.wait_saved(synced["step"] + 60)
        run.wait(lambda: len(run.commander.run()["milestones"]) > 0, "the record")
        assert run.state()["last_ok_step"] > synced["step"]
        a.vanish()
        milestone = run.commander.run()["milestones"][0]
        hub.kill()
        shutil.rmtree(tmp_path / "volume")
        (tmp_path / "volume").mkdir()
        b = run.pod("b", **environment)
        run.wait(lambda: "the hub does not answer" in b.said, "the wait for the hub", 120.0)
        time.sleep(3.0)  # why: nothing may begin in it
        assert len(run.epochs()) == 1
        hub.start()
        run.wait_step(1, epoch=2)
        assert run.epochs()[max(run.epochs())][0].step == milestone["step"] + 1, run.said()
        assert b.process.wait(120) == 0, run.said()
        run.assert_one_history(200)
        assert "no checkpoint on the volume is intact: the last milestone is restored" in b.said


def test_a_milestone_that_is_newer_than_what_is_whole_is_restored(tmp_path: Path, hub: Hub) -> None:
    """The newest checkpoints on the volume are damaged, older ones are not: the run goes on from the hub."""
    environment = hub.pod_environment(tmp_path / "hub-home")
    with relayed(tmp_path, "--pace=0.1", steps=5000, hf={"repo": REPO, "interval_seconds": 4}, keep_last=500) as run:
        a = run.pod("a", **environment)
        synced = lambda: [made for made in run.commander.run()["milestones"] if made["step"] >= 60]  # noqa: E731
        step = run.wait(synced, "a milestone", 120.0)[0]["step"]
        run.wait_saved(step + 20)
        a.vanish()
        step = run.commander.run()["milestones"][0]["step"]
        for path in checkpoints(run, step):
            (path / "trainer_state.json").write_text("{}")
        lose_saves(run)
        b = run.pod("b", **environment)
        run.wait_step(1, epoch=2)
        assert "is the newest intact one on the volume, and a milestone is newer: that is restored" in b.said
        assert run.epochs()[max(run.epochs())][0].step == step + 1, run.said()


def test_a_checkpoint_that_is_listed_late_is_not_given_up(tmp_path: Path, hub: Hub) -> None:
    """The newest in sight is a milestone: the pod looks for the run's last checkpoint, and goes on from that."""
    environment = hub.pod_environment(tmp_path / "hub-home")
    with relayed(tmp_path, "--pace=0.1", steps=5000, hf={"repo": REPO, "interval_seconds": 900}, keep_last=500) as run:
        a = run.pod("a", **environment)
        step = run.wait(lambda: run.commander.run()["milestones"], "a milestone", 120.0)[0]["step"]
        run.wait_saved(step + 40)
        a.vanish()
        head = run.commander.run()["head"]["step"]
        lose_saves(run)
        late = checkpoints(run, step + 1)
        for path in late:
            path.rename(tmp_path / path.name)
        b = run.pod("b", **environment)
        run.wait(lambda: f"(step {head}), is not in sight on this volume" in b.said, "what it misses")
        for path in late:
            (tmp_path / path.name).rename(path)
        run.wait_step(1, epoch=2)
        assert run.epochs()[max(run.epochs())][0].step == head + 1, run.said()


def checkpoints(run: Run, least: int) -> list[Path]:
    """The sealed ones of at least this step."""
    every = run.root.glob("ckpt/.store/my-run/*/step-*")
    return [path for path in every if CheckpointName.parse(path.name).step >= least]


def lose_saves(run: Run) -> None:
    """What the trainer itself has left is not there, either: a pod would take its last one."""
    for path in run.root.glob("ckpt/.store/my-run/*/e1/checkpoint-*"):
        shutil.rmtree(path)


def test_a_lost_volume_without_a_milestone_begins_anew_if_somebody_says_so(tmp_path: Path) -> None:
    """The pod says what it misses and waits; with --allow-baseline it names what is given up, and begins at step 1."""
    with relayed(tmp_path, "--pace=0.1", steps=60) as run:
        a = run.pod("a")
        saved = run.wait_saved(20)
        a.vanish()
        shutil.rmtree(tmp_path / "volume")
        (tmp_path / "volume").mkdir()
        b = run.pod("b")
        run.wait(lambda: "is not on this volume" in b.said, "what is missed")
        time.sleep(8.0)  # why: nothing may begin in it, also when the lease of the first pod is over
        assert len(run.epochs()) == 1
        b.vanish()
        c = run.pod("c", "--allow-baseline")
        assert c.process.wait(120) == 0, run.said()
        assert "begins anew, without step-" in c.said
        assert saved >= 20
        assert run.epochs()[max(run.epochs())][0].step == 1, run.said()
        run.assert_one_history(60)
        d = run.pod("d", "--allow-baseline")
        assert d.process.wait(60) == 0, "the run is finished, and nobody begins it again"
        assert len(run.epochs()) == 2
