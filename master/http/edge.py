"""The HTTP edge: health, metrics, the job as JSON, and one page for a person. Read-only.

It runs in the master's own process and loop, so it shows the state that was stored and nothing older. It needs the
extra `http` (FastAPI, uvicorn); without it the master runs as well, but without this page.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from google.protobuf.json_format import MessageToDict

from dalsegno.protos import control_pb2

from ..brain.events import Reply
from ..record.descriptors import HTTP_CONNECTIONS
from ..server.auth import TlsFiles
from ..server.listener import Listener
from .page import PAGE, PAGE_POLICY

__all__ = ("Edge", "Trace", "finite", "metrics")

log = logging.getLogger(__name__)

# Seconds between two looks at the job, and the most of them that the page's curve shows.
SAMPLE_INTERVAL_SECONDS = 1.0
CURVE_POINTS = 1000
# The most bytes of a request's line and headers.
LONGEST_HEAD_BYTES = 16 << 10
# Host names under which a loopback edge answers, so that a foreign name that was pointed here is refused.
LOOPBACK_NAMES = ["127.0.0.1", "localhost", "[::1]"]
_TRAINING = (control_pb2.PHASE_RUNNING, control_pb2.PHASE_DRAINING)

Status = Callable[[], Awaitable[Reply]]


@dataclass
class Trace:
    """What this master has seen of the run: the loss curve, and the productive share of the time."""

    curve: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=CURVE_POINTS))
    highest: int = 0
    epoch: int = 0
    first_at: float | None = None
    moved_at: float = 0.0
    productive: float = 0.0

    def see(self, status: control_pb2.StatusReply, now: float) -> None:
        """Notes one status; `now` is monotonic seconds."""
        if status.step <= self.highest or status.phase not in _TRAINING:
            return
        if self.first_at is None:
            self.first_at = now
        elif status.epoch == self.epoch:
            # Only steps beyond the furthest one count, because steps repeated after a crash bring nothing new.
            self.productive += now - self.moved_at
        self.highest, self.epoch, self.moved_at = status.step, status.epoch, now
        self.curve.append((status.step, status.loss))

    def goodput(self, now: float) -> float | None:
        """Productive share of the time since this master saw the first step, 0 to 1; None before."""
        if self.first_at is None or self.productive == 0.0:
            return None
        return self.productive / max(now - self.first_at, self.productive)


def metrics(status: control_pb2.StatusReply, goodput: float | None) -> str:
    """The job in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats)."""
    rows: list[tuple[str, str, str, float]] = [
        ("dalsegno_generation", "gauge", "Generation of this master", status.generation),
        ("dalsegno_epoch", "gauge", "The last opened epoch", status.epoch),
        ("dalsegno_phase", "gauge", "1 waiting, 2 forming, 3 running, 4 draining, 5 succeeded, 6 failed", status.phase),
        ("dalsegno_step", "gauge", "Optimizer steps of the run", status.step),
        ("dalsegno_committed_step", "gauge", "Step of the newest committed checkpoint", status.head.step),
        ("dalsegno_loss", "gauge", "The last loss that a node reported", status.loss),
        (
            "dalsegno_paused_seconds",
            "counter",
            "Time without steps because of changes",
            sum(e.paused for e in status.history),
        ),
        ("dalsegno_lost_steps", "counter", "Steps done again after a loss", sum(e.lost_steps for e in status.history)),
    ]
    if goodput is not None:
        rows.append(("dalsegno_goodput_ratio", "gauge", "Share of the time that brought the run forward", goodput))
    lines = []
    for name, kind, text, value in rows:
        suffix = "_total" if kind == "counter" else ""
        lines += [f"# HELP {name}{suffix} {text}.", f"# TYPE {name}{suffix} {kind}", f"{name}{suffix} {value:g}"]
    lines += ["# HELP dalsegno_nodes Nodes by role.", "# TYPE dalsegno_nodes gauge"]
    for role in ("member", "spare", "joining", "leaving"):
        count = sum(node.role == role for node in status.nodes)
        lines.append(f'dalsegno_nodes{{role="{role}"}} {count}')
    return "\n".join(lines) + "\n"


class _Server(uvicorn.Server):
    """Leaves the process's signals to the master."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Edge:
    """Serves from `start` to `close`."""

    def __init__(
        self,
        status: Status,
        host: str,
        port: int,
        token: str | None,
        *,
        loopback: bool,
        tls: TlsFiles | None = None,
        stands_by: Callable[[], bool] = lambda: False,
    ) -> None:
        """Listens at once (port 0: any free one). If `token` is given, everything that shows the job requires it.

        A master that `stands_by` is healthy, but not ready. Raises OSError if the address is not available.
        """
        self._status = status
        self._stands_by = stands_by
        self._token = None if token is None else f"Bearer {token}".encode()
        self._trace = Trace()
        self._tasks: list[asyncio.Task[None]] = []
        self._socket = Listener.open(host, port)
        bound = self._socket.getsockname()[1]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        # uvicorn's loggers stay unconfigured: its errors reach the master's log, and requests are not logged.
        self._server = _Server(
            uvicorn.Config(
                self._application(loopback),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                http="h11",
                h11_max_incomplete_event_size=LONGEST_HEAD_BYTES,
                backlog=HTTP_CONNECTIONS,
                **_ssl_options(tls),
            )
        )

    def start(self) -> None:
        """Starts to answer. An edge that fails says so in the log; the job does not depend on it."""
        for work in (self._server.serve(sockets=[self._socket]), self._sample()):
            task = asyncio.create_task(work)
            task.add_done_callback(_log_failure)
            self._tasks.append(task)

    async def close(self) -> None:
        """Ends within a bounded time: open connections are cut."""
        self._server.should_exit = self._server.force_exit = True
        done, _ = await asyncio.wait(self._tasks[:1], timeout=2.0) if self._tasks else (set(), set())
        for task in self._tasks:
            if task not in done:
                task.cancel()
        self._socket.close()

    def _application(self, loopback: bool) -> FastAPI:
        app = FastAPI(title="Dal Segno", docs_url=None, redoc_url=None, openapi_url=None)
        if loopback:
            app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK_NAMES)
        app.add_api_route("/", _page)
        app.add_api_route("/healthz", self._health)
        app.add_api_route("/readyz", self._ready)
        app.add_api_route("/metrics", self._metrics)
        app.add_api_route("/api/job", self._job)
        return app

    async def _health(self) -> PlainTextResponse:
        if not self._stands_by():
            await self._now()
        return PlainTextResponse("ok\n")

    async def _ready(self) -> PlainTextResponse:
        """200 where agents are served, 503 with the reason elsewhere."""
        await self._now()
        return PlainTextResponse("ok\n")

    async def _metrics(self, request: Request) -> PlainTextResponse:
        self._check(request)
        text = metrics(await self._now(), self._trace.goodput(time.monotonic()))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _job(self, request: Request) -> JSONResponse:
        self._check(request)
        status = MessageToDict(
            await self._now(), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        seen = {"goodput": self._trace.goodput(time.monotonic()), "curve": list(self._trace.curve)}
        return JSONResponse(finite(status | seen))

    def _check(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if self._token is not None and not hmac.compare_digest(given, self._token):
            raise HTTPException(401, "missing or wrong token: send `authorization: Bearer <token>`")

    async def _now(self) -> control_pb2.StatusReply:
        reply = await self._status()
        if not isinstance(reply.message, control_pb2.StatusReply):
            raise HTTPException(503, reply.detail)
        self._trace.see(reply.message, time.monotonic())
        return reply.message

    async def _sample(self) -> None:
        while True:
            with contextlib.suppress(HTTPException):
                await self._now()
            self._socket.drop_old()
            await asyncio.sleep(SAMPLE_INTERVAL_SECONDS)


def _ssl_options(tls: TlsFiles | None) -> dict[str, Any]:
    """TLS options for uvicorn: the token must not go over the network in the clear."""
    if tls is None:
        return {}
    options: dict[str, Any] = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    if tls.client_ca is not None:
        options |= {"ssl_ca_certs": str(tls.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


async def _page() -> HTMLResponse:
    return HTMLResponse(PAGE, headers={"content-security-policy": PAGE_POLICY})


def finite(value: Any) -> Any:
    """The value with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("the HTTP edge failed; the job goes on without it", exc_info=task.exception())
