"""A master whose event loop hangs ends itself; one that was only stopped does not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from dalsegno.protos import control_pb2 as pb
from tests.support.jobs.master_process import (
    Agent,
    MasterProcess,
    command,
    master_process,
    open_world,
    serving,
    settings,
)

pytestmark = pytest.mark.timeout(120)

# Looks a second apart, of which so many may find the loop where it was.
SECONDS = 3

HANGING = """
import sys, threading
from dalsegno.master import cli; from dalsegno.master.server import driver

def deadlock_of_the_test(self):
    held = threading.Lock()
    held.acquire()
    held.acquire()

driver.Driver.status = deadlock_of_the_test
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[MasterProcess]:
    """A master that deadlocks in its event loop when its status is asked for."""
    arguments = command(tmp_path / "s.sqlite", "--hang-timeout", str(SECONDS), "--log-file", str(tmp_path / "log"))[3:]
    line = [sys.executable, "-c", HANGING, *arguments]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield serving(process)
        finally:
            process.kill()


def test_a_loop_that_hangs_ends_the_master_with_its_stacks(hanging: MasterProcess, tmp_path: Path) -> None:
    """And the next one goes on from the store, where all that was answered is."""
    agent = Agent(hanging.address, "a")
    epoch = open_world([agent], settings((1, 1)))
    agent.commit(epoch, 5)
    with pytest.raises(grpc.RpcError):
        agent.stub.GetStatus(pb.StatusRequest(job_id="job", protocol=1), timeout=60)
    assert hanging.process.wait(60) == 1
    log = (tmp_path / "log").read_text()
    assert f"event loop has stood still for {SECONDS} s" in log
    assert "in deadlock_of_the_test" in log
    with master_process(tmp_path / "s.sqlite") as second:
        agent.connect(second.address)
        assert agent.status().head.step == 5


@pytest.mark.full
def test_a_master_that_was_stopped_for_longer_goes_on(tmp_path: Path) -> None:
    """Time in which the process did not run is no hang."""
    with master_process(tmp_path / "s.sqlite", "--hang-timeout", str(SECONDS)) as master:
        agent = Agent(master.address, "a")
        agent.register(settings((2, 2)))
        for _ in range(2):
            master.process.send_signal(signal.SIGSTOP)
            # why: only a time that passes while it is stopped can be taken for a hang
            time.sleep(SECONDS + 2)
            master.process.send_signal(signal.SIGCONT)
            agent.heartbeat()
        assert agent.status().nodes
        assert master.process.poll() is None
