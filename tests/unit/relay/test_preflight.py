"""What a pod asks of its Commander before it trains."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="needs the extra relay")

from dalsegno.protos.options import UsageError
from dalsegno.protos.run_file import read_run_file
from dalsegno.relay.milestones.access import Access
from dalsegno.relay.preflight import Away, ask
from tests.support.jobs.commander import run_file


class Commander(BaseHTTPRequestHandler):
    """Says that agents go to `port`, or what else the test wants."""

    port = 0
    code, text = 200, b""

    def do_GET(self) -> None:
        body = type(self).text or json.dumps({"grpc_port": type(self).port}).encode()
        self.send_response(type(self).code)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def served() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Commander) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_port_that_is_not_open_is_named(served: HTTPServer, tmp_path: Path) -> None:
    """People open the port of the URL in a firewall, and forget the run's own: the pod waits, and a line says which."""
    file = read_run_file(run_file(tmp_path, commander=f"http://127.0.0.1:{served.server_port}"))
    with socket.socket() as master:
        master.bind(("127.0.0.1", 0))
        Commander.port = master.getsockname()[1]
        with pytest.raises(Away, match=rf"127\.0\.0\.1:{Commander.port}, where agents go.*: open that port, too"):
            ask(file, Access(""))
        master.listen()
        assert ask(file, Access("")) == {"grpc_port": Commander.port}


ODD = [(404, b" "), (403, b" "), (404, b"<html>no such tunnel</html>"), (200, b"<html>"), (200, b"[]"), (401, b"{}")]


@pytest.mark.parametrize(("code", "text"), ODD)
def test_what_stands_before_a_commander_does_not_deny(
    served: HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: bytes
) -> None:
    """A proxy or a tunnel answers in its own words while the Commander starts anew: the pod asks again."""
    monkeypatch.setattr(Commander, "code", code)
    monkeypatch.setattr(Commander, "text", text)
    file = read_run_file(run_file(tmp_path, commander=f"http://127.0.0.1:{served.server_port}"))
    with pytest.raises(Away) as away:
        ask(file, Access(""))
    assert "Expecting value" not in str(away.value), "that is Python's"


def test_a_commander_that_denies_is_believed(
    served: HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so in a line of its own."""
    monkeypatch.setattr(Commander, "code", 404)
    monkeypatch.setattr(Commander, "text", b'{"detail": "no run is called so"}')
    file = read_run_file(run_file(tmp_path, commander=f"http://127.0.0.1:{served.server_port}"))
    with pytest.raises(UsageError, match="no run is called so: start dlrover-master"):
        ask(file, Access(""))
