"""What other agents may ask of this one: to hold a part, and to hand one out. See peer.proto."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

import grpc

from dalsegno.elastic.checkpoint import CheckpointDamaged
from dalsegno.protos import peer_pb2
from dalsegno.protos.peer_address import PeerAddress
from dalsegno.protos.text import LONGEST_NAME, one_line

from .arrivals import Arrival, ArrivalEnded
from .connection import BrokenOff, Connection, Stranger
from .fence import Fence
from .frames import Garbled
from .holdings import HeldParts, Holdings, StepPart
from .incoming import PartRefusedError, receive
from .pieces import header_of, read_manifest, read_part
from .space import Space
from .turnstile import Turnstile
from .watch import StallWatch
from .wire import Wire

__all__ = ["PeerServer", "PeerService"]

# At once. What comes beyond that is told so, and asks again.
MOST_CALLS = 16
# With those that have not shown yet who they are: what comes beyond that is hung up on.
MOST_CONNECTIONS = 256
# For calls to end when the server stops, seconds.
_STOP_WITHIN_SECONDS = 5.0
# Where no connection can be accepted, as this process has no descriptor left for it; seconds.
_AGAIN_SECONDS = 0.2
# Between two lines about those that are hung up on: there may be thousands of them, and some are let in now and then.
_SILENT_SECONDS = 60.0

logger = logging.getLogger(__name__)


class PeerService:
    """The two calls.

    Args:
        on_held: told what is here of a step, after a part has come.
        on_bad: told of a part of ours that is not what was sealed.
    """

    def __init__(
        self,
        job_id: str,
        holdings: Holdings,
        fence: Fence,
        space: Space,
        watch: StallWatch,
        on_held: Callable[[HeldParts], None],
        on_bad: Callable[[StepPart, CheckpointDamaged], None],
    ) -> None:
        self._job_id, self._holdings, self._fence, self._space = job_id, holdings, fence, space
        self._watch, self._on_held, self._on_bad = watch, on_held, on_bad
        self._turnstile = Turnstile()

    def serve(self, connection: Connection) -> None:
        """Carries out one call of somebody who was let in.

        Raises:
            BrokenOff: the caller is gone, or moved no byte for too long.
        """
        with self._watch.over(connection.cancel) as transfer:
            connection.moved = transfer.moved
            try:
                self._carry_out(connection)
            except PartRefusedError as refused:
                logger.info("refused: %s", refused)
                connection.refuse(refused.code, str(refused), refused.others)
            except Garbled as error:
                logger.info("refused: %s", error)
                connection.refuse(grpc.StatusCode.DATA_LOSS, str(error))
            except ValueError as error:
                connection.refuse(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _carry_out(self, connection: Connection) -> None:
        call = connection.receive(peer_pb2.Call)
        which = call.WhichOneof("what")
        if which is None:
            raise ValueError("not a call of this protocol")
        if which == "hold":
            self._hold(connection, call.hold)
        else:
            part = self._part(call.fetch)
            address = _address_of(call.fetch)
            with self._turnstile.passing(part, address, call.fetch.patient):
                whole = self._hand_on(connection, part) if isinstance(part, Arrival) else self._fetch(connection, part)
                if whole:
                    self._turnstile.fetched(part, address)

    def _hold(self, connection: Connection, header: peer_pb2.Header) -> None:
        self._fence.check(header)
        if self._holdings.has(header.run_id, header.name, header.digest, header.group_rank):
            connection.send(peer_pb2.Answer(here=True))
            return
        connection.send(peer_pb2.Answer())
        held = receive(header, connection.receive_pieces(), self._holdings, self._space)
        self._on_held(held)
        connection.send(peer_pb2.Answer(complete=True))

    def _fetch(self, connection: Connection, part: StepPart) -> bool:
        """Returns whether the part was sent as it should be."""
        with self._holdings.at_work(part.run_id, part.manifest.name):
            try:
                manifest = read_manifest(part)
            except (CheckpointDamaged, OSError) as error:
                raise self._unreadable(part, error) from error
            connection.send(peer_pb2.Answer(header=header_of(part, self._job_id, len(manifest))))
            try:
                for piece in read_part(part, manifest):
                    connection.send_piece(piece)
                problem = None
            except (CheckpointDamaged, OSError) as error:
                problem = self._unreadable(part, error)
        return _conclude(connection, problem)

    def _hand_on(self, connection: Connection, arrival: Arrival) -> bool:
        """The same for one that still comes here."""
        with self._holdings.at_work(arrival.header.run_id, arrival.header.name):
            connection.send(peer_pb2.Answer(header=arrival.header))
            try:
                for piece in arrival.read(unwanted=lambda: connection.cancelled):
                    connection.send_piece(piece)
                problem = None
            except (ArrivalEnded, OSError) as error:
                code = grpc.StatusCode.NOT_FOUND if isinstance(error, ArrivalEnded) else grpc.StatusCode.INTERNAL
                problem = PartRefusedError(code, f"{arrival} was on its way there: {error}")
        return _conclude(connection, problem)

    def _unreadable(self, part: StepPart, error: CheckpointDamaged | OSError) -> PartRefusedError:
        if isinstance(error, CheckpointDamaged):
            self._on_bad(part, error)
            return PartRefusedError(grpc.StatusCode.DATA_LOSS, str(error))
        return PartRefusedError(grpc.StatusCode.INTERNAL, f"{part} cannot be read: {error}")

    def _part(self, request: peer_pb2.FetchRequest) -> StepPart | Arrival:
        self._fence.check_job(request.job_id)
        wanted = request.run_id, request.name, request.digest, request.group_rank
        part = self._holdings.part(*wanted) or self._holdings.arrivals.find(*wanted)
        if part is None:
            raise PartRefusedError(
                grpc.StatusCode.NOT_FOUND,
                f"part {request.group_rank} of {one_line(request.name, LONGEST_NAME)} is not here",
            )
        return part


class PeerServer:
    """Serves until `close`, each connection on a thread of its own.

    Raises:
        RuntimeError: `host` cannot be listened on.
    """

    def __init__(self, host: str, wire: Wire, service: PeerService) -> None:
        self._wire, self._service = wire, service
        try:
            self._listener = _listen(host)
        except OSError as error:
            # Python says the address once more, in brackets.
            reason = str(error.strerror or error).partition(" (while")[0]
            raise RuntimeError(f"cannot listen on {host}: {reason}") from error
        self.address = wire.address(host, self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._serving: dict[Connection, threading.Thread] = {}
        self._closing = threading.Event()
        self._places = threading.Semaphore(MOST_CALLS)
        threading.Thread(target=self._accept, name="memory-accept", daemon=True).start()

    def close(self) -> None:
        """Ends calls under way, and waits for that a little."""
        self._closing.set()
        # It wakes the thread that accepts; closing alone does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            serving = dict(self._serving)
        for connection in serving:
            connection.cancel()
        deadline = time.monotonic() + _STOP_WITHIN_SECONDS
        for thread in serving.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        silent_until = 0.0
        while not self._closing.is_set():
            try:
                opened, _ = self._listener.accept()
            except OSError:
                # Who calls waits in the queue of the kernel meanwhile.
                self._closing.wait(_AGAIN_SECONDS)
                continue
            try:
                self._begin(opened)
            except (OSError, RuntimeError) as error:  # it is gone already, or there is no room for a thread
                opened.close()
                now = time.monotonic()
                if now >= silent_until:
                    logger.warning("connections of peers are hung up on: %s", error)
                    silent_until = now + _SILENT_SECONDS

    def _begin(self, opened: socket.socket) -> None:
        connection = Connection(opened)
        thread = threading.Thread(target=self._serve, args=(connection,), name="memory-serve", daemon=True)
        with self._lock:
            if self._closing.is_set():
                raise RuntimeError("this agent is closing")
            if len(self._serving) >= MOST_CONNECTIONS:
                raise RuntimeError(f"there are {MOST_CONNECTIONS} already")
            self._serving[connection] = thread
            try:
                thread.start()
            except RuntimeError:
                del self._serving[connection]
                raise

    def _serve(self, connection: Connection) -> None:
        try:
            if not self._wire.let_in(connection):
                return
            if not self._places.acquire(blocking=False):
                connection.refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, f"it serves {MOST_CALLS} others just now")
                return
            try:
                self._service.serve(connection)
            finally:
                self._places.release()
        except BrokenOff as error:
            logger.info("a call of a peer came to nothing: %s", error)
        except Stranger as error:
            logger.info("a stranger is hung up on: %s", error)
            connection.hang_up()
        except Exception:
            logger.exception("a call of a peer")
            connection.refuse(grpc.StatusCode.UNKNOWN, "it has failed there: its agent.log says how")
        finally:
            connection.close()
            with self._lock:
                del self._serving[connection]


def _conclude(connection: Connection, problem: PartRefusedError | None) -> bool:
    """Behind the last piece of a part. Returns whether all is well."""
    connection.send_piece(b"")
    if problem is None:
        connection.send(peer_pb2.Answer(complete=True))
    else:
        connection.send(peer_pb2.Answer(code=problem.code.value[0], detail=str(problem)))
    connection.hang_up()  # Who has fetched it closes the connection when it has put it in place.
    return problem is None


def _address_of(request: peer_pb2.FetchRequest) -> str:
    """Where who asks for a part can be reached; empty where it does not say."""
    try:
        return str(PeerAddress.parse(request.address)) if request.address else ""
    except ValueError as error:
        raise PartRefusedError(grpc.StatusCode.INVALID_ARGUMENT, f"the caller's address {error}") from error


def _listen(host: str) -> socket.socket:
    """On a free port. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=MOST_CONNECTIONS)
