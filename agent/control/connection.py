"""The agent's one gRPC channel: options, token, TLS, and the choice of the master's address."""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from dalsegno.protos import control_pb2_grpc
from dalsegno.protos.addresses import host_and_port
from dalsegno.protos.contract import LEADER_METADATA
from dalsegno.protos.shortage import prove_room, starting
from dalsegno.protos.text import one_line

from .places import MasterPlaces

__all__ = [
    "RETRIED",
    "Connector",
    "Credentials",
    "MasterLink",
    "channel_options",
    "code_of",
    "detail_of",
    "leader_of",
    "unconnected",
]

# Status codes that say nothing about the call itself: it is repeated, with the same request number.
RETRIED = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        # Another thread found the master gone, and closed the channel during the call.
        grpc.StatusCode.CANCELLED,
    }
)
# How often in a row a handshake must fail: once proves nothing, because the master may be ending.
_LOOKS = 3
# The most bytes of a message. Inventories name many checkpoints of a run.
_MESSAGE_LIMIT_BYTES = 16 << 20

# Of one attempt to connect. Whoever is not there at all, as behind a cable that is out, is waited for as long.
CONNECT_MILLISECONDS = 3000

logger = logging.getLogger(__name__)


def channel_options() -> list[tuple[str, int | str]]:
    """Options of the channel. Sources: gRPC's service config (retry design A6) and keepalive documents."""
    service_config = {
        "methodConfig": [
            {
                "name": [{"service": "dalsegno.control.v1.Control"}],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "0.5s",
                    "backoffMultiplier": 2,
                    # Only what was certainly not carried out, or has no second effect thanks to its number.
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
    return [
        ("grpc.service_config", json.dumps(service_config)),
        ("grpc.enable_retries", 1),
        # Milliseconds between pings, which find a dead connection even while the agent only watches. Answers to
        # heartbeats, which are more frequent, do the same, and cost the master no further wake-up.
        ("grpc.keepalive_time_ms", 8000),
        ("grpc.keepalive_timeout_ms", 3000),
        # Otherwise gRPC waits a minute for the answer to a ping, whatever the line above says (1.71 to 1.85).
        ("grpc.http2.ping_timeout_ms", 3000),
        ("grpc.http2.max_pings_without_data", 0),
        # Reconnect soon, and never long after the master is back.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # This is how long an attempt may take: several times there and back, also where that takes half a second, and
        # a lost packet more, which is sent again after one.
        ("grpc.min_reconnect_backoff_ms", CONNECT_MILLISECONDS),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # A new channel must not inherit the back-off of a closed one.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", _MESSAGE_LIMIT_BYTES),
        ("grpc.max_send_message_length", _MESSAGE_LIMIT_BYTES),
        # The master is reached directly, whatever proxy the environment names for the web.
        ("grpc.enable_http_proxy", 0),
    ]


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    """The status of a failed call."""
    return error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN


def detail_of(error: grpc.RpcError) -> str:
    """What the other side, or gRPC, says about a failed call."""
    return (error.details() if isinstance(error, grpc.Call) else "") or str(error)


def leader_of(error: grpc.RpcError) -> str:
    """The address of the master that leads, if the one that was called stands by and knows it; else empty."""
    metadata: Sequence[tuple[str, str | bytes]] = ()
    if isinstance(error, grpc.Call):
        metadata = error.trailing_metadata() or ()
    found = [value for key, value in metadata if key == LEADER_METADATA]
    return found[0] if found and isinstance(found[0], str) else ""


@dataclass(frozen=True)
class Credentials:
    """How the agent shows who it is, and checks who the master is.

    Attributes:
        token: sent as `authorization: Bearer …`; None: the master asks for none.
        tls_ca: certificates to check the master against; None: no TLS, unless `tls_cert` is given (system's roots).
        tls_cert, tls_key: the agent's own, for a master that asks for them.
    """

    token: str | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    @property
    def tls(self) -> bool:
        return self.tls_ca is not None or self.tls_cert is not None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata that is sent with every call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def channel(self, address: str, target: str = "") -> grpc.Channel:
        """Opens a channel; it connects when it is first used.

        Args:
            address: HOST:PORT, whose name the other side's certificate must have.
            target: where to connect, as gRPC writes it; empty: it looks the name up.

        Raises:
            OSError: a file cannot be read, or there is no room for gRPC's threads.
        """
        _prove_room_once()
        options = channel_options()
        if target:
            options.append(("grpc.default_authority", address))
        if not self.tls:
            return grpc.insecure_channel(target or address, options=options)
        if target:
            options.append(("grpc.ssl_target_name_override", host_and_port(address)[0]))
        roots, key, cert = (
            None if path is None else path.read_bytes() for path in (self.tls_ca, self.tls_key, self.tls_cert)
        )
        secure = grpc.ssl_channel_credentials(roots, key, cert)
        return grpc.secure_channel(target or address, secure, options=options)


@dataclass(frozen=True)
class MasterLink:
    """One channel, while it lasts."""

    channel: grpc.Channel
    stub: control_pb2_grpc.ControlStub
    address: str
    # Where it leads, among the addresses of a name; empty: there was no choice.
    target: str = ""


class Connector:
    """Provides the present link, and moves on to the next address when a user of the link finds it broken. Thread-safe.

    Args:
        locate: returns the addresses known now; must not block.
        credentials: called for every channel, so that a token can be changed. While it raises OSError or ValueError (a
            file system that is away), the last credentials are used.
        on_missing: called whenever a link was found broken (an embedded master may have to be started).
        explain: says why credentials cannot work with an address, "" if that is not known; may block. None: nobody can.
        places: chooses among the addresses of one name; may block.
    """

    def __init__(
        self,
        locate: Callable[[], Sequence[str]],
        credentials: Callable[[], Credentials],
        on_missing: Callable[[], None] = lambda: None,
        explain: Callable[[str, Credentials], str] | None = None,
        places: MasterPlaces | None = None,
    ) -> None:
        self._explain = explain
        self._places = MasterPlaces() if places is None else places
        # The last result of `hopeless`, and how often in a row it came.
        self._found, self._looks = "", 0
        self._locate = locate
        self._credentials = credentials
        self._on_missing = on_missing
        self._lock = threading.Lock()
        # Held while a link is opened: that takes seconds where names are looked up in vain, and has no end where the
        # token's file system hangs. Taken before `_lock`, which is held by nobody who waits.
        self._opening = threading.Lock()
        self._turn = 0
        # Which address to go to instead of the next one in turn; empty: none.
        self._leader = ""
        # Masters that have refused the token: HOST:PORT, and which address of a name. Behind such a name each is asked
        # alone from then on, so that it is known which one refuses.
        self._refusing: set[tuple[str, str]] = set()
        self._link: MasterLink | None = None
        self._last: Credentials | None = None
        self._unreadable = False
        self._closed = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Sent with every call on the present link."""
        with self._lock:
            return () if self._last is None else self._last.metadata

    @property
    def explains(self) -> bool:
        """Whether `hopeless` can ever find a reason."""
        return self._explain is not None

    def token(self) -> str | None:
        """The job's, as it was read last; None where there is none, or it cannot be read."""
        with self._lock:
            if self._last is not None:
                return self._last.token
        try:
            return self._credentials().token
        except (OSError, ValueError):
            return None

    @property
    def present(self) -> MasterLink | None:
        """The link that is open now, if there is one."""
        with self._lock:
            return self._link

    def get(self) -> MasterLink | None:
        """The present link, opened if need be; None if it cannot be opened now, or this is closed. May block."""
        with self._opening:
            with self._lock:
                if self._link is not None or self._closed:
                    return self._link
                addresses = self._locate()
                if not addresses:
                    return None
                address = self._leader or addresses[self._turn % len(addresses)]
                alone = any(address == refusing for refusing, _ in self._refusing)
            target = self._places.target(address, alone)
            channel = self._open(address, target)
            with self._lock:
                if channel is not None and self._closed:
                    channel.close()
                elif channel is not None:
                    self._link = MasterLink(channel, control_pb2_grpc.ControlStub(channel), address, target)
                return self._link

    def all_refuse(self, link: MasterLink) -> bool:
        """Notes that the master there refuses the token. Whether all do, or the one that leads.

        One of several that stands by may have another token.
        """
        with self._lock:
            self._refusing.add((link.address, link.target))
            asked = {(address, target) for address in self._locate() for target in self._places.each(address)}
            return link.address == self._leader or self._refusing.issuperset(asked)

    def hopeless(self) -> str:
        """Why none of the addresses will ever answer, once several looks in a row have found the same reason.

        Empty if one of them may answer. Blocks for some seconds; for one thread.
        """
        with self._lock:
            credentials = self._last
        if credentials is None or self._explain is None:
            return ""
        reasons = [self._explain(address, credentials) for address in self._locate()]
        found = reasons[0] if reasons and all(reasons) else ""
        self._looks = self._looks + 1 if found == self._found else 1
        self._found = found
        return found if self._looks >= _LOOKS else ""

    def _open(self, address: str, target: str) -> grpc.Channel | None:
        """Opens a channel with the newest credentials available. Reads files: no lock but `_opening` is held."""
        try:
            credentials = self._credentials()
        except (OSError, ValueError) as error:
            self._complain(error)
            with self._lock:
                if self._last is None:
                    return None
                credentials = self._last
        else:
            self._unreadable = False
            with self._lock:
                self._last = credentials
        try:
            return credentials.channel(address, target)
        except OSError as error:
            self._complain(error)
            return None

    def _complain(self, error: Exception) -> None:
        # Logged once, because it is tried again with every call.
        if not self._unreadable:
            self._unreadable = True
            logger.warning("token or certificates cannot be read now: %s", error)

    def failed(self, link: MasterLink | None, leader: str = "") -> None:
        """Reports that a call over `link` got no answer: the next `get` goes to the next address, or to the leader's.

        `leader` is what a master that stands by has named, HOST:PORT; it is believed for one link.
        """
        with self._lock:
            if self._closed:
                return
            if link is not None and link is self._link:
                self._link = None
                self._leader = leader if leader != link.address else ""
                self._turn += 0 if self._leader else 1
                link.channel.close()
        self._on_missing()

    def close(self) -> None:
        """Closes the channel; calls in flight end with CANCELLED."""
        with self._lock:
            self._closed = True
            if self._link is not None:
                self._link.channel.close()
                self._link = None


@functools.cache
def _prove_room_once() -> None:
    """gRPC ends this process without a word if there is no room for its threads. Others have started since ours began.

    Raises:
        CannotStartError: there is none.
    """
    with starting("the connection to the master"):
        prove_room()


def unconnected(address: str, detail: str) -> str:
    """What to say of a master on this machine that nobody can connect to, in gRPC's words."""
    cure = "see whether the loopback interface is up (ip link set lo up) and not filtered"
    if "refused" in detail:  # by an interface that is up
        cure = "it is ending, or its disk is slow"
    return f"cannot be connected to at {address} ({one_line(detail, 200)}): {cure}"
