"""What a hub and a network do to an upload: it fails alone, or gets through, and never makes a wrong milestone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.hub.client import TOKEN
from tests.support.hub.scene import REPO, Scene, milestones_on

from .test_milestones import scenes

pytestmark = pytest.mark.timeout(280)
Scenes = Callable[..., Scene]
__all__ = ("scenes",)

COMMIT = "POST .*/commit/main"
FAULTS = {
    "500 for a large file": ("PUT /_lfs/", {"kind": "status", "times": 2}),
    "500 for the commit": (COMMIT, {"kind": "status", "times": 2}),
    "503 for the listing": ("GET .*/tree/", {"kind": "status", "status": 503, "times": 1}),
    "cut in a large file": ("PUT /_lfs/", {"kind": "cut", "after": 70_000, "times": 2}),
    "cut in the commit": (COMMIT, {"kind": "cut", "after": 100, "times": 1}),
    "lost answer of a large file": ("PUT /_lfs/", {"kind": "lose", "times": 1}),
    "lost answer of the commit": (COMMIT, {"kind": "lose", "times": 1}),
    "lost answer of the creation": ("POST /api/repos/create", {"kind": "lose", "times": 1}),
    "rate limit for a large file": ("PUT /_lfs/", {"kind": "status", "status": 429, "retry_after": 1}),
    "rate limit for the commit": (COMMIT, {"kind": "status", "status": 429, "retry_after": 1}),
    "slow": (".", {"kind": "slow", "seconds": 0.3, "times": 10}),
}
SHORT = "lost answer of the commit"


@pytest.mark.parametrize("fault", [pytest.param(one, marks=[] if one == SHORT else pytest.mark.full) for one in FAULTS])
def test_an_upload_gets_through(scenes: Scenes, fault: str) -> None:
    """One milestone, whole, in one commit, whatever happened on the way. The failed creation waits a period."""
    scene = scenes(interval_seconds=3)
    scene.commit(40)
    match, how = FAULTS[fault]
    scene.hub.fault(match, **how)  # type: ignore[arg-type]
    scene.mirror()
    told = scene.wait_milestone(seconds=60)
    (own,) = milestones_on(scene.hub, scene.root)
    assert own["revision"] == told["revision"]
    assert len(scene.hub.commits(REPO)) == 2


@pytest.mark.full
def test_somebody_else_commits_meanwhile(scenes: Scenes, tmp_path: Path) -> None:
    """A README that a person adds in the middle of an upload is neither lost nor in the way."""
    scene = scenes()
    scene.commit(40)
    scene.hub.fault("GET .*/tree/", "slow", seconds=3)
    scene.mirror()
    scene.wait(lambda: scene.hub.asked("/tree/"))
    _commit_readme(scene, tmp_path)
    scene.wait_milestone()
    commits = scene.hub.commits(REPO)
    assert [one["title"].split()[0] for one in commits] == ["initial", "README", "Milestone"]
    assert "README.md" in commits[-1]["files"]
    assert [one["status"] for one in scene.hub.asked("/commit/main")] == [200, 412, 200]


@pytest.mark.full
def test_a_lost_commit_is_found_behind_others(scenes: Scenes, tmp_path: Path) -> None:
    """The answer is lost with the mirror, and a person commits: the revision is still the commit that added it all."""
    scene = scenes()
    scene.commit(40)
    scene.hub.fault(COMMIT, "lose")
    first = scene.mirror()
    (own,) = scene.wait(lambda: milestones_on(scene.hub, scene.root))
    first.kill()
    _commit_readme(scene, tmp_path)
    scene.mirror()
    assert scene.wait_milestone()["revision"] == own["revision"]
    assert [one["title"].split()[0] for one in scene.hub.commits(REPO)] == ["initial", "Milestone", "README"]


def _commit_readme(scene: Scene, tmp_path: Path) -> None:
    code = (
        "from huggingface_hub import HfApi, CommitOperationAdd as Add\n"
        f"HfApi().create_commit({REPO!r}, [Add('README.md', b'# mine')], commit_message='README')"
    )
    environment = {**scene.environment, "HF_HUB_OFFLINE": "0"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


@pytest.mark.full
def test_a_hub_that_is_away_is_one_line_per_try(scenes: Scenes) -> None:
    """Each period one line; when it is back, the newest checkpoint becomes the milestone; the older snapshot goes."""
    scene = scenes(interval_seconds=8)
    scene.hub.kill()
    scene.commit(40)
    scene.mirror()
    scene.wait_line("no milestone: step-40.e1.0", 60)
    assert len([line for line in scene.lines() if "no milestone" in line]) == 1
    scene.commit(60)
    scene.hub.start()
    assert scene.wait_milestone()["step"] == 60
    assert [one["step"] for one in milestones_on(scene.hub, scene.root)] == [60]
    scene.wait(lambda: not scene.volume.snapshots)


@pytest.mark.full
def test_a_wrong_token_is_one_line_without_it(scenes: Scenes) -> None:
    """401: said once per period, and the token stands in no line."""
    scene = scenes()
    scene.environment["HF_TOKEN"] = "hf_wr0ng" * 4
    scene.commit(40)
    scene.mirror()
    line = scene.wait_line("no milestone")
    assert "401" in line
    text = scene.log.read_text()
    assert "wr0ng" not in text
    assert TOKEN not in text
    assert "Traceback" not in text


@pytest.mark.full
@pytest.mark.parametrize("size", [0, 1])
def test_the_commander_away_holds_up_nothing_but_the_milestone(scenes: Scenes, size: int) -> None:
    """Nothing is uploaded that might not count; it goes on by itself once the Commander answers."""
    scene = scenes()
    scene.commit(40, size=1000 + size)
    scene.commander.away = True
    scene.mirror()
    scene.wait_line("a milestone is due, but")
    assert scene.hub.asked() == []
    scene.commander.away = False
    assert scene.wait_milestone()["step"] == 40


@pytest.mark.full
def test_what_a_library_prints_is_no_answer(scenes: Scenes) -> None:
    """Lines on standard output, at its start and in the middle of an upload, are not taken for the transfer's own."""
    scene = scenes()
    noise = scene.root / "noise"
    noise.mkdir()
    text = "import threading\nprint('noise')\nthreading.Timer(1.0, lambda: print('{} more noise', flush=True)).start()"
    (noise / "sitecustomize.py").write_text(text)
    scene.environment["PYTHONPATH"] = str(noise)
    scene.commit(40)
    scene.hub.fault("PUT /_lfs/", "slow", seconds=2.0)
    one = scene.mirror()
    assert scene.wait_milestone()["step"] == 40
    assert one.process.poll() is None


