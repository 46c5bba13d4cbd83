"""Milestones, as real mirrors make them with the real client: what is uploaded, when, and what a kill leaves."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.hub.scene import REPO, Scene, milestones_on
from tests.support.jobs.local_processes import is_alive

pytestmark = pytest.mark.timeout(280)
Scenes = Callable[..., Scene]


@pytest.fixture
def scenes(tmp_path: Path) -> Iterator[Scenes]:
    """Makes a scene, and ends all of it."""
    made: list[Scene] = []

    def make(*hub: str, **more: object) -> Scene:
        root = tmp_path / str(len(made))
        root.mkdir()
        made.append(Scene(root, *hub, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("private", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_milestone_is_one_commit_that_the_commander_hears_of(scenes: Scenes, private: bool) -> None:
    """One commit adds payload and manifest; its SHA is what is reported; the snapshot goes, the event stays.

    The repository that is made for it is private where `hf.private` says so.
    """
    scene = scenes(metrics_file="loss.jsonl", private=private)
    metrics = scene.volume.run_dir / "e1" / "loss.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 40, "loss": 2.0}\n')
    sealed = scene.commit(40)
    scene.mirror()
    told = scene.wait_milestone()
    (own,) = milestones_on(scene.hub, scene.root)
    assert scene.hub.is_private(REPO) == private
    assert told == {
        "repo": REPO,
        "revision": own["revision"],
        "step": 40,
        "checkpoint": sealed.name,
        "digest": sealed.digest,
    }
    assert own["manifest"] == {"git_sha": "abc", "hyperparameters": {"lr": 1e-4}}
    titles = [one["title"] for one in scene.hub.commits(REPO)]
    assert [title.split()[0] for title in titles] == ["initial", "Milestone"]
    assert "metrics.jsonl" in scene.hub.commits(REPO)[-1]["files"]
    scene.wait(lambda: scene.volume.events() and not scene.volume.snapshots)
    assert scene.volume.events() == [{"event": "hf_synced", **told}]


@pytest.mark.full
def test_two_milestones_are_two_revisions(scenes: Scenes) -> None:
    """What only the first had is gone from the second, what people put beside it stays, and both can be loaded."""
    scene = scenes(interval_seconds=1)
    scene.commit(40)
    scene.mirror()
    first = scene.wait_milestone()
    scene.commit(80)
    second = scene.wait_milestone(2)
    assert second["revision"] != first["revision"]
    assert [one["step"] for one in milestones_on(scene.hub, scene.root)] == [40, 80]
    files = scene.hub.commits(REPO)[-1]["files"]
    assert "checkpoint/deep/er/rng-80.state" in files
    assert "checkpoint/deep/er/rng-40.state" not in files
    assert ".gitattributes" in files


@pytest.mark.full
def test_an_improvement_makes_one(scenes: Scenes) -> None:
    """The metric of a checkpoint improves: a milestone of that step or a later one. Otherwise, none."""
    scene = scenes(interval_seconds=None, on_improve={"metric": "eval_loss", "min_delta": 0.1})
    metrics = scene.volume.run_dir / "e1" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 40, "eval_loss": 2.0}\n{"loss": 1}\nnonsense\n{"step": 50, "eval_loss": NaN}\n')
    scene.commit(20)
    scene.mirror()
    time.sleep(5)  # why: what must not happen has no event
    assert scene.commander.milestones == [], "the checkpoint is older than the improvement"
    scene.commit(40)
    assert scene.wait_milestone()["step"] == 40
    assert "metrics.jsonl" in scene.hub.commits(REPO)[-1]["files"]
    with metrics.open("a") as file:
        file.write('{"step": 60, "eval_loss": 1.95}\n{"step": 60, "eval_loss": 1.0')
    scene.commit(60)
    time.sleep(5)  # why: as above; too small an improvement, and half a line
    assert len(scene.commander.milestones) == 1
    with metrics.open("a") as file:
        file.write("}\n")
    assert scene.wait_milestone(2)["step"] == 60


@pytest.mark.full
def test_only_what_is_committed_becomes_one(scenes: Scenes) -> None:
    """A sealed checkpoint that the Commander does not have, as of a fenced pod, is not even uploaded."""
    scene = scenes()
    scene.volume.save(90, epoch=2)
    scene.commit(40)
    scene.mirror()
    assert scene.wait_milestone()["step"] == 40
    assert [one["step"] for one in milestones_on(scene.hub, scene.root)] == [40]


@pytest.mark.full
def test_what_the_commander_refuses_never_counts(scenes: Scenes) -> None:
    """409: one line, no event, and it is not told again."""
    scene = scenes()
    scene.commit(40)
    scene.hub.fault("POST .*/commit/", "slow", seconds=1.5)
    scene.mirror()
    scene.wait(lambda: scene.hub.asked("/commit/"))
    scene.commander.committed.clear()
    scene.wait_line("never counts")
    scene.wait(lambda: not scene.volume.snapshots)
    assert scene.volume.events() == []
    assert len(scene.commander.told) == 1


@pytest.mark.full
def test_pruning_does_not_hurt_a_snapshot(scenes: Scenes) -> None:
    """The run deletes the checkpoint while it is uploaded: all of it arrives."""
    scene = scenes()
    sealed = scene.commit(40)
    scene.hub.fault("preupload", "slow", seconds=1.5)
    scene.mirror()
    scene.wait(lambda: scene.hub.asked("preupload"))
    shutil.rmtree(scene.volume.run_dir / sealed.name)
    scene.wait_milestone()
    assert len(milestones_on(scene.hub, scene.root)) == 1


def test_sigterm_cancels_an_upload_at_once(scenes: Scenes) -> None:
    """Within a second it is gone, and nothing more is sent; the next mirror makes the milestone."""
    scene = scenes("--multipart", "1000000", upload_limit=400_000)
    scene.commit(40, size=1_500_000)
    first = scene.mirror()
    scene.wait(lambda: scene.hub.samples() and scene.hub.samples()[-1][1] > 100_000)
    (child,) = psutil.Process(first.process.pid).children()
    assert first.stop() < 1
    scene.wait(lambda: not is_alive(child.pid), 2)
    sent = scene.hub.samples()[-1][1]
    time.sleep(1)  # why: what must not happen has no event
    assert scene.hub.samples()[-1][1] == sent
    scene.configure()
    scene.mirror()
    scene.wait_milestone()
    assert len(milestones_on(scene.hub, scene.root)) == 1


# Where a mirror is killed: which request of its upload is held up meanwhile.
PHASES = {
    "looking": "GET .*/commits/main",
    "payload": "PUT /_lfs/",
    "between payload and manifest": "GET .*/tree/",
    "committing": "POST .*/commit/main",
}


@pytest.mark.parametrize(
    "phase", [pytest.param(one, marks=[] if one.startswith("between") else pytest.mark.full) for one in PHASES]
)
def test_a_kill_in_an_upload_loses_nothing(scenes: Scenes, phase: str) -> None:
    """The next mirror goes on with the same snapshot: one milestone, whole, though a newer checkpoint is there."""
    scene = scenes()
    scene.commit(40)
    scene.hub.fault(PHASES[phase], "hold", times=-1)
    first = scene.mirror()
    scene.wait(
        lambda: [
            one
            for one in scene.hub.asked()
            if "status" in one
            and not one["status"]
            and one["body"] == 0
            and PHASES[phase].split(" ")[0] in one["line"]
            and _held(one["line"], phase)
        ]
    )
    (child,) = psutil.Process(first.process.pid).children()
    first.kill()
    scene.wait(lambda: not is_alive(child.pid))
    assert milestones_on(scene.hub, scene.root) == []
    assert scene.volume.snapshots == ["step-40.e1.0"]
    sent = sum(one["body"] for one in scene.hub.asked("PUT /_lfs/"))
    scene.hub.clear()
    scene.commit(50)
    scene.mirror()
    assert scene.wait_milestone()["step"] == 40
    assert len(milestones_on(scene.hub, scene.root)) == 1
    if sent:
        assert scene.hub.asked("PUT /_lfs/") == [], "what the hub has is not sent again"


def _held(line: str, phase: str) -> bool:
    words = {"looking": "/commits/", "payload": "/_lfs/", "committing": "/commit/main"}
    return words.get(phase, "/tree/") in line


@pytest.mark.full
def test_a_kill_between_commit_and_its_answer(scenes: Scenes) -> None:
    """The hub has the commit, the mirror never heard of it: the next one finds it, and makes no second one."""
    scene = scenes()
    scene.commit(40)
    scene.hub.fault("POST .*/commit/main", "lose")
    first = scene.mirror()
    scene.wait(lambda: milestones_on(scene.hub, scene.root))
    first.kill()
    scene.mirror()
    told = scene.wait_milestone()
    (own,) = milestones_on(scene.hub, scene.root)
    assert told["revision"] == own["revision"]


@pytest.mark.full
def test_a_kill_before_the_commander_has_heard(scenes: Scenes) -> None:
    """It is told by the next mirror, without another upload."""
    scene = scenes()
    scene.commit(40)
    scene.hub.fault("POST .*/commit/main", "slow", seconds=1.0)
    first = scene.mirror()
    scene.wait(lambda: scene.hub.asked("/commit/main"))
    scene.commander.away = True
    scene.wait_line("is on the hub, but")
    first.kill()
    scene.commander.away = False
    scene.hub.clear()
    scene.mirror()
    told = scene.wait_milestone()
    assert scene.hub.asked() == []
    scene.wait(lambda: scene.volume.events() == [{"event": "hf_synced", **told}])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_random_kills(scenes: Scenes, seed: int) -> None:
    """Mirrors are killed at random moments: one milestone in the end, told once as an event, and every one whole."""
    scene = scenes("--multipart", "60000")
    draw = random.Random(seed)
    scene.commit(40)
    for _ in range(8):
        one = scene.mirror()
        time.sleep(draw.uniform(0.1, 4.0))  # why: this is the schedule
        one.kill()
        milestones_on(scene.hub, scene.root)
    scene.mirror()
    told = scene.wait_milestone()
    (own,) = milestones_on(scene.hub, scene.root)
    assert own["revision"] == told["revision"]
    scene.wait(lambda: scene.volume.events() == [{"event": "hf_synced", **told}])
    assert len(scene.commander.milestones) == 1


@pytest.mark.full
def test_the_next_pod_goes_on_with_the_pace(scenes: Scenes) -> None:
    """The best value so far and the time since the last milestone survive: a restart alone makes none."""
    scene = scenes(interval_seconds=3600)
    scene.commit(40)
    first = scene.mirror()
    scene.wait_milestone()
    scene.wait(lambda: not scene.volume.snapshots)
    first.stop()
    scene.commit(80)
    scene.mirror()
    time.sleep(6)  # why: what must not happen has no event
    assert len(scene.commander.milestones) == 1
    pace = json.loads((scene.volume.hf / "mirror.json").read_text())["pace"]
    assert pace["waited_seconds"] < 60


def test_bad_input_ends_with_one_line(scenes: Scenes) -> None:
    """No token, and no `hf`: exit 2 before anything is done."""
    scene = scenes()
    del scene.environment["HF_TOKEN"]
    assert scene.mirror().process.wait(20) == 2
    assert scene.lines() == [
        "error: HF_TOKEN is not set: hf in run.yaml needs a token that may write to the repository"
    ]
