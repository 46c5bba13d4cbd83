"""One name of several masters: each connection begins at the next address, whose certificate has the name."""

from __future__ import annotations

import argparse
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from dalsegno.agent.commands import asking
from dalsegno.agent.control.connection import Connector, Credentials, code_of
from dalsegno.agent.control.places import MasterPlaces
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos import control_pb2_grpc
from tests.support.jobs.certificates import Authority

NAME = "masters.test"
_OPEN = Credentials()


class Names:
    """Knows one name, whose addresses may change."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.asked = 0

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked += 1
        if host != NAME:
            raise socket.gaierror(-2, "Name or service not known")
        return self.addresses


def test_each_connection_begins_at_the_next_address() -> None:
    """All of them are in each target, and each is the first of one before any is the first of two."""
    names = Names("10.0.0.1", "10.0.0.2", "10.0.0.3")
    places = MasterPlaces(names)
    found = [places.target(f"{NAME}:7") for _ in range(6)]
    assert found[0] == "ipv4:10.0.0.1:7,10.0.0.2:7,10.0.0.3:7"
    assert [one.split(":")[1] for one in found] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"] * 2
    assert all(sorted(one[5:].split(",")) == ["10.0.0.1:7", "10.0.0.2:7", "10.0.0.3:7"] for one in found)
    assert names.asked == 6


def test_an_address_that_is_new_comes_next() -> None:
    """Pods come and go behind a name, and its servers turn the order round."""
    names = Names("10.0.0.1", "10.0.0.2")
    places = MasterPlaces(names)
    assert places.target(f"{NAME}:7").startswith("ipv4:10.0.0.1:")
    names.addresses = ["10.0.0.2", "10.0.0.1"]
    assert places.target(f"{NAME}:7").startswith("ipv4:10.0.0.2:")
    names.addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.9"]
    assert places.target(f"{NAME}:7") == "ipv4:10.0.0.9:7,10.0.0.1:7,10.0.0.2:7"


def test_two_kinds_of_addresses_both_get_their_turn() -> None:
    places = MasterPlaces(Names("fd00::1", "fd00::2", "10.0.0.1"))
    assert [places.target(f"{NAME}:7") for _ in range(3)] == [
        "ipv6:[fd00::1]:7,[fd00::2]:7",
        "ipv6:[fd00::2]:7,[fd00::1]:7",
        "ipv4:10.0.0.1:7",
    ]


@pytest.mark.parametrize(
    ("address", "known"),
    [
        ("10.1.1.1:7", ["10.0.0.1", "10.0.0.2"]),
        ("[fd00::1]:7", ["10.0.0.1", "10.0.0.2"]),
        (f"{NAME}:7", ["10.0.0.1"]),
        # As of localhost: gRPC tries both at once.
        (f"{NAME}:7", ["fd00::1", "10.0.0.1"]),
        (f"{NAME}:7", []),
        (f"{NAME}:7", ["no address", "neither"]),
        ("elsewhere.test:7", ["10.0.0.1", "10.0.0.2"]),
        (NAME, ["10.0.0.1", "10.0.0.2"]),
        (f"{NAME}:port", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_without_a_choice_grpc_does_it_all(address: str, known: list[str]) -> None:
    """It tries IPv4 and IPv6 side by side, and knows what to say of a name that is not known."""
    assert MasterPlaces(Names(*known)).target(address) == ""
    assert MasterPlaces(Names(*known)).targets(address) == [""]


class Standby(control_pb2_grpc.ControlServicer):
    """Answers with its number, or stands by and knows no leader."""

    def __init__(self, number: int, leads: bool) -> None:
        self.number, self.leads, self.asked = number, leads, 0

    def GetStatus(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        self.asked += 1
        if not self.leads:
            # As masters do: gRPC itself does not try again.
            context.set_trailing_metadata((("grpc-retry-pushback-ms", "-1"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "this master stands by")
        return pb.StatusReply(job_id=f"answered by {self.number}")


class Two:
    """Two masters behind one name, at 127.0.0.1 and 127.0.0.2; the second leads."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.masters = [Standby(1, leads=False), Standby(2, leads=True)]
        self.names, self.port = Names("127.0.0.1", "127.0.0.2"), 0
        self._servers: list[grpc.Server] = []
        self._made: list[Connector] = []
        for master in self.masters:
            server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
            control_pb2_grpc.add_ControlServicer_to_server(master, server)
            place = f"127.0.0.{master.number}:{self.port}"
            self.port = (
                server.add_insecure_port(place) if credentials is None else server.add_secure_port(place, credentials)
            )
            server.start()
            self._servers.append(server)
        self.address = f"{NAME}:{self.port}"

    def connector(self, credentials: Credentials = _OPEN) -> Connector:
        """An agent's; it is closed with the masters."""
        self._made.append(Connector(lambda: [self.address], lambda: credentials, places=MasterPlaces(self.names)))
        return self._made[-1]

    def close(self) -> None:
        for connector in self._made:
            connector.close()
        for server in self._servers:
            server.stop(0).wait(5)

    def answers(self, connector: Connector, calls: int) -> list[str]:
        """What so many calls were answered; each that fails gives its link up."""
        found = []
        for _ in range(calls):
            link = connector.get()
            assert link is not None
            try:
                found.append(link.stub.GetStatus(pb.StatusRequest(), timeout=10).job_id)
            except grpc.RpcError as error:
                found.append(code_of(error).name)
                connector.failed(link)
        return found


