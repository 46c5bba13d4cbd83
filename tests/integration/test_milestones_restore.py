"""Milestones and baselines back from the hub: what verifies is the sealed checkpoint that it was; nothing else is."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic.checkpoint import Manifest, inventory, verify
from dalsegno.relay.milestones.commander_client import Milestone
from dalsegno.relay.milestones.restore import (
    RevisionRefused,
    Unreachable,
    VolumeFull,
    baseline,
    restore,
    restore_newest,
)
from tests.support.hub.scene import REPO, Scene

from .test_milestones import scenes

pytestmark = pytest.mark.timeout(280)
Scenes = Callable[..., Scene]
__all__ = ("scenes",)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in list(os.environ):
        if key.startswith("HF_"):
            monkeypatch.delenv(key)


class Elsewhere:
    """Another machine, whose volume is empty."""

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch, xet: bool = False) -> None:
        self.checkpoints, self.hf = scene.root / "other" / "ckpt", scene.root / "other" / "hf"
        self.lines: list[str] = []
        self.scene = scene
        environment = {**scene.environment, "HF_HOME": str(scene.root / "other-home")}
        for key, value in environment.items():
            if key.startswith("HF_") and not (xet and key == "HF_HUB_DISABLE_XET"):
                monkeypatch.setenv(key, value)

    def restore(self, told: dict[str, Any]) -> Manifest:
        return restore(Milestone(**told), self.checkpoints, self.hf).manifest

    def newest(self) -> Manifest | None:
        listed = [Milestone(**one) for one in self.scene.commander.milestones]
        found = restore_newest(listed, self.checkpoints, self.hf, self.lines.append)
        return None if found is None else found.manifest


def milestones(scene: Scene, *steps: int, size: int = 200_000) -> list[dict[str, Any]]:
    """Makes them with a mirror; oldest first."""
    scene.configure(interval_seconds=0.1)
    scene.mirror()
    for count, step in enumerate(steps, 1):
        scene.commit(step, size=size)
        scene.wait_milestone(count)
    scene.mirrors[-1].stop()
    scene.hub.clear()
    return scene.commander.milestones[::-1]


@pytest.mark.parametrize("way", ["plain", pytest.param("xet", marks=pytest.mark.full)])
def test_a_milestone_comes_back_as_it_was(scenes: Scenes, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Name, digest and every byte are the same, and the store takes it for one of its own."""
    scene = scenes(*(["--xet"] if way == "xet" else []), xet=way == "xet")
    (told,) = milestones(scene, 40)
    elsewhere = Elsewhere(scene, monkeypatch, xet=way == "xet")
    manifest = elsewhere.restore(told)
    assert bool(scene.hub.asked("/_cas/v1/reconstructions")) is (way == "xet")
    assert manifest.digest == scene.commander.committed[0].digest
    run_dir = elsewhere.checkpoints / "r1"
    assert [one.ref for one in inventory(run_dir)] == [manifest.ref]
    verify(run_dir / manifest.name, manifest)
    assert (run_dir / ".sealed" / manifest.name).exists()
    assert list((elsewhere.hf / "incoming").iterdir()) == [], "nothing is left twice on the volume"


