"""Where calls arrive: at the service of a master that leads; otherwise they learn which master does."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.contract import LEADER_METADATA

__all__ = ("Desk",)

# Tells gRPC's own retries of the caller that they would be in vain.
_NO_RETRY = ("grpc-retry-pushback-ms", "-1")


class Desk(grpc.GenericRpcHandler):
    """All RPCs of the control protocol, for one server, whoever leads."""

    def __init__(self) -> None:
        # Present while this master leads.
        self.present: grpc.GenericRpcHandler | None = None
        # Address of the master that leads instead; empty: it is not known; None: there is no other master.
        self.leader: str | None = None
        service = pb.DESCRIPTOR.services_by_name["Control"]
        self._elsewhere = grpc.method_handlers_generic_handler(
            service.full_name, {method.name: self._handler(method.server_streaming) for method in service.methods}
        )

    @property
    def refusal(self) -> str:
        """Why calls are not served here."""
        if self.leader is None:
            return "the master is stopping or starting: try again"
        where = f"the master at {self.leader} leads" if self.leader else "no other master is known to lead: try again"
        return f"this master stands by: {where}"

    def service(self, handler_call_details: Any) -> Any:
        """See grpc.GenericRpcHandler."""
        return (self.present or self._elsewhere).service(handler_call_details)

    def _handler(self, streams: bool) -> Any:
        if streams:
            return grpc.unary_stream_rpc_method_handler(self._refuse_stream)
        return grpc.unary_unary_rpc_method_handler(self._refuse)

    async def _refuse(self, request: bytes, context: Any) -> None:
        metadata = (_NO_RETRY, (LEADER_METADATA, self.leader)) if self.leader else (_NO_RETRY,)
        await context.abort(grpc.StatusCode.UNAVAILABLE, self.refusal, metadata)

    async def _refuse_stream(self, request: bytes, context: Any) -> Any:
        await self._refuse(request, context)
        yield b""
