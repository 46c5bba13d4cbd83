"""Volumes that are full, that cannot be written, that go away, or that have neither links nor rename; real pods."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import Manifest
from tests.support.jobs.faults import Volume, volume
from tests.support.jobs.pods import Run, relayed
from tests.support.pages.sources import ROOT

BARE_MOUNT = ROOT / "tests" / "support" / "jobs" / "bare_mount"
pytestmark = [pytest.mark.full, pytest.mark.timeout(280)]


def newest(run: Run) -> Manifest:
    """What people are shown as the last checkpoint."""
    return Manifest.read((run.root / "ckpt" / "latest").resolve())


@contextmanager
def mounted(folder: Path, mebibytes: int = 160) -> Iterator[Volume]:
    """A real mount as the run's volume."""
    with volume(folder / "volume", mebibytes) as one:
        yield one


def test_a_full_volume_stops_no_training(tmp_path: Path) -> None:
    """Saves fail with a line, the last commit stands, steps go on; with room saves work again."""
    with (
        mounted(tmp_path) as disk,
        relayed(tmp_path, "--pace=0.1", "--go-on", "--size=200000", steps=400) as run,
    ):
        pod = run.pod("a")
        saved = run.wait_saved()
        disk.fill()
        run.wait_step(saved + 45)
        assert run.wait(lambda: "is not saved" in pod.said or "make room" in pod.said, "a line about it")
        stands = newest(run)
        assert [event["step"] for event in run.events("ckpt_saved")][-1] == stands.step
        disk.clear()
        run.wait_saved(stands.step + 1)
        assert pod.process.wait(150) == 0, run.said()
        assert len(run.epochs()) == 1, "one trainer, all the time"
        run.assert_one_history(400)
        assert newest(run).step == 400
        assert run.state()["status"] == "COMPLETED"


def test_the_oldest_go_before_the_volume_is_full(tmp_path: Path) -> None:
    """Ten are to stay, for which there is no room beside the trainer's own: each save is taken all the same."""
    with (
        mounted(tmp_path, 136) as disk,
        relayed(tmp_path, "--pace=0.3", "--save-every=10", f"--size={8 << 20}", keep_last=10, steps=100) as run,
    ):
        pod = run.pod("a")
        assert pod.process.wait(150) == 0, run.said()
        assert [event["step"] for event in run.events("ckpt_saved")] == list(range(10, 101, 10))
        assert "the checkpoint directory lacks " in pod.said
        assert "although 10 were to stay" in pod.said
        assert "is not saved" not in pod.said
        kept = run.checkpoints()
        assert 2 <= len(kept) < 10
        assert kept[-1] == 100
        assert disk.free > 0
        run.assert_one_history(100)


def test_the_oldest_go_where_others_fill_the_volume(tmp_path: Path) -> None:
    """The trainer ends at the save that fails. Started again it finds room, because all but two have gone."""
    with (
        mounted(tmp_path, 300) as disk,
        relayed(tmp_path, "--pace=0.3", "--save-every=10", f"--size={8 << 20}", keep_last=6, steps=150) as run,
    ):
        pod = run.pod("a")
        saved = run.wait_saved(60)
        assert len(run.checkpoints()) == 6
        disk.fill()
        run.wait_saved(saved + 1)
        assert "although 6 were to stay" in pod.said
        assert len(run.checkpoints()) in (2, 3), "two stay, and then there is another one"
        disk.clear()
        assert pod.process.wait(150) == 0, run.said()
        run.assert_one_history(150)
        assert len(run.checkpoints()) in (6, 7), "the last six, and what the world started from"


def test_a_pod_that_dies_on_a_full_volume_leaves_what_it_had(tmp_path: Path) -> None:
    """The next one is told what to do before it starts; with room it goes on from the last commit."""
    with mounted(tmp_path) as disk, relayed(tmp_path, "--pace=0.1", "--go-on", "--size=200000") as run:
        a = run.pod("a")
        saved = run.wait_saved()
        disk.fill()
        run.wait_step(saved + 25)
        stands = newest(run).step
        a.vanish()
        b = run.pod("b")
        assert b.process.wait(60) == 2
        assert f"the volume {disk.path} is full: make at least 64 MiB of room" in b.said
        disk.clear()
        c = run.pod("c")
        assert c.process.wait(120) == 0, run.said()
        # A save that found room just before, and whose copy did not, is taken now.
        assert run.epochs()[max(run.epochs())][0].step in (stands + 1, stands + 21)
        run.assert_one_history(200)


def test_a_notice_on_a_full_volume(tmp_path: Path) -> None:
    """Nothing can be written: the pod leaves all the same, within its notice, without a traceback."""
    with mounted(tmp_path) as disk, relayed(tmp_path, "--pace=0.1", "--go-on", "--size=200000") as run:
        a = run.pod("a", "--notice=10")
        saved = run.wait_saved()
        disk.fill()
        run.wait_step(saved + 25)
        a.notice()
        assert a.process.wait(30) in (75, 76), run.said()
        assert "Traceback" not in a.said
        disk.clear()
        b = run.pod("b")
        assert b.process.wait(120) == 0, run.said()
        run.assert_one_history(200)


