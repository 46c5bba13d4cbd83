"""Several masters over a real etcd: whichever of them and of etcd's members goes, a job trains, grows and commits."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("aetcd")

from tests.support.jobs.cluster import Training, Undisturbed
from tests.support.jobs.etcd_members import ETCD, MISSING, Members, etcd_members
from tests.support.jobs.several_masters import Several

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(ETCD is None, reason=MISSING)]


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    with etcd_members(tmp_path / "etcd", 3) as three:
        yield three


@pytest.fixture
def job(tmp_path: Path, members: Members) -> Iterator[Several]:
    with Several(tmp_path / "job", members=members, training=Training(steps=400, save_every=5)) as several:
        yield several


@pytest.mark.parametrize("how", ["killed", "stopped", "told to end", "killed with etcd's leader"])
def test_the_leader_goes(job: Several, members: Members, undisturbed: Undisturbed, how: str) -> None:
    """Another one leads soon, the ranks go on as they are, and the world grows under the new one."""
    job.start("a")
    first = job.wait_world(1, steps=2)
    job.wait_status(lambda status: status.head.step >= 5, "a commit")
    worker = job.worker_pid(job.node("a"))
    leader, before = job.leader()
    began = time.monotonic()
    if how.startswith("killed with"):
        members.send(members.leader(), signal.SIGKILL)
    job.signal_master(leader, {"stopped": signal.SIGSTOP, "told to end": signal.SIGTERM}.get(how, signal.SIGKILL))
    after = job.wait_leader(lambda name, generation: name != leader and generation > before)
    took = time.monotonic() - began
    assert job.worker_pid(job.node("a")) == worker
    job.start("b")
    job.wait_world(2, steps=3, after=first)
    if how == "stopped":
        job.signal_master(leader, signal.SIGCONT)
        job.wait_standby(leader, after[0])
    assert took < 30
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)
