"""A job whose master keeps its record in etcd: the master and etcd's members go, the training goes on."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("aetcd")

from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import Training, Undisturbed
from tests.support.jobs.etcd_members import ETCD, MISSING, Members, etcd_members
from tests.support.jobs.faults import Service
from tests.support.jobs.master_process import command, serving

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(ETCD is None, reason=MISSING)]


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    with etcd_members(tmp_path / "etcd", 3) as three:
        yield three


@pytest.fixture
def job(tmp_path: Path, members: Members) -> Iterator[Service]:
    with Service(tmp_path / "job", training=Training(steps=200, save_every=5), store=members.url) as service:
        service.start_master()
        yield service


@pytest.mark.full
def test_the_master_and_a_member_are_killed(job: Service, members: Members, undisturbed: Undisturbed) -> None:
    """Nothing on the master's machine is needed again; two members of three are enough, and then two others."""
    job.start("a")
    first = job.wait_world(1, steps=2)
    before = job.wait_status(lambda status: status.head.step >= 5, "a commit")
    worker = job.worker_pid(job.node("a"))
    members.send(0, signal.SIGKILL)
    processes.send([job.masters[-1].process.pid], signal.SIGKILL)
    job.masters[-1].process.wait(10)
    job.start_master()
    after = job.wait_status(lambda status: status.generation > before.generation, "the next master")
    assert (after.run_id, after.epoch) == (before.run_id, before.epoch)
    assert after.head.step >= before.head.step
    assert job.worker_pid(job.node("a")) == worker
    members.start(0)
    members.wait(0)
    members.send(1, signal.SIGKILL)
    job.start("b")
    job.wait_world(2, steps=3, after=first)
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


def order(job: Service, *words: str) -> str:
    """The one line of an order that nobody can take just now."""
    line = [sys.executable, "-m", "dalsegno.agent.commands.dalsegno", *words, f"--job-id={job.job}"]
    line.append(f"--master={job.masters[-1].address}")
    began = time.monotonic()
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stdout + done.stderr
    # Without the person's patience it would take as long as etcd is away.
    assert time.monotonic() - began < 30
    return done.stderr


@pytest.mark.full
def test_etcd_is_away_for_a_while(job: Service, members: Members, undisturbed: Undisturbed) -> None:
    """All members are stopped: training goes on, nobody is declared dead, and what waited is recorded afterwards."""
    job.start("a", "b")
    first = job.wait_world(2, steps=8)
    before = job.wait_status(lambda status: status.head.step >= 5, "a commit")
    pid = job.master_pid()
    for number in range(3):
        members.send(number, signal.SIGSTOP)
    stopped = time.monotonic()
    step = max(line.step for line in job.poll())
    # The first one may be in the turn that waits for etcd.
    told = [order(job, "scale", "1"), order(job, "stop"), order(job, "drain", "a")]
    assert all("the order was not taken" in line for line in told[1:]), told
    assert "the order may not have been taken" in told[0] or "the order was not taken" in told[0], told
    # Longer than a node may be silent, and than other stores are waited for.
    job.wait_for(lambda: time.monotonic() - stopped > 65, "some time")
    assert max(line.step for line in job.poll()) > step + 10
    # As the operations page has it, where the disk fills meanwhile: the recorded ones and the newest two stay.
    waiting = [one.name for one in job.sealed() if one.step > before.head.step]
    assert len(waiting) > 5
    for name in waiting[1:-2]:
        shutil.rmtree(next(job.checkpoints.glob(f"*/*/{name}")))
    for number in range(3):
        members.send(number, signal.SIGCONT)
    job.wait_status(lambda status: status.head.step > max(step, before.head.step), "a commit afterwards")
    # Nobody was stopped or told to go behind a person's back.
    assert (job.epoch(), job.master_pid()) == (first, pid) or "may not have been" in told[0]
    assert "etcd says again who leads" in (job.directory / "service.log").read_text()
    # What is gone is retired as if it were there, and the next world begins at what is left.
    job.wait_status(lambda status: len(status.checkpoints) <= 5, "retirements")
    job.kill_node(job.node("b"))
    job.wait_world(1, steps=3, after=first)
    job.finish()
    job.assert_undisturbed(undisturbed)


def test_a_master_waits_for_an_etcd_that_starts_after_it(tmp_path: Path) -> None:
    """Pods start in any order; a line says what it waits for."""
    with etcd_members(tmp_path / "etcd") as members:
        members.send(0, signal.SIGKILL)
        line = command(members.url, "--job-id=late")
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                assert "cannot read the store in etcd" in (said := process.stderr.readline())
                assert said.endswith("; waiting for it\n")
                members.start(0)
                assert serving(process).generation == 1
            finally:
                process.kill()
