"""Connections between agents that end, stand still or are no agents' at all."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dalsegno.agent.memory import connection as connections
from dalsegno.agent.memory import incoming, service, wire
from dalsegno.agent.memory.calls import PeerError, SendPace
from dalsegno.agent.memory.connection import BrokenOff, Connection
from dalsegno.protos import control_pb2, peer_pb2
from dalsegno.protos.addresses import host_and_port
from dalsegno.protos.peer_address import shown
from tests.support.checkpoints.memory import JOB, RUN, SMALL, TOKEN, called, manifest_of, nodes
from tests.support.jobs.memory_node import sent_step
from tests.support.jobs.unreachable import unreachable

pytestmark = pytest.mark.timeout(120)
STEP = "step-10.e1.1"


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("what", ["hold", "fetch"])
def test_an_agent_that_ends_lets_the_other_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool, what: str
) -> None:
    """At once, whichever moment it is: it is no stall, for which the other one would wait for 30 s."""
    feed = incoming.Incoming.feed

    def slowly(self: incoming.Incoming, data: memoryview) -> None:
        time.sleep(0.005)
        feed(self, data)

    monkeypatch.setattr(incoming.Incoming, "feed", slowly)
    manifest, files = sent_step(200_000_000)
    for run in range(6):
        with nodes(tmp_path / f"{run}-1", 1, tls=tls) as (one,), nodes(tmp_path / f"{run}-2", 1, tls=tls) as (two,):
            one.tier.open_epoch(RUN, 1, 0, [])
            one.writes(manifest, 0, files)
            one.holds(manifest.name, 0)
            part = one.tier._holdings.part(RUN, manifest.name, manifest.digest, 0)
            assert part is not None
            with ThreadPoolExecutor(1) as pool:
                if what == "hold":
                    call = pool.submit(one.tier._peers.send, two.tier.address, part, SendPace(None))
                else:
                    wanted = one.tier.address, RUN, manifest.name, manifest.digest, 0
                    call = pool.submit(two.tier._peers.fetch, *wanted, lambda: False)  # type: ignore[arg-type]
                two.wait_for(lambda run=run: list((tmp_path / f"{run}-2").rglob(".in-*/0")))  # type: ignore[misc]
                time.sleep(0.1)
                began = time.monotonic()
                two.tier.close()
                with pytest.raises(PeerError):
                    call.result(60)
                one.wait_for(lambda one=one: not one.tier._watch._transfers)  # type: ignore[misc]
                assert time.monotonic() - began < 20


@pytest.mark.parametrize("tls", [True, False])
def test_who_says_nothing_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool) -> None:
    """Another address, and the end, are quick on the agent's main thread; nothing is served at the old one."""
    monkeypatch.setattr(wire, "PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(service, "_STOP_WITHIN_SECONDS", 60.0)
    with nodes(tmp_path, 1, tls=tls) as (one,):
        silent = socket.create_connection(host_and_port(shown(one.tier.address)), 10)
        with silent:
            one.wait_for(lambda: one.tier._server._serving)
            time.sleep(0.2)  # it waits for a handshake now, or for the first word
            began = time.monotonic()
            one.tier.listen("127.0.0.2")
            one.tier.close()
            assert time.monotonic() - began < 30


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(1 << 16):
            self.request.sendall(data)


@contextlib.contextmanager
def echo() -> Iterator[str]:
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Echo)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_an_echo_holds_nothing(tmp_path: Path) -> None:
    """What it sends back is no answer."""
    with nodes(tmp_path, 1) as (one,), echo() as address:
        manifest = manifest_of(STEP, {0: SMALL[0]})
        one.tier.open_epoch(RUN, 1, 0, [address])
        one.writes(manifest, 0, SMALL[0])
        one.wait_for(lambda: one.said)
        assert "what answers there is no agent" in one.said[0]
        assert [held.copies for held in one.tier.held()] == [()]


