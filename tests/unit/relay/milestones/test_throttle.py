"""The proxy that lets only so many bytes per second out."""

from __future__ import annotations

import http.client
import resource
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import urlsplit

import pytest

from dalsegno.relay.milestones import throttle
from dalsegno.relay.milestones.throttle import SAVED_SECONDS, Bucket, ThrottlingProxy, is_direct


def test_the_bucket_books_what_goes() -> None:
    """Whoever comes while others are booked waits behind them; what was not used is saved up for a moment only."""
    bucket = Bucket(100.0)
    assert bucket.delay(90, 10.0) == 0
    assert bucket.delay(100, 10.0) == pytest.approx(0.9 - SAVED_SECONDS)
    assert bucket.delay(10, 11.0) == pytest.approx(0.9 - SAVED_SECONDS)
    assert bucket.delay(1000, 50.0) == 0
    assert bucket.delay(1, 50.0) == pytest.approx(10 - SAVED_SECONDS)


@pytest.mark.parametrize(
    ("host", "exceptions", "direct"),
    [
        ("hub.example", "", False),
        ("hub.example", "*", True),
        ("hub.example", "localhost, hub.example", True),
        ("a.hub.example", ".hub.example", True),
        ("nothub.example", "hub.example", False),
        ("HUB.example", "hub.EXAMPLE", True),
    ],
)
def test_who_goes_straight(host: str, exceptions: str, direct: bool) -> None:
    """As curl reads `no_proxy`."""
    assert is_direct(host, exceptions) is direct


class _Origin(BaseHTTPRequestHandler):
    seen: list[tuple[str, dict[str, str]]]

    def do_PUT(self) -> None:
        rest = int(self.headers["Content-Length"])
        while rest:
            rest -= len(self.rfile.read1(min(rest, 65536)))
        self.seen.append((self.path, dict(self.headers)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def origin() -> Iterator[HTTPServer]:
    _Origin.seen = []
    server = HTTPServer(("127.0.0.1", 0), _Origin)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def _put(proxy: str, origin: HTTPServer, size: int, tunnel: bool) -> int:
    parts = urlsplit(proxy)
    word = b64encode(f"{parts.username}:{parts.password}".encode()).decode()
    headers = {"Proxy-Authorization": f"Basic {word}"}
    client = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    target = f"http://127.0.0.1:{origin.server_address[1]}/file"
    if tunnel:
        client.set_tunnel("127.0.0.1", origin.server_address[1], headers)
        target, headers = "/file", {}
    client.request("PUT", target, bytes(size), headers)
    status = client.getresponse().status
    client.close()
    return status


@pytest.mark.slow
@pytest.mark.parametrize("tunnel", [False, True])
def test_what_goes_out_keeps_to_the_rate(origin: HTTPServer, tunnel: bool) -> None:
    """Through a tunnel, as TLS goes, or not. No answer is held up, and the password stays here."""
    proxy = ThrottlingProxy(1_000_000, {})
    begun = time.monotonic()
    assert _put(proxy.url, origin, 1_500_000, tunnel) == 200
    assert 0.95 < time.monotonic() - begun < 2.5
    assert "proxy-authorization" not in {key.lower() for key in _Origin.seen[0][1]}


@pytest.mark.slow
@pytest.mark.parametrize("tunnel", [False, True])
def test_a_proxy_that_was_set_before_is_used(origin: HTTPServer, tunnel: bool) -> None:
    """It gets its own credentials, and the hosts that `no_proxy` names are reached without it."""
    before = ThrottlingProxy(1e9, {})
    key = "https" if tunnel else "http"
    proxy = ThrottlingProxy(1e9, {f"{key}_proxy": before.url})
    assert _put(proxy.url, origin, 1000, tunnel) == 200
    gone = f"http://127.0.0.1:{_closed_port()}"
    straight = ThrottlingProxy(1e9, {f"{key}_proxy": gone, "NO_PROXY": "127.0.0.1"})
    assert _put(straight.url, origin, 1000, tunnel) == 200
    assert len(_Origin.seen) == 2


@pytest.mark.slow
def test_nobody_else_may_use_it(origin: HTTPServer) -> None:
    """Another user of the machine does not get out by it."""
    proxy = ThrottlingProxy(1e9, {})
    port = urlsplit(proxy.url).port
    assert _put(f"http://dalsegno:wrong@127.0.0.1:{port}", origin, 10, tunnel=False) == 407
    assert _Origin.seen == []


def test_it_goes_on_where_descriptors_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload opens many files. Whoever calls meanwhile waits."""
    fell, pauses = threading.Event(), []
    monkeypatch.setattr(throttle.time, "sleep", lambda seconds: (pauses.append(seconds), fell.wait(10)))
    proxy = ThrottlingProxy(1e9, {})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client:
        client.settimeout(10)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            client.connect(("127.0.0.1", urlsplit(proxy.url).port))
            deadline = time.monotonic() + 10
            while not pauses and time.monotonic() < deadline:
                threading.Event().wait(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        fell.set()
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 407 ")


def _closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
