"""The master as one server: store, brain and gRPC put together, and the order in which they start and stop."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from dalsegno.protos import control_pb2, control_pb2_grpc

from .auth import TlsFiles, TokenInterceptor, check_exposure
from .driver import HELD_UP_AFTER, Brain, Driver, Views
from .service import ControlService
from .store import Store
from .watchers import End, Watcher, Watchers

__all__ = ("BindError", "ControlServer", "ServerOptions")

log = logging.getLogger(__name__)

# How long open calls may take to end when the server stops; in seconds.
STOP_GRACE = 1.0
# Inventories name every checkpoint of a run.
MESSAGE_LIMIT = 16 << 20


class BindError(Exception):
    """The address cannot be listened on; one line for a person."""


@dataclass(frozen=True)
class ServerOptions:
    """Where and to whom the master speaks."""

    host: str = "127.0.0.1"
    # 0: any free one.
    port: int = 0
    token: str | None = None
    tls: TlsFiles | None = None
    # Listen beyond this machine without a token.
    insecure: bool = False
    held_up_after: float = HELD_UP_AFTER


class ControlServer:
    """`start`, then `run` until the store is lost, superseded or `stop` is called; then `close`."""

    def __init__(
        self,
        job_id: str,
        brain: Brain[Any],
        store: Store,
        options: ServerOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises AuthError where `options` would let everybody in."""
        check_exposure(options.host, options.token, options.insecure)
        self._job_id = job_id
        self._brain = brain
        self._store = store
        self._options = options
        self._clock = clock
        self.watchers = Watchers()
        self._server: grpc.aio.Server | None = None
        self._driver: Driver | None = None
        # Sequence number of the last notice in the log.
        self._logged = 0
        self.address = ""

    @property
    def driver(self) -> Driver:
        assert self._driver is not None, "start() comes first"
        return self._driver

    async def start(self) -> None:
        """Listens, takes the store over, and serves.

        The port comes first: a start that fails for it must not supersede a master that serves well.
        Raises BindError, AuthError, StoreError.
        """
        server = self._new_server()
        port = self._bind(server)
        self._driver = Driver(
            self._brain,
            self._store,
            self._publish,
            clock=self._clock,
            held_up_after=self._options.held_up_after,
        )
        service = ControlService(self._job_id, self._driver, self.watchers)
        control_pb2_grpc.add_ControlServicer_to_server(service, server)
        await server.start()
        self._server = server
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        self.address = f"{host}:{port}"
        log.info("serving job %s at %s, generation %d", self._job_id, self.address, self._driver.generation)

    async def run(self) -> None:
        """Serves until `stop`. Raises Superseded, StoreError."""
        await self.driver.run()

    def stop(self) -> None:
        self.driver.stop()

    async def close(self) -> None:
        """Ends streams and calls, then lets go of port and store; safe after a failed start."""
        self.watchers.end_all(End.STOPPING)
        if self._server is not None:
            await self._server.stop(STOP_GRACE)
        self._store.close()

    def _new_server(self) -> grpc.aio.Server:
        interceptors = [] if self._options.token is None else [TokenInterceptor(self._options.token)]
        return grpc.aio.server(
            interceptors=interceptors,
            options=[
                # Otherwise a second master on the same port would get every other connection instead of an error.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MESSAGE_LIMIT),
                ("grpc.max_send_message_length", MESSAGE_LIMIT),
                # Agents find a dead connection by pings, also while they only watch.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )

    def _bind(self, server: grpc.aio.Server) -> int:
        host, port = self._options.host, self._options.port
        _probe(host, port)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._options.tls is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, self._options.tls.credentials())
        except RuntimeError as error:
            raise BindError(f"cannot listen on {address}: {error}") from error
        return bound

    def _publish(self) -> None:
        """Tells every agent what is new for it. One that cannot be told is cut off, and asks again."""
        views = self.driver.views()
        for watcher in self.watchers.ready():
            try:
                self._tell(watcher, views)
            except Exception:
                log.exception("%s cannot be told what to do: its stream is ended", watcher.node)
                watcher.end(End.STOPPING)

    def _tell(self, watcher: Watcher, views: Views) -> None:
        key = views.key(watcher.node, watcher.incarnation)
        if key is not None and watcher.knows(views.common, key):
            return
        if key is None:
            directive = control_pb2.Directive(
                generation=self.driver.generation,
                fenced=control_pb2.Fenced(reason="this incarnation is not known to the master: register anew"),
            )
        else:
            directive = views.directive(watcher.node)
        self._log_news(directive)
        watcher.offer(directive)
        if key is None:
            watcher.end(End.FENCED)

    def _log_news(self, directive: control_pb2.Directive) -> None:
        """What the agents' consoles show is in the master's log, too; after a restart the last of it once more."""
        for notice in directive.notices:
            if notice.sequence > self._logged:
                self._logged = notice.sequence
                log.log(logging.WARNING if notice.warning else logging.INFO, "%s", notice.text)


def _probe(host: str, port: int) -> None:
    """Binds as gRPC will, because its own error does not say what is wrong."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise BindError(
            f"cannot listen on {host} port {port}: {error.strerror or error}: choose another --port or --host"
        ) from error
