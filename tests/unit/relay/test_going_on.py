"""What a pod goes on from where the volume lacks the run's newest checkpoints: nothing saved is lost silently."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="needs the extra relay")

from dalsegno.elastic.checkpoint import Manifest, Unsealed
from dalsegno.elastic.checkpoint.manifest import Ref
from dalsegno.protos.run_file import read_run_file
from dalsegno.relay import recovering
from dalsegno.relay.milestones import restore
from dalsegno.relay.recovering import Stuck, prepared
from dalsegno.relay.volume import Volume
from tests.support.hub import scene
from tests.support.jobs.commander import run_file

# What a pod of the first epoch has saved, each step a milestone where a test says so.
STEPS = (20, 40, 60, 80)


class Scene:
    """A run of four checkpoints, all on the volume and intact; tests take some away."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made = scene.Volume(folder / "made")
        self.every = {step: made.save(step) for step in STEPS}
        self.volume = Volume(folder, "my-run")
        self.volume.job.mkdir(parents=True)
        self.volume.hf.mkdir(parents=True)
        self.run_dir = self.volume.job / "r1"
        self.aside = folder / "aside"
        shutil.move(made.run_dir, self.run_dir)
        shutil.copytree(self.run_dir, self.aside)
        self.file = read_run_file(run_file(folder))
        self.lines: list[str] = []
        self.asked: list[int] = []
        # Steps of revisions that cannot be had, and why.
        self.refused: set[int] = set()
        self.away = False
        monkeypatch.setattr(restore, "restore", self._restore)

    def path(self, step: int) -> Path:
        return self.run_dir / self.every[step].name

    def lose(self, *steps: int) -> None:
        """They are not in sight."""
        for step in steps:
            shutil.rmtree(self.path(step))

    def damage(self, *steps: int) -> None:
        for step in steps:
            (self.path(step) / "model.bin").write_bytes(b"x")

    def come_back(self, *steps: int) -> None:
        for step in steps:
            shutil.copytree(self.aside / self.every[step].name, self.path(step), dirs_exist_ok=True)

    def go_on(
        self, *milestones: int, head: int | None = 80, allowed: bool = False, older: bool = False, **more: Any
    ) -> tuple[Path | None, str] | None:
        """What `prepared` says where these steps are milestones, and the Commander has this head."""
        known = None if head is None else self.every[head]
        shown = {
            "state": "PREEMPTED",
            "head": None if known is None else {"name": known.name, "step": known.step, "digest": known.digest},
            "milestones": [
                {"repo": "me/it", "revision": f"r{step}", "step": step, "checkpoint": one.name, "digest": one.digest}
                for step in milestones
                for one in (self.every[step],)
            ],
            "epoch": 1,
            **more,
        }
        return prepared(self.file, self.volume, shown, self.lines.append, allowed=allowed, older=older)

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def _restore(self, milestone: Any, checkpoints: Path, hf: Path) -> restore.Restored:
        if self.away:
            raise restore.Unreachable("no answer")
        self.asked.append(milestone.step)
        if milestone.step in self.refused:
            raise restore.RevisionRefused(f"{milestone.revision} is not whole")
        self.come_back(milestone.step)
        return restore.Restored(self.path(milestone.step), self.every[milestone.step])


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_a_newer_milestone_comes_before_an_older_checkpoint(made: Scene) -> None:
    """The newest commits are damaged, and an old one is whole, as the best one that is kept: steps on the hub count."""
    made.damage(40, 60, 80)
    assert made.go_on(60, 40, 20) == (None, "60:2")
    assert made.asked == [60]
    assert made.said("step-80.e1.0 (step 80), the run's last checkpoint, is given up")
    assert made.volume.restored() == made.every[60].digest


def test_a_milestone_of_the_head_itself_is_restored(made: Scene) -> None:
    made.damage(80)
    assert made.go_on(80, 40) == (None, "80:2")
    assert not made.said("given up")


def test_a_milestone_that_was_restored_is_replaced_by_a_newer_one(made: Scene) -> None:
    """The old pod trained on, and vanished: this volume never had more than the first one, so the head is not there."""
    made.lose(20, 60, 80)
    made.volume.note_restored(made.every[40].digest)
    assert made.go_on(60, 40) == (None, "60:2")


