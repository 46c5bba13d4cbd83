"""A run's directory where its volume is gone is another one: nothing of it becomes the run's."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from dalsegno.agent.storage import volume_check as module
from dalsegno.agent.storage.job_directory import JobDirectory
from dalsegno.agent.storage.volume_check import VolumeCheck


def test_a_volume_that_is_gone_is_told_from_one_that_is_there(tmp_path: Path) -> None:
    """What a script makes again at the same place is not it; the same volume, mounted again, is."""
    volume, away = tmp_path / "volume", tmp_path / "away"
    job = JobDirectory(volume, "job")
    job.prepare()
    job.probe()
    run_dir = job.run("run-0001")
    run_dir.mkdir()
    standing = VolumeCheck(run_dir)
    standing.check()
    volume.rename(away)
    (run_dir / "e1").mkdir(parents=True)
    with pytest.raises(OSError, match="not mounted here any more: mount it again"):
        standing.check()
    volume.rename(tmp_path / "bare")
    other = JobDirectory(volume, "job")
    other.prepare()
    other.probe()
    with pytest.raises(OSError, match="another volume is mounted here now"):
        standing.check()
    volume.rename(tmp_path / "other")
    away.rename(volume)
    standing.check()


def test_without_a_probe_nothing_is_known(tmp_path: Path) -> None:
    """Nobody of ours has registered there."""
    VolumeCheck(tmp_path / "job" / "run-0001").check()


def test_a_probe_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale handle switched the check off for the whole epoch."""
    job = JobDirectory(tmp_path, "job")
    job.prepare()
    job.probe()
    code = errno.ESTALE

    def stale(path: Path) -> bytes:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "lstat", stale)
    monkeypatch.setattr(module, "read_private", stale)
    with pytest.raises(OSError, match="Stale file handle"):
        VolumeCheck(job.run("run-0001"))


@pytest.mark.slow
def test_a_copy_is_not_sealed_before_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing that lags behind shows only some files; how long that takes is remembered."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"x")
    until = time.monotonic() + 0.5
    monkeypatch.setattr(module, "list_files", lambda path: ["a"] if time.monotonic() < until else ["a", "b"])
    standing = VolumeCheck(tmp_path)
    standing.wait_listed(tmp_path, {"a"})
    assert standing.lag == 0
    standing.wait_listed(tmp_path, {"a", "b"})
    assert 0.2 < standing.lag < 5.0
    with pytest.raises(OSError, match="c was written 0 s ago, and the volume does not list it"):
        standing.wait_listed(tmp_path, {"a", "c"}, 0.2)