def test_a_volume_that_cannot_be_written(tmp_path: Path) -> None:
    """At the start: one line, exit code 2. In mid-run the trainer goes on, and the last commit stands."""
    with mounted(tmp_path) as disk, relayed(tmp_path, "--pace=0.1", "--go-on", steps=300) as run:
        remount(disk, "ro")
        early = run.pod("early")
        assert early.process.wait(60) == 2
        assert len(early.said.splitlines()) == 1, early.said
        assert "cannot be written" in early.said
        remount(disk, "rw")
        a = run.pod("a")
        saved = run.wait_saved()
        remount(disk, "ro")
        run.wait_step(saved + 45)
        stands = newest(run).step
        remount(disk, "rw")
        run.wait_saved(stands + 1)
        assert a.process.wait(120) == 0, run.said()
        assert len(run.epochs()) == 1, "one trainer, all the time"
        run.assert_one_history(300)


def remount(disk: Volume, how: str) -> None:
    """For reading only, or for writing again; what is open for writing is in the way of that for a moment."""
    for _ in range(200):
        done = subprocess.run(["mount", "-o", f"remount,{how}", str(disk.path)], capture_output=True, check=False)
        if done.returncode == 0:
            return
    assert not done.returncode, done.stderr


def test_a_volume_that_goes_away_in_mid_run(tmp_path: Path) -> None:
    """What the trainer saves where the mount was is never the run's. With the mount the run goes on."""
    with volume(tmp_path / "behind", 160) as disk:
        place = tmp_path / "volume"
        place.mkdir()
        mount("--bind", str(disk.path), str(place))
        try:
            with relayed(tmp_path, "--pace=0.1", "--go-on", steps=400) as run:
                a = run.pod("a")
                run.wait_saved()
                subprocess.run(["umount", "-l", str(place)], check=True, timeout=30)
                run.wait(lambda: "not mounted here any more: mount it again" in a.said, "a line about it")
                run.wait_step(run.steps()[-1].step + 45)
                assert not list(place.rglob("MANIFEST.json")), "it was sealed beside the volume"
                mount("--bind", str(disk.path), str(place))
                head = run.commander.run()["head"]
                assert any(place.glob(f"runs/my-run/ckpt/.store/my-run/*/{head['name']}/MANIFEST.json")), head
                assert a.process.wait(150) == 0, run.said()
                assert "Traceback" not in a.said
                run.assert_one_history(400)
                assert newest(run).step == 400
                assert run.state()["status"] == "COMPLETED"
        finally:
            subprocess.run(["umount", "-l", str(place)], check=False, timeout=30)


def mount(*arguments: str) -> None:
    """As a provider does."""
    subprocess.run(["mount", *arguments], check=True, timeout=30)


@pytest.mark.parametrize(("code", "late"), [(errno.EPERM, 0.0), (errno.EINVAL, 0.0), (errno.ENOSYS, 3.0)])
def test_a_volume_without_links_and_rename(tmp_path: Path, code: int, late: float) -> None:
    """As object stores are mounted, with late listings or without: saves, a notice, a kill, and the end."""
    bare = {"DALSEGNO_TEST_BARE": str(tmp_path / "volume"), "DALSEGNO_TEST_BARE_CODE": str(code)}
    bare |= {"DALSEGNO_TEST_BARE_LATE": str(late), "PYTHONPATH": str(BARE_MOUNT)}
    with relayed(tmp_path, "--pace=0.1", "--end-when-asked", "--save-every=40") as run:
        a = run.pod("a", **bare)
        run.wait_saved()
        a.notice()
        assert a.process.wait(60) == 75, run.said()
        b = run.pod("b", **bare)
        saved = run.wait_saved(run.steps()[-1].step + 1)
        b.vanish()
        c = run.pod("c", **bare)
        assert c.process.wait(120) == 0, run.said()
        first, second, *_, last = run.epochs().values()
        assert second[0].step == first[-1].step + 1, "nothing is lost on notice"
        assert last[0].step >= saved + 1
        run.assert_one_history(200)
        assert "Traceback" not in run.said()
        # Where there are no links, `latest` is a small file, and so are the others.
        assert not (run.root / "ckpt" / "latest").is_symlink()
        pointers = {one.name: one.read_text().strip() for one in run.root.glob("ckpt/step_*")}
        assert "step_00000200" in pointers
        for name, target in pointers.items():
            assert Manifest.read(run.root / "ckpt" / target).step == int(name.removeprefix("step_"))
        latest = (run.root / "ckpt" / "latest").read_text().strip()
        assert Manifest.read(run.root / "ckpt" / latest).step == 200
        assert run.state()["status"] == "COMPLETED"
