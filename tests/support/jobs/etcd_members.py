"""A real etcd on this machine: members that a test may kill, stop and start again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc

with contextlib.suppress(ImportError):  # who uses them asks for aetcd first
    from aetcd.rpc import rpc_pb2, rpc_pb2_grpc

from dalsegno.master.record.chunks import Head, decoded
from tests.support.hosts.hosts import Host
from tests.support.hosts.namespaces import Inside
from tests.support.jobs.ports import free_port
from tests.support.jobs.proxy import Proxy
from tests.support.jobs.wires import Wires

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
        flags: more of etcd's own.
        wired: members reach each other through `wires`; only on this machine.

    Attributes:
        endpoints: of all members, as `--store` has them.
        wires: between the members, if they are wired.
    """

    def __init__(
        self,
        directory: Path,
        count: int,
        hosts: Sequence[Host] = (),
        flags: Sequence[str] = (),
        wired: bool = False,
    ) -> None:
        self._directory, self._hosts, self._flags = directory, hosts, flags
        self._names = [f"m{number}" for number in range(count)]
        self._clients = {name: self._place(number) for number, name in enumerate(self._names)}
        self._peers = {name: self._place(number) for number, name in enumerate(self._names)}
        self._processes: dict[str, subprocess.Popen[bytes] | Inside] = {}
        # Where its peers find each one.
        self._advertised = dict(self._peers)
        self._wires: Wires | None = None
        if wired:
            self._wires = Wires(list(self._peers.values()), self.pid)
            self._advertised = dict(zip(self._names, self._wires.addresses, strict=True))
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

    @property
    def wires(self) -> Wires:
        """Between the members."""
        assert self._wires is not None, "they were not started with wires"
        return self._wires

    def pid(self, number: int) -> int:
        """Of a member's process; 0: it has none yet."""
        process = self._processes.get(self._names[number])
        return 0 if process is None else process.pid

    def gone(self, number: int) -> bool:
        """Whether a member's process has ended."""
        return self._processes[self._names[number]].poll() is not None

    def start(self, number: int, token: str = "etcd", state: str = "new") -> None:
        """Starts a member, or starts it again with what it had. Without its data a token makes another cluster.

        `state`: "existing" for one that was added to those that run.
        """
        assert ETCD is not None, MISSING
        name = self._names[number]
        client, peer = (f"http://{places[name]}" for places in (self._clients, self._peers))
        cluster = ",".join(f"{one}=http://{place}" for one, place in self._advertised.items())
        command = [ETCD, "--name", name, "--data-dir", str(self._directory / name), "--log-level", "warn"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", f"http://{self._advertised[name]}"]
        command += ["--initial-cluster", cluster, "--initial-cluster-state", state, "--initial-cluster-token", token]
        command += self._flags
        with open(self._directory / f"{name}.log", "ab") as log:
            if self._hosts:
                host = self._hosts[number]
                self._processes[name] = host.popen(command, self._directory, os.environ, stdout=log, stderr=log)
            else:
                # A signal to whoever has started them, as Ctrl-C, is not for them.
                self._processes[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

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
        raise AssertionError(f"member {number} is not healthy after {PATIENCE:.0f} s:\n{self.log(number)[-3000:]}")

    def log(self, number: int) -> str:
        """What a member has said so far."""
        return (self._directory / f"{self._names[number]}.log").read_text(errors="replace")

    def leader(self) -> int:
        """The number of the member that leads the others."""
        found = self.find_leader()
        assert found is not None, "no member leads"
        return found

    def find_leader(self) -> int | None:
        """As `leader`, of the highest term if one has not heard of the next; None: none of those that answer leads."""
        found: list[tuple[int, int]] = []
        for number, endpoint in enumerate(self._reached):
            request = urllib.request.Request(f"http://{endpoint}/v3/maintenance/status", data=b"{}", method="POST")
            try:
                with urllib.request.urlopen(request, timeout=5) as reply:
                    said = json.load(reply)
            except OSError:
                # One that is gone, or stopped.
                continue
            if said.get("leader") == said["header"]["member_id"]:
                found.append((int(said["raftTerm"]), number))
        return max(found)[1] if found else None

    def history(self, key: str) -> Iterator[bytes]:
        """All values that a key has had since it is there, in order; where etcd was compacted, those since then."""
        with grpc.insecure_channel(self._reached[0]) as channel:
            stub = rpc_pb2_grpc.KVStub(channel)
            now = stub.Range(rpc_pb2.RangeRequest(key=key.encode()), timeout=10)
            seen = 0
            for revision in range(now.kvs[0].create_revision, now.header.revision + 1):
                try:
                    found = stub.Range(rpc_pb2.RangeRequest(key=key.encode(), revision=revision), timeout=10).kvs
                except grpc.RpcError as error:
                    if seen or error.code() is not grpc.StatusCode.OUT_OF_RANGE:
                        raise
                    continue
                if found and found[0].mod_revision > seen:
                    seen = found[0].mod_revision
                    yield found[0].value

    def heal(self) -> None:
        """All members are there again, and reach each other."""
        if self._wires is not None:
            self._wires.heal()
        for number in range(len(self._names)):
            if self.gone(number):
                self.start(number)
            else:
                self.send(number, signal.SIGCONT)
        for number in range(len(self._names)):
            self.wait(number)

    def assert_histories(self) -> None:
        """Reads back all that the head of each job's record has been; for the end of a scene."""
        self.heal()
        with grpc.insecure_channel(self._reached[0]) as channel:
            asked = rpc_pb2.RangeRequest(key=b"/dalsegno/", range_end=b"/dalsegno0", keys_only=True)
            keys = [one.key.decode() for one in rpc_pb2_grpc.KVStub(channel).Range(asked, timeout=10).kvs]
        for key in keys:
            if key.endswith("/head"):
                assert_one_history([decoded(data) for data in self.history(key)])

    def send(self, number: int, signum: signal.Signals) -> None:
        """Signals a member; after SIGKILL it is gone."""
        process = self._processes[self._names[number]]
        process.send_signal(signum)
        if signum == signal.SIGKILL:
            process.wait()

    def forget(self, number: int) -> None:
        """A member dies with its disk."""
        self.send(number, signal.SIGKILL)
        shutil.rmtree(self._directory / self._names[number])

    def admit(self, number: int) -> None:
        """Has one that lost its data taken in under its name, as an operator does: `member remove`, `member add`."""
        name = self._names[number]
        with grpc.insecure_channel(self._reached[(number + 1) % len(self._names)]) as channel:
            stub = rpc_pb2_grpc.ClusterStub(channel)
            known = stub.MemberList(rpc_pb2.MemberListRequest(), timeout=10).members
            (old,) = [one.ID for one in known if one.name == name]
            insist(lambda: stub.MemberRemove(rpc_pb2.MemberRemoveRequest(ID=old), timeout=10))
            url = f"http://{self._advertised[name]}"
            insist(lambda: stub.MemberAdd(rpc_pb2.MemberAddRequest(peerURLs=[url]), timeout=10))
        self.start(number, state="existing")
        self.wait(number)

    @contextmanager
    def put_back(self, number: int) -> Iterator[None]:
        """In the end a member, the only one, has what it had at the beginning, as from an operator's backup."""
        data, kept = self._directory / self._names[number], self._directory / "kept"
        self.send(number, signal.SIGKILL)
        shutil.copytree(data, kept)
        self.start(number)
        self.wait(number)
        yield
        self.send(number, signal.SIGKILL)
        shutil.rmtree(data)
        kept.rename(data)
        self.start(number)
        self.wait(number)

    def close(self) -> None:
        """Ends all members."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        for way in self._ways:
            way.close()
        if self._wires is not None:
            self._wires.close()


def insist(change: Callable[[], object]) -> None:
    """Changes who the members are, as soon as etcd lets it.

    It adds nobody ("unhealthy cluster") before those that are there have been connected for 5 s without a break.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            change()
            return
        except grpc.RpcError as error:
            if "unhealthy cluster" not in str(error.details()) or time.monotonic() > deadline:
                raise
        time.sleep(0.2)  # why: etcd tells nobody when it would


def assert_one_history(heads: Sequence[Head]) -> None:
    """None was written over unseen, generations never fall, and each has one writer."""
    numbers = [head.number for head in heads]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), f"the chain of heads breaks: {numbers}"
    generations = [head.generation for head in heads]
    assert generations == sorted(generations), f"generations fall: {generations}"
    writers = {(head.generation, head.owner) for head in heads}
    assert len(writers) == len(set(generations)), f"two writers of one generation: {sorted(writers)}"


@contextmanager
def etcd_members(
    directory: Path,
    count: int = 1,
    hosts: Sequence[Host] = (),
    *,
    flags: Sequence[str] = (),
    wired: bool = False,
    unread: str = "",
) -> Iterator[Members]:
    """An etcd of so many members within this; see `Members`.

    In the end all revisions of each job's head are read back, whatever was killed or cut. `unread`: why that cannot be.
    """
    directory.mkdir(parents=True, exist_ok=True)
    members = Members(directory, count, hosts, flags, wired)
    try:
        yield members
        if not unread:
            members.assert_histories()
    finally:
        members.close()
