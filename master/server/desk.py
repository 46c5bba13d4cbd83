"""Where calls arrive: at the service of a master that leads; otherwise they learn which master does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.contract import LEADER_METADATA

__all__ = ("Desk",)

# Tells gRPC's own retries of the caller that they would be in vain.
_NO_RETRY = ("grpc-retry-pushback-ms", "-1")
# Seconds that a call waits here until a leader is known; less than agents wait for the answer to a heartbeat.
HOLD_SECONDS = 2.0


@dataclass
class _Details:
    """What a handler is found by (see grpc.HandlerCallDetails)."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...] = ()


class Desk(grpc.GenericRpcHandler):
    """All RPCs of the control protocol, for one server, whoever leads.

    While nobody is known to lead, calls wait for a moment: whoever called would only come again, later than need be.
    """

    def __init__(self) -> None:
        self._present: grpc.GenericRpcHandler | None = None
        self._leader: str | None = None
        # Whether etcd does not answer, or refuses, so that who leads is not known, or was known last.
        self.etcd_is_away = False
        self._changed = asyncio.Event()
        service = pb.DESCRIPTOR.services_by_name["Control"]
        self._elsewhere = grpc.method_handlers_generic_handler(
            service.full_name,
            {
                method.name: self._handler(f"/{service.full_name}/{method.name}", method.server_streaming)
                for method in service.methods
            },
        )

    @property
    def present(self) -> grpc.GenericRpcHandler | None:
        """Who answers calls while this master leads."""
        return self._present

    @present.setter
    def present(self, present: grpc.GenericRpcHandler | None) -> None:
        self._present = present
        self._wake()

    @property
    def leader(self) -> str | None:
        """Address of the master that leads instead; empty: it is not known; None: there is no other master."""
        return self._leader

    @leader.setter
    def leader(self, leader: str | None) -> None:
        if leader != self._leader:
            self._leader = leader
            self._wake()

    @property
    def refusal(self) -> str:
        """Why calls are not served here."""
        if self.leader is None:
            return "the master is stopping or starting: try again"
        away = "etcd does not answer or refuses (this master's log says why)"
        if self.leader:
            led = f", or did: {away}" if self.etcd_is_away else ""
            return f"this master stands by: the master at {self.leader} leads{led}"
        why = f", as {away}" if self.etcd_is_away else ""
        return f"this master stands by: no other master is known to lead{why}: try again"

    def service(self, handler_call_details: Any) -> Any:
        """See grpc.GenericRpcHandler."""
        return (self.present or self._elsewhere).service(handler_call_details)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _handler(self, method: str, streams: bool) -> Any:
        if not streams:
            return grpc.unary_unary_rpc_method_handler(self._unary(method))

        async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
            found = await self._found(method, context)
            async for reply in found.unary_stream(found.request_deserializer(request), context):
                yield found.response_serializer(reply)

        return grpc.unary_stream_rpc_method_handler(stream)

    def _unary(self, method: str) -> Callable[[bytes, Any], Coroutine[Any, Any, bytes]]:
        async def unary(request: bytes, context: Any) -> bytes:
            found = await self._found(method, context)
            reply = await found.unary_unary(found.request_deserializer(request), context)
            return bytes(found.response_serializer(reply))

        return unary

    async def _found(self, method: str, context: Any) -> Any:
        """Who answers this call, if this master leads in time; else it is refused, with the address that is known."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._settled(), HOLD_SECONDS)
        present = self.present
        if present is None:
            metadata = (_NO_RETRY, (LEADER_METADATA, self.leader)) if self.leader else (_NO_RETRY,)
            return await context.abort(grpc.StatusCode.UNAVAILABLE, self.refusal, metadata)
        return present.service(_Details(method))

    async def _settled(self) -> None:
        """Until this master leads, or knows whom to send callers to, or that it will send them to nobody."""
        while self.present is None and self.leader == "":
            await self._changed.wait()
