"""docs/supervisors.md on Ray: the printed script, with a real Ray whose machines come and go."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from dalsegno.protos import control_pb2
from tests.support.jobs.foreign import RAY, installed
from tests.support.jobs.local_processes import carriers, is_alive, send, stat_fields
from tests.support.jobs.master_process import asked_status, master_process
from tests.support.pages.sources import ROOT

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]
SCRIPT = ROOT / "deploy" / "ray" / "train_on_ray.py"
CLUSTER = ROOT / "tests" / "support" / "workers" / "ray_cluster.py"
MARK = "DALSEGNO_TEST_RAY"


@dataclass
class RayCluster:
    """Machines of one processor each, a master, and a driver's command line."""

    place: Path
    process: subprocess.Popen[str]
    environment: dict[str, str]
    address: str
    master: str

    def order(self, word: str) -> None:
        """Adds or loses a machine, or has one vanish."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def drive(self, nodes: int, *flags: str) -> subprocess.Popen[bytes]:
        """A driver as the page has it, with examples/ddp.py."""
        job = ["--nnodes=1:3", "--job-id=job", f"--master={self.master}", f"--log-dir={self.place / 'logs'}"]
        line = [sys.executable, str(SCRIPT), f"--address={self.address}", f"--nodes={nodes}", "--", *job]
        line += [f"--checkpoint-dir={self.place / 'checkpoints'}", str(ROOT / "examples" / "ddp.py"), *flags]
        with open(self.place / "driver.log", "ab") as log:
            return subprocess.Popen(line, env=self.environment, stdout=log, stderr=log, start_new_session=True)

    def status(self) -> control_pb2.StatusReply | None:
        """What the master says; None before the first agent."""
        with grpc.insecure_channel(self.master) as channel, contextlib.suppress(grpc.RpcError):
            return asked_status(channel, "job")
        return None

    def agents(self) -> list[int]:
        """Live agents, the oldest first."""
        found = [int(path.name.rpartition("-")[2]) for path in self.place.glob("logs/*-*")]
        return [pid for pid in sorted(found) if is_alive(pid)]

    def wait(self, look: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + 120
        while not (found := look()):
            text = (self.place / "driver.log").read_text(errors="replace")
            assert time.monotonic() < deadline, f"not within 120 s: {what}\n{self.status()}\n{text[-8000:]}"
            time.sleep(0.2)  # why: processes of others, and a master: there is no event
        return found

    def wait_world(self, nodes: int, after: int = 0) -> control_pb2.StatusReply:
        """Until a world of so many nodes, of a later epoch, makes steps."""

        def look() -> control_pb2.StatusReply | None:
            now = self.status()
            if now is None or now.epoch <= after or now.unheard or now.phase != control_pb2.PHASE_RUNNING:
                return None
            members = sum(node.role == "member" for node in now.nodes)
            return now if members == nodes else None

        found: control_pb2.StatusReply = self.wait(look, f"a world of {nodes} nodes after epoch {after}")
        return found


@pytest.fixture
def ray_cluster(tmp_path: Path) -> Iterator[RayCluster]:
    """A cluster without machines."""
    mark = secrets.token_hex(8)
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed(*RAY)),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "OMP_NUM_THREADS": "1",
        MARK: mark,
    }
    with master_process(tmp_path / "job.sqlite") as master, open(tmp_path / "cluster.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(CLUSTER)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            yield RayCluster(tmp_path, process, environment, address, master.address)
        finally:
            send(carriers(f"{MARK}={mark}"))
            process.wait(10)


def test_machines_and_agents_come_and_go(ray_cluster: RayCluster) -> None:
    """A preempted agent, a killed one, a killed actor, a lost and two added machines; then Ctrl-C, and all is saved."""
    job = ray_cluster
    job.order("add")
    job.order("add")
    driver = job.drive(3, "--steps=1000000", "--step-time=0.1")
    try:
        epoch = job.wait_world(2).epoch
        os.kill(job.agents()[0], signal.SIGTERM)
        epoch = job.wait_world(2, epoch).epoch
        os.kill(job.agents()[0], signal.SIGKILL)
        epoch = job.wait_world(2, epoch).epoch
        agent = job.agents()[0]
        os.kill(int(stat_fields(agent)[1]), signal.SIGKILL)
        job.wait(lambda: not is_alive(agent), "the end of an agent whose actor was killed")
        epoch = job.wait_world(2, epoch).epoch
        job.order("lose")
        epoch = job.wait_world(1, epoch).epoch
        job.order("add")
        job.order("add")
        job.wait_world(3, epoch)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(90) == 75
        assert job.agents() == []
        last = job.status()
        assert last is not None
        assert last.head.step == last.step, "nothing is lost"
    finally:
        driver.kill()


def test_a_machine_that_vanishes_is_replaced(ray_cluster: RayCluster) -> None:
    """With its agent, and nobody says so: the others go on, and Ray starts another agent where it has room."""
    job = ray_cluster
    job.order("add")
    job.order("add")
    driver = job.drive(2, "--steps=1000000", "--step-time=0.1")
    try:
        epoch = job.wait_world(2).epoch
        job.order("vanish")
        epoch = job.wait_world(1, epoch).epoch
        job.order("add")
        job.wait_world(2, epoch)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(90) == 75
        last = job.status()
        assert last is not None
        assert last.head.step == last.step, "nothing is lost"
    finally:
        driver.kill()


def test_a_job_that_ends_ends_the_driver(ray_cluster: RayCluster) -> None:
    """With its exit code, also while an agent still waits for a machine."""
    ray_cluster.order("add")
    driver = ray_cluster.drive(2, "--steps=20")
    try:
        assert driver.wait(120) == 0
        assert ray_cluster.agents() == []
    finally:
        driver.kill()
