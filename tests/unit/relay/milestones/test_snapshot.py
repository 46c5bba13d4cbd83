"""Frozen copies of checkpoints."""

from __future__ import annotations

import datetime
import errno
import hashlib
import math
import os
import shutil
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import CheckpointDamaged, CheckpointStore
from dalsegno.relay.milestones.snapshot import freeze, local_path, plain, snapshots
from tests.support.hub.scene import Volume


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path)


@pytest.mark.parametrize("links", [True, False])
def test_it_holds_all_and_survives_pruning(volume: Volume, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """By links where there are links, else by copies: the run's deletion takes nothing from it."""
    if not links:
        monkeypatch.setattr(os, "link", _no_links)
    sealed = volume.save(40)
    source = volume.run_dir / sealed.name
    one = freeze(source, volume.hf / "snapshots", "tune", {"a": 1}, None)
    model = local_path(one.directory, sealed.name, "checkpoint/model.bin")
    assert (model.stat().st_ino == (source / "model.bin").stat().st_ino) is links
    assert not CheckpointStore(volume.run_dir).prune([sealed.name])
    assert not source.exists()
    assert [file.path for file in one.manifest.files][:2] == ["checkpoint/MANIFEST.json", "checkpoint/config.json"]
    for file in one.manifest.files:
        data = local_path(one.directory, sealed.name, file.path).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.size, file.sha256)
    assert snapshots(volume.hf / "snapshots") == [one]


def _no_links(*paths: object, **options: object) -> None:
    raise OSError(errno.EPERM, "no links here")


def test_a_changed_byte_is_no_snapshot(volume: Volume) -> None:
    """What differs from what was sealed is named, and nothing of it is left."""
    sealed = volume.save(40)
    path = volume.run_dir / sealed.name / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointDamaged, match=r"optimizer\.pt"):
        freeze(volume.run_dir / sealed.name, volume.hf / "snapshots", "tune", {}, None)
    assert volume.snapshots == []


def test_what_was_not_finished_is_thrown_away(volume: Volume) -> None:
    """Without its manifest, or with half of one, it is none. Others stay, the oldest first."""
    root = volume.hf / "snapshots"
    for step in (9, 10, 20, 30):
        sealed = volume.save(step)
        freeze(volume.run_dir / sealed.name, root, "tune", {}, None)
    (root / "step-20.e1.0" / "run_manifest.json").unlink()
    torn = root / "step-30.e1.0" / "run_manifest.json"
    torn.write_bytes(torn.read_bytes()[:100])
    assert [one.manifest.step for one in snapshots(root)] == [9, 10]
    assert volume.snapshots == ["step-10.e1.0", "step-9.e1.0"]


def test_it_knows_where_it_went(volume: Volume) -> None:
    """For the process after the one that uploaded it; a torn note is as none."""
    sealed = volume.save(40)
    root = volume.hf / "snapshots"
    freeze(volume.run_dir / sealed.name, root, "tune", {}, None).published("me/tune", "abc").note()
    assert [(one.repo, one.revision) for one in snapshots(root)] == [("me/tune", "abc")]
    (root / sealed.name / "state.json").write_text('{"repo":')
    assert [(one.repo, one.revision) for one in snapshots(root)] == [("", "")]


def test_the_same_again_is_the_same(volume: Volume) -> None:
    """A try after one that failed takes what is there."""
    sealed = volume.save(40)
    root = volume.hf / "snapshots"
    first = freeze(volume.run_dir / sealed.name, root, "tune", {}, None)
    inode = (first.directory / "run_manifest.json").stat().st_ino
    shutil.rmtree(volume.run_dir / sealed.name / "deep")
    again = freeze(volume.run_dir / sealed.name, root, "tune", {}, None)
    assert (again, (again.directory / "run_manifest.json").stat().st_ino) == (first, inode)


def test_metrics_go_with_it_in_whole_lines(volume: Volume) -> None:
    """A line that is being written stays behind; a file that cannot be read is left out."""
    sealed = volume.save(40)
    metrics = volume.root / "m.jsonl"
    metrics.write_text('{"loss": 2}\n{"loss"')
    one = freeze(volume.run_dir / sealed.name, volume.hf / "snapshots", "tune", {}, metrics)
    assert (one.directory / "metrics.jsonl").read_text() == '{"loss": 2}\n'
    assert one.manifest.files[-1].path == "metrics.jsonl"
    other = freeze(volume.run_dir / volume.save(50).name, volume.hf / "snapshots", "tune", {}, volume.root / "none")
    assert other.manifest.files[-1].path.startswith("checkpoint/")


def test_any_section_becomes_json() -> None:
    """YAML has dates, and numbers that JSON has not."""
    section = {"day": datetime.date(2026, 1, 2), "lr": math.nan, 3: [1, "a"], "none": None}
    assert plain(section) == {"day": "2026-01-02", "lr": "NaN", "3": [1, "a"], "none": None}
