"""The mirror as a process of the pod's: whatever becomes of it, the pod goes on."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest

from dalsegno.relay.agent_process import MirrorProcess
from dalsegno.relay.volume import Volume


def test_a_mirror_that_cannot_be_started_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for a process just now: each commit is another try, and training goes on."""
    said: list[str] = []
    mirror = MirrorProcess(tmp_path / "run.yaml", Volume(tmp_path, "my-run"), said.append)
    with monkeypatch.context() as full:

        def fails(*_: object, **__: object) -> None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

        full.setattr(subprocess, "Popen", fails)
        for _ in range(2):
            mirror.start()
    (line,) = said
    assert "mirror cannot be started" in line
    assert "training goes on" in line
    mirror.start()
    mirror.end()
    assert said == [line]
