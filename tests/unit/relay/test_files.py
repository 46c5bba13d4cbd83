"""The run files that the project prints are runs: each is read, and has a trainer to start."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.protos.run_file import read_run_file
from dalsegno.relay.command_line import agent_command
from dalsegno.relay.volume import Volume
from tests.support.pages.sources import ROOT

FILES = sorted((ROOT / "deploy" / "relay").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_printed_run_is_one(path: object) -> None:
    """Its command reaches the agent with the macros in it, and the resume point reaches the trainer."""
    file = read_run_file(path)  # type: ignore[arg-type]
    words = agent_command(file, Volume(file.l1_root, file.run_id), "localhost:1", 30.0, logs=Path("/logs"))
    assert f"--job-id={file.run_id}" in words
    assert any("${resume_dir" in word for word in words)
    assert words[-1] != file.resume_flag


def test_the_files_are_found() -> None:
    """There are some."""
    assert len(FILES) >= 5
