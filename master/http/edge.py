"""The HTTP edge: health, metrics, the job and its events as JSON, orders, and one page for a person.

It runs in the master's own process and loop, so it shows the state that was stored and nothing older. It needs the
extra `http` (FastAPI, uvicorn, prometheus-client); without it the master runs as well, but without this edge.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from ..record.descriptors import HTTP_CONNECTIONS
from ..server.auth import TlsFiles
from ..server.listener import Listener
from .api import Api
from .guard import Bounded, Guard
from .looking import Looking, Master
from .metrics import CONTENT_TYPE, metrics
from .page import PAGE, PAGE_POLICY

__all__ = ("Edge",)

log = logging.getLogger(__name__)

# Seconds between two looks at the job, for the page's curve.
SAMPLE_INTERVAL_SECONDS = 1.0
# The most bytes of a request's line and headers.
LONGEST_HEAD_BYTES = 16 << 10
# Host names under which a loopback edge answers, so that a foreign name that was pointed here is refused.
LOOPBACK_NAMES = ["127.0.0.1", "localhost", "[::1]"]


class _Server(uvicorn.Server):
    """Leaves the process's signals to the master."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Edge:
    """Serves from `start` to `close`."""

    def __init__(
        self,
        master: Master,
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
        self._looking, self._guard = Looking(master), Guard(token)
        self._api = Api(master, self._guard, self._looking)
        self._stands_by = stands_by
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
        # The browsable pages of the schema would load scripts from elsewhere.
        app = FastAPI(
            title="Dal Segno",
            summary="Control and events of one elastic training job",
            version="1",
            docs_url=None,
            redoc_url=None,
            openapi_url="/api/v1/openapi.json",
        )
        app.add_exception_handler(RequestValidationError, _wrong)
        app.add_middleware(Bounded)
        if loopback:
            app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK_NAMES)
        app.add_api_route("/", _page, include_in_schema=False)
        app.add_api_route("/healthz", self._health, summary="200 while the process works")
        app.add_api_route("/readyz", self._ready, summary="200 where agents are served")
        reads = [Depends(self._guard.reads)]
        app.add_api_route("/metrics", self._metrics, dependencies=reads, summary="Prometheus' text format")
        app.include_router(self._api.router)
        return app

    async def _health(self) -> PlainTextResponse:
        if not self._stands_by():
            await self._looking.now()
        return PlainTextResponse("ok\n")

    async def _ready(self) -> PlainTextResponse:
        """200 where agents are served, 503 with the reason elsewhere."""
        await self._looking.now()
        return PlainTextResponse("ok\n")

    async def _metrics(self) -> PlainTextResponse:
        return PlainTextResponse(metrics(await self._looking.now()), media_type=CONTENT_TYPE)

    async def _sample(self) -> None:
        while True:
            with contextlib.suppress(HTTPException):
                await self._looking.now()
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


async def _wrong(request: Request, error: Exception) -> JSONResponse:
    """What is wrong with a request, without its values: some of them (NaN, lone surrogates) are no JSON."""
    assert isinstance(error, RequestValidationError)
    found = [{name: one[name] for name in ("type", "loc", "msg")} for one in error.errors()]
    return JSONResponse({"detail": found}, 422)


async def _page() -> HTMLResponse:
    return HTMLResponse(PAGE, headers={"content-security-policy": PAGE_POLICY})


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("the HTTP edge failed; the job goes on without it", exc_info=task.exception())
