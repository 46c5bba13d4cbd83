"""How agents reach each other: channels, servers, and the job's token, or the callee's secret, on every call.

Where the master speaks TLS they do, too, and never anything else: what would be plaintext is neither sent nor taken.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Callable
from typing import Any

import grpc

from dalsegno.protos import peer_pb2
from dalsegno.protos.addresses import address_of
from dalsegno.protos.peer_address import PeerAddress

from .identity import NAME, MemoryIdentity, StrangerError, certificate_at
from .pieces import MESSAGE_BYTES

__all__ = ["SERVICE", "TokenGate", "Wire", "code_of", "detail_of"]

SERVICE = peer_pb2.DESCRIPTOR.services_by_name["Peer"].full_name
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
]
_OF_SERVER: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),
    # A stranger that says nothing is cut off; each call of ours has a connection of its own.
    ("grpc.server_handshake_timeout_ms", 5000),
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.max_allowed_incoming_connections", 256),
]
_OF_CHANNEL: list[tuple[str, int]] = [
    # Repeated by us, with another address; gRPC would keep what it has sent.
    ("grpc.enable_retries", 0),
    # A new channel must not inherit the back-off of a closed one.
    ("grpc.use_local_subchannel_pool", 1),
    # So long an attempt to connect may take: a firewall that drops it says nothing.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Peers are reached directly, whatever proxy the environment names for the web.
    ("grpc.enable_http_proxy", 0),
]

logger = logging.getLogger(__name__)


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    """The status of a failed call."""
    return error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN


def detail_of(error: grpc.RpcError) -> str:
    """What the other side, or gRPC, says about a failed call."""
    return (error.details() if isinstance(error, grpc.Call) else "") or str(error)


class Wire:
    """The token of this moment, and what is opened with it. Thread-safe.

    Args:
        token: None: the job has none. With TLS a caller then shows the callee's secret, which it has from the master;
            without, everybody is let in, as the master does. While it raises OSError or ValueError (a
            file system that is away) the last one counts.
        identity: this agent's own, and whoever is called must have one, too. None: agents speak plaintext.
    """

    def __init__(self, token: Callable[[], str | None], identity: MemoryIdentity | None = None) -> None:
        self._ask, self._identity = token, identity
        self._lock = threading.Lock()
        self._last: str | None = None
        self._known = False

    def token(self) -> str | None:
        """Raises OSError or ValueError as long as it was never known."""
        with self._lock:
            try:
                self._last, self._known = self._ask(), True
            except (OSError, ValueError) as error:
                if not self._known:
                    raise
                logger.warning("the token cannot be read now: %s", error)
            return self._last

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """Sent with every call to an address that `channel` has opened. Raises as `token`."""
        token = self.token()
        shown = PeerAddress.parse(address).secret if token is None else token
        return (("authorization", f"Bearer {shown}"),) if shown else ()

    def admits(self, metadata: Any) -> bool:
        """Whether a call with these has the token, or the secret in its place."""
        try:
            wanted = self._wanted()
        except (OSError, ValueError) as error:
            logger.warning("a peer is refused, as the token cannot be read: %s", error)
            return False
        if wanted is None:
            return True
        given = [value for key, value in metadata or () if key == "authorization"]
        encoded = [value if isinstance(value, bytes) else value.encode() for value in given]
        # Constant time: an early mismatch must not be told from a late one.
        return any(hmac.compare_digest(value, f"Bearer {wanted}".encode()) for value in encoded)

    def _wanted(self) -> str | None:
        """What callers have to show. Raises as `token`."""
        token = self.token()
        return self._identity.secret if token is None and self._identity is not None else token

    def channel(self, address: str) -> grpc.Channel:
        """Opens a channel; it connects when it is first used. With TLS it looks at the other side first, see below.

        Raises:
            StrangerError: what is there is not the agent that registered this address, or it cannot be called.
            OSError: nobody answers; see `certificate_at` for how long that may take.
        """
        try:
            peer = PeerAddress.parse(address)
        except ValueError as error:
            raise StrangerError(f"its address {error}") from error
        options: list[tuple[str, int | str]] = [*_OPTIONS, *_OF_CHANNEL]
        if self._identity is None:
            if peer.certificate:
                raise StrangerError("it speaks TLS, and this agent does not: give --tls-ca here, too")
            return grpc.insecure_channel(peer.target, options=options)
        if not peer.certificate:
            raise StrangerError(
                "it does not speak TLS, and this agent sends nothing in plaintext: give --tls-ca there, or upgrade it"
            )
        trusted = grpc.ssl_channel_credentials(certificate_at(peer))
        options.append(("grpc.ssl_target_name_override", NAME))
        return grpc.secure_channel(peer.target, trusted, options=options)

    @staticmethod
    def server_options() -> list[tuple[str, int]]:
        return [*_OPTIONS, *_OF_SERVER]

    def bind(self, server: grpc.Server, host: str) -> str:
        """Has the server listen on a free port of `host`; returns the address (`PeerAddress`) for other agents.

        Raises:
            RuntimeError: it cannot.
        """
        any_port, own = address_of(host, 0), self._identity
        if own is None:
            port = server.add_insecure_port(any_port)
        else:
            port = server.add_secure_port(any_port, grpc.ssl_server_credentials([(own.key, own.certificate)]))
        if not port:
            raise RuntimeError(f"cannot listen on {host}")
        target = address_of(host, port)
        if own is None:
            return str(PeerAddress(target))
        return str(PeerAddress(target, own.digest, "" if self._has_token() else own.secret))

    def _has_token(self) -> bool:
        try:
            return self.token() is not None
        except (OSError, ValueError):  # it has one, which cannot be read now
            return True


class TokenGate(grpc.ServerInterceptor):
    """Lets a call through only with the job's token, or the secret in its place; of any other no message is read."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = continuation(handler_call_details)
        if handler is None or self._wire.admits(handler_call_details.invocation_metadata):
            return handler
        return grpc.stream_stream_rpc_method_handler(_refuse)


def _refuse(requests: Any, context: grpc.ServicerContext) -> Any:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong token, or secret: not an agent of this job")
