"""Calls to etcd over several endpoints: whichever member answers, and only until it does not.

Reads and conditional writes, and leases. All may be repeated: a write carries the revision of what it replaces, so a
second try of one that was carried out changes nothing, and says so; a lease that was granted twice ends by itself.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dalsegno.protos.addresses import ADDRESS, addresses_of
from dalsegno.protos.text import one_line

__all__ = ["Change", "Etcd", "EtcdFiles", "EtcdUnavailable", "Value", "endpoints_of"]

DEFAULT_PORT = 2379
# Seconds that one member may take to answer, and that all of them together may, before the store counts as away.
CALL_SECONDS, PATIENCE_SECONDS = 2.0, 5.0
# Seconds before the same members are asked again.
PAUSE_SECONDS = 0.1
# What another member, or the same one a moment later, may do.
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
# What a person can do about a refusal, by what etcd says of it.
_CURES = {
    "user name is empty": "etcd asks for a user: give a certificate with the user's name as its CN"
    " (--etcd-ca, --etcd-cert, --etcd-key)",
    "permission denied": "grant the user's role read and write on the keys under /dalsegno/",
    "database space exceeded": "etcd is full: compact and defragment it or raise its quota, then disarm its alarm",
    "connection refused": "more than half of its members have to run: the log of one that has ended says why, as that"
    " its disk is full",
}
# What gRPC puts around the reason, which names the endpoint once more.
_AROUND = re.compile(r"^failed to connect to all .*; last error: \w+: \S+: (failed to connect to remote host: )?")
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    # A member that was away is asked again at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Members are reached directly, whatever proxy the environment names for the web.
    ("grpc.enable_http_proxy", 0),
)


# What the files for TLS have in them: authority, key, certificate.
_Contents = tuple[bytes | None, bytes | None, bytes | None]


class EtcdUnavailable(Exception):
    """No member could do it, in all the time there was; the message is a reason for a person.

    Attributes:
        cure: what a person can do about it, which the message says, too; empty: it is not known.
    """

    def __init__(self, why: str, cure: str = "") -> None:
        super().__init__(f"{why} ({cure})" if cure else why)
        self.cure = cure


@dataclass(frozen=True)
class EtcdFiles:
    """Files for TLS with etcd, all PEM; None: not given. Without `ca` connections are plain.

    They are read anew where a member does not answer, because certificates are renewed.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True)
class Value:
    """What a key has, and the revision in which it got that.

    `at` is the revision in which it was read, `lease` the lease that it ends with (0: none).
    """

    data: bytes
    revision: int
    at: int = 0
    lease: int = 0


@dataclass(frozen=True)
class Change:
    """One change of a transaction: data for a key; None: the key is deleted.

    With a lease (0: none) the key is deleted when the lease ends.
    """

    key: str
    data: bytes | None
    lease: int = 0


def endpoints_of(hosts: str) -> list[str]:
    """The endpoints in `h1:2379,h2,[::1]:2379`, each with a port.

    Raises:
        ValueError: some are no addresses; the message says which.
    """
    found = []
    for part in addresses_of(hosts):
        match = ADDRESS.fullmatch(part)
        if match is None or not 0 < int(match[2] or DEFAULT_PORT) <= 65535:
            raise ValueError(f"{part!r} is no endpoint: write HOST:PORT")
        found.append(f"{match[1]}:{match[2] or DEFAULT_PORT}")
    return found