@pytest.mark.full
def test_both_revisions_come_back(scenes: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older one, too, though the newer one has replaced its files in the repository."""
    scene = scenes()
    first, second = milestones(scene, 40, 80)
    elsewhere = Elsewhere(scene, monkeypatch)
    assert elsewhere.restore(second).step == 80
    assert elsewhere.restore(first).step == 40


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted by root")
def test_a_volume_without_room_is_no_silent_hub(scenes: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how much is missing before a large file comes; with more room it goes on."""
    scene = scenes()
    (told,) = milestones(scene, 40, size=3_000_000)
    elsewhere = Elsewhere(scene, monkeypatch)
    place = elsewhere.checkpoints.parent
    place.mkdir()
    mount = ("mount", "-t", "tmpfs")
    if subprocess.run([*mount, "-o", "size=2m", "tmpfs", str(place)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with pytest.raises(VolumeFull, match=r"me/tune@.*: 4\.5 MB are to come, and 3 MB of room for that are missing"):
            elsewhere.restore(told)
        large = lambda: [one for one in scene.hub.asked() if "/model.bin" in one["line"]]  # noqa: E731
        assert large() == [], "it was asked for"
        # What a killed download has left takes no room from the next one.
        cache = next(place.glob("hf/incoming/*/.cache/huggingface/download"))
        (cache / "part.1234.incomplete").write_bytes(bytes(1_000_000))
        subprocess.run([*mount, "-o", "remount,size=5m", "tmpfs", str(place)], check=True)
        assert elsewhere.restore(told).step == 40
        assert large() != []
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


# What is done to the newest milestone, and what the line says.
DAMAGES = {
    "another byte": "is not what its checksum says",
    "another byte in the manifest": "not in canonical form",
    "another size": "bytes instead of",
    "a file is missing": "is missing",
    "a file too many": "does not belong to it",
    "no manifest": "no milestone of ours",
    "another checkpoint": "another digest",
    "the revision is gone": "has no revision",
}
SHORT = "another byte"


@pytest.mark.full
@pytest.mark.parametrize(
    "damage", [pytest.param(one, marks=[] if one == SHORT else pytest.mark.full) for one in DAMAGES]
)
def test_a_damaged_milestone_is_refused(scenes: Scenes, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """One line says what is wrong; the one before is restored instead, and nothing of the damaged one is left."""
    scene = scenes()
    milestones(scene, 40, 80)
    _damage(scene, damage)
    elsewhere = Elsewhere(scene, monkeypatch)
    found = elsewhere.newest()
    assert found is not None
    assert found.step == 40
    (line,) = [line for line in elsewhere.lines if line.startswith("refused")]
    assert DAMAGES[damage] in line
    assert [one.step for one in inventory(elsewhere.checkpoints / "r1")] == [40]
    assert list((elsewhere.hf / "incoming").iterdir()) == []


def _damage(scene: Scene, damage: str) -> None:
    """Changes what the hub has of the newest milestone, while nobody looks."""
    scene.hub.kill()
    path = scene.root / "hub" / "repos.json"
    repos = json.loads(path.read_text())
    newest = repos[REPO]["commits"][-1]
    files, blobs = newest["files"], scene.root / "hub" / "blobs"
    if damage == "another byte":
        blob = blobs / files["checkpoint/model.bin"]["sha256"]
        data = bytearray(blob.read_bytes())
        data[5000] ^= 4
        blob.write_bytes(data)
    elif damage == "another byte in the manifest":
        blob = blobs / files["run_manifest.json"]["sha256"]
        text = blob.read_bytes().replace(b'"step": 80', b'"step":80 ')
        files["run_manifest.json"]["sha256"] = hashlib.sha256(text).hexdigest()
        (blobs / files["run_manifest.json"]["sha256"]).write_bytes(text)
    elif damage == "another size":
        files["checkpoint/optimizer.pt"]["size"] -= 1
    elif damage == "a file is missing":
        del files["checkpoint/config.json"]
    elif damage == "a file too many":
        files["checkpoint/extra.json"] = files["checkpoint/config.json"]
    elif damage == "no manifest":
        del files["run_manifest.json"]
    elif damage == "another checkpoint":
        newest["files"] = repos[REPO]["commits"][-2]["files"]
    else:
        newest["oid"] = "0" * 40
    path.write_text(json.dumps(repos))
    scene.hub.start()


@pytest.mark.full
@pytest.mark.parametrize("fault", ["cut", "damage", "status"])
def test_a_bad_network_is_no_bad_milestone(scenes: Scenes, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A cut, a flipped byte on the way, errors of the server: fetched again, and whole."""
    scene = scenes()
    (told,) = milestones(scene, 40)
    scene.hub.fault("GET /_cdn/", fault, after=1000, times=1)
    assert Elsewhere(scene, monkeypatch).restore(told).step == 40


@pytest.mark.full
@pytest.mark.parametrize("away", ["killed", "wrong token"])
def test_a_hub_out_of_reach_is_no_reason_to_go_back(scenes: Scenes, monkeypatch: pytest.MonkeyPatch, away: str) -> None:
    """It is said so; no older milestone, and nothing else, is taken for that."""
    scene = scenes()
    milestones(scene, 40, 80)
    elsewhere = Elsewhere(scene, monkeypatch)
    if away == "killed":
        scene.hub.kill()
    else:
        monkeypatch.setenv("HF_TOKEN", "hf_wr0ng")
    with pytest.raises(Unreachable) as caught:
        elsewhere.newest()
    assert "wr0ng" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not elsewhere.checkpoints.exists()


_RESTORE = """
import sys
from pathlib import Path
from dalsegno.relay.milestones.commander_client import Milestone
from dalsegno.relay.milestones.restore import restore
repo, revision, step, checkpoint, digest, checkpoints, hf = sys.argv[1:]
restore(Milestone(repo, revision, int(step), checkpoint, digest), Path(checkpoints), Path(hf))
"""


@pytest.mark.full
def test_a_restore_that_was_killed_goes_on(scenes: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that have come are not fetched again, and until all have there is no checkpoint."""
    scene = scenes()
    (told,) = milestones(scene, 40)
    elsewhere = Elsewhere(scene, monkeypatch)
    sha256 = scene.hub.commits(REPO)[-1]["files"]["checkpoint/optimizer.pt"]["sha256"]
    scene.hub.fault(f"GET /_cdn/{sha256}", "hold", times=-1)
    words = [*(str(one) for one in told.values()), str(elsewhere.checkpoints), str(elsewhere.hf)]
    process = subprocess.Popen([sys.executable, "-c", _RESTORE, *words])
    scene.wait(lambda: scene.hub.asked(f"GET /_cdn/{sha256}"))
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert not (elsewhere.checkpoints / "r1").exists()
    fetched = [one["line"] for one in scene.hub.asked("GET /_cdn/") if one["status"] == 200]
    assert len(fetched) == 1
    time.sleep(0.5)  # why: its child ends by itself
    scene.hub.clear()
    assert elsewhere.restore(told).step == 40
    assert len(scene.hub.asked("GET /_cdn/")) == 1


@pytest.mark.full
def test_damage_on_the_volume_makes_room(scenes: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of that name whose files are damaged is set aside, a sound one is left as it is."""
    scene = scenes()
    (told,) = milestones(scene, 40)
    elsewhere = Elsewhere(scene, monkeypatch)
    elsewhere.restore(told)
    model = elsewhere.checkpoints / "r1" / told["checkpoint"] / "model.bin"
    inode = model.stat().st_ino
    elsewhere.restore(told)
    assert model.stat().st_ino == inode
    model.write_bytes(b"rubbish")
    manifest = elsewhere.restore(told)
    verify(model.parent, manifest)
    assert [one.name for one in model.parent.parent.iterdir() if one.name.startswith(".damaged")]


@pytest.mark.full
def test_a_baseline_needs_no_manifest_of_ours(scenes: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any revision of any repository, once; each file as the hub lists it."""
    scene = scenes()
    milestones(scene, 40)
    elsewhere = Elsewhere(scene, monkeypatch)
    path = baseline(f"{REPO}@main", elsewhere.hf)
    there = {str(one.relative_to(path)) for one in path.rglob("*") if one.is_file()}
    assert {".gitattributes", "run_manifest.json", "checkpoint/model.bin", "checkpoint/deep/er/rng-40.state"} <= there
    scene.hub.kill()
    assert baseline(f"{REPO}@main", elsewhere.hf) == path, "it is there"
    scene.hub.start()
    with pytest.raises(RevisionRefused):
        baseline(f"{REPO}@{'1' * 40}", elsewhere.hf)


# Pods that do the same at once: as they do, each waits a little where the hub does not seem to answer.
_AT_ONCE = """
import json, sys, time
from pathlib import Path
from dalsegno.relay.milestones.commander_client import Milestone
from dalsegno.relay.milestones.restore import Unreachable, baseline, restore_newest
what, checkpoints, hf = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
sys.stdin.readline()
for _ in range(5):
    try:
        if what.startswith("["):
            every = [Milestone(**one) for one in json.loads(what)]
            found = restore_newest(every, checkpoints, hf, lambda line: print(line, file=sys.stderr))
            print(found.manifest.step)
        else:
            print(baseline(what, hf))
        break
    except Unreachable as error:
        print(error, file=sys.stderr)
        time.sleep(2)
"""


def at_once(what: str, root: Path, pods: int = 3) -> list[tuple[str, str]]:
    """What each says, and its complaints."""
    words = [sys.executable, "-c", _AT_ONCE, what, str(root / "ckpt"), str(root / "hf")]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [subprocess.Popen(words, text=True, **pipes) for _ in range(pods)]
    for pod in started:
        assert pod.stdin is not None
        pod.stdin.write("\n")
        pod.stdin.flush()
    return [pod.communicate(timeout=120) for pod in started]


@pytest.mark.full
def test_two_pods_restore_it_at_once(scenes: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a volume whose locks other machines do not see: each has the newest, whatever the other one moves away."""
    scene = scenes()
    milestones(scene, 40, 80)
    Elsewhere(scene, monkeypatch)
    for number in range(6):
        root = scene.root / f"volume-{number}"
        for out, err in at_once(json.dumps(scene.commander.milestones), root):
            assert out == "80\n", err
            assert "refused" not in err
        (found,) = inventory(root / "ckpt" / "r1")
        verify(root / "ckpt" / "r1" / found.name, Manifest.read(root / "ckpt" / "r1" / found.name))


@pytest.mark.full
def test_two_pods_bring_the_baseline_at_once(scenes: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above: all begin from it, and it is whole."""
    scene = scenes()
    milestones(scene, 40)
    Elsewhere(scene, monkeypatch)
    files = scene.hub.commits(REPO)[-1]["files"]
    for number in range(6):
        root = scene.root / f"volume-{number}"
        for out, err in at_once(f"{REPO}@main", root):
            assert out, err
            for path, one in files.items():
                assert (Path(out.strip()) / path).stat().st_size == one["size"], path
