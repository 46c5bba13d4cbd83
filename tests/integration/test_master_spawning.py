"""How an embedded master is started on machines that do something of their own at the start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.agent.control.claim import ClaimFile
from dalsegno.agent.control.embedded import EmbeddedMaster, MasterError
from dalsegno.agent.control.machine import Machine

pytestmark = pytest.mark.timeout(120)


class Job:
    """Agents' views of one job; its master ends with the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.said: list[str] = []
        self.views: list[EmbeddedMaster] = []

    def view(self, *command: str) -> EmbeddedMaster:
        words = command or (sys.executable, "-m", "dalsegno.master")
        one = EmbeddedMaster(self.directory, "job", 2.0, lambda text, warning: self.said.append(text), words)
        self.views.append(one)
        return one

    def end(self) -> None:
        for view in self.views:
            view.close()
        if (claim := ClaimFile(self.directory).read()) is not None:
            Machine().kill(claim.pid, claim.start_time)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    one = Job(tmp_path / "checkpoints" / ".dalsegno" / "job")
    yield one
    one.end()


def prints_at_start(directory: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Makes every interpreter run this first, as a site's own `sitecustomize` does."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), *os.environ.get("PYTHONPATH", "").split(":")]))


NOISES = {
    "lines": "import sys; print('loading modules\\n[1]\\n{}\\nnull'); print('site err', file=sys.stderr)",
    "no newline": "import sys; sys.stdout.write('loading {')",
    "bytes": "import sys; sys.stdout.buffer.write(b'\\xff\\xfe\\n')",
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_site_that_prints_keeps_no_master_from_starting(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: str
) -> None:
    """What a site's `sitecustomize` prints is not the master's address."""
    prints_at_start(tmp_path / "site", monkeypatch, noise)
    job.view().start()
    assert job.views[0].addresses()


def test_the_reason_is_told_also_where_a_site_prints(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of a master that cannot start is its own, and not the site's."""
    prints_at_start(tmp_path / "site", monkeypatch, NOISES["lines"])
    with pytest.raises(MasterError, match="the store is broken"):
        job.view(sys.executable, "-c", "import sys; sys.exit('dlrover-master: the store is broken')").start()


def test_a_master_that_only_prints_is_given_up(job: Job) -> None:
    """Who prints for ever, and nothing of ours, is no master; what it printed is told."""
    with pytest.raises(MasterError, match="no such thing"):
        job.view(sys.executable, "-c", "while True: print('no such thing')").start()
