"""Somebody who gives orders to a job of many nodes, as the commands do it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc

from benchmarks.cluster import PATIENCE, SceneFailed
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos import control_pb2_grpc
from dalsegno.protos.contract import CONTROL_PROTOCOL

__all__ = ("Person",)

# Seconds between two looks, and that one call may take.
LOOK_EVERY, CALL_SECONDS = 0.05, 20.0
# Waits until all nodes are one world again, which opened after that time.
Whole = Callable[[float], None]


class Person:
    """Has a connection of their own; a context manager. Each order returns the seconds until it was carried out.

    Each raises SceneFailed if it was refused, or not carried out in time.
    """

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", 1 << 26)])
        self._stub: Any = control_pb2_grpc.ControlStub(self._channel)

    def __enter__(self) -> Person:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._channel.close()

    def saves(self) -> float:
        """The ranks save, and train on."""
        began, order = self._give("SaveNow", pb.SaveNowRequest(protocol=CONTROL_PROTOCOL))
        return self._until(lambda job: not job.save_order and job.head.step > order.step, "a save") - began

    def drains(self, whole: Whole) -> float:
        """One node goes, and comes back when it has gone."""
        before = self._status()
        name = before.nodes[-1].node
        began, _ = self._give("DrainNode", pb.DrainNodeRequest(protocol=CONTROL_PROTOCOL, node=name))
        done = self._world(before, len(before.nodes) - 1, f"a world without {name}")
        whole(done)
        return done - began

    def scales(self, few: int, all_of_them: int, whole: Whole) -> float:
        """The world gets smaller, and larger again."""
        before = self._status()
        began, _ = self._give("Scale", pb.ScaleRequest(protocol=CONTROL_PROTOCOL, nodes=few))
        done = self._world(before, few, f"a world of {few}")
        self._give("Scale", pb.ScaleRequest(protocol=CONTROL_PROTOCOL, nodes=all_of_them))
        whole(done)
        return done - began

    def stops(self, whole: Whole) -> float:
        """All nodes go; then the job is started again."""
        began, _ = self._give("Stop", pb.StopRequest(protocol=CONTROL_PROTOCOL))
        done = self._until(lambda job: job.phase == pb.PHASE_STOPPED, "a stop")
        self._give("Start", pb.StartRequest(protocol=CONTROL_PROTOCOL))
        whole(done)
        return done - began

    def _world(self, before: pb.StatusReply, nodes: int, what: str) -> float:
        def there(job: pb.StatusReply) -> bool:
            newest = job.history[-1] if job.history else None
            return newest is not None and newest.epoch > before.epoch and newest.nodes == nodes

        return self._until(there, what)

    def _status(self) -> pb.StatusReply:
        reply: pb.StatusReply = self._stub.GetStatus(pb.StatusRequest(protocol=CONTROL_PROTOCOL), timeout=CALL_SECONDS)
        return reply

    def _give(self, method: str, request: Any) -> tuple[float, Any]:
        """When the order was given, and the answer."""
        began = time.monotonic()
        try:
            return began, getattr(self._stub, method)(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise SceneFailed(f"{method}: {error}") from error

    def _until(self, done: Callable[[pb.StatusReply], bool], what: str) -> float:
        """When it was so."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                if done(self._status()):
                    return time.monotonic()
            except grpc.RpcError as error:
                raise SceneFailed(f"{what}: {error}") from error
            if time.monotonic() > deadline:
                raise SceneFailed(f"{what}: not within {PATIENCE:.0f} s")
            time.sleep(LOOK_EVERY)  # why: the status has no event to wait for
