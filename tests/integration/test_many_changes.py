"""One agent and one master through two hundred changes: neither grows, whatever comes and goes beside them."""

from __future__ import annotations

import json
import os
import secrets
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import grpc
import pytest

from dalsegno.protos import control_pb2, control_pb2_grpc
from dalsegno.protos.contract import CONTROL_PROTOCOL
from tests.support.jobs.cluster import Cluster, Training
from tests.support.jobs.master_process import settings

from .test_membership import Clusters

# Fewer for a first look: DALSEGNO_TEST_CHANGES=20.
CHANGES = int(os.environ.get("DALSEGNO_TEST_CHANGES", "200"))
CHECKPOINTS, HEARTBEATS = 5 * CHANGES, 50 * CHANGES

pytestmark = [pytest.mark.timeout(10 * 3600), pytest.mark.full, pytest.mark.once]


@dataclass(frozen=True)
class Size:
    """Of one process: resident memory in MB, open descriptors, threads."""

    memory: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Size:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
        return cls(int(fields["VmRSS"][0]) / 1024, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"][0]))


# How much more the last changes may show than the first: far less than one thing for each change.
ROOM = Size(memory=12.0, descriptors=4, threads=4)


class Heart(threading.Thread):
    """A node that is no candidate, as it sees another directory, and says that it lives, again and again."""

    def __init__(self, job: Cluster) -> None:
        super().__init__(name="heart", daemon=True)
        self._job, self._end = job, threading.Event()
        self.beats = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._beat()
        except Exception as error:
            self.error = error

    def _beat(self) -> None:
        address = json.loads((self._job.private / "claim.json").read_text(encoding="utf-8"))["address"]
        token = (self._job.private / "token").read_text(encoding="utf-8").strip()
        metadata = (("authorization", f"Bearer {token}"),)
        caller = control_pb2.Caller(
            job_id=self._job.job,
            node="heart",
            incarnation="heart-1",
            protocol=CONTROL_PROTOCOL,
            secret=secrets.token_bytes(32),
        )
        with grpc.insecure_channel(address) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            register = control_pb2.RegisterRequest(
                job_id=self._job.job,
                node="heart",
                incarnation=caller.incarnation,
                secret=caller.secret,
                protocol=CONTROL_PROTOCOL,
                host="elsewhere",
                nproc=1,
                probe="of another directory",
                settings=settings((1, 2)),
            )
            stub.Register(register, timeout=10, metadata=metadata)
            stream = stub.Watch(control_pb2.WatchRequest(caller=caller), metadata=metadata)
            threading.Thread(target=lambda: [None for _ in _until_cancelled(stream)], daemon=True).start()
            while not self._end.wait(0.02):
                stub.Heartbeat(control_pb2.HeartbeatRequest(caller=caller), timeout=30, metadata=metadata)
                self.beats += 1
            stream.cancel()

    def end(self) -> None:
        self._end.set()
        self.join(60)
        assert self.error is None, self.error


def _until_cancelled(stream: Iterator[object]) -> Iterator[object]:
    try:
        yield from stream
    except grpc.RpcError:
        return


@contextmanager
def beating(job: Cluster) -> Iterator[Heart]:
    heart = Heart(job)
    heart.start()
    try:
        yield heart
    finally:
        heart.end()


def judge(what: str, sizes: Sequence[Size]) -> None:
    """The last fifth against what the second tenth had at most: the first one is for what is only made once."""
    tenth = len(sizes) // 10
    for name, first, last, room in zip(
        ("MB", "descriptors", "threads"),
        zip(*map(astuple, sizes[tenth : 2 * tenth + 1]), strict=True),
        zip(*map(astuple, sizes[-2 * tenth :]), strict=True),
        astuple(ROOM),
        strict=True,
    ):
        before, after = max(first), statistics.median(last)
        print(f"{what}: {before:.0f} {name} at most at first, {after:.0f} at the end")
        assert after <= before + room, f"{what} grows: {[getattr(one, FIELD[name]) for one in sizes]}"


FIELD = {"MB": "memory", "descriptors": "descriptors", "threads": "threads"}


def test_two_hundred_changes_leave_agent_and_master_as_they_were(clusters: Clusters) -> None:
    """Nodes under new names come, and leave or are killed; 1,000 checkpoints and 10,000 heartbeats go by meanwhile."""
    job = clusters(training=Training(steps=1_000_000, save_every=1), hooked=False, nnodes="1:2", universal="")
    job.step_time = 0.05
    epoch = job.open("a")
    first, master = job.node("a"), job.master_pid()
    assert master is not None
    agents, masters = [], []
    with beating(job) as heart:
        for number in range(CHANGES // 2):
            (node,) = job.start(f"guest-{number}")
            epoch = job.wait_world(2, after=epoch)
            if number % 2:
                job.kill_node(node)
            else:
                job.leave(node)
                node.process.wait(60)
            epoch = job.wait_world(1, after=epoch)
            agents.append(Size.of(first.pid))
            masters.append(Size.of(master))
        job.wait_for(lambda: heart.beats >= HEARTBEATS or heart.error, "the heartbeats", 3600)
        job.wait_status(lambda status: status.head.step >= CHECKPOINTS, "the checkpoints", 3600)
        agents.append(Size.of(first.pid))
        masters.append(Size.of(master))
    assert job.master_pid() == master, "it is the same one"
    judge("the agent", agents)
    judge("the master", masters)
    job.leave(first)
    assert first.process.wait(60) == 75
