"""The embedded master: found, started, replaced, and never two of them. With the real master and with scripted ones."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.agent import embedded
from dalsegno.agent.claim import Claim, ClaimFile
from dalsegno.agent.embedded import EmbeddedMaster, MasterError
from dalsegno.agent.processes import is_same_process, kill_same_process

pytestmark = pytest.mark.timeout(120)

HOLDER = """
import sys, time
from pathlib import Path
from dalsegno.agent.embedded import EmbeddedMaster
master = EmbeddedMaster(Path(sys.argv[1]), "job", 2.0)
master.start()
print(master.addresses()[0], flush=True)
time.sleep(300)
"""


class Jobs:
    """Agents' views of one job, and the masters that they left behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.claims = ClaimFile(directory)
        self.said: list[str] = []
        self.views: list[EmbeddedMaster] = []

    def view(self, node_timeout: float = 2.0, command: tuple[str, ...] | None = None) -> EmbeddedMaster:
        extra = {} if command is None else {"command": command}
        one = EmbeddedMaster(self.directory, "job", node_timeout, lambda text, warning: self.said.append(text), **extra)
        self.views.append(one)
        return one

    def claim(self) -> Claim:
        claim = self.claims.read()
        assert claim is not None
        return claim

    def close(self) -> None:
        for view in self.views:
            view.close()
        claim = self.claims.read()
        if claim is not None:
            kill_same_process(claim.pid, claim.start_time)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    one = Jobs(tmp_path / "job")
    yield one
    one.close()


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def test_two_terminals_at_once_share_one_master(jobs: Jobs) -> None:
    """Racing starts end with one process, one address, one token that only its owner can read."""
    views = [jobs.view() for _ in range(4)]
    threads = [threading.Thread(target=view.start) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {view.addresses() for view in views} == {(jobs.claim().address,)}
    assert jobs.claim().generation == 1
    assert len({view.credentials().token for view in views}) == 1
    assert stat.S_IMODE((jobs.directory / "token").stat().st_mode) == 0o600


def test_the_counter_moves_and_somebody_takes_it_over(jobs: Jobs) -> None:
    """One agent renews; when it goes, another on the machine does."""
    first, second = jobs.view(), jobs.view()
    first.start()
    second.start()
    begin = jobs.claim().counter
    wait_for(lambda: jobs.claim().counter >= begin + 2, 10)
    first.close()
    begin = jobs.claim().counter
    wait_for(lambda: jobs.claim().counter >= begin + 2, 10)


def test_the_master_outlives_the_agent_that_started_it(jobs: Jobs) -> None:
    """SIGKILL of the starter's whole group: the master goes on, the next agent finds it."""
    starter = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(jobs.directory)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert starter.stdout is not None
    address = starter.stdout.readline().strip()
    os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()
    view = jobs.view()
    view.start()
    assert view.addresses() == (address,)
    assert jobs.claim().generation == 1


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_stopped_master_is_replaced(jobs: Jobs, signum: signal.Signals) -> None:
    """Whoever misses it starts the next, with a higher generation; a stopped one is killed first."""
    view = jobs.view()
    view.start()
    before = jobs.claim()
    os.kill(before.pid, signum)
    begin = time.monotonic()
    view.missing()
    wait_for(lambda: jobs.claim().generation == 2)
    assert time.monotonic() - begin < 15
    wait_for(lambda: view.addresses() == (jobs.claim().address,))
    assert not is_same_process(before.pid, before.start_time)
    assert view.abandoned_generation == 1


def test_a_false_alarm_changes_nothing(jobs: Jobs) -> None:
    """A master that answers is kept."""
    view = jobs.view()
    view.start()
    before = jobs.claim()
    view.missing()
    time.sleep(1.0)
    assert jobs.claim().pid == before.pid
    assert is_same_process(before.pid, before.start_time)


def test_a_job_that_another_machine_serves_is_refused(jobs: Jobs) -> None:
    """While the counter moves, the line says --master; the claim stays theirs."""
    jobs.directory.mkdir(parents=True)
    theirs = Claim("elsewhere", "boot", 1, 1, 5, 0, "127.0.0.1:1")
    stop = threading.Event()

    def renew() -> None:
        claim = theirs
        while not stop.wait(0.2):
            claim = replace(claim, counter=claim.counter + 1)
            jobs.claims.write(claim, stop)

    jobs.claims.write(theirs, stop)
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(MasterError, match="--master"):
            jobs.view(node_timeout=5.0).start()
        assert jobs.claim().host == "elsewhere"
    finally:
        stop.set()
        thread.join()


def test_an_abandoned_claim_is_taken_over(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter that stands still for one node-timeout: the job is ours, and its generation is known."""
    monkeypatch.setattr(embedded, "_LEAST_WATCH", 0.5)
    jobs.directory.mkdir(parents=True)
    jobs.claims.write(Claim("elsewhere", "boot", os.getpid(), 1, 5, 0, "127.0.0.1:1"), threading.Event())
    view = jobs.view(node_timeout=1.0)
    begin = time.monotonic()
    view.start()
    assert time.monotonic() - begin >= 1.0
    assert jobs.claim().host != "elsewhere"
    assert view.abandoned_generation == 5
    assert "elsewhere" in jobs.said[0]


def test_a_short_node_timeout_does_not_take_a_served_job(jobs: Jobs) -> None:
    """The counter moves every two seconds: whoever watches for less would take over from a living master."""
    jobs.directory.mkdir(parents=True)
    theirs = Claim("elsewhere", "boot", 1, 1, 5, 0, "127.0.0.1:1")
    stop = threading.Event()
    jobs.claims.write(theirs, stop)
    move = threading.Timer(2.0, lambda: jobs.claims.write(replace(theirs, counter=1), stop))
    move.start()
    try:
        with pytest.raises(MasterError, match="--master"):
            jobs.view(node_timeout=1.0).start()
    finally:
        move.join()


def test_a_master_that_does_not_start_says_why(jobs: Jobs) -> None:
    """The last line of its log comes with the error, and no claim is left."""
    code = "import sys; sys.exit('dlrover-master: the store is broken')"
    with pytest.raises(MasterError, match="the store is broken"):
        jobs.view(command=(sys.executable, "-c", code)).start()
    assert jobs.claims.read() is None


def test_a_reused_process_number_is_not_killed(jobs: Jobs) -> None:
    """The claim names a process that is somebody else's by now: it lives on."""
    view = jobs.view()
    view.start()
    claim = jobs.claim()
    os.kill(claim.pid, signal.SIGKILL)
    view.close()
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        jobs.claims.write(replace(claim, pid=stranger.pid), threading.Event())
        jobs.view().start()
        assert stranger.poll() is None
        assert jobs.claim().generation == 2
    finally:
        stranger.kill()
        stranger.wait()
