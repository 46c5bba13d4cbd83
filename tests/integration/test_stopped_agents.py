"""An agent that is stopped (SIGSTOP, Ctrl-Z) while it holds a lock of its job's: what others do and say meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.control import awake, claim, embedded, locks
from dalsegno.agent.control.claim import Claim, ClaimFile
from dalsegno.agent.control.embedded import EmbeddedMaster, MasterError
from dalsegno.agent.control.locks import JobLocks
from dalsegno.agent.control.machine import Machine
from tests.support.jobs.local_processes import is_same_process, process_state
from tests.support.jobs.master_process import eventually

pytestmark = pytest.mark.timeout(120)

HOLDER = """
import sys
from pathlib import Path
from dalsegno.agent.control.claim import ClaimFile
file = ClaimFile(Path(sys.argv[1]))
with file._locks.try_hold(sys.argv[2]) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


class Job:
    """One agent's view of a job, what it says and what it starts."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.said: list[str] = []
        self.starts: list[int] = []
        self.inside = 0
        self.view = EmbeddedMaster(directory, "job", 2.0, self._say, undisturbed=self._undisturbed)
        start = embedded.start_master

        def counted(*args: Any) -> Any:
            started = start(*args)
            self.starts.append(started.process.pid)
            return started

        monkeypatch.setattr(embedded, "start_master", counted)

    def _say(self, text: str, warning: bool) -> None:
        self.said.append(text)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        self.inside += 1
        yield
        self.inside -= 1

    def claim(self) -> Claim:
        claim = ClaimFile(self.directory).read()
        assert claim is not None
        return claim

    @contextlib.contextmanager
    def stopped_holder(self, name: str) -> Iterator[int]:
        """A process that holds a lock and is stopped; it goes on, and gives the lock back, at the end."""
        self.directory.mkdir(exist_ok=True, mode=0o700)
        command = [sys.executable, "-c", HOLDER, str(self.directory), name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "True\n"
                process.send_signal(signal.SIGSTOP)
                eventually(lambda: process_state(process.pid) == "T", 20)
                yield process.pid
            finally:
                process.kill()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    one = Job(tmp_path / "job", monkeypatch)
    yield one
    one.view.close()
    with contextlib.suppress(AssertionError):
        Machine().kill(one.claim().pid, one.claim().start_time)


def test_a_start_names_the_stopped_one_for_which_it_waits(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z within the first seconds, and the same command again: 90 s without a word, then a line about a file."""
    monkeypatch.setattr(locks, "_SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(embedded, "_LOCK_TIMEOUT_SECONDS", 4.0)
    with job.stopped_holder("start.lock") as pid:
        who = f"process {pid} of this machine (it is stopped: `fg`, or end it)"
        with pytest.raises(MasterError) as failed:
            job.view.start()
        assert job.said == [f"{who} starts the job's master; waiting for it"]
        assert str(failed.value) == f"{job.directory / 'start.lock'} is locked by {who} for more than 4 s"
    job.view.start()
    assert len(job.starts) == 1


def test_nothing_is_started_that_could_not_be_claimed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped as it moved the counter: each try started a master, superseded with it, and ended it again."""
    monkeypatch.setattr(claim, "_WRITE_TIMEOUT_SECONDS", 1.0)
    with job.stopped_holder("claim.lock") as pid, pytest.raises(MasterError) as failed:
        job.view.start()
    assert job.starts == []
    assert f"claim.lock is locked by process {pid} of this machine (it is stopped" in str(failed.value)


def test_nothing_is_ended_whose_successor_could_not_be_claimed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped master may go on; as soon as the claim can be written it has a successor."""
    monkeypatch.setattr(claim, "_WRITE_TIMEOUT_SECONDS", 1.0)
    job.view.start()
    before = job.claim()
    with job.stopped_holder("claim.lock") as pid:
        os.kill(before.pid, signal.SIGSTOP)
        job.view.missing()
        eventually(lambda: any(f"is locked by process {pid}" in text for text in job.said), 20)
        assert is_same_process(before.pid, before.start_time)
        assert len(job.starts) == 1
    eventually(lambda: job.claim().generation == 2, 30)
    assert len(job.starts) == 2


def test_ctrl_z_waits_for_what_is_done_under_a_lock(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both, the start of a master and the move of its counter."""
    inside: dict[str, list[int]] = {}
    sign = JobLocks._sign

    def signing(self: JobLocks, name: str) -> None:
        inside.setdefault(name, []).append(job.inside)
        sign(self, name)

    monkeypatch.setattr(JobLocks, "_sign", signing)
    job.view.start()
    # Once before the start, once for the claim, then for each move of its counter.
    eventually(lambda: len(inside.get("claim.lock", [])) > 3, 30)
    eventually(lambda: job.inside == 0, 20)
    assert inside.keys() == {"start.lock", "claim.lock"}
    assert min(itertools.chain(*inside.values())) > 0


def test_who_was_stopped_while_it_waited_asks_once_more(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A master that does not answer is given up after a while in which it was asked; that was none."""
    job.view.start()
    leaps = iter((0.0, 1.0, 500.0, 1000.0))
    monkeypatch.setattr(awake, "time", type("clock", (), {"monotonic": lambda: next(leaps)}))
    standings = iter([embedded._Standing.SILENT, embedded._Standing.SILENT, embedded._Standing.SERVES])
    monkeypatch.setattr(job.view, "_standing", lambda claim: next(standings))
    job.view._ensure()
    assert next(standings, None) is None
