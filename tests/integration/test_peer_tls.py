"""TLS between agents that hold each other's memory: a proxy that remembers, and all that does not fit."""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509

from dalsegno.agent.memory import buddies, wire
from dalsegno.agent.memory.connection import BrokenOff, Connection, Stranger
from dalsegno.agent.memory.identity import MemoryIdentity, caller_context
from dalsegno.agent.memory.service import PeerServer
from dalsegno.agent.memory.wire import Wire
from dalsegno.elastic.checkpoint import Manifest, read_sealed, verify
from dalsegno.protos import control_pb2
from dalsegno.protos.addresses import host_and_port
from dalsegno.protos.peer_address import PeerAddress, shown
from tests.support.checkpoints.memory import JOB, RUN, SMALL, TOKEN, Node, manifest_of, nodes
from tests.support.jobs.proxy import Proxy, proxy

pytestmark = pytest.mark.timeout(120)
STEP = "step-10.e1.1"
# Of `SMALL`, and in no other file.
KNOWN = (b"zero" * 10, b"one" * 10)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the tries of a buddy."""
    monkeypatch.setattr(buddies, "_PAUSES_SECONDS", (0.1,))
    monkeypatch.setattr(buddies, "_SAY_AFTER_SECONDS", 0.0)


@contextmanager
def pair(root: Path, tls: bool = True) -> Iterator[tuple[Node, Node, Manifest]]:
    """Two agents with the parts 0 and 1 of a step; the first has not sent its own."""
    with nodes(root, 2, tls=tls) as (one, two):
        manifest = manifest_of(STEP, {rank: SMALL[rank] for rank in range(2)})
        one.tier.open_epoch(RUN, 1, 0, [])
        two.tier.open_epoch(RUN, 1, 1, [])
        two.writes(manifest, 1, SMALL[1])
        two.holds(STEP, 1)
        yield one, two, manifest


def led_through(way: Proxy, node: Node) -> str:
    """The address of a node, at the proxy."""
    return str(PeerAddress(way.address, PeerAddress.parse(node.tier.address).certificate))


def sends(node: Node, manifest: Manifest, address: str) -> None:
    """It writes part 0, if it has not yet, and sends it there."""
    node.tier.open_epoch(RUN, 1, 0, [address])
    if node.parts(STEP) != (0,):
        node.writes(manifest, 0, SMALL[0])
        node.holds(STEP, 0)


def works(one: Node, two: Node, manifest: Manifest) -> None:
    """Nobody was harmed: the second hands out what it has, and takes the other's part."""
    sends(one, manifest, two.tier.address)
    two.holds(STEP, 0, 1)
    found = one.gathers(manifest, {1: [two.tier.address]})
    assert isinstance(found, control_pb2.Checkpoint), found
    verify(one.memory() / STEP, read_sealed(one.memory() / STEP, manifest.digest))


# ---- what passes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tls", [True, False])
def test_who_listens_reads_neither_token_nor_state(tmp_path: Path, tls: bool) -> None:
    """In both directions; without TLS the same proxy reads both, so it looks in the right place."""
    with pair(tmp_path, tls) as (one, two, manifest), proxy(shown(two.tier.address), remembers=True) as way:
        address = led_through(way, two)
        sends(one, manifest, address)
        two.holds(STEP, 0, 1)
        assert isinstance(one.gathers(manifest, {1: [address]}), control_pb2.Checkpoint)
        verify(one.memory() / STEP, read_sealed(one.memory() / STEP, manifest.digest))
        seen = [bytes(one) for one in way.seen]
        secrets = (TOKEN.encode(), JOB.encode() + b"\x12", STEP.encode(), *KNOWN)
        found = {secret for secret in secrets if any(secret in one for one in seen)}
        assert found == (set() if tls else set(secrets))
        assert sum(map(len, seen)) > sum(len(data) for rank in range(2) for data in SMALL[rank].values())


def test_each_process_has_a_certificate_of_its_own(tmp_path: Path) -> None:
    """It never expires, so that clocks may differ; its key never touches a disk."""
    with nodes(tmp_path, 2, tls=True) as two:
        digests = {PeerAddress.parse(node.tier.address).certificate for node in two}
        assert len(digests) == 2
        assert "" not in digests
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"PRIVATE" in path.read_bytes()]
    made = x509.load_pem_x509_certificate(MemoryIdentity.make().certificate)
    assert (made.not_valid_before_utc.year, made.not_valid_after_utc.year) == (2000, 9999)


