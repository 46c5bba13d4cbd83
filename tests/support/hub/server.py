"""The hub's process: `python -m tests.support.hub.server ROOT TOKEN [--multipart BYTES]` prints its port."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from . import api, large, xet
from .faults import Fault, Faults
from .repos import Repos

PIECE = 1 << 16
Answer = tuple[int, dict[str, str], bytes | Path]


class State:
    """What all requests share."""

    def __init__(self, root: Path, token: str, multipart: int, large_from: int, takes_xet: bool) -> None:
        self.repos, self.faults, self.token, self.multipart = Repos(root), Faults(), token, multipart
        self.large_from, self.xet = large_from, takes_xet
        self.root, self.url, self.cdn = root, "", ""
        self.lock = threading.Lock()
        self.asked: list[dict[str, Any]] = []
        self.received = 0
        self.samples: list[tuple[float, int]] = []
        self.xet_files: dict[str, str] = {}  # SHA-256 -> Xet's hash
        self.xet_terms: dict[str, list[xet.Term]] = {}

    def count(self, size: int) -> None:
        with self.lock:
            self.received += size
            self.samples.append((time.monotonic(), self.received))


class Cut(Exception):
    """The connection is to end now."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    state: State
    timeout = 120

    def log_message(self, *args: object) -> None:
        pass

    def _body(self, fault: Fault | None) -> Iterator[bytes]:
        """The request's body in pieces, however its length is told."""
        limit = fault.after if fault is not None and fault.kind == "cut" and self.command != "GET" else None
        seen = 0
        for piece in self._pieces():
            self.state.count(len(piece))
            seen += len(piece)
            if limit is not None and seen >= limit:
                raise Cut
            yield piece
        if limit is not None:
            raise Cut

    def _pieces(self) -> Iterator[bytes]:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline().split(b";")[0], 16):
                while size:
                    piece = self.rfile.read1(min(size, PIECE))
                    if not piece:
                        raise Cut
                    size -= len(piece)
                    yield piece
                self.rfile.readline()
            self.rfile.readline()
            return
        rest = int(self.headers.get("Content-Length", 0))
        while rest:
            piece = self.rfile.read1(min(rest, PIECE))
            if not piece:
                raise Cut
            rest -= len(piece)
            yield piece

    def handle_any(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        if path.startswith("/_test/"):
            self._send(self.test(path.removeprefix("/_test/"), b"".join(self._pieces())), None)
            return
        # A proxy's client names the whole address.
        self.path = f"{url.path}?{url.query}" if url.query else url.path
        line = f"{self.command} {path}"
        fault = self.state.faults.take(line)
        noted: dict[str, Any] = {"line": line, "at": time.monotonic(), "body": 0, "status": 0, "agent": ""}
        with self.state.lock:
            self.state.asked.append(noted)
        before = self.state.received
        try:
            answer = self._answer(path, query, fault)
            noted["status"], noted["body"] = answer[0], self.state.received - before
            noted["range"] = self.headers.get("Range", "")
            if fault is not None and fault.kind == "lose":
                raise Cut
            self._send(answer, fault)
        except Cut:
            noted["cut"] = True
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, path: str, query: dict[str, str], fault: Fault | None) -> Answer:
        if fault is not None and fault.kind == "status":
            for _ in self._body(fault):
                pass
            headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
            return fault.status, headers, json.dumps({"error": "as it was ordered"}).encode()
        if fault is not None and fault.kind == "slow":
            time.sleep(fault.seconds)  # why: this is the fault
        if fault is not None and fault.kind == "hold":
            while self.connection.recv(1, socket.MSG_PEEK):  # until the client is gone
                time.sleep(0.05)  # why: bytes that are there would come at once again and again
            raise Cut
        body = self._body(fault)
        for pattern, method, function in (*api.ROUTES, *large.ROUTES, *xet.ROUTES):
            found = re.fullmatch(pattern, path)
            if found and self.command in method:
                is_open = function in (*large.OPEN, *xet.OPEN)
                if not is_open and self.headers.get("Authorization") != f"Bearer {self.state.token}":
                    return self._drained(body, 401, "Invalid username or password.")
                return function(self.state, self, found, query, body)
        return self._drained(body, 404, "there is no such page")

    @staticmethod
    def _drained(body: Iterator[bytes], status: int, error: str) -> Answer:
        """The body that nobody wanted is read: another request may come behind it."""
        for _ in body:
            pass
        return status, {}, json.dumps({"error": error}).encode()

    def _send(self, answer: Answer, fault: Fault | None) -> None:
        status, headers, body = answer
        size = body.stat().st_size if isinstance(body, Path) else len(body)
        start, end = 0, size
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and status == 200 and self.command == "GET":
            start = int(asked[1])
            end = min(size, int(asked[2]) + 1) if asked[2] else size
            if start >= size:
                status, start, end = 416, 0, 0
            else:
                status = 206
                headers = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{size}"}
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = fault.after if fault is not None and fault.kind == "cut" else end - start
        for piece in pieces(body, start, start + min(limit, end - start)):
            if fault is not None and fault.kind == "damage":
                piece = bytes([piece[0] ^ 1]) + piece[1:]
            self.wfile.write(piece)
            if fault is not None and fault.kind == "slow":
                self.wfile.flush()
                time.sleep(fault.seconds / 50)  # why: this is the fault
        if limit < end - start:
            self.wfile.flush()
            raise Cut

    def test(self, what: str, body: bytes) -> Answer:
        """What tests order and ask."""
        state = self.state
        given: Any = json.loads(body) if body else None
        if what == "fault":
            state.faults.order(Fault(**given))
        elif what == "clear":
            state.faults.clear()
            with state.lock:
                state.asked.clear()
                state.samples.clear()
        elif what == "set":
            for key, value in given.items():
                assert hasattr(state, key), key
                setattr(state, key, value)
        found = {"repos": state.repos.show, "asked": lambda: state.asked, "samples": lambda: state.samples}
        with state.lock:
            return 200, {}, json.dumps(found[what]() if what in found else None).encode()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any


def pieces(body: bytes | Path, start: int, end: int) -> Iterator[bytes]:
    if isinstance(body, bytes):
        if start < end:
            yield body[start:end]
        return
    with body.open("rb") as file:
        file.seek(start)
        while start < end and (piece := file.read(min(PIECE, end - start))):
            start += len(piece)
            yield piece


class Server(ThreadingHTTPServer):
    """A thread for each connection; one that was cut says nothing."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, address: Any) -> None:
        import sys

        if not isinstance(sys.exc_info()[1], OSError | Cut):
            super().handle_error(request, address)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("token")
    parser.add_argument("--multipart", type=int, default=0, help="large files travel in parts of so many bytes")
    parser.add_argument("--large-from", type=int, default=1 << 14, help="files of so many bytes are large ones")
    parser.add_argument("--xet", action="store_true", help="takes uploads the Xet way")
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    state = State(given.root, given.token, given.multipart, given.large_from, given.xet)
    Handler.state = state
    server = Server(("127.0.0.1", given.port), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    # Large files are read from another host, as from the real hub.
    state.cdn = f"http://localhost:{server.server_address[1]}"
    print(server.server_address[1], flush=True)
    server.serve_forever()


Route = tuple[str, tuple[str, ...], Callable[..., Answer]]

if __name__ == "__main__":
    main()
