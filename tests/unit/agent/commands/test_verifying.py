"""`dalsegno checkpoints verify`: it ends with 0 only where it has read what a person meant."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.agent.commands import dalsegno
from dalsegno.elastic import checkpoint
from dalsegno.elastic.checkpoint import Manifest
from tests.unit.agent.storage.test_storage import make_checkpoint

Output = pytest.CaptureFixture[str]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A damaged checkpoint in a run's directory."""
    path = tmp_path / "checkpoints" / "job" / "run-0001" / "step-3.e1.1"
    make_checkpoint(path.parent, path.name)
    (path / "model.pt").write_bytes(b"wEights")
    return path


def verify(directory: Path | str, capsys: Output) -> tuple[int, str]:
    code = dalsegno.run(["checkpoints", "verify", str(directory)])
    said = capsys.readouterr()
    assert said.err == ""
    return code, said.out


def test_a_checkpoint_is_verified_under_any_name(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """`.` in it, and a link to it: nothing was looked at, and all seemed to be well."""
    wrong = (1, f"{damaged}: {damaged.name}/model.pt: WRONG_CHECKSUM\n")
    monkeypatch.chdir(damaged)
    assert verify(".", capsys) == wrong
    (tmp_path / "latest").symlink_to(damaged)
    assert verify(tmp_path / "latest", capsys) == wrong
    (damaged / "MANIFEST.json").unlink()
    assert verify(".", capsys) == (1, f"{damaged}: {damaged.name}/MANIFEST.json: MANIFEST (not there)\n")


def test_a_renamed_copy_belongs_to_another_name(damaged: Path, tmp_path: Path, capsys: Output) -> None:
    """What its manifest names is not there; under its own name it can be verified."""
    copy = tmp_path / "backup"
    shutil.copytree(damaged, copy)
    assert verify(copy, capsys) == (1, f"{copy}: backup/MANIFEST.json: MANIFEST (it belongs to step-3.e1.1)\n")


def test_where_nothing_was_verified_not_all_is_well(damaged: Path, tmp_path: Path, capsys: Output) -> None:
    """As in the parent of the checkpoint directory."""
    nothing = "nor in what lies one or two levels below it: nothing was verified"
    assert verify(tmp_path, capsys) == (1, f"no checkpoints in {tmp_path}, {nothing}\n")
    assert verify(damaged.parents[2], capsys)[0] == 1
    (tmp_path / "empty").mkdir()
    assert verify(tmp_path / "empty", capsys) == (0, f"no checkpoints in {tmp_path / 'empty'}\n")


PLAIN = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.parametrize(
    ("closed", "mode", "why"),
    [
        (".", 0o400, "checkpoints/job: it cannot be looked at: Permission denied"),
        ("job", 0o400, "job/run-0001: it cannot be looked at: Permission denied"),
        ("job", 0o000, "job: it cannot be read: Permission denied"),
        ("job/run-0001", 0o400, "step-3.e1.1: [Errno 13] Permission denied"),
        ("job/run-0002/.sealed", 0o000, "run-0002: it cannot be read: Permission denied"),
    ],
)
def test_what_is_closed_is_not_passed_over(damaged: Path, closed: str, mode: int, why: str) -> None:
    """Each is named, and what can be read is still looked at."""
    root = damaged.parents[2]
    make_checkpoint(root / "job" / "run-0002", "step-5.e2.1")
    (root / closed).chmod(mode)
    action = "ls" if closed.endswith(".sealed") else "verify"
    done = subprocess.run(
        [*PLAIN, sys.executable, "-m", "dalsegno.agent.commands.dalsegno", "checkpoints", action, str(root)],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=60,
    )
    (root / closed).chmod(0o700)
    assert (done.returncode, done.stderr) == (1, "")
    assert why in done.stdout
    assert ("step-3.e1.1" in done.stdout) == (closed not in (".", "job"))


def test_a_save_that_goes_on_is_no_damage(tmp_path: Path, capsys: Output) -> None:
    """Of a live run each look ended with 1. The marks tell it from what has lost its manifest."""
    make_checkpoint(tmp_path, "step-3.e1.1")
    (tmp_path / "step-4.e1.1").mkdir()
    (tmp_path / "step-4.e1.1" / "model.pt").touch()
    intact, going = (tmp_path / name for name in ("step-3.e1.1", "step-4.e1.1"))
    lines = f"{intact}: intact\n{going}: not sealed: a save that goes on, or was given up\n"
    assert verify(tmp_path, capsys) == (0, lines)
    # Whoever names it wants to have a checkpoint.
    lost = f"{going}: {going.name}/MANIFEST.json: MANIFEST (not there)\n"
    assert verify(going, capsys) == (1, lost)
    (tmp_path / ".sealed" / going.name).touch()
    assert verify(tmp_path, capsys) == (1, f"{intact}: intact\n{lost}")
    # A copy without marks: it may lack what comes last.
    shutil.rmtree(tmp_path / ".sealed")
    assert verify(tmp_path, capsys) == (1, f"{intact}: intact\n{lost}")


def test_where_no_checkpoint_was_intact_nothing_was_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Of saves that were given up, and of checkpoints that are deleted meanwhile: a backup's check ended with 0."""
    make_checkpoint(tmp_path, "step-3.e1.1")
    (tmp_path / ".sealed" / "step-3.e1.1").unlink()
    old, path = tmp_path / "step-3.e1.1", tmp_path / "step-4.e1.1"
    path.mkdir()

    def deletes(directory: Path, manifest: Manifest) -> None:
        shutil.rmtree(directory)
        checked(directory, manifest)

    checked = checkpoint.verify
    monkeypatch.setattr(checkpoint, "verify", deletes)
    lines = f"{old}: deleted meanwhile\n{path}: not sealed: a save that goes on, or was given up\n"
    assert verify(tmp_path, capsys) == (1, f"{lines}no sealed checkpoint in {tmp_path}: nothing was verified\n")


@pytest.mark.parametrize("after", ["all of it", "the manifest"])
def test_a_checkpoint_that_is_deleted_meanwhile_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, after: str
) -> None:
    """The job retires its old ones while they are read."""
    make_checkpoint(tmp_path, "step-3.e1.1")
    make_checkpoint(tmp_path, "step-4.e1.1")
    old, new = (tmp_path / name for name in ("step-3.e1.1", "step-4.e1.1"))

    def deletes(path: Path, manifest: Manifest) -> None:
        if path == old:
            (tmp_path / ".sealed" / path.name).unlink()
            (path / "MANIFEST.json").unlink()
            (path / "model.pt").unlink()
            if after == "all of it":
                path.rmdir()
        checked(path, manifest)

    checked = checkpoint.verify
    monkeypatch.setattr(checkpoint, "verify", deletes)
    assert verify(tmp_path, capsys) == (0, f"{old}: deleted meanwhile\n{new}: intact\n")


def test_a_checkpoint_that_is_sealed_meanwhile_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Between two looks at its manifest."""
    make_checkpoint(tmp_path, "step-3.e1.1")
    path = tmp_path / "step-3.e1.1"
    (path / "MANIFEST.json").rename(tmp_path / "manifest")

    def seals(directory: Path) -> Manifest:
        try:
            return read(directory)
        finally:
            if (tmp_path / "manifest").exists():
                (tmp_path / "manifest").rename(path / "MANIFEST.json")

    read = Manifest.read
    monkeypatch.setattr(Manifest, "read", seals)
    assert verify(tmp_path, capsys) == (0, f"{path}: intact\n")