# ---- what does not fit -----------------------------------------------------------------------------------------------


class Curious(Wire):
    """Lets everybody in, and notes what they say first."""

    def __init__(self, own: MemoryIdentity | None, heard: list[str]) -> None:
        super().__init__(lambda: TOKEN, own)
        self._heard = heard

    def admits(self, credential: str) -> bool:
        self._heard.append(credential)
        return False


@contextmanager
def someone(curious: Curious) -> Iterator[str]:
    """A server that hears everybody; its address."""
    server = PeerServer("127.0.0.1", curious, None)  # type: ignore[arg-type]
    try:
        yield server.address
    finally:
        server.close()


def assert_refused(one: Node, two: Node, manifest: Manifest, address: str, words: str) -> None:
    """One line where it was to be sent, the same where it was to be fetched; and nobody is harmed."""
    sends(one, manifest, address)
    one.wait_for(lambda: one.said)
    reason = str(one.gathers(manifest, {1: [address]}))
    for line in (one.said[0], reason):
        assert words in line
        assert "\n" not in line
        assert "@" not in line
    assert "training goes on" in one.said[0] or "no replica of this node's memory checkpoints" in one.said[0]
    assert len(one.said) == 1
    works(one, two, manifest)
    assert len(one.said) == 1


def test_a_certificate_that_is_not_that_agents(tmp_path: Path) -> None:
    """What shows another one hears nothing, not even the token; with its own one it would."""
    heard: list[str] = []
    with pair(tmp_path) as (one, two, manifest), someone(Curious(MemoryIdentity.make(), heard)) as address:
        lying = str(PeerAddress(shown(address), PeerAddress.parse(two.tier.address).certificate))
        assert_refused(one, two, manifest, lying, "another certificate than the one that the agent has registered")
        assert not heard
        assert "not an agent of this job" in str(one.gathers(manifest, {2: [address]}))
        assert heard == [TOKEN]


def test_a_caller_hears_no_older_tls(tmp_path: Path) -> None:
    """In TLS 1.2 a handshake shows more, and a certificate is sent in plaintext."""
    with pair(tmp_path) as (_, two, _manifest):
        old = caller_context()
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
        plain = socket.create_connection(host_and_port(shown(two.tier.address)), 10)
        with plain, pytest.raises(ssl.SSLError):
            old.wrap_socket(plain)


