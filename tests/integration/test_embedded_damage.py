"""Real jobs whose embedded master is slow, stopped, or loses its token or store: they go on without a person."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.control import embedded
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import Cluster, Training, Undisturbed
from tests.support.jobs.master_process import eventually
from tests.support.jobs.shell import Shell, expect_one_line

pytestmark = pytest.mark.timeout(300)

Jobs = Callable[..., Cluster]
SMALL = Training(steps=40, save_every=5)
FLAGS = ("--node-timeout=6",)
DDP = str(Path(__file__).resolve().parents[2] / "examples" / "ddp.py")


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made: list[Cluster] = []

    def make(**options: Any) -> Cluster:
        made.append(Cluster(tmp_path / "job", training=SMALL, agent_flags=FLAGS, **options))
        return made[-1]

    yield make
    for job in made:
        print(job.diagnosis())
        job.close()


def claimed(job: Cluster) -> tuple[int, int]:
    """Process and generation of the master that the claim names."""
    claim = json.loads((job.private / "claim.json").read_text(encoding="utf-8"))
    return claim["pid"], claim["generation"]


def damage(path: Path, content: bytes) -> None:
    """As a full or failing disk leaves a file: its name, its owner, other bytes."""
    path.write_bytes(content)


DAMAGES = {
    "garbage store": ("master.sqlite", os.urandom(20_000)),
    "empty token": ("token", b""),
    "token of other bytes": ("token", b"\xff\x00\xfe" * 20),
}


@pytest.mark.parametrize(
    "kind", ["garbage store", *(pytest.param(kind, marks=pytest.mark.full) for kind in list(DAMAGES)[1:])]
)
def test_the_same_command_goes_on_after_damage(jobs: Jobs, undisturbed: Undisturbed, kind: str) -> None:
    """Everything had ended: the next start puts the file aside, says so, and resumes where the last one had saved."""
    job = jobs(nnodes="1:2")
    epoch = job.open("a", steps=12)
    job.leave(job.node("a"))
    job.wait_exit()
    pid = job.master_pid()
    if pid is not None:
        processes.send([pid], signal.SIGKILL)
        eventually(lambda: job.master_pid() is None)
    left = max(job.sealed(), key=lambda one: one.step).step
    assert left >= 12
    name, content = DAMAGES[kind]
    damage(job.private / name, content)
    (again,) = job.start("a")
    job.wait_line(f"put aside as {name}.damaged-1", again)
    after = job.wait_world(1, after=epoch)
    assert job.first_step(after) == left + 1
    assert (job.private / f"{name}.damaged-1").read_bytes() == content
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


def damaged_while_running(job: Cluster, kind: str) -> None:
    """The file is damaged, then the master is killed; until the next one serves."""
    (node,) = job.nodes
    pid, generation = claimed(job)
    name, content = DAMAGES[kind]
    damage(job.private / name, content)
    processes.send([pid], signal.SIGKILL)
    job.wait_line(f"put aside as {name}.damaged-1", node)
    eventually(lambda: job.master_pid() not in (None, pid), 60)
    if "token" in kind:
        assert claimed(job)[1] > generation


@pytest.mark.parametrize("kind", ["empty token", pytest.param("token of other bytes", marks=pytest.mark.full)])
def test_a_running_job_goes_on_with_another_token(jobs: Jobs, undisturbed: Undisturbed, kind: str) -> None:
    """The next master serves the same workers in the same epoch."""
    job = jobs(nnodes="1:2")
    epoch = job.open("a", steps=6)
    worker = job.worker_pid(job.node("a"))
    damaged_while_running(job, kind)
    job.wait_status(lambda status: status.head.step > 5 and status.epoch == epoch, "a commit under the next master")
    assert job.worker_pid(job.node("a")) == worker
    job.finish()
    assert job.epoch() == epoch
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_a_running_job_goes_on_without_its_store(jobs: Jobs, undisturbed: Undisturbed) -> None:
    """The run is read back from its checkpoints; what was made since the last of them is made again, at most."""
    job = jobs(nnodes="1:2")
    epoch = job.open("a", steps=6)
    damaged_while_running(job, "garbage store")
    after = job.wait_world(1, after=epoch)
    assert job.first_step(after) > 5
    job.finish()
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_a_master_with_a_slow_disk_lives_on(jobs: Jobs, undisturbed: Undisturbed) -> None:
    """Commits wait for somebody who holds the store's lock, much longer than agents are patient; nobody is killed."""
    job = jobs(nnodes="1:2")
    epoch = job.open("a", steps=3)
    before = claimed(job)
    store = sqlite3.connect(job.private / "master.sqlite", isolation_level=None, timeout=30)
    with contextlib.closing(store):
        store.execute("BEGIN EXCLUSIVE")
        until = time.monotonic() + embedded._SILENCE_SECONDS + 8.0
        job.wait_for(lambda: time.monotonic() > until or None, "the end of the slow time")
        assert claimed(job) == before
        assert job.master_pid() == before[0]
    job.finish()
    assert claimed(job) == before
    assert job.epoch() == epoch
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_a_stopped_master_is_replaced(jobs: Jobs, undisturbed: Undisturbed) -> None:
    """SIGSTOP: nobody says whether it is ever continued, and it may hold the store's lock."""
    job = jobs(nnodes="1:2")
    epoch = job.open("a", steps=3)
    pid, generation = claimed(job)
    processes.send([pid], signal.SIGSTOP)
    job.wait_status(lambda status: status.generation > generation, "the next master")
    assert not processes.is_alive(pid)
    job.finish()
    assert job.epoch() == epoch
    job.assert_undisturbed(undisturbed)


def test_a_private_directory_that_others_can_write(shell: Shell) -> None:
    """One line that says what to do, before anything in it is believed."""
    private = shell.directory / "checkpoints" / ".dalsegno" / "job"
    private.mkdir(parents=True)
    private.chmod(0o777)
    expect_one_line(shell.run("--job-id=job", DDP), "can be written by others", "chmod go-w", str(private))


def test_a_planted_link_as_log(shell: Shell) -> None:
    """Nothing is written through it."""
    private = shell.directory / "checkpoints" / ".dalsegno" / "job"
    private.mkdir(parents=True, mode=0o700)
    victim = shell.directory / "victim"
    victim.write_bytes(b"mine")
    (private / "master.log").symlink_to(victim)
    expect_one_line(shell.run("--job-id=job", DDP), "master.log is no regular file")
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("length", [60, 200])
def test_a_temporary_directory_with_a_long_path(shell: Shell, length: int) -> None:
    """The workers' socket has a place all the same."""
    deep = shell.directory / ("d" * length)
    deep.mkdir()
    ended = shell.run("--job-id=job", DDP, "--steps=3", "--save-every=0", "--global-batch-size=4", TMPDIR=str(deep))
    assert ended.code == 0, ended.text
    assert "Traceback" not in ended.text
