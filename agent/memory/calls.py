"""What this agent asks of others: to hold a part, and to hand one out. Each call blocks; bytes pass once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import grpc

from dalsegno.elastic.checkpoint import CheckpointDamaged
from dalsegno.protos import peer_pb2
from dalsegno.protos.text import one_line

from .holdings import HeldParts, Holdings, StepPart
from .identity import StrangerError
from .incoming import PartRefusedError, receive, received_header
from .pieces import PIECE_BYTES, read_part
from .space import Space
from .watch import StallWatch, WatchedCall
from .wire import SERVICE, Wire, code_of, detail_of

__all__ = ["OPEN_PORTS", "PeerError", "Peers", "SendPace"]

# What to do where nobody answers.
OPEN_PORTS = "nodes must reach each other's ports (is there a firewall between them?)"

# The least bytes of one message, and how many messages the bytes of a second are cut into.
_SMALLEST_PIECE, _PIECES_IN_A_SECOND = 4 << 10, 10


class PeerError(Exception):
    """A call that came to nothing: the status, and one line that says why.

    Attributes:
        ours: the trouble is on this node: no other peer would help.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, *, ours: bool = False) -> None:
        super().__init__(reason)
        self.code, self.ours = code, ours

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
        """Before `count` bytes are sent. Each message waits for those before it: about 0.1 s for each buddy."""
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
        problems: list[CheckpointDamaged | OSError] = []
        started: list[WatchedCall] = []
        begun = threading.Event()

        def messages() -> Iterator[bytes]:
            begun.wait()
            try:
                for message in read_part(part, self._job_id, pace.piece_bytes):
                    pace.wait(len(message))
                    started[0].moved()
                    yield message
            except (CheckpointDamaged, OSError) as error:
                # An end that comes too early: gRPC would log what is raised here.
                problems.append(error)

        with self._holdings.at_work(part.run_id, part.manifest.name), self._channel(address) as channel:
            hold: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(f"/{SERVICE}/Hold")
            call = hold.future(messages(), metadata=self._metadata(address))
            with self._watch.over(call.cancel) as transfer:
                started.append(transfer)
                begun.set()
                try:
                    call.result()
                except (grpc.RpcError, grpc.FutureCancelledError) as error:
                    if problems and isinstance(problems[0], CheckpointDamaged):
                        raise problems[0] from error
                    if problems:
                        reason = f"{part} cannot be read: {problems[0]}"
                        raise PeerError(grpc.StatusCode.INTERNAL, reason, ours=True) from error
                    raise _failed(error, transfer) from error

    def fetch(
        self, address: str, run_id: str, name: str, digest: str, group_rank: int, stopped: Callable[[], bool]
    ) -> HeldParts:
        """Brings a part here, from the agent at `address`.

        Args:
            address: as the master tells it (`PeerAddress`).
            run_id, name, digest, group_rank: which one.
            stopped: asked now and then whether it is still wanted.

        Raises:
            PeerError: it did not come whole.
        """
        request = peer_pb2.FetchRequest(
            job_id=self._job_id, run_id=run_id, name=name, digest=digest, group_rank=group_rank
        )
        with self._channel(address) as channel:
            ask: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{SERVICE}/Fetch")
            call = ask(request.SerializeToString(), metadata=self._metadata(address))
            with self._watch.over(call.cancel, stopped) as transfer:
                try:
                    return self._take(call, request, transfer, stopped)
                except grpc.RpcError as error:
                    raise _failed(error, transfer) from error
                except ValueError as error:
                    raise PeerError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
                except PartRefusedError as refused:
                    ours = refused.code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL)
                    raise PeerError(refused.code, str(refused), ours=ours) from refused
                finally:
                    call.cancel()

    def _take(
        self,
        messages: Iterator[bytes],
        request: peer_pb2.FetchRequest,
        transfer: WatchedCall,
        stopped: Callable[[], bool],
    ) -> HeldParts:
        header = received_header(messages)
        fields = ("job_id", "run_id", "name", "digest", "group_rank")
        if any(getattr(header, field) != getattr(request, field) for field in fields):
            raise ValueError(f"another part was sent than {request.group_rank} of {request.name}")

        def moved() -> None:
            transfer.moved()
            if stopped():
                raise PeerError(grpc.StatusCode.CANCELLED, "it is not wanted any more", ours=True)

        return receive(header, messages, self._holdings, self._space, moved)

    def _channel(self, address: str) -> grpc.Channel:
        try:
            return self._wire.channel(address)
        except StrangerError as error:
            raise PeerError(grpc.StatusCode.UNAUTHENTICATED, str(error)) from error
        except OSError as error:
            raise PeerError(grpc.StatusCode.UNAVAILABLE, f"it cannot be reached: {error.strerror or error}") from error

    def _metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        try:
            return self._wire.metadata(address)
        except (OSError, ValueError) as error:
            raise PeerError(grpc.StatusCode.UNAUTHENTICATED, f"no token: {error}", ours=True) from error


def _failed(error: BaseException, transfer: WatchedCall) -> PeerError:
    if transfer.stalled:
        return PeerError(grpc.StatusCode.DEADLINE_EXCEEDED, "not a byte has moved for too long")
    if not isinstance(error, grpc.RpcError):
        return PeerError(grpc.StatusCode.CANCELLED, "it was ended", ours=True)
    code, detail = code_of(error), one_line(detail_of(error))
    return PeerError(code, "it has ended the call" if detail == code.name else detail)
