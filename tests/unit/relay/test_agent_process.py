"""The mirror as a process of the pod's: whatever becomes of it, the pod goes on."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest

from dalsegno.relay.agent_process import AgentProcess, MirrorProcess
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


class Hanging:
    """A process in a call to a volume that is gone: not even SIGKILL ends it (`D` of proc(5))."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def poll(self) -> None:
        return None

    def terminate(self) -> None:
        self.asked.append("terminate")

    def kill(self) -> None:
        self.asked.append("kill")

    def wait(self, seconds: float | None = None) -> int:
        assert seconds is not None, "it would be waited for without a limit"
        raise subprocess.TimeoutExpired("a process", seconds)


def test_a_pod_ends_where_its_volume_is_gone(tmp_path: Path) -> None:
    """Its mirror or agent ends once that call returns; the pod, which heeds no signal by then, does not wait for it."""
    mirror = MirrorProcess(tmp_path / "run.yaml", Volume(tmp_path, "my-run"), print)
    mirror._process = hanging = Hanging()
    mirror.end()
    assert hanging.asked == ["terminate", "kill"]
    agent = AgentProcess()
    real = agent._process
    agent._process = hanging = Hanging()
    agent.close()
    assert hanging.asked == ["kill"]
    real.kill()
    real.wait()
