"""What this agent asks of others: to hold a part, and to hand one out. Each call blocks; bytes pass once."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from dalsegno.protos import peer_pb2
from dalsegno.protos.peer_address import PeerAddress
from dalsegno.protos.text import one_line

from .connection import PIECE_BYTES, BrokenOff, Connection, Stranger
from .holdings import HeldParts, Holdings, StepPart
from .incoming import PartRefusedError, receive
from .pieces import header_of, read_manifest, read_part
from .space import Space
from .turnstile import MOST_NAMED
from .watch import StallWatch
from .wire import Wire

__all__ = ["OPEN_PORTS", "PeerError", "Peers", "SendPace"]

# What to do where nobody answers.
OPEN_PORTS = "nodes must reach each other's ports (is there a firewall between them?)"

# The least bytes of one piece, and how many pieces the bytes of a second are cut into.
_SMALLEST_PIECE, _PIECES_IN_A_SECOND = 4 << 10, 10
_STATUS = {status.value[0]: status for status in grpc.StatusCode}


class PeerError(Exception):
    """A call that came to nothing: the status, and one line that says why.

    Attributes:
        ours: the trouble is on this node: no other peer would help.
        others: addresses of agents that may have what was asked for.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, *, ours: bool = False, others: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.code, self.ours, self.others = code, ours, others

    @property
    def crowded(self) -> bool:
        """It serves too many others just now, and does not tell when it is done."""
        return self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not self.ours

    @property
    def unreachable(self) -> bool:
        """Nobody answers there, or not any more: an agent that ends cancels what is under way."""
        gone = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
        return self.code in gone and not self.ours

    @property
    def closed(self) -> bool:
        """The part is of an epoch that is over there, which is nobody's trouble: the next world opens here, too."""
        return self.code is grpc.StatusCode.FAILED_PRECONDITION and not self.ours