@pytest.fixture
def two() -> Iterator[Two]:
    one = Two()
    yield one
    one.close()


def test_a_standby_that_names_nobody_is_not_asked_again(two: Two) -> None:
    """The next connection goes to the other master behind the name."""
    assert two.answers(two.connector(), 2) == ["UNAVAILABLE", "answered by 2"]
    assert [master.asked for master in two.masters] == [1, 1]


def test_the_certificate_is_checked_for_the_name(tmp_path: Path) -> None:
    """Not for the address to which the connection goes."""
    authority = Authority(tmp_path / "keys")
    own, other = (authority.issue(name, f"DNS:{name}") for name in (NAME, "other.test"))
    for pair, answers in ((own, ["UNAVAILABLE", "answered by 2"]), (other, ["UNAVAILABLE", "UNAVAILABLE"])):
        keys = [(pair.key.read_bytes(), pair.path.read_bytes())]
        two = Two(grpc.ssl_server_credentials(keys))
        try:
            assert two.answers(two.connector(Credentials(tls_ca=authority.path)), 2) == answers
        finally:
            two.close()


def test_closing_does_not_wait_for_a_lookup() -> None:
    """It may take as long as name servers are silent; nothing is opened afterwards."""
    asked, answer = threading.Event(), threading.Event()

    def lookup(host: str, port: int) -> list[str]:
        asked.set()
        assert answer.wait(10)
        return ["127.0.0.1", "127.0.0.2"]

    connector = Connector(lambda: [f"{NAME}:1"], Credentials, places=MasterPlaces(lookup))
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(connector.get()))
    thread.start()
    assert asked.wait(10)
    connector.close()
    answer.set()
    thread.join(10)
    assert found == [None]


def test_a_command_asks_all_addresses_of_a_name(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "MasterPlaces", lambda: MasterPlaces(two.names))
    monkeypatch.setattr(asking, "_master_of", lambda options: ([two.address], Credentials()))
    asked = asking.AskedMaster(argparse.Namespace(job_id="job", master=two.address))
    assert asked.call("GetStatus", pb.StatusRequest()).job_id == "answered by 2"
    two.masters[1].leads = False
    with pytest.raises(asking.NoAnswer, match="this master stands by"):
        asked.call("GetStatus", pb.StatusRequest())
    assert [master.asked for master in two.masters] == [2, 2]
