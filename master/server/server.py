"""The master as one server: store, brain and gRPC put together, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from dalsegno.protos import control_pb2
from dalsegno.protos.addresses import address_of
from dalsegno.protos.limits import MESSAGE_BYTES
from dalsegno.protos.text import one_line

from ..brain.chronicle import NOTICES
from ..brain.events import Reply
from ..record.descriptors import connections_left
from ..record.store import Store
from .auth import TlsFiles, TokenInterceptor, check_exposure
from .desk import Desk
from .driver import HELD_UP_AFTER_SECONDS, Brain, Driver, OrderLate, Views
from .feed import Feed
from .service import ORDERS, ControlService
from .watchers import MOST_STREAMS, End, Watcher, Watchers

__all__ = ("BindError", "ControlServer", "ServerOptions")

_LOOPBACK = "127.0.0.1"

log = logging.getLogger(__name__)

# Seconds that open calls may take to end when the server stops.
STOP_GRACE_SECONDS = 1.0
# The most bytes of an answer: the status of a job of very many nodes.
ANSWER_LIMIT_BYTES = 16 << 20
# The most calls at a time on one connection. An agent needs three; further calls wait until one ends.
CALLS_PER_CONNECTION = 100
# The most kinds of errors that are logged with a traceback.
MOST_FAILURES = 100
# The most calls at a time in all, including streams.
MOST_CALLS = MOST_STREAMS + 4096


# A connection whose cable was pulled sends no FIN. Pings find it dead, so that its stream does not stay for ever. There
# is no hurry: the node-timeout decides that a silent node is dead, and a frozen node must have all of it. In seconds.
PING_EVERY_SECONDS = 30.0
PING_TIMEOUT_SECONDS = 60.0


def _connections() -> list[tuple[str, int]]:
    """Options for each connection; times in milliseconds."""
    timeout = int(PING_TIMEOUT_SECONDS * 1000)
    return [
        # Connections that say nothing, or do not finish TLS, are closed. The token comes with each call, so idle ones
        # go, too.
        ("grpc.server_handshake_timeout_ms", 5000),
        ("grpc.max_connection_idle_ms", 10_000),
        # Agents find a dead connection by pings, even while they only watch.
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", int(PING_EVERY_SECONDS * 1000)),
        ("grpc.keepalive_timeout_ms", timeout),
        # Otherwise gRPC uses its own limit, whatever the line above says.
        ("grpc.http2.ping_timeout_ms", timeout),
    ]


class BindError(Exception):
    """The server cannot listen on the address; one line for a person."""


@dataclass(frozen=True)
class ServerOptions:
    """Where the master listens, and to whom it speaks."""

    host: str = "127.0.0.1"
    # 0: any free one.
    port: int = 0
    token: str | None = None
    tls: TlsFiles | None = None
    # Listen beyond this machine without a token.
    insecure: bool = False
    # dlrover-run started it: its own flags say where it listens.
    embedded: bool = False
    held_up_after: float = HELD_UP_AFTER_SECONDS


class ControlServer:
    """A master's gRPC server. Calls are served while it leads, and sent to the one that does while it stands by.

    One master alone: `start`, then `run`, which ends when the store is lost or superseded or `stop` is called; then
    `close`. One of several: `listen`, then `lead` and `run` as often as it leads.
    """

    def __init__(
        self,
        job_id: str,
        brain: Brain[Any],
        store: Store,
        options: ServerOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises AuthError if `options` would let everybody in."""
        check_exposure(options.host, options.token, options.insecure)
        self._job_id = job_id
        self._brain = brain
        self._store = store
        self._options = options
        self._clock = clock
        self.watchers = Watchers()
        self._desk = Desk()
        self.feed = Feed()
        self._server: grpc.aio.Server | None = None
        self._driver: Driver | None = None
        # Sequence number of the last notice in the log.
        self._logged = 0
        # Kinds of errors with directives, each logged once.
        self._failures: set[str] = set()
        self._most_connections = connections_left()
        self.address = ""
        # Where agents find this one of several masters, and the Unix seconds since which it has led.
        self.advertised, self._since = "", 0.0

    @property
    def driver(self) -> Driver:
        assert self._driver is not None, "start() comes first"
        return self._driver

    @property
    def leads(self) -> bool:
        """Whether agents are served here."""
        return self._desk.present is not None

    async def start(self) -> None:
        """Listens, takes the store over, and serves.

        The port comes first, because a failed start must not supersede a master that serves well.
        Raises BindError, AuthError, StoreError.
        """
        server = self._new_server()
        self._bind(server)
        self._open(self._new_driver())
        await self._begin(server)

    async def listen(self) -> None:
        """Listens; calls are not served before `lead`. Raises BindError, AuthError."""
        server = self._new_server()
        self._bind(server)
        self._desk.leader = ""
        await self._begin(server)

    async def lead(self) -> int:
        """Takes the store over; returns its generation. Agents are served by `run`. Raises StoreError."""
        self._driver = None
        # Agents are answered meanwhile: a store that is a service may take its time.
        self._driver = await asyncio.to_thread(self._new_driver)
        return self._driver.generation

    async def run(self) -> None:
        """Serves until `stop`; then this stands by. Raises Superseded, StoreError."""
        if self._desk.present is None:
            self._open(self.driver)
        try:
            await self.driver.run()
        finally:
            self.stand_by(None if self._desk.leader is None else "")

    def stop(self) -> None:
        """Ends `run` after the present turn, also one that begins only then."""
        if self._driver is not None:
            self._driver.stop()

    def stand_by(self, leader: str | None, etcd_is_away: bool = False) -> None:
        """Serves nobody: agents are sent to this address (HOST:PORT; empty: who leads is not known; None: to none).

        `etcd_is_away`: why it is not known, or may be so no longer; for people.
        """
        self._desk.leader, self._desk.etcd_is_away = leader, etcd_is_away
        if self._desk.present is not None:
            self._desk.present = None
            self.watchers.end_all(End.STOPPING)

    @property
    def turns(self) -> int:
        """How many turns of the brain have ended here."""
        return 0 if self._driver is None else self._driver.turns

    async def status(self) -> Reply:
        """The job's status, if this master leads."""
        if not self.leads:
            return Reply("UNAVAILABLE", self._desk.refusal, None)
        reply = await self.driver.status()
        if isinstance(reply.message, control_pb2.StatusReply):
            reply.message.store_trouble = self.driver.store_trouble
            if self.advertised:
                reply.message.leader.address, reply.message.leader.since = self.advertised, self._since
        return reply

    async def call(self, message: Message) -> Reply:
        """The brain's reply to a request of the HTTP edge, once it is stored, if this master leads."""
        if not self.leads:
            return Reply("UNAVAILABLE", self._desk.refusal, None)
        if not isinstance(message, ORDERS):
            return await self.driver.call(message)
        try:
            return await self.driver.order(message)
        except OrderLate as error:
            return Reply("UNAVAILABLE", str(error), None)

    async def close(self) -> None:
        """Ends streams and calls, then lets go of port and store; safe after a failed start."""
        # Nobody waits here for a leader any more.
        self.stand_by(None)
        self.watchers.end_all(End.STOPPING)
        if self._server is not None:
            await self._server.stop(STOP_GRACE_SECONDS)
        self._store.close()

    async def _begin(self, server: grpc.aio.Server) -> None:
        await server.start()
        self._server = server
        log.info("serving job %s at %s", self._job_id, self.address)

    def _new_driver(self) -> Driver:
        """Takes the store over. Raises StoreError."""
        return Driver(
            self._brain,
            self._store,
            self._publish,
            clock=self._clock,
            held_up_after=self._options.held_up_after,
        )

    def _open(self, driver: Driver) -> None:
        self._driver, self._since = driver, time.time()
        self.feed.show(driver.events())
        log.info("job %s has generation %d", self._job_id, driver.generation)
        self._logged = self._log_earlier()
        self._desk.present = ControlService(self._job_id, driver, self.watchers, self.status, self.feed).handlers()

    def _new_server(self) -> grpc.aio.Server:
        interceptors = [] if self._options.token is None else [TokenInterceptor(self._options.token)]
        server = grpc.aio.server(
            interceptors=interceptors,
            options=[
                # Otherwise a second master on the same port would get every other connection instead of an error.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MESSAGE_BYTES),
                ("grpc.max_send_message_length", ANSWER_LIMIT_BYTES),
                ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION),
                # Calls that came while the loop was busy wait: gRPC would cancel some of them above 1,000.
                ("grpc.server.max_pending_requests", MOST_CALLS),
                ("grpc.server.max_pending_requests_hard_limit", MOST_CALLS),
                *_connections(),
                ("grpc.max_allowed_incoming_connections", self._most_connections),
            ],
            maximum_concurrent_rpcs=MOST_CALLS,
        )
        server.add_generic_rpc_handlers((self._desk,))
        return server

    def _bind(self, server: grpc.aio.Server) -> None:
        host, port = self._options.host, self._options.port
        _probe(host, port, embedded=self._options.embedded)
        address = address_of(host, port)
        try:
            if self._options.tls is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, self._options.tls.credentials())
        except RuntimeError as error:
            raise BindError(f"cannot listen on {address}: {error}") from error
        self.address = address_of(host, bound)

    def _publish(self) -> None:
        """Sends every agent its directive if that changed. A stream that fails is cut off, and the agent asks again."""
        self.feed.show(self.driver.events())
        try:
            views = self.driver.views()
        except Exception as error:
            # Agents keep their last directive; the next turn tries again.
            self._log_failure("no directives for anybody", error)
            return
        for watcher in self.watchers.ready():
            try:
                self._tell(watcher, views)
            except Exception as error:
                # Only this node is affected: it opens another stream.
                self._failed(watcher, error)

    def _failed(self, watcher: Watcher, error: Exception) -> None:
        self._log_failure(f"no directive for {watcher.node}", error)
        watcher.end(End.BROKEN)

    def _log_failure(self, what: str, error: Exception) -> None:
        """Logs an error with its traceback, but not again for each turn and stream."""
        if (kind := one_line(repr(error), 200)) not in self._failures and len(self._failures) < MOST_FAILURES:
            self._failures.add(kind)
            log.error("%s", what, exc_info=error)

    def _tell(self, watcher: Watcher, views: Views) -> None:
        key = views.key(watcher.node, watcher.incarnation)
        if key is not None and watcher.knows(key):
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

    def _log_earlier(self) -> int:
        """Logs the last of what the record has from before this master, as that. Returns its last number.

        The master before may have had its log elsewhere. None of it needs attention now, and none is news: what this
        master has found out as it took the record over comes with the first directives. Numbers tell the one from the
        other, because a clock may be set back.
        """
        earlier = [event for event in self.feed.events if event.sequence <= self.driver.earlier]
        for event in [event for event in earlier if event.said][-NOTICES:]:
            log.info("earlier, %sZ: %s", time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.at)), event.text)
        return self.driver.earlier

    def _log_news(self, directive: control_pb2.Directive) -> None:
        """Logs what the agents' consoles show, as it comes."""
        for notice in directive.notices:
            if notice.sequence > self._logged:
                self._logged = notice.sequence
                log.log(logging.WARNING if notice.warning else logging.INFO, "%s", notice.text)


def _probe(host: str, port: int, *, embedded: bool = False) -> None:
    """Binds as gRPC will, because gRPC's own error does not say what is wrong."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:  # the second one of a name like a..b
        why, what = getattr(error, "strerror", None) or error, "choose another --port or --host"
        if embedded and port:
            what = "choose another port in --rdzv-endpoint or --master-port (the same on all nodes)"
        if host == _LOOPBACK and getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            # dlrover-run's own master serves there, and has no such flags.
            what = f"this machine's loopback has no {_LOOPBACK}: `ip link set lo up; ip addr add {_LOOPBACK}/8 dev lo`"
        raise BindError(f"cannot listen on {host} port {port}: {why}: {what}") from error
