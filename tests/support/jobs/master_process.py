"""A real `dlrover-master` process for tests, and a client that speaks to it as an agent does."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dalsegno.protos import control_pb2 as pb
from dalsegno.protos import control_pb2_grpc
from dalsegno.protos.contract import CONTROL_PROTOCOL

# Seconds in which a master says its first line, for which it computes half a second. All that a pytest has started, but
# for what has a session of its own, shares one part of the cores among many: eight such masters took more than 20 s.
START_TIMEOUT = 60.0


@dataclass
class MasterProcess:
    """A serving master; `address` is HOST:PORT, and so is `http` where it has an HTTP edge."""

    process: subprocess.Popen[str]
    address: str
    generation: int
    http: str = ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


def command(store: Path | str, *arguments: str, job_id: str = "job") -> list[str]:
    """The command line of a master; `store` is a file, or a URL."""
    url = store if isinstance(store, str) else f"sqlite:///{store}"
    return [sys.executable, "-m", "dalsegno.master", "--job-id", job_id, "--store", url, *arguments]


@contextlib.contextmanager
def master_process(store: Path | str, *arguments: str, job_id: str = "job") -> Iterator[MasterProcess]:
    """Starts a master and waits for its line; kills it at the end if it still runs."""
    line = command(store, *arguments, job_id=job_id)
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield serving(process)
        finally:
            process.kill()


def serving(process: subprocess.Popen[str]) -> MasterProcess:
    """Waits until it leads; one of several says before where it listens."""
    said: dict[str, Any] = {}
    while "generation" not in said:
        said = said_by(process)
    return MasterProcess(process, said["address"], said["generation"], said.get("http", ""))


def said_by(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of a master."""
    assert process.stdout is not None
    assert process.stderr is not None
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            assert selector.select(START_TIMEOUT), "the master said nothing"
            # Not through the buffer, in which the selector would not see a second line.
            if not (byte := os.read(process.stdout.fileno(), 1)):
                break
            line += byte
    assert line, f"the master did not start: {process.stderr.read()}"
    said: dict[str, Any] = json.loads(line)
    return said


def asked_status(
    channel: grpc.Channel, job_id: str, metadata: Sequence[tuple[str, str]] = (), seconds: float = 5.0
) -> pb.StatusReply:
    """What the master says of the job. Raises grpc.RpcError."""
    reply: pb.StatusReply = control_pb2_grpc.ControlStub(channel).GetStatus(
        pb.StatusRequest(job_id=job_id, protocol=1), timeout=seconds, metadata=metadata
    )
    return reply


class Agent:
    """As much of an agent as the master can see, for one node with one worker."""

    def __init__(
        self, address: str, node: str, incarnation: str = "1", credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        self.node, self.incarnation = node, f"{node}#{incarnation}"
        # Shows the directory of this node to be the job's.
        self.probe = "probe"
        self.requests = 0
        self.secret = secrets.token_bytes(32)
        self.connect(address, credentials)

    def connect(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        """Goes to a (new) master."""
        self.channel = (
            grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)
        )
        self.stub: Any = control_pb2_grpc.ControlStub(self.channel)

    def caller(self, epoch: int = 0, request: int = 0) -> pb.Caller:
        return pb.Caller(
            job_id="job",
            node=self.node,
            incarnation=self.incarnation,
            epoch=epoch,
            request=request,
            protocol=CONTROL_PROTOCOL,
            secret=self.secret,
        )

    def next_caller(self, epoch: int = 0) -> pb.Caller:
        self.requests += 1
        return self.caller(epoch, self.requests)

    def register(self, settings: pb.Settings, **fields: Any) -> pb.RegisterReply:
        request = pb.RegisterRequest(
            job_id="job",
            node=self.node,
            incarnation=self.incarnation,
            protocol=CONTROL_PROTOCOL,
            host=self.node,
            nproc=1,
            settings=settings,
            probe=self.probe,
            secret=self.secret,
            **fields,
        )
        return self.stub.Register(request, timeout=10)

    def watch(self, timeout: float = 30.0) -> Any:
        return self.stub.Watch(pb.WatchRequest(caller=self.caller()), timeout=timeout)

    def join(self, directive: pb.Directive) -> None:
        """Answers an order to gather, or to wait for a place."""
        request = pb.JoinRequest(
            caller=self.next_caller(directive.epoch),
            round=directive.gather.round or directive.wait.round,
            store_host="127.0.0.1",
            store_port=29400 + len(self.node),
            probe=self.probe,
        )
        self.stub.Join(request, timeout=10)

    def heartbeat(self) -> pb.Ack:
        return self.stub.Heartbeat(pb.HeartbeatRequest(caller=self.caller()), timeout=10)

    def progress(self, epoch: int, step: int) -> None:
        request = pb.ProgressRequest(caller=self.caller(epoch), step=step, loss=1.0, has_session=True, longest=0.1)
        self.stub.ReportProgress(request, timeout=10)

    def commit(self, epoch: int, step: int) -> pb.CommitRequest:
        """Commits a checkpoint; returns the request, so that it can be repeated."""
        checkpoint = pb.Checkpoint(
            ref=pb.CheckpointRef(name=f"step-{step}.e{epoch}.0", digest=f"{step:064d}"),
            run_id="run-0001",
            step=step,
            epoch=epoch,
            form=pb.FORM_SHARDED,
            shape=pb.Shape(world_size=1, strategy="ddp", any_world_size=True),
        )
        request = pb.CommitRequest(caller=self.next_caller(epoch), checkpoint=checkpoint)
        self.stub.CommitCheckpoint(request, timeout=10)
        return request

    def status(self) -> pb.StatusReply:
        return self.stub.GetStatus(pb.StatusRequest(job_id="job", protocol=1), timeout=10)


def settings(nnodes: tuple[int, int] = (1, 2), **changes: Any) -> pb.Settings:
    values: dict[str, Any] = {
        "min_nodes": nnodes[0],
        "max_nodes": nnodes[1],
        "node_unit": 1,
        "node_timeout": 15.0,
        "drain_timeout": 30.0,
        "join_timeout": 10.0,
        "stall_timeout": 600.0,
        "grow_interval": 0.0,
        "grow_wait": 300.0,
        "wait_for_nodes": -1.0,
        "quiet_time": 0.2,
        "max_restarts": 3,
    }
    return pb.Settings(**(values | changes))


def open_world(agents: list[Agent], wanted: pb.Settings) -> int:
    """Registers the agents and has them form a world; returns its epoch."""
    streams = []
    for agent in agents:
        agent.register(wanted)
        streams.append(agent.watch())
    epochs = set()
    for agent, stream in zip(agents, streams, strict=True):
        answer_gathers(agent, stream, until_run=False)
    for agent, stream in zip(agents, streams, strict=True):
        epochs.add(answer_gathers(agent, stream, until_run=True))
        stream.cancel()
    assert len(epochs) == 1
    return epochs.pop()


def answer_gathers(agent: Agent, stream: Any, until_run: bool) -> int:
    """Joins when told to; returns the epoch of the world that the agent is in, 0 if it only joined."""
    for directive in stream:
        order = directive.WhichOneof("order")
        if order == "gather":
            agent.join(directive)
            if not until_run:
                return 0
        if order == "run":
            return int(directive.run.epoch)
    raise AssertionError("the stream ended without a world")


def eventually(condition: Any, seconds: float = 10.0) -> None:
    """Waits for something that has no event here: the state of another process."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