def test_a_part_is_refused_while_it_is_being_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender hears why, and sends no more of it."""
    sent: list[int] = []
    plain = Connection.send_piece

    def counted(connection: Connection, piece: memoryview) -> None:
        sent.append(len(piece))
        plain(connection, piece)

    monkeypatch.setattr(Connection, "send_piece", counted)
    content = bytes(200_000_000)
    manifest = manifest_of(STEP, {0: {"x": content}})
    for tls in (True, False):
        root = tmp_path / str(tls)
        room = nodes(root / "full", 1, tls=tls, budget_bytes=1000)
        with nodes(root, 1, tls=tls) as (one,), room as (full,):
            sent.clear()
            one.tier.open_epoch(RUN, 1, 0, [full.tier.address])
            one.writes(manifest, 0, {"x": content})
            one.wait_for(lambda one=one: one.said)  # type: ignore[misc]
            assert "there is no room for part 0 of step-10.e1.1 (200 MB): the budget is 0.0 MB" in one.said[0]
            assert sum(sent) < len(content)


def test_an_agent_without_tls_beside_one_with(tmp_path: Path) -> None:
    """Neither calls the other; each says what to change."""
    with pair(tmp_path / "tls") as (one, two, manifest), pair(tmp_path / "plain", False) as (plain, other, _):
        assert_refused(one, two, manifest, plain.tier.address, "it does not speak TLS, and this agent sends nothing in")
        assert_refused(
            plain, other, manifest, two.tier.address, "it speaks TLS, and this agent does not: give --tls-ca"
        )
        certificate = PeerAddress.parse(two.tier.address).certificate
        lying = str(PeerAddress(plain.tier.address, certificate))
        assert "what answers there does not speak TLS" in str(one.gathers(manifest, {2: [lying]}))


def test_a_caller_in_plaintext_is_not_heard(tmp_path: Path) -> None:
    """Also one with the token, who knows where."""
    with pair(tmp_path) as (one, two, manifest):
        plain, address = Wire(lambda: TOKEN), shown(two.tier.address)
        with contextlib.closing(plain.connect(address)) as connection, pytest.raises((BrokenOff, Stranger)):
            plain.greet(connection, address)
        works(one, two, manifest)


@pytest.mark.parametrize("token", [None, "", "f" * 32])
def test_a_caller_without_the_token(tmp_path: Path, token: str | None) -> None:
    """TLS says who is called, and the token who calls."""
    others = nodes(tmp_path / "others", 1, tls=True, token=lambda: token)
    with pair(tmp_path) as (one, two, manifest), others as (stranger,):
        sends(stranger, manifest, two.tier.address)
        stranger.wait_for(lambda: stranger.said)
        assert "not an agent of this job" in stranger.said[0]
        assert "not an agent of this job" in str(stranger.gathers(manifest, {1: [two.tier.address]}))
        assert two.parts(STEP) == (1,)
        works(one, two, manifest)


@pytest.mark.parametrize("secret", ["", "f" * 32])
def test_a_job_without_a_token(tmp_path: Path, secret: str) -> None:
    """Agents then show the secret of whom they call. Who has only seen its certificate has none, and is not let in."""

    def no_token() -> str | None:
        return None

    made = [nodes(tmp_path / where, 2, tls=True, token=no_token) for where in ("job", "others")]
    with made[0] as (one, two), made[1] as (stranger, _):
        manifest = manifest_of(STEP, {rank: SMALL[rank] for rank in range(2)})
        for rank, node in enumerate((one, two)):
            node.tier.open_epoch(RUN, 1, rank, [])
        two.writes(manifest, 1, SMALL[1])
        two.holds(STEP, 1)
        seen = str(replace(PeerAddress.parse(two.tier.address), secret=secret))
        sends(stranger, manifest, seen)
        stranger.wait_for(lambda: stranger.said)
        assert "not an agent of this job" in stranger.said[0]
        assert "not an agent of this job" in str(stranger.gathers(manifest, {1: [seen]}))
        assert two.parts(STEP) == (1,)
        works(one, two, manifest)


DIGEST = "0" * 64


@pytest.mark.parametrize(
    "address",
    ["nonsense", "", f"{DIGEST[1:]}@127.0.0.1:7", f"{DIGEST}@127.0.0.1", "-----BEGIN", "x" * 70_000, "a\x1b:7"],
)
def test_addresses_that_are_none(tmp_path: Path, address: str) -> None:
    """From a master that makes no sense."""
    with pair(tmp_path) as (one, two, manifest):
        sends(one, manifest, address)
        one.wait_for(lambda: one.said)
        assert "its address is " in one.said[0]
        assert one.said[0].isprintable()
        assert len(one.said[0]) < 2000
        works(one, two, manifest)


@pytest.mark.parametrize("how", ["says nothing", "hangs up", "is not there"])
def test_what_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """It may be there again later: it is asked again, and then the next holder."""
    monkeypatch.setattr(wire, "PATIENCE_SECONDS", 0.5)
    with pair(tmp_path) as (one, two, manifest), socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if how == "is not there":
            listener.close()
        elif how == "hangs up":
            threading.Thread(target=_hang_up, args=(listener,), daemon=True).start()
        address = str(PeerAddress(f"127.0.0.1:{port}", PeerAddress.parse(two.tier.address).certificate))
        began = time.monotonic()
        sends(one, manifest, address)
        one.wait_for(lambda: one.said)
        assert "it cannot be reached: " in one.said[0]
        found = one.gathers(manifest, {1: [address, two.tier.address]})
        assert isinstance(found, control_pb2.Checkpoint), found
        assert time.monotonic() - began < 60
        one.tier.open_epoch(RUN, 1, 0, [two.tier.address])
        two.holds(STEP, 0, 1)


def _hang_up(listener: socket.socket) -> None:
    while True:
        try:
            listener.accept()[0].close()
        except OSError:
            return


def test_without_the_library_there_is_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather that than plaintext."""
    monkeypatch.setitem(sys.modules, "cryptography", None)
    node = Node(tmp_path / "node", tls=True)
    assert "TLS between agents needs the package cryptography" in node.tier.problem
    assert node.tier.address == ""
    assert not list((tmp_path / "node" / JOB).glob("*"))
    node.tier.close()
