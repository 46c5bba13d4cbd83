"""A look into an earlier epoch's directory costs nothing where seconds count, and takes no file for a new one."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from dalsegno.agent.storage import elsewhere
from dalsegno.agent.storage.elsewhere import Elsewhere
from dalsegno.agent.storage.taking import Before
from dalsegno.elastic.checkpoint import CheckpointName, SavedAs

from .test_adoption import begun, world

NAME = str(CheckpointName(10, 1, 1))


def test_a_file_that_only_has_another_inode_was_not_saved_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FUSE mounts give new ones to files that nobody touches."""
    monkeypatch.setattr(elsewhere, "_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(elsewhere, "_SHARE", 0)
    file = tmp_path / "e1" / "last.pt"
    file.parent.mkdir()
    file.write_bytes(bytes(1 << 20))
    said: list[str] = []
    looks, before = Elsewhere(tmp_path / "e2", "", said.append), Before(tmp_path / NAME, {}, SavedAs("", "last.pt"))
    looks.look(before)
    shutil.copy2(file, tmp_path / "copy")
    number = file.stat().st_ino
    (tmp_path / "copy").replace(file)
    assert file.stat().st_ino != number
    looks.look(before)
    assert said == []
    file.write_bytes(bytes(1 << 21))
    looks.look(before)
    assert len(said) == 1


def test_it_lengthens_no_pause_and_comes_in_no_last_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier epoch may have very many files, on a slow volume."""
    looks: list[float] = []

    def slow(*_: object) -> None:
        looks.append(time.monotonic())
        # why: what is measured is that it is not counted.
        time.sleep(0.5)

    monkeypatch.setattr(Elsewhere, "look", slow)
    (tmp_path / "e2").mkdir()
    taken, _ = begun(tmp_path, monkeypatch, world(2))
    taken.settle(20)
    adopter = taken._adopter
    assert adopter is not None
    assert looks
    assert adopter._took < 0.5
    adopter.interrupt()
    taken.settle(20)
    seen = len(looks)
    taken.settle(20)
    assert len(looks) == seen
    taken.close()