def test_an_older_milestone_changes_nothing(made: Scene) -> None:
    made.damage(80)
    assert made.go_on(40, 20) == (None, "")
    assert made.asked == []


def test_newer_milestones_that_are_not_whole_are_no_reason_to_stop(made: Scene) -> None:
    """What is intact on the volume is gone on from; older milestones than that are not tried."""
    made.damage(60, 80)
    made.refused = {60}
    assert made.go_on(60, 20) == (None, "")
    assert made.asked == [60]
    assert made.said("r60 is not whole")
    assert made.said("the run goes on from the volume: step-40.e1.0 is intact")


def test_what_the_run_has_gone_back_from_is_passed_over(made: Scene) -> None:
    """The Commander's head is older than a milestone: a line names it, and it is not fetched."""
    made.lose(60, 80)
    assert made.go_on(60, 40, head=40) == (None, "")
    assert made.asked == []
    assert made.said("step-60.e1.0 at me/it@r60 is passed over: the run has left it, on its way to step-40.e1.0")


def later(made: Scene, step: int, epoch: int, begins: Manifest | None) -> None:
    """A checkpoint of a later epoch, which is damaged; that epoch began from another one, or from none."""
    volume = scene.Volume(made.aside.parent / f"epoch-{epoch}")
    ref = None if begins is None else Ref(begins.name, begins.digest)
    made.every[step] = replace(volume.save(step, epoch=epoch), resumed_from=ref)
    shutil.move(volume.run_dir / made.every[step].name, made.run_dir / made.every[step].name)
    (made.path(step) / "MANIFEST.json").write_bytes(made.every[step].to_bytes())
    (made.path(step) / "model.bin").write_bytes(b"x")


def test_a_way_back_on_purpose_is_not_undone(made: Scene) -> None:
    """Epoch 2 went back to step 40. Its save is damaged: neither step 60 on the volume nor its milestone counts."""
    made.lose(80)
    later(made, 50, 2, made.every[40])
    assert made.go_on(60, head=50) == (None, "")
    assert made.asked == []
    assert made.said("step-60.e1.0 is passed over: the run has gone back behind it since")
    assert made.said("step-40.e1.0 is intact")


@pytest.mark.parametrize("damaged", [(), (20, 40)])
def test_a_way_back_is_not_undone_where_nothing_is_intact(made: Scene, damaged: tuple[int, ...]) -> None:
    """It went back to step 40, has saved nothing since, and the volume is lost, or what it had is damaged."""
    made.damage(*damaged)
    made.lose(*(step for step in STEPS if step not in damaged))
    assert made.go_on(60, 40, head=40) == (None, "40:2")
    assert made.asked == [40]
    assert made.said("step-60.e1.0 at me/it@r60 is passed over")


@pytest.mark.parametrize("gone", [(60, 80), STEPS])
def test_a_run_that_began_anew_does_not_go_on_from_before(made: Scene, gone: tuple[int, ...]) -> None:
    """Epoch 2 began at the beginning, on purpose. All that is from before it was left, here and on the hub."""
    made.lose(*gone)
    later(made, 10, 2, None)
    with pytest.raises(Stuck):
        made.go_on(60, head=10)
    assert made.asked == []


def test_what_was_left_does_not_come_back_through_a_gap(made: Scene) -> None:
    """Epoch 3 began from the second one, of which nothing is left: that went back to step 20, which nobody knows."""
    second = scene.Volume(made.aside.parent / "epoch-2").save(70, epoch=2)
    later(made, 75, 3, second)
    made.lose(60, 80)
    assert made.go_on(60, 40, head=75) == (None, ""), "neither the newer milestone nor, for good, what is intact here"
    assert made.asked == []
    assert made.said("step-60.e1.0 at me/it@r60 is passed over: it is not known whether the run has gone back from it")
    assert made.said("step-40.e1.0 is intact (step 40), and it is not known whether the run has gone back from that")
    assert made.go_on(60, 40, head=75, older=True) == (None, "40:2"), "a person knows"


