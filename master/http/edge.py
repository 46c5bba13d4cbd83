"""The HTTP edge: health, metrics, the job and its events as JSON, orders, and one page for a person.

It runs in the master's own process, so it shows the state that was stored and nothing older, but in a thread of its
own: however many ask, a turn does not wait for them. It needs the extra `http` (FastAPI, uvicorn, prometheus-client);
without it the master runs as well, but without this edge.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import sys
import threading
from collections.abc import Callable

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from ..server.auth import TlsFiles
from .across import Across
from .api import Api
from .guard import Guard
from .looking import Looking, Master
from .metrics import CONTENT_TYPE, metrics
from .page import PAGE, PAGE_POLICY
from .port import Port, application, say_failure

__all__ = ("Edge",)

# Seconds between two looks at the job, for the page's curve.
SAMPLE_INTERVAL_SECONDS = 1.0
# Seconds in which the thread ends, once it is told to.
CLOSE_SECONDS = 4.0
# The longest that a thread keeps the interpreter while another one waits for it. Python's own 0.005 would be waited for
# behind each look of the master's loop at its sockets: dozens of times in a turn.
SWITCH_SECONDS = 0.0005


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

        A master that `stands_by` is healthy, but not ready. Made in the master's running loop. Raises OSError if the
        address is not available.
        """
        self._master = Across(master, asyncio.get_running_loop())
        self._looking, self._guard = Looking(self._master), Guard(token)
        self._api = Api(self._master, self._guard, self._looking)
        self._stands_by = stands_by
        self._port = Port(self._application(loopback), host, port, tls)
        self.address = self._port.address

        self._thread: threading.Thread | None = None
        self._over: concurrent.futures.Future[None] = concurrent.futures.Future()

    def start(self) -> None:
        """Starts to answer. An edge that fails says so in the log; the job does not depend on it."""
        sys.setswitchinterval(SWITCH_SECONDS)
        # What was imported for it stays: no collection needs to look at it.
        gc.freeze()
        self._thread = threading.Thread(target=self._run, name="dalsegno-http", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Ends within a bounded time: open connections are cut."""
        if not self._over.done():
            self._over.set_result(None)
        if self._thread is None:
            await self._port.close()
        else:
            await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            say_failure(error)

    async def _serve(self) -> None:
        await self._master.open()
        self._port.start(self._sample())
        await asyncio.wrap_future(self._over)
        await self._port.close()

    def _application(self, loopback: bool) -> FastAPI:
        app = application("Control and events of one elastic training job", loopback, "/api/v1/openapi.json")
        app.add_exception_handler(RequestValidationError, _wrong)
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
            self._port.drop_old()
            await asyncio.sleep(SAMPLE_INTERVAL_SECONDS)


async def _wrong(request: Request, error: Exception) -> JSONResponse:
    """What is wrong with a request, without its values: some of them (NaN, lone surrogates) are no JSON."""
    assert isinstance(error, RequestValidationError)
    found = [{name: one[name] for name in ("type", "loc", "msg")} for one in error.errors()]
    return JSONResponse({"detail": found}, 422)


async def _page() -> HTMLResponse:
    return HTMLResponse(PAGE, headers={"content-security-policy": PAGE_POLICY})