RATE = 1_000_000


@pytest.mark.full
@pytest.mark.parametrize("parts", [[], pytest.param(["--multipart", "700000"], marks=pytest.mark.full)])
def test_the_upload_keeps_to_its_limit(scenes: Scenes, parts: list[str]) -> None:
    """Over some seconds the hub takes in the limit, within a tenth, however many files travel at once."""
    scene = scenes(*parts, upload_limit=RATE)
    scene.commit(40, size=4_000_000)
    scene.mirror()
    scene.wait_milestone(seconds=60)
    assert abs(rate(scene.hub.samples()) / RATE - 1) < 0.1, rate(scene.hub.samples())


def rate(samples: list[tuple[float, int]]) -> float:
    """Bytes per second while the large files came: between the first tenth of all bytes and the last one."""
    total = samples[-1][1]
    inner = [one for one in samples if 0.1 * total < one[1] < 0.9 * total]
    assert inner[-1][0] - inner[0][0] > 3, "too short to be measured"
    return (inner[-1][1] - inner[0][1]) / (inner[-1][0] - inner[0][0])


@pytest.mark.full
def test_a_damaged_checkpoint_never_goes_up(scenes: Scenes) -> None:
    """A byte that changed after it was sealed: one line, and nothing on the hub."""
    scene = scenes()
    sealed = scene.commit(40)
    path = scene.volume.run_dir / sealed.name / "model.bin"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    scene.mirror()
    scene.wait_line("cannot be frozen")
    time.sleep(1)  # why: what must not happen has no event
    assert scene.hub.asked() == []
    assert scene.volume.snapshots == []


@pytest.mark.full
def test_the_limit_holds_the_xet_way(scenes: Scenes) -> None:
    """It is another library, which knows of no rate."""
    scene = scenes("--xet", xet=True, upload_limit=RATE)
    scene.commit(40, size=4_000_000)
    scene.mirror()
    scene.wait_milestone(seconds=60)
    assert scene.hub.asked("/_cas/v1/xorbs/")
    assert not scene.hub.asked("/_lfs/")
    assert abs(rate(scene.hub.samples()) / RATE - 1) < 0.1, rate(scene.hub.samples())


@pytest.mark.full
@pytest.mark.parametrize("where", ["token", "shards"])
def test_a_hub_without_xet(scenes: Scenes, where: str) -> None:
    """The library has no way back: the plain way is taken at once, not in the next period."""
    scene = scenes(*(["--xet"] if where == "shards" else []), xet=True)
    scene.hub.fault("/_cas/v./shards", "status", status=400, times=-1)
    scene.commit(40)
    scene.mirror()
    scene.wait_milestone()
    scene.wait_line("the Xet way fails")
    assert len(scene.hub.asked("PUT /_lfs/")) == 2
    assert len(milestones_on(scene.hub, scene.root)) == 1


@pytest.mark.full
@pytest.mark.parametrize("phase", ["payload", "committing"])
def test_a_kill_the_xet_way(scenes: Scenes, phase: str) -> None:
    """On another machine, with an empty home, the next mirror goes on: what has arrived is not sent again."""
    scene = scenes("--xet", xet=True)
    scene.commit(40)
    scene.hub.fault("/_cas/v1/xorbs" if phase == "payload" else COMMIT, "hold", times=-1)
    first = scene.mirror()
    scene.wait(lambda: scene.hub.asked("/_cas/v1/xorbs" if phase == "payload" else "/commit/main"))
    first.kill()
    scene.hub.clear()
    scene.environment["HF_HOME"] = str(scene.root / "other-home")
    scene.mirror()
    scene.wait_milestone()
    assert len(milestones_on(scene.hub, scene.root)) == 1
    assert bool(scene.hub.asked("/_cas/v1/xorbs")) is (phase == "payload")
