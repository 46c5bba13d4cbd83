"""The commands that look at a run, where what they are given is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="needs the extra relay")

from dalsegno.agent.commands.dalsegno import run as dalsegno
from tests.support.jobs.commander import run_file


def said(words: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capfd.readouterr()
    code = dalsegno(words)
    out, error = capfd.readouterr()
    (line,) = (out + error).splitlines()
    return code, line


def test_a_volume_that_is_not_mounted_is_not_verified(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A job that verifies each night must not take an empty mount point for a run without damage."""
    file = run_file(tmp_path)
    missing = f"{tmp_path}/volume/runs/my-run is no directory"
    for more in ([], [f"--at={tmp_path}/nowhere"]):
        code, line = said(["relay", "verify", str(file), *more], capfd)
        assert (code, (missing if not more else "nowhere/runs/my-run is no directory") in line) == (2, True), line
    (tmp_path / "volume" / "runs" / "my-run").mkdir(parents=True)
    code, line = said(["relay", "verify", str(file)], capfd)
    assert (code, line.startswith("no checkpoints in")) == (0, True), "it has not saved yet"


def test_a_word_that_was_mistyped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no file of a run; a file of that name is one."""
    file = run_file(tmp_path)
    code, line = said(["relay", "statu", str(file)], capfd)
    assert (code, "statu is no file, did you mean dalsegno relay status?" in line) == (2, True), line
    code, line = said(["relay", str(tmp_path / "statu")], capfd)
    assert (code, "cannot be read" in line) == (2, True), line
    monkeypatch.chdir(tmp_path)
    Path("statu").write_text("run_id: a/b\n")
    code, line = said(["relay", "statu"], capfd)
    assert (code, "statu: run_id: 'a/b' is no name" in line) == (2, True), line


def test_a_flag_of_a_relay_that_names_a_file_is_not_empty(capfd: pytest.CaptureFixture[str]) -> None:
    """As of a variable of the shell that is not set."""
    for arguments in ([""], ["--tls-ca=", "run.yaml"], ["verify", "--at=", "run.yaml"], ["export", "run.yaml", ""]):
        code, line = said(["relay", *arguments], capfd)
        assert (code, "the name is empty: is a variable unset?" in line) == (2, True), line
