"""An old copy of a master's record is brought back, as by somebody who restores a whole machine."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import Training, Undisturbed
from tests.support.jobs.faults import Service

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]


def kill_master(job: Service) -> None:
    processes.send([job.masters[-1].process.pid], signal.SIGKILL)
    job.masters[-1].process.wait(10)


def put_in_place(record: Path, other: Path) -> None:
    """Has `other` be what a record is, with the journal of a write that a kill has cut off: alone, neither is whole."""
    for end in ("", "-journal"):
        source, target = record.with_name(record.name + end), other.with_name(other.name + end)
        target.unlink(missing_ok=True)
        if source.exists():
            shutil.copy(source, target)


@pytest.mark.parametrize("grown", [False, True], ids=["same world", "world has grown"])
def test_an_old_copy_of_the_record(tmp_path: Path, undisturbed: Undisturbed, grown: bool) -> None:
    """Nobody waits for --stall-timeout: the run goes on soon, in an epoch of its own, and every sample counts once."""
    with Service(tmp_path / "job", training=Training(steps=300, save_every=5)) as job:
        record, copy = job.directory / "job.sqlite", job.directory / "copy" / "job.sqlite"
        copy.parent.mkdir()
        job.start_master()
        job.start("a")
        job.wait_world(1, steps=2)
        job.wait_status(lambda status: status.head.step >= 5, "a commit")
        kill_master(job)
        put_in_place(record, copy)
        job.start_master()
        if grown:
            job.start("b")
            job.wait_world(2, steps=3, after=1)
        before = job.wait_status(lambda status: status.head.step >= 30, "commits")
        kill_master(job)
        put_in_place(copy, record)
        job.start_master()
        job.wait_status(lambda status: status.head.step > before.head.step, "a commit under the old record")
        job.wait_world(2 if grown else 1, steps=3, after=before.epoch if grown else 0)
        assert ("remembers epoch 2" in (job.directory / "service.log").read_text()) == grown
        job.finish()
        job.assert_undisturbed(undisturbed)
