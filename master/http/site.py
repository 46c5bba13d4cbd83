"""What the HTTP edge shows: health, metrics, the job and its events as JSON, orders, and one page for a person.

It serves in the loop in which it is started, around any `Master`. It needs the extra `http` (FastAPI, uvicorn,
prometheus-client).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from ..server.auth import TlsFiles
from ..server.listener import Listener
from .api import Api
from .guard import Guard
from .looking import Looking, Master
from .metrics import CONTENT_TYPE, metrics
from .page import PAGE, PAGE_POLICY
from .port import Port, application, say_failure

__all__ = ("Site",)

# Seconds between two looks at the job, for the page's curve.
SAMPLE_INTERVAL_SECONDS = 1.0


class Site:
    """Serves from `start` to `close`."""

    def __init__(
        self,
        master: Master,
        listener: Listener,
        token: str | None,
        *,
        loopback: bool,
        tls: TlsFiles | None = None,
        stands_by: Callable[[], bool] = lambda: False,
        failed: Callable[[BaseException], None] = say_failure,
    ) -> None:
        """`listener` is open, and is closed with this. With a `token`, everything that shows the job requires it.

        A master that `stands_by` is healthy, but not ready. `failed` hears the error if serving fails.
        """
        self._looking, self._guard = Looking(master), Guard(token)
        self._api = Api(master, self._guard, self._looking)
        self._stands_by = stands_by
        self._port = Port(self._application(loopback, listener.address), listener, tls, failed)
        self.address = listener.address

    def start(self) -> None:
        """Starts to answer, in the running loop."""
        self._port.start(self._sample())

    async def close(self) -> None:
        """Ends within a bounded time: open connections are cut."""
        await self._port.close()

    def _application(self, loopback: bool, address: str) -> FastAPI:
        title = "Control and events of one elastic training job"
        app = application(title, loopback, "/api/v1/openapi.json", address)
        app.add_exception_handler(RequestValidationError, _wrong)
        app.add_api_route("/", _page, include_in_schema=False)
        app.add_api_route("/healthz", self._health, summary="200 while the process works")
        app.add_api_route("/readyz", self._ready, summary="200 where agents are served")
        reads = [Depends(self._guard.reads)]
        app.add_api_route("/metrics", self._metrics, dependencies=reads, summary="Prometheus' text format")
        app.include_router(self._api.router)
        return app

    async def _health(self) -> PlainTextResponse:
        """It looks at the master also where it stands by: so its loop goes on."""
        try:
            await self._looking.now()
        except HTTPException:
            if not self._stands_by():
                raise
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