class Etcd:
    """A client of one etcd.

    Args:
        endpoints: its members, as HOST:PORT.
        files: for TLS.
        call_seconds: that one member may take to answer.
        patience_seconds: that all of them together may, before etcd counts as away.

    Raises:
        OSError: a file cannot be read.
        ImportError: the package aetcd, whose messages these are, is not installed.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        files: EtcdFiles,
        *,
        call_seconds: float = CALL_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        from aetcd.rpc import rpc_pb2

        self._messages: Any = rpc_pb2
        self._endpoints, self._files = list(endpoints), files
        self._call_seconds, self._patience_seconds = call_seconds, patience_seconds
        self._present = 0
        self._is_given_up = False
        # Number of the etcd that is meant (0: none was heard yet), what each endpoint said last that it belongs to, and
        # those that have been asked since they failed last.
        self._cluster = 0
        self._clusters: dict[int, int] = {}
        self._checked: set[int] = set()
        self._connect(_contents(files))

    def get(self, key: str, at: int = 0) -> Value | None:
        """What the key has now, or had in an earlier revision; None: nothing. Raises EtcdUnavailable."""
        found = self._call("Range", self._messages.RangeRequest(key=key.encode(), revision=at))
        if not found.kvs:
            return None
        (one,) = found.kvs
        return Value(one.value, one.mod_revision, found.header.revision, one.lease)

    def get_all(self, keys: Sequence[str], at: int = 0) -> list[Value | None]:
        """What each of these keys has, as of one revision, in one request; see `get`.

        Raises:
            EtcdUnavailable: see there; also for more keys than etcd takes in a transaction (128).
        """
        messages = self._messages
        asked = [messages.RangeRequest(key=key.encode(), revision=at) for key in keys]
        request = messages.TxnRequest(success=[messages.RequestOp(request_range=one) for one in asked])
        reply = self._call("Txn", request)
        found = [one.response_range.kvs for one in reply.responses]
        return [
            Value(kvs[0].value, kvs[0].mod_revision, reply.header.revision, kvs[0].lease) if kvs else None
            for kvs in found
        ]

    def names(self, prefix: str) -> list[str]:
        """All keys with this prefix. Raises EtcdUnavailable."""
        start = prefix.encode()
        end = start[:-1] + bytes([start[-1] + 1])
        found = self._call("Range", self._messages.RangeRequest(key=start, range_end=end, keys_only=True))
        return [one.key.decode() for one in found.kvs]

    def change(self, key: str, revision: int, changes: Sequence[Change], held: bytes | None = None) -> int:
        """Makes all changes if `key` was changed last in this revision (0: is not there), else none.

        Args:
            held: what it has to have, too (None: anything). An etcd that was set back counts its revisions anew.

        Returns:
            The revision in which they were made; 0: not now, but an earlier try may have made them.

        Raises:
            EtcdUnavailable: nobody knows whether they were made.
        """
        messages = self._messages
        equal, name = messages.Compare.EQUAL, key.encode()
        asked = [messages.Compare(result=equal, target=messages.Compare.MOD, key=name, mod_revision=revision)]
        if revision and held is not None:
            asked.append(messages.Compare(result=equal, target=messages.Compare.VALUE, key=name, value=held))
        request = messages.TxnRequest(compare=asked, success=[self._operation(one) for one in changes])
        reply = self._call("Txn", request)
        return int(reply.header.revision) if reply.succeeded else 0

    def grant(self, seconds: int) -> int:
        """A new lease, which ends after so many seconds unless it is kept. Raises EtcdUnavailable."""
        return int(self._call("LeaseGrant", self._messages.LeaseGrantRequest(TTL=seconds), "Lease").ID)

    def keep(self, lease: int) -> None:
        """Has the lease last its seconds anew; nothing happens if it has ended. Raises EtcdUnavailable."""
        self._call("LeaseKeepAlive", self._messages.LeaseKeepAliveRequest(ID=lease), "Lease")

    def give_up(self) -> None:
        """From now on every call raises, and one that is under way does so when its member's time is up at the latest.

        For another thread than the one that calls.
        """
        self._is_given_up = True

    def close(self) -> None:
        """Closes all connections."""
        for channel in self._channels:
            channel.close()

    def _operation(self, change: Change) -> Any:
        messages, key = self._messages, change.key.encode()
        if change.data is None:
            return messages.RequestOp(request_delete_range=messages.DeleteRangeRequest(key=key))
        return messages.RequestOp(request_put=messages.PutRequest(key=key, value=change.data, lease=change.lease))

    def _connect(self, contents: _Contents) -> None:
        from aetcd.rpc import rpc_pb2_grpc

        self._contents = contents
        self._channels = [_channel(endpoint, contents) for endpoint in self._endpoints]
        self._stubs = {
            "KV": [rpc_pb2_grpc.KVStub(channel) for channel in self._channels],
            "Lease": [rpc_pb2_grpc.LeaseStub(channel) for channel in self._channels],
        }

    def _renew(self) -> None:
        """Connects anew if the files are other ones by now: certificates end, and others are put in their place."""
        try:
            contents = _contents(self._files)
        except OSError:
            # They are being replaced: the next failure looks again.
            return
        if contents != self._contents:
            self.close()
            self._connect(contents)

    def strangers(self) -> tuple[str, str] | None:
        """Two endpoints that belong to two etcds; None: nobody says so. Those that do not answer are passed over."""
        found: dict[int, str] = {}
        for number, endpoint in enumerate(self._endpoints):
            if self._is_given_up:
                return None
            with contextlib.suppress(grpc.RpcError):
                found.setdefault(self._ask_cluster(number), endpoint)
        return (found.popitem()[1], found.popitem()[1]) if len(found) > 1 else None

    def _is_member(self) -> bool:
        """Whether the present endpoint belongs to the etcd that is meant: asked anew whenever it had failed.

        Another etcd has a record of its own. One that was restored is another one, too: it is meant where more than
        half of the endpoints belong to it. Raises grpc.RpcError.
        """
        if self._present in self._checked:
            return True
        cluster = self._ask_cluster(self._present)
        self._clusters[self._present] = cluster
        if not self._cluster or 2 * list(self._clusters.values()).count(cluster) > len(self._endpoints):
            self._cluster = cluster
        if cluster != self._cluster:
            return False
        self._checked.add(self._present)
        return True

    def _ask_cluster(self, number: int) -> int:
        """What an endpoint says that it belongs to, without asking others. Raises grpc.RpcError."""
        asked = self._messages.RangeRequest(key=b"/dalsegno/", serializable=True, count_only=True)
        return int(self._stubs["KV"][number].Range(asked, timeout=self._call_seconds).header.cluster_id)

    def _call(self, method: str, request: Any, of: str = "KV") -> Any:
        deadline, reasons = time.monotonic() + self._patience_seconds, dict[str, str]()
        while True:
            for _ in self._endpoints:
                if self._is_given_up:
                    raise EtcdUnavailable("this master ends")
                endpoint = self._endpoints[self._present]
                try:
                    if self._is_member():
                        call: Callable[..., Any] = getattr(self._stubs[of][self._present], method)
                        answer = _answer(call, request, self._call_seconds)
                        if answer.header.cluster_id == self._cluster:
                            return answer
                        # Since it was asked it has gone, and come back as another etcd.
                        self._checked.discard(self._present)
                    reasons[endpoint] = "it belongs to another etcd than the others: name the members of one in --store"
                except grpc.RpcError as error:
                    reasons[endpoint] = _reason(error)
                    self._checked.discard(self._present)
                    self._renew()
                    if error.code() not in _PASSING:
                        raise _unavailable(reasons) from error
                self._present = (self._present + 1) % len(self._endpoints)
                if time.monotonic() >= deadline:
                    raise _unavailable(reasons)
            time.sleep(PAUSE_SECONDS)  # why: nobody tells when a member is back


def _answer(call: Callable[..., Any], request: Any, seconds: float) -> Any:
    """The one answer to a request, also where etcd has only a stream for it."""
    if isinstance(call, grpc.StreamStreamMultiCallable):
        answers = call(iter([request]), timeout=seconds)
        try:
            answer = next(answers, None)
            if answer is None:
                raise EtcdUnavailable("a member has ended its answer before it began")
            return answer
        finally:
            answers.cancel()
    return call(request, timeout=seconds)


def _contents(files: EtcdFiles) -> _Contents:
    """Of the authority, the key and the certificate. Raises OSError."""
    ca, key, cert = (None if one is None else one.read_bytes() for one in (files.ca, files.key, files.cert))
    return ca, key, cert


def _channel(endpoint: str, contents: _Contents) -> grpc.Channel:
    if contents[0] is None:
        return grpc.insecure_channel(endpoint, options=_OPTIONS)
    return grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(*contents), options=_OPTIONS)


def _reason(error: grpc.RpcError) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    return one_line(_AROUND.sub("", str(error.details() or error.code().name).lower()))


def _unavailable(reasons: dict[str, str]) -> EtcdUnavailable:
    told = "; ".join(f"{endpoint}: {reason}" for endpoint, reason in reasons.items())
    return EtcdUnavailable(told, "; ".join(cure for said, cure in _CURES.items() if said in told))
