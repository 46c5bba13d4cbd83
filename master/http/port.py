"""A port on which FastAPI answers, in the loop in which it is started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.middleware.trustedhost import TrustedHostMiddleware

from ..record.descriptors import HTTP_CONNECTIONS
from ..server.auth import TlsFiles
from ..server.listener import Listener
from .guard import Bounded, Receive, Scope, Send

__all__ = ("Port", "application", "say_failure")

log = logging.getLogger(__name__)

# The most bytes of a request's line and headers.
LONGEST_HEAD_BYTES = 16 << 10
# Seconds in which answers that are on their way end.
CLOSE_SECONDS = 2.0
# Host names under which a loopback edge answers, so that a foreign name that was pointed here is refused.
# An older Starlette sees only the first bracket of an IPv6 address, with which no name begins.
LOOPBACK_NAMES = ["127.0.0.1", "localhost", "[::1]", "["]


def say_failure(error: BaseException) -> None:
    """Logs that nobody is answered any more, with why."""
    log.error("the HTTP edge failed; the job goes on without it", exc_info=error)


class _Server(uvicorn.Server):
    """Leaves the process's signals to the master."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Port:
    """Serves from `start` to `close`."""

    def __init__(
        self,
        app: FastAPI,
        listener: Listener,
        tls: TlsFiles | None = None,
        failed: Callable[[BaseException], None] = say_failure,
    ) -> None:
        """`listener` is open, and is closed with this. `failed` hears the error if serving fails."""
        self._tasks: list[asyncio.Task[None]] = []
        self._app, self._socket, self._failed = app, listener, failed
        # uvicorn's loggers stay unconfigured: its errors reach the master's log, and requests are not logged, not even
        # those that are no HTTP: a stranger without a token would fill the disk with lines about them.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._server = _Server(
            uvicorn.Config(
                self._answer,
                interface="asgi3",
                # The other end of the connection, whatever it says of a proxy before it.
                proxy_headers=False,
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

    def start(self, *beside: Coroutine[Any, Any, None]) -> None:
        """Starts to answer, with work `beside`."""
        for work in (self._server.serve(sockets=[self._socket]), *beside):
            task = asyncio.create_task(work)
            task.add_done_callback(self._note)
            self._tasks.append(task)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if client := scope.get("client"):
            self._socket.begin(tuple(client))
        await self._app(scope, receive, send)

    def _note(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def drop_old(self) -> None:
        """Ends connections whose last request began longer ago than any takes."""
        self._socket.drop_old()

    async def close(self) -> None:
        """Ends within a bounded time: open connections are cut."""
        # What is not answered yet ends because its reader is gone. uvicorn would log a traceback if it were cancelled.
        self._socket.end_all()
        self._server.should_exit = True
        done, _ = await asyncio.wait(self._tasks[:1], timeout=CLOSE_SECONDS) if self._tasks else (set(), set())
        self._server.force_exit = True
        for task in self._tasks:
            if task not in done:
                task.cancel()
        self._socket.close()


def application(title: str, loopback: bool, schema: str, address: str) -> FastAPI:
    """An empty application with what guards every port of ours, at this `address`; `schema`: path of its schema."""
    # The browsable pages of the schema would load scripts from elsewhere.
    app = FastAPI(title="Dal Segno", summary=title, version="1", docs_url=None, redoc_url=None, openapi_url=schema)
    app.add_middleware(Bounded)
    if loopback:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK_NAMES, address.rpartition(":")[0]])
    return app


def _ssl_options(tls: TlsFiles | None) -> dict[str, Any]:
    """TLS options for uvicorn: the token must not go over the network in the clear."""
    if tls is None:
        return {}
    options: dict[str, Any] = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    if tls.client_ca is not None:
        options |= {"ssl_ca_certs": str(tls.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options
