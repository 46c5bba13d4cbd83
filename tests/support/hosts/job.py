"""A cluster on hosts: agents and masters each on one of their own, and cables between them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from dalsegno.agent.control.connection import Credentials, leader_of
from dalsegno.protos import control_pb2

from ..jobs.cluster import CLUSTER_MARK, PATIENCE, Cluster, Node
from ..jobs.master_process import asked_status, command, said_by
from ..jobs.proxy import Proxy
from .hosts import Host, Hosts
from .namespaces import Inside

__all__ = ["PORT", "HostedJob", "hosted_job"]

# Of every master, on its own host: nobody else is in its network.
PORT = 29_400
# A module in the way of every interpreter: `sitecustomize`.
CLOCK = Path(__file__).with_name("clock")


@dataclass
class HostedJob(Cluster):
    """A job on hosts. Each node runs on the host that has its name; masters are started by `start_master`.

    Attributes:
        hosts: where everything runs.
        master_hosts: the hosts on which a master may run; agents are given their addresses, in this order.
        store: the URL of the masters' store; empty: a file that all hosts see.
        credentials: what `status` shows and checks; agents have theirs from their flags.
        given: by a node's name what it is given as `--master`, if not those addresses.
        environments: by a node's name what its agent's environment has besides.
        flags_of: by a node's name its further flags.
        meeting_point: HOST:PORT of a node that hosts the master; then there are no others.
    """

    hosts: Hosts = field(kw_only=True)
    master_hosts: tuple[str, ...] = ("m",)
    store: str = ""
    master_flags: tuple[str, ...] = ("--insecure",)
    credentials: Credentials = field(default_factory=Credentials)
    given: Mapping[str, str] = field(default_factory=dict)
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    flags_of: Mapping[str, Sequence[str]] = field(default_factory=dict)
    meeting_point: str = ""
    masters: dict[str, Inside] = field(default_factory=dict)
    _ways: dict[str, Proxy] = field(default_factory=dict)

    def __enter__(self) -> HostedJob:
        return self

    @property
    def addresses(self) -> dict[str, str]:
        """By the name of its host, where agents find a master."""
        return {name: f"{self.hosts[name].address}:{PORT}" for name in self.master_hosts}

    # ---- masters ----------------------------------------------------------------------------------------------------

    def start_master(self, name: str) -> None:
        """Starts the master of a host; returns when it listens."""
        host, log = self.hosts[name], self.directory / f"{name}.log"
        flags = (f"--host={host.address}", f"--port={PORT}", f"--log-file={log}", *self.master_flags)
        self.masters[name] = host.popen(
            command(self.store or f"sqlite:///{self.directory / 'job.sqlite'}", *flags, job_id=self.job),
            self.directory,
            {**os.environ, CLUSTER_MARK: self.job},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        said_by(self.masters[name])

    def ask(self, name: str, seconds: float = 2.0) -> control_pb2.StatusReply | str:
        """A master's status, if it leads; else the address that it names, empty if none."""
        if not self.hosts[name].is_up:
            return ""
        with self.credentials.channel(self._way(name)) as channel:
            try:
                return asked_status(channel, self.job, self.credentials.metadata, seconds)
            except grpc.RpcError as error:
                return leader_of(error)

    def _way(self, name: str) -> str:
        """Where a master is reached from outside: as a process of its own host would reach it, cable or not."""
        if name not in self._ways:
            host = self.hosts[name]
            self._ways[name] = Proxy(self.addresses[name], connect=host.connect)
        return self._ways[name].address

    def status(self) -> control_pb2.StatusReply | None:
        for name, process in self.masters.items():
            if process.poll() is None and isinstance(said := self.ask(name), control_pb2.StatusReply):
                return said
        return None

    def leader(self, good: Callable[[str, int], bool] = lambda name, generation: True) -> tuple[str, int]:
        """Host and generation of the master that leads, once one leads of which this holds."""

        def look() -> tuple[str, int] | None:
            for name, process in self.masters.items():
                if process.poll() is not None:
                    continue
                said = self.ask(name)
                if isinstance(said, control_pb2.StatusReply) and good(name, said.generation):
                    return name, said.generation
            return None

        return self.wait_for(look, "a master that leads")

    def master_pid(self) -> int | None:
        return None

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def host(self, node: Node | str) -> Host:
        """Where a node runs."""
        return self.hosts[node if isinstance(node, str) else node.name]

    def host_of(self, name: str) -> int | None:
        return self.hosts[name].pid

    def command(self, name: str) -> list[str]:
        runner, *rest = super().command(name)
        rest = [*self.flags_of.get(name, ()), *rest]
        if self.meeting_point:
            return [runner, f"--rdzv-endpoint={self.meeting_point}", "--rdzv-backend=c10d", *rest]
        addresses = self.given.get(name, ",".join(self.addresses.values()))
        return [runner, f"--master={addresses}", *rest]

    def start(self, *names: str, hold: str = "", environment: Mapping[str, str] | None = None) -> list[Node]:
        started = []
        # Behind the clock, what is tested may lie elsewhere than where it is installed from.
        path = os.pathsep.join(filter(None, (str(CLOCK), os.environ.get("PYTHONPATH"))))
        for name in names:
            own = {"PYTHONPATH": path, **self.environments.get(name, {}), **(environment or {})}
            started += super().start(name, hold=hold, environment=own)
        return started

    def power_cut(self, node: Node) -> None:
        """The node's host is gone at once, and its agent with it."""
        node.expected = -9
        self.host(node).power_cut()
        node.process.wait(PATIENCE)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def diagnosis(self, lines: int = 25) -> str:
        parts = [super().diagnosis(lines)]
        for log in [*self.directory.glob("*.log"), *self.directory.glob("logs/**/agent.log")]:
            parts += [f"---- {log.relative_to(self.directory)}", *_tail(log, lines)]
        return "\n".join(parts)

    def close(self) -> None:
        for host in self.hosts.hosts.values():
            if host.is_up:
                host.plug()
        super().close()
        for process in self.masters.values():
            process.kill()
            process.wait(PATIENCE)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        for way in self._ways.values():
            way.close()


@contextmanager
def hosted_job(
    directory: Path,
    names: Sequence[str] = ("h1", "h2", "h3", "m"),
    *,
    network: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[HostedJob]:
    """A job on hosts with these names, and the hosts; all of it ends. `network`: of `Hosts`, `options`: of the job."""
    with (
        Hosts(directory / "hosts", names, **(network or {})) as hosts,
        HostedJob(directory / "job", hosts=hosts, **options) as job,
    ):
        yield job


def _tail(path: Path, lines: int) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
