"""The control protocol's RPCs: checks what needs no state, hands the rest to the driver."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from dalsegno.protos import control_pb2 as pb
from dalsegno.protos import control_pb2_grpc
from dalsegno.protos.contract import CONTROL_PROTOCOL
from dalsegno.protos.text import one_line

from ..brain.chronicle import KEPT
from ..brain.door import ShapeError, admit
from ..brain.events import Reply, StreamClosed, StreamOpened
from ..brain.shown import event_proto
from .driver import Driver, OrderLate
from .feed import Feed
from .watchers import End, TooManyStreams, Watchers

__all__ = ("ORDERS", "ControlService")

log = logging.getLogger(__name__)

# The most lines about left-out parts of requests that are remembered, so that repeated requests do not fill the log.
MOST_SAID = 1000

# How long a call for events may wait for one.
LONGEST_WAIT_SECONDS = 30.0
ORDERS = (pb.ScaleRequest, pb.DrainNodeRequest, pb.StopRequest, pb.StartRequest, pb.SaveNowRequest)
# Calls of people and tools, which need not name the job.
OF_PEOPLE = (pb.StatusRequest, pb.EventsRequest, *ORDERS)

Context = grpc.aio.ServicerContext[Any, Any]


class Unreadable:
    """Stands for a request whose bytes are no such message. (gRPC would answer UNKNOWN and log a traceback.)"""


class ControlService(control_pb2_grpc.ControlServicer):
    """The RPCs. Each unary call becomes one event of the brain; `Watch` sends the brain's directives for that node."""

    def __init__(
        self, job_id: str, driver: Driver, watchers: Watchers, status: Callable[[], Awaitable[Reply]], feed: Feed
    ) -> None:
        self._job_id = job_id
        self._feed = feed
        self._driver = driver
        self._status = status
        self._watchers = watchers
        self._said: set[str] = set()

    def handlers(self) -> grpc.GenericRpcHandler:
        """All RPCs, for `add_generic_rpc_handlers`; like the generated code, except for unreadable requests."""
        service = pb.DESCRIPTOR.services_by_name["Control"]
        found: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for method in service.methods:
            make = grpc.unary_unary_rpc_method_handler
            if method.server_streaming:
                make = grpc.unary_stream_rpc_method_handler
            found[method.name] = make(
                getattr(self, method.name),
                request_deserializer=_reader(getattr(pb, method.input_type.name)),
                response_serializer=getattr(pb, method.output_type.name).SerializeToString,
            )
        return grpc.method_handlers_generic_handler(service.full_name, found)

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterReply:
        await self._admit(request, context)
        message = await self._answer(await self._driver.call(request), context)
        assert isinstance(message, pb.RegisterReply), f"the brain answered Register with {type(message).__name__}"
        return message

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.Directive]:
        await self._admit(request, context)
        caller = request.caller
        if not self._driver.admits(caller.incarnation, caller.secret):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"only the agent that registered {caller.node} may watch for it"
            )
        if self._driver.stopping:
            # All streams have been ended already.
            await context.abort(grpc.StatusCode.UNAVAILABLE, End.STOPPING.value)
        try:
            watcher = self._watchers.open(caller.node, caller.incarnation)
        except TooManyStreams as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        watcher.opened = self._driver.tell(StreamOpened(caller.node, caller.incarnation))
        try:
            while (directive := await watcher.next()) is not None:
                yield directive
            await _say_why(watcher.ended, context)
        finally:
            # Also if the peer went away, which cancels the stream's task.
            if self._watchers.close(watcher):
                self._driver.tell(StreamClosed(caller.node, caller.incarnation))

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ReportProgress(self, request: pb.ProgressRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ReportWarm(self, request: pb.WarmRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ReportDrained(self, request: pb.DrainedRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ReportSaveFailed(self, request: pb.SaveFailedRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ReportFinished(self, request: pb.FinishedRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ReportFailure(self, request: pb.FailureRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def CommitCheckpoint(self, request: pb.CommitRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ClaimConversion(self, request: pb.ClaimRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ReportConversion(self, request: pb.ConversionReport, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ReportBadCheckpoint(self, request: pb.BadCheckpointRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ReportVerification(self, request: pb.VerificationReport, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ReportSighted(self, request: pb.SightedRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ReportPruned(self, request: pb.PrunedRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ReportShortage(self, request: pb.ShortageRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ReportHeld(self, request: pb.HeldRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ReportRemark(self, request: pb.RemarkRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def ReportDurable(self, request: pb.DurableRequest, context: Context) -> pb.Ack:
        return await self._ack(request, context)

    async def GetStatus(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        await self._admit(request, context)
        message = await self._answer(await self._status(), context)
        assert isinstance(message, pb.StatusReply), f"the brain answered GetStatus with {type(message).__name__}"
        return message

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleReply:
        message = await self._ordered(request, context)
        assert isinstance(message, pb.ScaleReply), f"the brain answered Scale with {type(message).__name__}"
        return message

    async def DrainNode(self, request: pb.DrainNodeRequest, context: Context) -> pb.OrderReply:
        return await self._order(request, context)

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.OrderReply:
        return await self._order(request, context)

    async def Start(self, request: pb.StartRequest, context: Context) -> pb.OrderReply:
        return await self._order(request, context)

    async def SaveNow(self, request: pb.SaveNowRequest, context: Context) -> pb.OrderReply:
        return await self._order(request, context)

    async def GetEvents(self, request: pb.EventsRequest, context: Context) -> pb.EventsReply:
        await self._admit(request, context)
        feed = self._feed
        await feed.wait(request.after, min(request.wait_seconds, LONGEST_WAIT_SECONDS))
        found = feed.after(request.after, min(request.limit or KEPT, KEPT))
        reply = pb.EventsReply(generation=self._driver.generation, oldest=feed.oldest, newest=feed.newest)
        reply.events.extend(map(event_proto, found))
        return reply

    async def _order(self, request: Any, context: Context) -> pb.OrderReply:
        message = await self._ordered(request, context)
        assert isinstance(message, pb.OrderReply), f"the brain answered an order with {type(message).__name__}"
        return message

    async def _ordered(self, request: Any, context: Context) -> Message | None:
        await self._admit(request, context)
        try:
            return await self._answer(await self._driver.order(request), context)
        except OrderLate as error:
            # Not UNAVAILABLE: no other master could do better, and nobody is to repeat it by himself.
            return await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def _ack(self, request: Any, context: Context) -> pb.Ack:
        await self._admit(request, context)
        message = await self._answer(await self._driver.call(request), context)
        return message if isinstance(message, pb.Ack) else pb.Ack(generation=self._driver.generation)

    async def _answer(self, reply: Reply, context: Context) -> Message | None:
        if reply.code != "OK":
            await context.abort(grpc.StatusCode[reply.code], reply.detail)
        return reply.message

    async def _admit(self, request: Any, context: Context) -> None:
        """Aborts the call unless it is of this protocol, for this job, and of a possible shape."""
        if isinstance(request, Unreadable):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the request's bytes are no such message: which client sends this?"
            )
        speaker = request.caller if "caller" in request.DESCRIPTOR.fields_by_name else request
        if speaker.protocol > CONTROL_PROTOCOL:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED,
                f"the client speaks protocol {speaker.protocol}, this master only {CONTROL_PROTOCOL}:"
                " upgrade dalsegno on the master",
            )
        job_id = speaker.job_id
        if not job_id and isinstance(request, OF_PEOPLE):
            job_id = self._job_id
        if job_id != self._job_id:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"this master serves job {self._job_id!r}, not {one_line(job_id, 128)!r}: check --job-id and --master",
            )
        try:
            left_out = admit(request)
        except ShapeError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{type(request).__name__}: {error}")
        for line in left_out:
            self._say_once(f"{type(request).__name__} of {_name_of(request)}: {line}")

    def _say_once(self, line: str) -> None:
        if line not in self._said and len(self._said) < MOST_SAID:
            self._said.add(line)
            log.warning("%s", line)


def _name_of(request: Any) -> str:
    named = getattr(request, "caller", request)
    return str(named.node or getattr(named, "host", ""))


def _reader(kind: type[Message]) -> Callable[[bytes], Message | Unreadable]:
    def read(data: bytes) -> Message | Unreadable:
        try:
            return kind.FromString(data)
        except DecodeError:
            return Unreadable()

    return read


async def _say_why(ended: End | None, context: Context) -> None:
    if ended is End.REPLACED:
        await context.abort(grpc.StatusCode.ABORTED, ended.value)
    if ended is End.STOPPING:
        await context.abort(grpc.StatusCode.UNAVAILABLE, ended.value)
    if ended is End.BROKEN:
        await context.abort(grpc.StatusCode.INTERNAL, ended.value)
