"""How agents reach each other: TLS where it is spoken, and the job's token, or the callee's secret, in every call.

Where the master speaks TLS they do, too, and never anything else: what would be plaintext is neither sent nor taken.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from dalsegno.protos import peer_pb2
from dalsegno.protos.addresses import address_of, host_and_port
from dalsegno.protos.peer_address import PeerAddress

from .connection import BrokenOff, Connection, Stranger
from .identity import MemoryIdentity, caller_context, digest_of

__all__ = ["Wire"]

# For reaching somebody, for a handshake, and for the first words; seconds.
PATIENCE_SECONDS = 5.0
# Between two looks whether who is being reached is still wanted.
_LOOK_SECONDS = 0.1
# A credential has 32 characters, and an operator's own token some more.
_HELLO_BYTES = 64 << 10

logger = logging.getLogger(__name__)


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
        self._as_callee = None if identity is None else identity.context()
        self._as_caller = caller_context()
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

    def credential(self, address: str) -> str:
        """What a caller of that address says first. Raises as `token`."""
        token = self.token()
        return (PeerAddress.parse(address).secret if token is None else token) or ""

    def admits(self, credential: str) -> bool:
        """Whether a caller with this is let in."""
        try:
            wanted = self._wanted()
        except (OSError, ValueError) as error:
            logger.warning("a peer is refused, as the token cannot be read: %s", error)
            return False
        # Constant time: an early mismatch must not be told from a late one.
        return wanted is None or hmac.compare_digest(credential.encode(), wanted.encode())

    def _wanted(self) -> str | None:
        """What callers have to show. Raises as `token`."""
        token = self.token()
        return self._identity.secret if token is None and self._identity is not None else token

    def connect(self, address: str, unwanted: Callable[[], bool] = lambda: False) -> Connection:
        """Opens a connection to an agent, to which nothing must be said before `greet`.

        Args:
            address: as the master tells it (`PeerAddress`).
            unwanted: asked now and then while nobody answers; where it is so, this ends.

        Raises:
            Stranger: it cannot be called.
            BrokenOff: nobody answers, or not within `PATIENCE_SECONDS`.
        """
        peer = _parsed(address)
        if self._identity is None and peer.certificate:
            raise Stranger("it speaks TLS, and this agent does not: give --tls-ca here, too")
        if self._identity is not None and not peer.certificate:
            raise Stranger(
                "it does not speak TLS, and this agent sends nothing in plaintext: give --tls-ca there, or upgrade it"
            )
        try:
            # Reached directly, whatever proxy the environment names for the web.
            return Connection(_reached(peer.target, unwanted))
        except (OSError, UnicodeError) as error:  # some texts are no names of hosts
            raise BrokenOff(f"it cannot be reached: {getattr(error, 'strerror', '') or error}") from error

    def greet(self, connection: Connection, address: str) -> None:
        """Makes sure that an agent is there, and, with TLS, the one that registered this address.

        Raises:
            Stranger: it is not.
            BrokenOff: it does not answer within `PATIENCE_SECONDS`, or is gone.
        """
        certificate = _parsed(address).certificate
        try:
            with connection.within(PATIENCE_SECONDS):
                if certificate and digest_of(connection.secure(self._as_caller, False)) != certificate:
                    raise Stranger(
                        "what answers there shows another certificate than the one that the agent has registered"
                    )
                connection.greet(calls=True)
        except BrokenOff as error:
            raise BrokenOff(f"it cannot be reached: {error}") from error

    def let_in(self, connection: Connection) -> bool:
        """Whether who has connected speaks as we do, and is an agent of this job; if not, it was told so.

        Raises:
            BrokenOff, Stranger: it is gone, says nothing, or what makes no sense.
        """
        with connection.within(PATIENCE_SECONDS):
            if self._as_callee is not None:
                connection.secure(self._as_callee, True)
            connection.greet(calls=False)
            try:
                hello = connection.receive(peer_pb2.Hello, _HELLO_BYTES)
            except ValueError as error:
                raise Stranger(str(error)) from error
        if self.admits(hello.credential):
            return True
        reason = "missing or wrong token, or secret: not an agent of this job"
        connection.refuse(grpc.StatusCode.UNAUTHENTICATED, reason)
        return False

    def address(self, host: str, port: int) -> str:
        """What other agents call (`PeerAddress`)."""
        target, own = address_of(host, port), self._identity
        if own is None:
            return str(PeerAddress(target))
        return str(PeerAddress(target, own.digest, "" if self._has_token() else own.secret))

    def _has_token(self) -> bool:
        try:
            return self.token() is not None
        except (OSError, ValueError):  # it has one, which cannot be read now
            return True


def _parsed(address: str) -> PeerAddress:
    try:
        return PeerAddress.parse(address)
    except ValueError as error:
        raise Stranger(f"its address {error}") from error


def _reached(target: str, unwanted: Callable[[], bool]) -> socket.socket:
    """A connected socket. Raises OSError: nobody answers in time at any of the host's addresses, or it is unwanted."""
    host, port = host_and_port(target)
    problem = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        opened = socket.socket(family, kind, protocol)
        try:
            _connect(opened, address, unwanted)
        except OSError as error:
            opened.close()
            problem = error
        else:
            return opened
    raise problem


def _connect(opened: socket.socket, address: Any, unwanted: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    opened.setblocking(False)
    code = opened.connect_ex(address)
    look = select.poll()
    look.register(opened, select.POLLOUT)
    while code == errno.EINPROGRESS:
        if unwanted():
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "it does not answer")
        if look.poll(1000 * _LOOK_SECONDS):
            code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
    opened.setblocking(True)