def test_a_host_whose_name_is_none(tmp_path: Path) -> None:
    """From a master that makes no sense: the next holder is asked."""
    with nodes(tmp_path, 2) as (one, two):
        manifest = manifest_of(STEP, {1: SMALL[1]})
        two.tier.open_epoch(RUN, 1, 1, [])
        two.writes(manifest, 1, SMALL[1])
        two.holds(STEP, 1)
        found = one.gathers(manifest, {1: ["a..b:7000", f"{'x' * 70}:7000", two.tier.address]})
        assert isinstance(found, control_pb2.Checkpoint), found


def test_each_address_of_a_host_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first one leads nowhere, as IPv6 in half a network, the next one has as long as it."""
    monkeypatch.setattr(wire, "PATIENCE_SECONDS", 0.5)
    with nodes(tmp_path, 1) as (one,), unreachable() as nowhere:
        own = host_and_port(one.tier.address)
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in (host_and_port(nowhere), own)]
        monkeypatch.setattr(wire.socket, "getaddrinfo", lambda *_, **__: found)
        with called(one):
            pass


def test_what_a_caller_names_is_logged_in_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However long it is, and whatever is in it."""
    caplog.set_level("INFO")
    with nodes(tmp_path, 1) as (one,):
        for name in ("x\n2026-01-01 ERROR forged \x1b[31m", "y" * 5_000_000):
            fetch = peer_pb2.FetchRequest(job_id=JOB, run_id=RUN, name=name, digest="d")
            with called(one) as opened:
                opened.send(peer_pb2.Hello(credential=TOKEN), peer_pb2.Call(fetch=fetch))
                assert opened.receive_answer().code == 5
        one.wait_for(lambda: "yyy" in caplog.text)
        assert "forged" in caplog.text
        for record in caplog.records:
            assert record.getMessage().isprintable()
            assert len(record.getMessage()) < 1000


def test_many_strangers_fill_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are hung up on, and that is said once."""
    monkeypatch.setattr(service, "MOST_CONNECTIONS", 2)
    warnings: list[object] = []
    monkeypatch.setattr(service.logger, "warning", lambda *words: warnings.append(words))
    with nodes(tmp_path, 1) as (one,), contextlib.ExitStack() as strangers:
        place = host_and_port(shown(one.tier.address))
        for _ in range(100):
            strangers.enter_context(socket.create_connection(place, 10))
        one.wait_for(lambda: warnings)
    assert len(warnings) <= 3


def test_a_fault_of_the_callee_is_said_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not as a firewall's."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with nodes(tmp_path, 2) as (one, two):
        manifest = manifest_of(STEP, {0: SMALL[0]})
        monkeypatch.setattr(two.tier._fence, "check", broken)
        one.tier.open_epoch(RUN, 1, 0, [two.tier.address])
        one.writes(manifest, 0, SMALL[0])
        one.wait_for(lambda: one.said)
        assert "it has failed there: its agent.log says how" in one.said[0]
        assert "firewall" not in one.said[0]


def test_bytes_that_are_still_on_their_way_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow line the last answer is long in coming, and nothing stands still meanwhile."""
    monkeypatch.setattr(connections, "_LOOK_MS", 100)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.socket()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
    moved: list[float] = []

    def read() -> None:
        for _ in range(20):
            time.sleep(0.15)
            far.recv(100_000, socket.MSG_WAITALL)
        far.close()

    with contextlib.closing(Connection(near)) as sender, ThreadPoolExecutor(1) as pool:
        near.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                near.send(bytes(100_000))
        near.setblocking(True)
        sender.moved = lambda: moved.append(time.monotonic())
        reading = pool.submit(read)
        with pytest.raises(BrokenOff):
            sender.receive_answer()
        reading.result(60)
    assert len(moved) >= 3


def test_a_deadline_holds_for_who_always_has_something_to_say() -> None:
    """A stranger that trickles, or floods, is cut off as one that is silent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    stop = threading.Event()

    def flood() -> None:
        with contextlib.suppress(OSError):
            while not stop.is_set():
                far.sendall(bytes(1 << 16))

    # It is closed before the flood is waited for: only then is the other side told in any case.
    with ThreadPoolExecutor(1) as pool, far, contextlib.closing(Connection(near)) as refusing:
        pool.submit(flood)
        began = time.monotonic()
        refusing.hang_up()
        stop.set()
        refusing.cancel()
        assert time.monotonic() - began < 20
