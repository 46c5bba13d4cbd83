"""DeepSpeed's own converter behind our guards, led into the traps that make it write wrong files without a word."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal

from dalsegno.elastic.universal import Wish, convert_directory
from dalsegno.elastic.universal.loading import load
from tests.support.checkpoints.conversions import Died, assert_equal, files_below
from tests.support.checkpoints.shards import write_shards
from tests.support.jobs.mounts import bare_mount
from tests.support.workers.zero_runs import Sources

pytestmark = pytest.mark.timeout(180)
THEIRS = Wish(upstream=True)


def assert_same_parameters(one: Path, two: Path) -> None:
    paths = [path for path in files_below(one / "zero") if path != "optimizer_state.pt"]
    assert paths == [path for path in files_below(two / "zero") if path != "optimizer_state.pt"]
    for path in paths:
        assert_equal(load(one / "zero" / path), load(two / "zero" / path), path)


def test_paths_with_special_characters(sources: Sources, tmp_path: Path) -> None:
    """``[`` drops Adam's moments, ``+`` raises, and a slash at the end puts ``latest_universal`` into the directory."""
    parent = tmp_path / "job [a]+b*"
    source = parent / "global_step3"
    shutil.copytree(sources.get(2, 2)[0], source, ignore=shutil.ignore_patterns("MANIFEST.json"))
    convert_directory(source, Path(f"{parent}/theirs [b]+/"), wish=THEIRS)
    convert_directory(source, tmp_path / "ours")
    assert_same_parameters(parent / "theirs [b]+", tmp_path / "ours")
    assert not (parent / "theirs [b]+" / "latest_universal").exists()
    assert (parent / "latest_universal").read_text() == "theirs [b]+"


def test_what_a_killed_one_left_is_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It adds pieces that it finds in its working directory to its own: every file of stage 3 is wrong."""
    source, target = tmp_path / "source", tmp_path / "target"
    values = write_shards(source, {"a.weight": (5, 3), "b": (7,)}, stage=3, world=3)

    def die(*arguments: Any) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(ds_to_universal, "_merge_zero3_slice_files", die)
        with pytest.raises(Died):
            convert_directory(source, target, wish=THEIRS)
    (left,) = target.rglob("tmp")
    for path in [*left.rglob("*.02")]:  # as if there had been a rank more
        shutil.copy(path, path.with_suffix(".03"))
    convert_directory(source, target, wish=THEIRS)
    for name, states in values.items():
        for state, value in states.items():
            assert torch.equal(load(target / "zero" / name / f"{state}.pt").reshape(-1), value), f"{name}/{state}"


def test_without_other_processes(sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its pool outlive a parent that is killed, and write on."""

    def pool(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a pool was started")

    monkeypatch.setattr(ds_to_universal, "ProcessPoolExecutor", pool)
    assert convert_directory(sources.get(2, 2)[0], tmp_path / "universal", wish=THEIRS)


def test_a_mount_without_links(sources: Sources, tmp_path: Path) -> None:
    """Of any kind: files are copied where others would be linked."""
    source = tmp_path / "global_step3"
    shutil.copytree(sources.get(2, 2)[0], source, ignore=shutil.ignore_patterns("MANIFEST.json"))
    with bare_mount() as refused:
        convert_directory(source, tmp_path / "theirs", wish=THEIRS)
    assert "symlink" in refused
    convert_directory(source, tmp_path / "ours")
    assert_same_parameters(tmp_path / "theirs", tmp_path / "ours")
