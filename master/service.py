"""The control protocol's RPCs: checks what needs no state, hands the rest to the driver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from dalsegno.protos import control_pb2 as pb
from dalsegno.protos import control_pb2_grpc

from .driver import Driver
from .events import Reply, StreamClosed, StreamOpened
from .watchers import End, Watchers

__all__ = ("PROTOCOL", "ControlService")

# Raised when an older master would misunderstand a newer agent. 2: a world names only the place of who is told of it.
PROTOCOL = 2

Context = grpc.aio.ServicerContext[Any, Any]


class ControlService(control_pb2_grpc.ControlServicer):
    """Every unary call becomes one event of the brain; `Watch` sends what the brain shows to that node."""

    def __init__(self, job_id: str, driver: Driver, watchers: Watchers) -> None:
        self._job_id = job_id
        self._driver = driver
        self._watchers = watchers

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterReply:
        await self._check(request.job_id, request.protocol, context)
        message = await self._answer(await self._driver.call(request), context)
        assert isinstance(message, pb.RegisterReply), f"the brain answered Register with {type(message).__name__}"
        return message

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.Directive]:
        caller = request.caller
        await self._check(caller.job_id, caller.protocol, context)
        if not self._driver.admits(caller.incarnation, caller.secret):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"only the agent that registered {caller.node} may watch for it"
            )
        watcher = self._watchers.open(caller.node, caller.incarnation)
        watcher.opened = self._driver.tell(StreamOpened(caller.node, caller.incarnation))
        try:
            while (directive := await watcher.next()) is not None:
                yield directive
            await _say_why(watcher.ended, context)
        finally:
            # Also when the peer went away: the stream's task is cancelled then.
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

    async def GetStatus(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        await self._check(request.job_id or self._job_id, request.protocol, context)
        message = await self._answer(self._driver.status(), context)
        assert isinstance(message, pb.StatusReply), f"the brain answered GetStatus with {type(message).__name__}"
        return message

    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleReply:
        await self._check(request.job_id or self._job_id, request.protocol, context)
        message = await self._answer(await self._driver.call(request), context)
        assert isinstance(message, pb.ScaleReply), f"the brain answered Scale with {type(message).__name__}"
        return message

    async def _ack(self, request: Any, context: Context) -> pb.Ack:
        await self._check(request.caller.job_id, request.caller.protocol, context)
        message = await self._answer(await self._driver.call(request), context)
        return message if isinstance(message, pb.Ack) else pb.Ack(generation=self._driver.generation)

    async def _answer(self, reply: Reply, context: Context) -> Message | None:
        if reply.code != "OK":
            await context.abort(grpc.StatusCode[reply.code], reply.detail)
        return reply.message

    async def _check(self, job_id: str, protocol: int, context: Context) -> None:
        if protocol > PROTOCOL:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED,
                f"the client speaks protocol {protocol}, this master only {PROTOCOL}: upgrade dalsegno on the master",
            )
        if job_id != self._job_id:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"this master serves job {self._job_id!r}, not {job_id!r}: check --job-id and --master",
            )


async def _say_why(ended: End | None, context: Context) -> None:
    if ended is End.REPLACED:
        await context.abort(grpc.StatusCode.ABORTED, ended.value)
    if ended is End.STOPPING:
        await context.abort(grpc.StatusCode.UNAVAILABLE, ended.value)