class SendPace:
    """Holds back what is sent to buddies, to all of them together, so that so many bytes pass in a second. Thread-safe.

    Args:
        bytes_per_second: None: no limit.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._hurried = False
        share = PIECE_BYTES if bytes_per_second is None else int(bytes_per_second / _PIECES_IN_A_SECOND)
        self.piece_bytes = min(PIECE_BYTES, max(_SMALLEST_PIECE, share))

    def hurry(self, wanted: bool) -> None:
        """Whether people wait for what is sent: then nothing is held back, until they do not any more."""
        self._hurried = wanted

    def wait(self, count: int) -> None:
        """Before `count` bytes are sent. Each piece waits for those before it: about 0.1 s for each buddy."""
        if self._rate is None or self._hurried:
            return
        now = time.monotonic()
        with self._lock:
            begin = max(now, self._free_at)
            self._free_at = begin + count / self._rate
        # why: nothing happens but that time passes
        time.sleep(begin - now)


class Peers:
    """The calls. Thread-safe.

    Args:
        watch: ends those that do not move.
    """

    def __init__(self, job_id: str, wire: Wire, watch: StallWatch, holdings: Holdings, space: Space) -> None:
        self._job_id, self._wire, self._watch = job_id, wire, watch
        self._holdings, self._space = holdings, space

    def send(self, address: str, part: StepPart, pace: SendPace) -> None:
        """Has the agent at `address` hold a part; it has it, whole, when this returns.

        Raises:
            PeerError: it has not.
            CheckpointDamaged: the part is not what was sealed.
        """
        with self._holdings.at_work(part.run_id, part.manifest.name):
            try:
                manifest = read_manifest(part)
                header = header_of(part, self._job_id, len(manifest))
                pieces = read_part(part, manifest, pace.piece_bytes)
                with self._call(address, peer_pb2.Call(hold=header)) as (connection, answer):
                    if not answer.here:
                        self._send(connection, pieces, pace)
            except OSError as error:
                raise PeerError(grpc.StatusCode.INTERNAL, f"{part} cannot be read: {error}", ours=True) from error

    def _send(self, connection: Connection, pieces: Iterator[memoryview], pace: SendPace) -> None:
        whole = False
        try:
            for piece in pieces:
                pace.wait(len(piece))
                connection.moved()  # what is held back on purpose does not stand still
                if connection.is_readable():
                    break
                connection.send_piece(piece)
            else:
                connection.send_piece(b"")
                whole = True
        except BrokenOff:
            if connection.cancelled:
                raise
            # It may have said why before it hung up.
        answer = connection.receive_answer()
        _check(answer)
        if not (whole and answer.complete):
            raise PeerError(grpc.StatusCode.INTERNAL, "it answers that all is well before it has all")

    def fetch(
        self,
        address: str,
        run_id: str,
        name: str,
        digest: str,
        group_rank: int,
        stopped: Callable[[], bool],
        own_address: str = "",
        patient: bool = False,
        seconds: float = math.inf,
    ) -> HeldParts:
        """Brings a part here, from the agent at `address`.

        Args:
            address: as the master tells it (`PeerAddress`).
            run_id, name, digest, group_rank: which one.
            stopped: asked now and then whether it is still wanted.
            own_address: others that want it are told of this one, once it is here.
            patient: waits there for a moment, where it serves others.
            seconds: without a byte, after which it is given up, if that is less than usual.

        Raises:
            PeerError: it did not come whole.
        """
        request = peer_pb2.FetchRequest(
            job_id=self._job_id,
            run_id=run_id,
            name=name,
            digest=digest,
            group_rank=group_rank,
            address=own_address,
            patient=patient,
        )
        with self._call(address, peer_pb2.Call(fetch=request), stopped, seconds) as (connection, answer):
            fields = ("job_id", "run_id", "name", "digest", "group_rank")
            if any(getattr(answer.header, field) != getattr(request, field) for field in fields):
                raise PeerError(
                    grpc.StatusCode.INVALID_ARGUMENT, f"another part was sent than {group_rank} of {one_line(name)}"
                )

            def pieces() -> Iterator[memoryview]:
                for piece in connection.receive_pieces():
                    if stopped():
                        raise PeerError(grpc.StatusCode.CANCELLED, "it is not wanted any more", ours=True)
                    yield piece
                last = connection.receive_answer()
                _check(last)
                if not last.complete:
                    raise PeerError(grpc.StatusCode.INTERNAL, "it answers that all is well before it has sent all")

            try:
                return receive(answer.header, pieces(), self._holdings, self._space)
            except ValueError as error:
                raise PeerError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
            except PartRefusedError as refused:
                ours = refused.code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL)
                raise PeerError(refused.code, str(refused), ours=ours) from refused

    @contextlib.contextmanager
    def _call(
        self,
        address: str,
        call: peer_pb2.Call,
        stopped: Callable[[], bool] = lambda: False,
        seconds: float = math.inf,
    ) -> Iterator[tuple[Connection, peer_pb2.Answer]]:
        """Makes a call, which ends with this; the first answer is one of success."""
        with (
            contextlib.closing(self._connect(address, stopped)) as connection,
            self._watch.over(connection.cancel, stopped, seconds) as transfer,
        ):
            try:
                self._wire.greet(connection, address)
                connection.moved = transfer.moved
                connection.send(peer_pb2.Hello(credential=self._credential(address)), call)
                answer = connection.receive_answer()
                _check(answer)
                yield connection, answer
            except Stranger as error:
                raise PeerError(grpc.StatusCode.UNAUTHENTICATED, str(error)) from error
            except BrokenOff as error:
                if transfer.stalled:
                    reason = "not a byte has moved for too long"
                    raise PeerError(grpc.StatusCode.DEADLINE_EXCEEDED, reason) from error
                if connection.cancelled:
                    raise PeerError(grpc.StatusCode.CANCELLED, "it was ended", ours=True) from error
                raise PeerError(grpc.StatusCode.UNAVAILABLE, str(error)) from error

    def _connect(self, address: str, stopped: Callable[[], bool]) -> Connection:
        try:
            return self._wire.connect(address, stopped)
        except Stranger as error:
            raise PeerError(grpc.StatusCode.UNAUTHENTICATED, str(error)) from error
        except BrokenOff as error:
            if stopped():
                raise PeerError(grpc.StatusCode.CANCELLED, "it is not wanted any more", ours=True) from error
            raise PeerError(grpc.StatusCode.UNAVAILABLE, str(error)) from error

    def _credential(self, address: str) -> str:
        try:
            return self._wire.credential(address)
        except (OSError, ValueError) as error:
            raise PeerError(grpc.StatusCode.UNAUTHENTICATED, f"no token: {error}", ours=True) from error


def _check(answer: peer_pb2.Answer) -> None:
    """Raises PeerError: it is none of success."""
    if answer.code:
        code = _STATUS.get(answer.code, grpc.StatusCode.UNKNOWN)
        raise PeerError(code, answer.detail or "it has ended the call", others=_addresses(answer))


def _addresses(answer: peer_pb2.Answer) -> tuple[str, ...]:
    """Those that make sense."""
    found: list[str] = []
    for address in answer.others[:MOST_NAMED]:
        with contextlib.suppress(ValueError):
            found.append(str(PeerAddress.parse(address)))
    return tuple(found)
