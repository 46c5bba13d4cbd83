"""How an embedded master is started where a site prints at the start, and where its directory is gone."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.agent.control import embedded
from dalsegno.agent.control.claim import ClaimFile
from dalsegno.agent.control.embedded import EmbeddedMaster, MasterError
from dalsegno.agent.control.machine import Machine
from dalsegno.agent.storage.private import mount_of

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


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


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


def test_a_deleted_directory_is_made_again(job: Job) -> None:
    """Somebody deletes the whole checkpoint directory in mid-run: the next master starts, and one line says so."""
    view = job.view()
    view.start()
    first = ClaimFile(job.directory).read()
    assert first is not None
    shutil.rmtree(job.directory.parents[1])
    Machine().kill(first.pid, first.start_time)
    view.missing()
    wait_for(lambda: view.addresses() not in ((), (first.address,)))
    assert stat.S_IMODE(job.directory.stat().st_mode) == 0o700
    assert job.said == [
        f"{job.directory} was deleted: it is made again, and the next master, with a new token, asks the nodes and the"
        " checkpoints how far the run is"
    ]


def test_nothing_is_made_where_a_volume_is_away(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a mount point whose volume is gone no directory is made on the machine's own disk; it is waited for."""
    view = job.view()
    view.start()
    volume, away = job.directory.parents[1], job.directory.parents[2] / "away"
    first = ClaimFile(job.directory).read()
    assert first is not None
    volume.rename(away)
    volume.mkdir()
    monkeypatch.setattr(embedded, "mount_of", lambda path: (0, ""))
    Machine().kill(first.pid, first.start_time)
    view.missing()
    wait_for(lambda: bool(job.said))
    assert job.said == [
        f"no master can be started: {job.directory} is gone with the volume that the run began on, which is not mounted"
        " here any more: mount it again"
    ]
    assert list(volume.iterdir()) == []
    volume.rmdir()
    away.rename(volume)
    wait_for(lambda: view.addresses() not in ((), (first.address,)))
    after = ClaimFile(job.directory).read()
    assert after is not None
    assert after.generation == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_volume_is_known_by_its_mount(tmp_path: Path) -> None:
    """Also one of the same file system, mounted elsewhere; and what is not there counts as what it lies in."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "point").mkdir()
    script = (
        f"import subprocess; from pathlib import Path; from {mount_of.__module__} import mount_of;"
        f" point = Path({str(tmp_path / 'point')!r}); before = mount_of(point);"
        f" subprocess.run(['mount', '--bind', {str(tmp_path / 'disk')!r}, point], check=True);"
        " during = mount_of(point);"
        " assert mount_of(point / 'a' / 'b') == during; subprocess.run(['umount', point], check=True);"
        " assert mount_of(point / 'a') == before != during"
    )
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    if "unshare failed" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("nothing may be mounted here")
    assert done.returncode == 0, done.stderr
