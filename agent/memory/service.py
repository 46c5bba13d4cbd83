"""What other agents may ask of this one: to hold a part, and to hand one out. Serves `Peer` of peer.proto."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.protobuf.message import DecodeError

from dalsegno.elastic.checkpoint import CheckpointDamaged
from dalsegno.protos import peer_pb2

from .fence import Fence
from .holdings import HeldParts, Holdings, StepPart
from .incoming import PartRefusedError, receive, received_header
from .pieces import read_part
from .space import Space
from .watch import StallWatch, WatchedCall
from .wire import SERVICE, TokenGate, Wire

__all__ = ["PeerServer", "PeerService"]

# At once. What comes beyond that is told so, and asks again.
MOST_CALLS = 16
# For calls to end when the server stops, seconds.
_STOP_WITHIN_SECONDS = 5.0

logger = logging.getLogger(__name__)


class PeerService:
    """The two calls. Every message is decoded here, so that nonsense is answered and not logged by gRPC.

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

    def handlers(self) -> grpc.GenericRpcHandler:
        """For a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Hold": grpc.stream_unary_rpc_method_handler(self.hold),
                "Fetch": grpc.unary_stream_rpc_method_handler(self.fetch),
            },
        )

    def hold(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """See peer.proto."""
        with self._watch.over(context.cancel) as transfer:
            try:
                held = self._take(requests, transfer)
            except PartRefusedError as refused:
                logger.info("refused a part: %s", refused)
                context.abort(refused.code, str(refused))
            except grpc.RpcError:
                # Whoever sent it is gone, or moved no byte for too long.
                logger.info("a part did not arrive: its sender has gone")
                return b""
        if held is not None:
            self._on_held(held)
        return peer_pb2.HoldReply().SerializeToString()

    def _take(self, requests: Iterator[bytes], transfer: WatchedCall) -> HeldParts | None:
        """None: it is here already."""
        try:
            header = received_header(requests)
            self._fence.check(header)
            if self._holdings.has(header.run_id, header.name, header.digest, header.group_rank):
                return None
            return receive(header, requests, self._holdings, self._space, transfer.moved)
        except ValueError as error:
            raise PartRefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error

    def fetch(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """See peer.proto."""
        try:
            part = self._part(message)
        except PartRefusedError as refused:
            context.abort(refused.code, str(refused))
        with (
            self._watch.over(context.cancel) as transfer,
            self._holdings.at_work(part.run_id, part.manifest.name),
        ):
            try:
                for piece in read_part(part, self._job_id):
                    transfer.moved()
                    yield piece
            except CheckpointDamaged as damaged:
                self._on_bad(part, damaged)
                context.abort(grpc.StatusCode.DATA_LOSS, str(damaged))
            except OSError as error:
                context.abort(grpc.StatusCode.INTERNAL, f"{part} cannot be read: {error}")

    def _part(self, message: bytes) -> StepPart:
        try:
            request = peer_pb2.FetchRequest.FromString(message)
        except DecodeError as error:
            raise PartRefusedError(grpc.StatusCode.INVALID_ARGUMENT, "not a request of this protocol") from error
        self._fence.check_job(request.job_id)
        part = self._holdings.part(request.run_id, request.name, request.digest, request.group_rank)
        if part is None:
            raise PartRefusedError(
                grpc.StatusCode.NOT_FOUND, f"part {request.group_rank} of {request.name} is not here"
            )
        return part


class PeerServer:
    """Serves until `close`.

    Raises:
        RuntimeError: `host` cannot be listened on.
    """

    def __init__(self, host: str, wire: Wire, service: PeerService) -> None:
        self._server = grpc.server(
            ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="memory-serve"),
            interceptors=[TokenGate(wire)],
            options=wire.server_options(),
            maximum_concurrent_rpcs=MOST_CALLS,
        )
        self._server.add_generic_rpc_handlers((service.handlers(),))
        self.address = wire.bind(self._server, host)
        self._server.start()

    def close(self) -> None:
        """Ends calls under way, and waits for that a little."""
        self._server.stop(0).wait(_STOP_WITHIN_SECONDS)
