"""What a pod finds on its volume before it trains: damage of any kind is damage, and never a reason to begin anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="needs the extra relay")

from dalsegno.elastic.checkpoint import Manifest
from dalsegno.protos.run_file import read_run_file
from dalsegno.relay import recovering
from dalsegno.relay.milestones import restore
from dalsegno.relay.milestones.commander_client import Milestone
from dalsegno.relay.recovering import Stuck, prepared
from dalsegno.relay.volume import Volume
from tests.support.hub import scene
from tests.support.jobs.commander import run_file

# What the Commander says that has lost its record: nothing hints at the checkpoints of the volume.
NEW: dict[str, Any] = {"state": "WAITING", "head": None, "milestones": [], "epoch": 0}

DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: (path / "model.bin").write_bytes(b"x"),
    "a file is gone": lambda path: (path / "config.json").unlink(),
    "a file more": lambda path: (path / "extra.pt").write_bytes(b"whose is this?"),
    "another byte": lambda path: (path / "tokenizer.json").write_text("[]"),
    "its manifest is gone": lambda path: (path / "MANIFEST.json").unlink(),
    "its manifest is cut off": lambda path: (path / "MANIFEST.json").write_text("{"),
    "a link in place of a file": lambda path: (
        (path / "empty.txt").unlink(),
        (path / "empty.txt").symlink_to("/dev/null"),
    ),
}


def volume_with(folder: Path, *steps: int) -> Volume:
    """A volume with sealed checkpoints of these steps."""
    made = scene.Volume(folder / "made")
    for step in steps:
        made.save(step)
    volume = Volume(folder, "my-run")
    volume.job.mkdir(parents=True)
    volume.hf.mkdir(parents=True)
    shutil.move(made.run_dir, volume.job / "r1")
    return volume


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_never_a_new_run(tmp_path: Path, damage: str) -> None:
    """The one before is taken, with a line about the newest; if there is none, a person decides."""
    file = read_run_file(run_file(tmp_path))
    volume = volume_with(tmp_path, 40, 80)
    lines: list[str] = []
    DAMAGES[damage](volume.job / "r1" / "step-80.e1.0")
    assert prepared(file, volume, NEW, lines.append, allowed=False) == (None, "")
    assert any("step-80.e1.0 is damaged" in line for line in lines), lines
    assert any("step-40.e1.0 is intact" in line for line in lines), lines
    DAMAGES[damage](volume.job / "r1" / "step-40.e1.0")
    with pytest.raises(Stuck, match="no checkpoint on the volume is intact"):
        prepared(file, volume, NEW, lines.append, allowed=False)
    assert prepared(file, volume, NEW, lines.append, allowed=True) == (None, "")


def test_what_a_foreign_worker_has_published_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names no checkpoint of the store, so nothing proves what it holds: a line says whose it is."""
    monkeypatch.setattr(restore, "Transfer", None)
    file = read_run_file(run_file(tmp_path))
    volume = volume_with(tmp_path)
    foreign = {"repo": "me/m", "revision": "abc", "step": 5, "checkpoint": "", "digest": ""}
    lines: list[str] = []
    with pytest.raises(Stuck, match="no milestone holds what it should"):
        prepared(file, volume, NEW | {"milestones": [foreign]}, lines.append, allowed=False)
    assert any("me/m@abc was reported by a worker that is not ours" in line for line in lines), lines


@pytest.mark.parametrize(("there", "said"), [((), 1), ((40,), 1), ((1200,), 0)])
def test_what_a_foreign_worker_has_made_is_not_silently_given_up(
    tmp_path: Path, there: tuple[int, ...], said: int
) -> None:
    """Its files are not in the store: whoever goes on from less than it has reported is told so."""
    file = read_run_file(run_file(tmp_path))
    report = {"worker_id": "pod-7", "step": 1200, "latest_ckpt": "step_00001200", "status": "PREEMPTED"}
    lines: list[str] = []
    shown = NEW | {"epoch": 1, "report": report}
    assert prepared(file, volume_with(tmp_path, *there), shown, lines.append, allowed=False) == (None, "")
    assert sum("pod-7, which is not ours, has reported step 1200 (step_00001200)" in line for line in lines) == said


def test_what_was_never_finished_is_no_damage(tmp_path: Path) -> None:
    """A save that was cut off by a kill is passed over."""
    file = read_run_file(run_file(tmp_path))
    volume = volume_with(tmp_path)
    volume.job.joinpath("r1", "step-20.e1.0").mkdir(parents=True)
    lines: list[str] = []
    assert prepared(file, volume, NEW, lines.append, allowed=False) == (None, "")
    assert lines == ["the run has no checkpoint, no milestone and no baseline: it begins"]


def test_what_was_restored_to_a_new_volume_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its revision, which nothing else there names."""
    volume = volume_with(tmp_path, 40)
    (manifest,) = (one for one in volume.manifests() if isinstance(one, Manifest))
    listed = [
        Milestone("me/it", revision, 40, manifest.name, digest)
        for revision, digest in (("newer", "another"), ("older", manifest.digest))
    ]
    found = restore.Restored(volume.job / "r1" / manifest.name, manifest)
    monkeypatch.setattr(restore, "restore_newest", lambda *_: found)
    assert recovering._restored(listed, volume, lambda text: None, None, older=False) == manifest
    assert volume.last_revision() == "older"
