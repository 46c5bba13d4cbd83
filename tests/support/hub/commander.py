"""The part of the Commander that milestones need: a head, a list of milestones, and what was ever committed."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dalsegno.elastic.checkpoint import Manifest


class TestCommander:
    """Answers on loopback until it is closed.

    Attributes:
        milestones: what counts, newest first.
        told: how often it was told of one, refused ones included.
        away: it answers 503.
    """

    __test__ = False

    def __init__(self, run_id: str) -> None:
        self.run_id, self.away = run_id, False
        self.committed: list[Manifest] = []
        self.milestones: list[dict[str, Any]] = []
        self.told: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def answer(self, status: int, content: object) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                self.answer(503 if outer.away else 200, outer.run())

            def do_POST(self) -> None:
                given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if outer.away:
                    self.answer(503, {"detail": "away"})
                    return
                outer.told.append(given)
                counts = (given["checkpoint"], given["digest"]) in [(m.name, m.digest) for m in outer.committed]
                if counts and given not in outer.milestones:
                    outer.milestones.insert(0, given)
                self.answer(200 if counts else 409, {} if counts else {"detail": "never committed"})

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def run(self) -> dict[str, Any]:
        head = self.committed[-1] if self.committed else None
        return {
            "run_id": self.run_id,
            "state": "RUNNING",
            "head": None if head is None else {"name": head.name, "step": head.step, "digest": head.digest},
            "milestones": self.milestones,
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
