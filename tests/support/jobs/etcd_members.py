"""A real etcd on this machine: members that a test may kill, stop and start again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc

from tests.support.hosts.hosts import Host
from tests.support.hosts.namespaces import Inside
from tests.support.jobs.ports import free_port
from tests.support.jobs.proxy import Proxy

ETCD = shutil.which("etcd")
MISSING = "no etcd here: install Debian's etcd-server"
# Seconds that members may take to agree on a leader.
PATIENCE = 60.0


class Members:
    """One etcd of some members, each with a directory of its own.

    Args:
        directory: of their data and logs.
        count: how many.
        hosts: where each one runs; none: all on this machine.

    Attributes:
        endpoints: of all members, as `--store` has them.
    """

    def __init__(self, directory: Path, count: int, hosts: Sequence[Host] = ()) -> None:
        self._directory, self._hosts = directory, hosts
        self._names = [f"m{number}" for number in range(count)]
        self._clients = {name: self._place(number) for number, name in enumerate(self._names)}
        self._peers = {name: self._place(number) for number, name in enumerate(self._names)}
        self._processes: dict[str, subprocess.Popen[bytes] | Inside] = {}
        self.endpoints = list(self._clients.values())
        # Where this process reaches them.
        self._ways = [Proxy(one, connect=host.connect) for one, host in zip(self.endpoints, hosts, strict=False)]
        self._reached = [way.address for way in self._ways] or self.endpoints
        try:
            for number in range(count):
                self.start(number)
            for number in range(count):
                self.wait(number)
        except BaseException:
            self.close()
            raise

    def _place(self, number: int) -> str:
        """HOST:PORT where nobody listens yet."""
        return f"{self._hosts[number].address if self._hosts else '127.0.0.1'}:{free_port()}"

    @property
    def url(self) -> str:
        """What `--store` takes."""
        return f"etcd://{','.join(self.endpoints)}"

    def start(self, number: int) -> None:
        """Starts a member, or starts it again with what it had."""
        assert ETCD is not None, MISSING
        name = self._names[number]
        client, peer = (f"http://{places[name]}" for places in (self._clients, self._peers))
        cluster = ",".join(f"{one}=http://{place}" for one, place in self._peers.items())
        command = [ETCD, "--name", name, "--data-dir", str(self._directory / name), "--log-level", "warn"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", cluster, "--initial-cluster-state", "new"]
        with open(self._directory / f"{name}.log", "ab") as log:
            if self._hosts:
                host = self._hosts[number]
                self._processes[name] = host.popen(command, self._directory, os.environ, stdout=log, stderr=log)
            else:
                self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def wait(self, number: int) -> None:
        """Until a member says that it is healthy: it knows a leader."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://{self._reached[number]}/health", timeout=1) as reply:
                    if b"true" in reply.read():
                        return
            except (OSError, urllib.error.URLError):
                pass
            time.sleep(0.05)  # why: a member tells nobody when it is there
        log = (self._directory / f"{self._names[number]}.log").read_text(errors="replace")
        raise AssertionError(f"member {number} is not healthy after {PATIENCE:.0f} s:\n{log[-3000:]}")

    def leader(self) -> int:
        """The number of the member that leads the others."""
        for number, endpoint in enumerate(self._reached):
            request = urllib.request.Request(f"http://{endpoint}/v3/maintenance/status", data=b"{}", method="POST")
            with urllib.request.urlopen(request, timeout=5) as reply:
                said = json.load(reply)
            if said["leader"] == said["header"]["member_id"]:
                return number
        raise AssertionError("no member leads")

    def history(self, key: str) -> Iterator[bytes]:
        """All values that a key has had, in order, as long as etcd was not compacted."""
        from aetcd.rpc import rpc_pb2, rpc_pb2_grpc

        with grpc.insecure_channel(self._reached[0]) as channel:
            stub = rpc_pb2_grpc.KVStub(channel)
            now = stub.Range(rpc_pb2.RangeRequest(key=key.encode()), timeout=10)
            seen = 0
            for revision in range(now.kvs[0].create_revision, now.header.revision + 1):
                found = stub.Range(rpc_pb2.RangeRequest(key=key.encode(), revision=revision), timeout=10).kvs
                if found and found[0].mod_revision > seen:
                    seen = found[0].mod_revision
                    yield found[0].value

    def send(self, number: int, signum: signal.Signals) -> None:
        """Signals a member; after SIGKILL it is gone."""
        process = self._processes[self._names[number]]
        process.send_signal(signum)
        if signum == signal.SIGKILL:
            process.wait()

    def close(self) -> None:
        """Ends all members."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        for way in self._ways:
            way.close()


@contextmanager
def etcd_members(directory: Path, count: int = 1, hosts: Sequence[Host] = ()) -> Iterator[Members]:
    """An etcd of so many members within this; each on one of the hosts, if there are any."""
    directory.mkdir(parents=True, exist_ok=True)
    members = Members(directory, count, hosts)
    try:
        yield members
    finally:
        members.close()
