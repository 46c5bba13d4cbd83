"""A cluster with several masters over etcd: each may be signalled, and started again at its address."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import grpc

from dalsegno.agent.control.connection import Credentials, leader_of
from dalsegno.protos import control_pb2
from tests.support.jobs.cluster import Cluster
from tests.support.jobs.etcd_members import Members
from tests.support.jobs.master_process import asked_status, command, said_by
from tests.support.jobs.ports import free_port
from tests.support.jobs.proxy import Proxy


@dataclass
class Several(Cluster):
    """Masters `m0`, `m1`, …, all started with the cluster; agents know all their addresses."""

    members: Members = field(kw_only=True)
    count: int = 3
    credentials: Credentials = field(default_factory=Credentials)
    master_flags: tuple[str, ...] = ()
    # By a master's name the URL of its store, if it reaches etcd in another way.
    stores: Mapping[str, str] = field(default_factory=dict)
    # Agents and masters are told of proxies in front of the masters, `ways`.
    wired: bool = False

    def __post_init__(self) -> None:
        self.ports = {f"m{number}": free_port() for number in range(self.count)}
        self.masters: dict[str, subprocess.Popen[str]] = {}
        self.ways = {name: Proxy(address) for name, address in self._own.items()} if self.wired else {}
        super().__post_init__()
        try:
            # Together: each takes a second to import what it needs.
            for name in self.ports:
                self.launch(name)
            for name in self.ports:
                assert said_by(self.masters[name])["leads"] is False
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> dict[str, str]:
        """By a master's name where agents reach it."""
        return {name: way.address for name, way in self.ways.items()} or self._own

    @property
    def _own(self) -> dict[str, str]:
        return {name: f"127.0.0.1:{port}" for name, port in self.ports.items()}

    def start_master(self, name: str) -> None:
        """Starts a master, or starts it again; returns when it listens."""
        self.launch(name)
        assert said_by(self.masters[name])["leads"] is False

    def launch(self, name: str) -> None:
        """Starts a master; it may wait for etcd before it listens."""
        flags = (f"--port={self.ports[name]}", f"--log-file={self.directory / name}.log", *self.master_flags)
        if self.wired:
            flags += (f"--advertise={self.addresses[name]}",)
        process = subprocess.Popen(
            command(self.stores.get(name, self.members.url), *flags, job_id=self.job),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # The mark lets `close` find it, whatever happens here.
            env={**os.environ, "DALSEGNO_TEST_CLUSTER": self.job},
            start_new_session=True,
        )
        self.masters[name] = process

    def signal_master(self, name: str, signum: signal.Signals) -> None:
        """Signals a master; after SIGKILL it is gone."""
        self.masters[name].send_signal(signum)
        if signum == signal.SIGKILL:
            self.masters[name].wait(10)

    def ask(self, name: str, seconds: float = 1.0) -> control_pb2.StatusReply | str:
        """A master's status, if it leads; else the address that it names, empty if none."""
        with self.credentials.channel(self._own[name]) as channel:
            try:
                return asked_status(channel, self.job, self.credentials.metadata, seconds)
            except grpc.RpcError as error:
                return leader_of(error)

    def leader(self) -> tuple[str, int]:
        """Name and generation of the master that leads."""
        return self.wait_leader(lambda name, generation: True)

    def wait_leader(self, good: Callable[[str, int], bool]) -> tuple[str, int]:
        """Until one leads of which this holds: name, and generation."""
        found: list[tuple[str, int]] = []

        def look() -> bool:
            for name in self.masters:
                said = self.ask(name)
                if isinstance(said, control_pb2.StatusReply) and good(name, said.generation):
                    found.append((name, said.generation))
            return bool(found)

        self.wait_for(look, "a master that leads")
        return found[0]

    def wait_standby(self, name: str, leader: str) -> None:
        """Until this master names that one."""
        self.wait_for(lambda: self.ask(name) == self.addresses[leader], f"{name} to stand by")

    def status(self) -> control_pb2.StatusReply | None:
        for name, process in self.masters.items():
            if process.poll() is None and isinstance(said := self.ask(name), control_pb2.StatusReply):
                return said
        return None

    def command(self, name: str) -> list[str]:
        runner, *rest = super().command(name)
        return [runner, f"--master={','.join(self.addresses.values())}", *rest]

    def master_pid(self) -> int | None:
        return None

    def close(self) -> None:
        super().close()
        for way in self.ways.values():
            way.close()
        for process in self.masters.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
