"""How an embedded master is started where a site prints at the start, and where its directory is gone."""

from __future__ import annotations

import os
import re
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
from dalsegno.elastic.checkpoint.mounts import is_away
from tests.support.pages.sources import ROOT

pytestmark = pytest.mark.timeout(120)

# Registers, as an agent does, while it can; says all lines for people.
REGISTERS = """
import sys, time
from pathlib import Path
import grpc
from dalsegno.agent.control import embedded
from dalsegno.agent.control.claim import ClaimFile
from dalsegno.agent.control.machine import Machine
from dalsegno.protos import control_pb2, control_pb2_grpc
from tests.support.jobs.master_process import settings

directory = Path(sys.argv[1])
view = embedded.EmbeddedMaster(directory, "job", 2.0, lambda text, warning: print(text, flush=True))
try:
    view.start()
    print("it serves", flush=True)
    for number in range(3):
        if not view.addresses():
            break
        credentials = view.credentials()
        with credentials.channel(view.addresses()[0]) as channel:
            request = control_pb2.RegisterRequest(
                job_id="job", node="n", incarnation="i" * 32, protocol=embedded.CONTROL_PROTOCOL, host="n", nproc=1,
                settings=settings(), probe="p", secret=b"s" * 32,
            )
            try:
                control_pb2_grpc.ControlStub(channel).Register(request, timeout=2.0, metadata=credentials.metadata)
            except grpc.RpcError as error:
                print(error.code(), flush=True)
            view.missing()
            time.sleep(3.0)
except embedded.MasterError as error:
    print(error, flush=True)
finally:
    view.close()
    if claim := ClaimFile(directory).read():
        Machine().kill(claim.pid, claim.start_time)
"""


def alone(directory: Path, first: str, script: str, *prefix: str) -> str:
    """What the script prints, run by a shell that does something first."""
    words = [*prefix, "bash", "-c", f'{first}; exec "$0" -c "$1" "$2"', sys.executable, script, str(directory)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)
    print(done.stderr)
    return done.stdout


def with_mounts_of_its_own(script: str) -> str:
    """What the script says on standard error; its mounts are nobody else's."""
    words = ["unshare", "--mount", sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if "unshare failed" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("nothing may be mounted here")
    assert done.returncode == 0, done.stderr
    return done.stderr


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
        job.view(sys.executable, "-c", "import os\nwhile True: os.write(1, b'no such thing\\n' * 4999)").start()


@pytest.mark.parametrize("waits", [True, False])
def test_a_deleted_directory_is_made_again(job: Job, waits: bool) -> None:
    """Somebody deletes the whole checkpoint directory in mid-run: the next master starts, and one line says so.

    The one before ends by itself, as it can record nothing, or is ended first: there are never two.
    """
    view = job.view()
    view.start()
    first = ClaimFile(job.directory).read()
    assert first is not None
    shutil.rmtree(job.directory.parents[1])
    if waits:
        wait_for(lambda: not Machine().is_same_process(first.pid, first.start_time))
    view.missing()
    wait_for(lambda: view.addresses() not in ((), (first.address,)))
    assert not Machine().is_same_process(first.pid, first.start_time)
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
    monkeypatch.setattr(embedded, "is_away", lambda before, path: True)
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
def test_nothing_is_saved_where_a_volume_was_mounted(tmp_path: Path) -> None:
    """A save then fails, and the next one behind the mount's return succeeds; a directory that was deleted is made."""
    disk, point = tmp_path / "disk", tmp_path / "point"
    disk.mkdir()
    point.mkdir()
    script = (
        "import shutil, subprocess; from pathlib import Path; from dalsegno.elastic import session;"
        f" disk, point = Path({str(disk)!r}), Path({str(point)!r});"
        " mount = ['mount', '--bind', disk, point]; subprocess.run(mount, check=True);"
        " s = session(checkpoint_dir=point / 'ck'); step = lambda: (s.begin_step(), s.end_step());"
        " write = lambda path: (path / 'x').write_text('x') and None; step(); assert s.save(write);"
        " subprocess.run(['umount', '--lazy', point], check=True); step(); assert s.save(write) is None;"
        " assert not [*point.iterdir()], [*point.iterdir()]; subprocess.run(mount, check=True);"
        " step(); assert s.save(write).name.startswith('step-3.'); shutil.rmtree(point / 'ck');"
        " step(); assert s.save(write).name.startswith('step-4.')"
    )
    assert "is not mounted here any more" in with_mounts_of_its_own(script)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_volume_is_known_by_its_mount(tmp_path: Path) -> None:
    """Also one of the same file system, mounted elsewhere; and what is not there counts as what it lies in."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "point").mkdir()
    script = (
        f"import subprocess; from pathlib import Path; from {is_away.__module__} import is_away, mount_point;"
        f" point = Path({str(tmp_path / 'point')!r}); mount = ['mount', '--bind', {str(tmp_path / 'disk')!r}, point];"
        " below = mount_point(point); assert below in point.parents;"
        " subprocess.run(mount, check=True); during = mount_point(point / 'a' / 'b');"
        " assert during == point; assert not is_away(during, point / 'a'); assert not is_away(below, point / 'a');"
        " subprocess.run(['umount', point], check=True); assert is_away(during, point / 'a' / 'b');"
        " subprocess.run(mount, check=True); assert not is_away(during, point / 'a' / 'b')"
    )
    with_mounts_of_its_own(script)


@pytest.mark.full
def test_a_limit_on_files_is_named(tmp_path: Path) -> None:
    """A store that may not be made, or not grow: the line has the limit, and not the I/O error alone."""
    directory = tmp_path / ".dalsegno" / "job"
    for kilobytes, said in ((4, "did not start: .*disk I/O error"), (16, "can record nothing: .*disk I/O error")):
        found = alone(directory, f"ulimit -f {kilobytes}", REGISTERS)
        assert re.search(f"{said}.*a file may have at most {kilobytes} kB here .ulimit -f.", found), found
        shutil.rmtree(directory)


@pytest.mark.full
def test_a_loopback_that_is_down_is_named(tmp_path: Path) -> None:
    """What the last attempt to connect said, and what to do; the disk is not to blame."""
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces here")
    found = alone(tmp_path / ".dalsegno" / "job", "true", REGISTERS, "unshare", "--net")
    assert re.search(r"lives and cannot be connected to at 127\.0\.0\.1:\d+ \(.*Network is unreachable.*\): see", found)
    assert "slow" not in found


def test_the_last_words_of_a_master_that_fails_are_told(job: Job) -> None:
    """It ends by itself while it serves: the reason is in its log, and on the agent's console."""
    code = (
        "import json, os, sys, time; print(json.dumps({'address': '127.0.0.1:9', 'generation': 1}), flush=True);"
        " time.sleep(0.5); sys.exit('dlrover-master: the disk is gone')"
    )
    job.view(sys.executable, "-c", code).start()
    wait_for(lambda: "the job's own master has ended: dlrover-master: the disk is gone" in job.said)