def test_with_a_gap_a_milestone_is_better_than_nothing(made: Scene) -> None:
    """Each pod's epoch is another one, and a lost volume tells nothing of where they began."""
    later(made, 90, 2, made.every[80])
    made.lose(*STEPS, 90)
    assert made.go_on(80, head=90) == (None, "80:2")


def test_an_epoch_that_was_left_says_nothing_about_the_line(made: Scene) -> None:
    """Epoch 2 went back to step 20 and was left for step 60, from which the third one began: that is the line."""
    later(made, 30, 2, made.every[20])
    later(made, 90, 3, made.every[60])
    made.lose(80)
    made.damage(60)
    assert made.go_on(60, head=90) == (None, "60:2")


def test_a_milestone_that_has_no_room_is_no_reason_to_stop(made: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something is intact here. Where nothing is, a person makes room."""
    made.lose(60)
    made.damage(80)

    def full(*_: object) -> restore.Restored:
        raise restore.VolumeFull("the volume is full")

    monkeypatch.setattr(restore, "restore", full)
    assert made.go_on(60) == (None, "")
    assert made.said("step 60 is not restored: the volume is full")
    assert made.said("the run goes on from the volume: step-40.e1.0 is intact")
    made.damage(20, 40)
    with pytest.raises(restore.VolumeFull):
        made.go_on(60)


def test_without_what_speaks_to_the_hub_a_pod_ends(made: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost for an image that is not complete, unless a person gives it up."""
    made.lose(60)
    made.damage(80)

    def lacks(*_: object) -> restore.Restored:
        raise restore.HubUnusable("the hub needs the extra relay")

    monkeypatch.setattr(restore, "restore", lacks)
    with pytest.raises(restore.HubUnusable, match=r"the extra relay; --allow-older goes on from step-\S+ instead$"):
        made.go_on(60)
    assert made.go_on(60, older=True) == (None, "40:2")
    assert made.said("step 60 is given up: the hub needs the extra relay")


@pytest.mark.parametrize("milestones", [(), (60,)])
def test_a_head_out_of_sight_is_not_given_up(made: Scene, milestones: tuple[int, ...]) -> None:
    """A mount lists late: the agent looks for the head, also where the newest that is listed is a milestone."""
    made.lose(80)
    assert made.go_on(*milestones) == (None, "")
    assert made.said("step-80.e1.0 (step 80), is not in sight on this volume, where step-60.e1.0 is intact")


def test_a_damaged_head_is_given_up_for_a_milestone_on_the_volume(made: Scene) -> None:
    """The Commander may have no record of that any more."""
    made.damage(80)
    assert made.go_on(60) == (None, "60:2")
    assert made.said("step-60.e1.0 is intact (step 60); step-80.e1.0 (step 80) is given up")


def test_a_restored_milestone_is_gone_back_to_until_the_run_has_begun_there(made: Scene) -> None:
    """Whoever restored it has died before its agent began."""
    made.lose(80)
    made.volume.note_restored(made.every[60].digest)
    assert made.go_on(60) == (None, "60:2")


@pytest.mark.parametrize("half", [False, True])
def test_a_milestone_does_not_replace_a_head_out_of_sight(made: Scene, half: bool) -> None:
    """An old copy of the volume was mounted, or a mount lists late, perhaps a directory before its manifest."""
    made.lose(60)
    if half:
        (made.path(80) / "MANIFEST.json").unlink()
        (made.run_dir / ".sealed" / made.every[80].name).unlink()
    else:
        made.lose(80)
    assert made.go_on(60) == (None, "")
    assert made.asked == []
    assert made.said("is not in sight on this volume, where step-40.e1.0 is intact")
    assert made.said("or --allow-older goes on from step 40")


@pytest.mark.parametrize("refused", [False, True])
def test_only_the_head_itself_is_restored_where_it_is_out_of_sight(made: Scene, refused: bool) -> None:
    """If that cannot be had, an older milestone is no reason to give it up."""
    made.lose(60, 80)
    made.refused = {80} if refused else set()
    assert made.go_on(80, 60) == (None, "" if refused else "80:2")
    assert made.asked == [80]


def test_nothing_is_restored_in_place_of_a_head_without_its_manifest_and_mark(made: Scene) -> None:
    """Nothing here says that it was damaged. With nothing intact the last milestone is better than none."""
    made.lose(20, 40, 60)
    (made.path(80) / "MANIFEST.json").unlink()
    (made.run_dir / ".sealed" / made.every[80].name).unlink()
    assert made.go_on(60) == (None, "60:2")


def test_an_empty_volume_is_filled_at_once(made: Scene) -> None:
    made.lose(*STEPS)
    assert made.go_on(60) == (None, "60:2")


def test_a_spare_does_not_restore_while_the_run_goes_on(made: Scene) -> None:
    """What another machine saves comes late: the agent waits."""
    made.lose(40, 60, 80)
    assert made.go_on(80, 60, holder="other", expires_in_sec=5.0) == (None, "")
    assert made.asked == []


def test_allow_older_goes_on_from_an_export(made: Scene) -> None:
    """A small volume with one checkpoint: a person gives up what came later, and a line names it."""
    made.lose(20, 60, 80)
    assert made.go_on(older=True) == (None, "40:2")
    assert made.said(
        "--allow-older: the run goes on from the volume: step-40.e1.0 is intact (step 40), without step-80"
    )
    assert made.go_on(head=40, older=True) == (None, ""), "it has been followed"


def test_allow_older_does_not_wait_for_the_hub(made: Scene) -> None:
    made.lose(60, 80)
    assert made.go_on(60, older=True) == (None, "60:2")
    made.lose(60)
    made.away = True
    assert made.go_on(60, older=True) == (None, "40:2")
    assert made.said("step 60 is given up")


def unreadable(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Reading files of these checkpoints fails."""
    checked: Callable[[Path, Manifest], str] = recovering.damage_of

    def damage_of(directory: Path, manifest: Manifest) -> str:
        if manifest.name in names:
            raise OSError(errno.EIO, "Input/output error", str(directory / "model.bin"))
        return checked(directory, manifest)

    monkeypatch.setattr(recovering, "damage_of", damage_of)


@pytest.mark.parametrize(
    ("milestones", "gone", "help"),
    [
        ((), (), r"--allow-older goes on from step-60.e1.0 \(step 60\) without it"),
        ((60,), (20, 40, 60), "--allow-older goes on from the last milestone without it"),
        ((), (20, 40, 60), "--allow-baseline begins anew without it"),
    ],
)
def test_what_cannot_be_read_may_be_whole(
    made: Scene,
    monkeypatch: pytest.MonkeyPatch,
    milestones: tuple[int, ...],
    gone: tuple[int, ...],
    help: str,
) -> None:
    """The file is named, a person decides, and the flag that the line names goes on without it."""
    unreadable(monkeypatch, "step-80.e1.0")
    made.lose(*gone)
    with pytest.raises(Stuck, match=rf"step-80.e1.0 cannot be read: .*model.bin.* it may be whole.*{help}"):
        made.go_on(*milestones)
    found = made.go_on(*milestones, older="older" in help, allowed="baseline" in help)
    assert found == (None, "0:2" if "baseline" in help else "60:2")


@pytest.mark.parametrize("lost", [False, True])
def test_what_cannot_be_read_and_is_not_the_run_s_is_no_reason_to_stop(
    made: Scene, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """It was never committed, or is aside. The head before it is intact, or out of sight."""
    unreadable(monkeypatch, "step-80.e1.0")
    made.lose(*((60,) if lost else ()))
    assert made.go_on(head=60) == (None, "")
    assert made.said("step-80.e1.0 cannot be read")


def test_a_directory_that_cannot_be_read_is_not_called_damaged(made: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about the checkpoint, either."""
    made.lose(80)
    listed = Volume.manifests
    shut = Unsealed(made.every[80].name, "Permission denied", unreadable=True)
    monkeypatch.setattr(Volume, "manifests", lambda volume: [shut, *listed(volume)])
    with pytest.raises(Stuck, match=r"step-80.e1.0 cannot be read: Permission denied: it may be whole"):
        made.go_on(60)
    assert made.go_on(60, older=True) == (None, "60:2")
