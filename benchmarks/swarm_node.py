"""One simulated node: everything that the master can see of an agent, and nothing else.

It has a channel of its own with the agents' own options, a Watch stream, heartbeats at the agents' pace, and an outbox
that is sent in order and repeated until it is answered. It answers a Gather with a Join, a Drain with ReportDrained,
and registers anew when it is fenced. It has no workers, so it carries out orders in no time.

Thousands of them share one event loop beside the master, so they are lean: calls without generated stubs, heartbeats
serialised once per epoch, answers that are not parsed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import Message

from benchmarks.swarm_memory import NodeMemory, checkpoint_of
from dalsegno.agent.control.connection import RETRIED, channel_options
from dalsegno.agent.control.master_client import CALL_TIMEOUT_SECONDS
from dalsegno.agent.control.pace import ReportPace
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.contract import CONTROL_PROTOCOL

__all__ = ("Node", "Observer")

SERVICE = "/dalsegno.control.v1.Control/"
METHODS = ("Register", "Join", "Heartbeat", "ReportProgress", "ReportWarm", "ReportDrained")
METHODS += ("Leave", "ReportPruned", "ReportSighted", "CommitCheckpoint", "ReportHeld", "ReportFailure")
HEARTBEAT_TIMEOUT = 3.0
FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0
# Seconds until it asks again for a name that its predecessor still holds.
NAME_PAUSE_SECONDS = 0.5
# Seconds between two reports that the ranks are busy, because a world without steps counts as stuck. They do not report
# steps: those are collectives, so the master would take them for a proof that silent nodes live.
BUSY_EVERY = 10
# Seconds of the longest step, as a node claims.
STEP_SECONDS = 0.1
# A save by order is so many steps behind the newest one that this node knows: others have reported steps of their own.
AHEAD = 1000


class Fenced(Exception):
    """The master has declared this incarnation dead."""


class Observer(Protocol):
    """Counts what the nodes see. Times are those of the machine's monotonic clock, which its processes share."""

    job_id: str
    address: str
    settings: pb.Settings

    def registered(self) -> None: ...

    def joined(self, round_: int) -> None: ...

    def directed(self, order: str, size: int) -> None: ...

    def running(self, epoch: int, nodes: int) -> None: ...

    def left(self, epoch: int) -> None: ...

    def answered(self, method: str, seconds: float) -> None: ...

    def failed(self, method: str, code: str) -> None: ...


@dataclass
class Node:
    """Run `run` as a task until it is cancelled. `reports`: it reports for all nodes that work goes on."""

    observer: Observer
    name: str
    number: int
    reports: bool = False
    incarnation: str = ""
    # The epoch whose world it is in, and the number of nodes of that world; 0: none.
    epoch: int = 0
    nodes: int = 0
    # The last opened epoch and the highest generation that it has heard of.
    known: int = 0
    generation: int = 0
    run_id: str = ""
    step: int = 0
    head: pb.Checkpoint | None = None

    def __post_init__(self) -> None:
        self.secret = secrets.token_bytes(16)
        self._channel = grpc.aio.insecure_channel(self.observer.address, options=channel_options())
        self._calls = {name: self._channel.unary_unary(SERVICE + name) for name in METHODS}
        self._watch = self._channel.unary_stream(SERVICE + "Watch")
        self._stream: Any = None
        self._outbox: deque[tuple[str, Any]] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._request = 0
        self._joined: tuple[int, str, tuple[int, ...]] | None = None
        self._drained = 0
        self._pruned: tuple[str, ...] = ()
        self._sighted = ""
        self._fenced = False
        # Whether it has the first rank, which saves for all; the last order to save, and the save.
        self._first = False
        self._ordered = 0
        in_memory = self.observer.settings.memory_replicas > 0
        self._memory = NodeMemory(self.number) if in_memory else None
        self._saving: asyncio.Task[bool] | None = None
        self._goodbye: asyncio.Task[None] | None = None
        self._beat = b""
        # When agents speak, in the event loop's seconds.
        self._pace = ReportPace(0.0, 0.0)
        self.pace = 0.0

    # ---- its life ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Registers, and again whenever it is fenced."""
        try:
            while True:
                await self._register()
                await self._attend()
        finally:
            await self._channel.close()

    async def _register(self) -> None:
        before, self.incarnation = self.incarnation, secrets.token_hex(16)
        self._outbox.clear()
        self._request, self._joined, self._drained, self._fenced = 0, None, 0, False
        request = pb.RegisterRequest(
            job_id=self.observer.job_id,
            incarnation=self.incarnation,
            protocol=CONTROL_PROTOCOL,
            host=self.name,
            node=self.name,
            nproc=1,
            settings=self.observer.settings,
            probe="probe",
            epoch=self.known,
            generation=self.generation,
            inventory=[self.head] if self.head is not None else [],
            previous_incarnation=before,
            secret=self.secret,
            peer_address=self._memory.address if self._memory is not None else "",
        )
        while (raw := await self._answered("Register", request)) is None:
            await asyncio.sleep(NAME_PAUSE_SECONDS)
        reply = pb.RegisterReply.FromString(raw)
        self.run_id = reply.run_id
        self._pace.told(reply.pace, asyncio.get_running_loop().time())
        self._set_epoch(0, 0)
        self.observer.registered()
        self._send("ReportWarm", pb.WarmRequest(caller=self.caller()))
        if self._memory is not None:
            self._send("ReportHeld", pb.HeldRequest(caller=self._next_caller(), all=True))

    async def _attend(self) -> None:
        """Runs until this incarnation is fenced."""
        pulse = asyncio.create_task(self._pulse())
        try:
            await self._watch_on()
        finally:
            pulse.cancel()
            sender, self._sender = self._sender, None
            if sender is not None:
                sender.cancel()

    async def _pulse(self) -> None:
        """Sends a heartbeat each interval, no matter what else is sent."""
        loop = asyncio.get_running_loop()
        self._pace.begin(loop.time())
        busy = loop.time() + BUSY_EVERY
        count = 0
        while not self._fenced:
            await asyncio.sleep(self._pace.due(None) - loop.time())
            self._pace.spoke(loop.time(), None, random.random())
            if await self.call("Heartbeat", self._beat, HEARTBEAT_TIMEOUT) is None:
                self._pace.unanswered(loop.time())
            count += 1
            if self.reports and self.epoch and loop.time() >= busy:
                busy = loop.time() + BUSY_EVERY
                await self.call("ReportProgress", self._progress(beats=count).SerializeToString(), HEARTBEAT_TIMEOUT)

    async def _watch_on(self) -> None:
        """Reads the stream of directives, and opens it again whenever it breaks."""
        pause = FIRST_PAUSE
        while not self._fenced:
            # The stream is the agent's lifeline and has no deadline; pings find a dead connection.
            self._stream = self._watch(pb.WatchRequest(caller=self.caller()).SerializeToString())
            try:
                while (raw := await self._stream.read()) is not grpc.aio.EOF:
                    pause = FIRST_PAUSE
                    self._directed(raw)
            except grpc.aio.AioRpcError as error:
                self._note("Watch", error)
            except asyncio.CancelledError:
                # `_set_fenced` cancels the stream; anything else is the end of this node.
                if not self._fenced:
                    raise
            if not self._fenced:
                await asyncio.sleep(pause * random.uniform(0.7, 1.3))
                pause = min(2 * pause, LAST_PAUSE)

    def _set_fenced(self) -> None:
        self._fenced = True
        if self._stream is not None:
            self._stream.cancel()

    async def _leave(self) -> None:
        own = self.incarnation
        request = pb.LeaveRequest(caller=self._next_caller(), gone=True)
        await self.call("Leave", request.SerializeToString(), CALL_TIMEOUT_SECONDS)
        if self.incarnation == own:
            self._set_fenced()

    def _set_epoch(self, epoch: int, nodes: int) -> None:
        if self.epoch and epoch != self.epoch:
            self.observer.left(self.epoch)
        if epoch and epoch != self.epoch:
            self.observer.running(epoch, nodes)
        self.epoch, self.nodes = epoch, nodes
        self._beat = pb.HeartbeatRequest(caller=self.caller()).SerializeToString()

    # ---- what it is told --------------------------------------------------------------------------------------------

    def _directed(self, raw: bytes) -> None:
        directive = pb.Directive.FromString(raw)
        order = directive.WhichOneof("order") or "none"
        self.observer.directed(order, len(raw))
        self.generation = max(self.generation, directive.generation)
        self.known = max(self.known, directive.epoch)
        self.run_id = directive.run_id
        if directive.HasField("head"):
            self.head = directive.head
        if order not in ("run", "drain"):
            self._set_epoch(0, 0)
        match order:
            case "gather":
                if self._gathers(directive.gather):
                    self._join(directive.gather.round, directive.gather.resume, some_of(directive.gather))
            case "wait" if directive.wait.round or directive.wait.HasField("look_for"):
                self._join(directive.wait.round, directive.wait.look_for)
            case "run":
                self._train(directive.run)
            case "drain":
                self._train(directive.drain.run)
                self._drain(directive.drain)
            case "fenced":
                self._set_fenced()
            case "release":
                # It goes, and its supervisor starts it again.
                self._goodbye = asyncio.create_task(self._leave())
        if order == "run" and self._first and directive.save_order > self._ordered:
            self._ordered = directive.save_order
            self._saving = asyncio.create_task(self.commit(AHEAD + self.newest))
        self._prune(directive)
        self._sight(directive)

    def _gathers(self, order: pb.Gather) -> bool:
        """Brings the resume point here, if it is in memory; returns whether what was named of it is here."""
        memory = self._memory
        if memory is None or not order.parts or self.head is None:
            return True
        for request in memory.gather(self.head, order.parts):
            self._hold(request)
        return memory.has(order.resume.digest, [part.group_rank for part in order.parts])

    def _hold(self, request: pb.HeldRequest) -> None:
        request.caller.CopyFrom(self._next_caller())
        self._send("ReportHeld", request)

    def save(self, count: int, loads: str) -> None:
        """The nth save of this epoch to memory."""
        if self._memory is not None and self.epoch:
            for request in self._memory.save(count, loads)[1]:
                self._hold(request)

    def fail(self) -> None:
        """Its ranks have failed, and it stays."""
        kind = pb.FAILURE_KIND_WORKER
        self._send(
            "ReportFailure", pb.FailureRequest(caller=self._next_caller(), kind=kind, exit_code=1, message="exit 1")
        )

    def _join(self, round_: int, resume: pb.CheckpointRef, parts: tuple[int, ...] = ()) -> None:
        if self._joined == (round_, resume.digest, parts):
            return
        self._joined = (round_, resume.digest, parts)
        seen = self.head is not None and self.head.ref.digest == resume.digest
        request = pb.JoinRequest(
            caller=self._next_caller(),
            round=round_,
            resume=resume,
            store_host="127.0.0.1",
            store_port=10_000 + self.number % 50_000,
            probe="probe",
            inventory=[self.head] if seen else [],
            parts=parts,
        )
        self._send("Join", request)
        self.observer.joined(round_)

    def _train(self, world: pb.World) -> None:
        if world.epoch == self.epoch:
            return
        self.step = world.resume.source.step
        self._first = world.HasField("place") and not world.place.group_rank
        # Older masters name all members but no numbers.
        self._set_epoch(world.epoch, world.nodes or len(world.members))
        self._joined = None
        if self._memory is not None:
            self._memory.opened(world, self.nodes, self.observer.settings)
        self._send("ReportProgress", None)

    def _drain(self, order: pb.Drain) -> None:
        if self._drained == order.epoch:
            return
        self._drained = order.epoch
        self.step += 1
        ref = None
        if self._memory is not None and order.to_memory:
            checkpoint, requests = self._memory.save(-1)
            self.step, ref = checkpoint.step, checkpoint.ref
            for request in requests:
                self._hold(request)
        caller = self.caller()
        self._send("ReportProgress", self._progress(draining=True))
        self._send("ReportDrained", pb.DrainedRequest(caller=caller, step=self.step, checkpoint=ref))

    def _prune(self, directive: pb.Directive) -> None:
        names = tuple(ref.name for ref in directive.prune)
        if names and names != self._pruned:
            self._send("ReportPruned", pb.PrunedRequest(caller=self.caller(), refs=directive.prune))
        self._pruned = names

    def _sight(self, directive: pb.Directive) -> None:
        """Sees a checkpoint that another node has committed at once. Older masters do not ask."""
        ref = directive.sight
        if ref is not None and ref.digest not in ("", self._sighted):
            self._sighted = ref.digest
            self._send("ReportSighted", pb.SightedRequest(caller=self.caller(), ref=ref))

    # ---- what it says -----------------------------------------------------------------------------------------------

    def caller(self) -> pb.Caller:
        return pb.Caller(
            job_id=self.observer.job_id,
            node=self.name,
            incarnation=self.incarnation,
            epoch=self.epoch,
            protocol=CONTROL_PROTOCOL,
            secret=self.secret,
        )

    def _next_caller(self) -> pb.Caller:
        caller = self.caller()
        self._request += 1
        caller.request = self._request
        return caller

    def _progress(self, **fields: Any) -> pb.ProgressRequest:
        return pb.ProgressRequest(
            caller=self.caller(), step=self.step, loss=1.0, has_session=True, longest=STEP_SECONDS, **fields
        )

    async def progress(self) -> None:
        """Makes one more step; only the newest report is sent, as agents do it."""
        self.step += 1
        await self.call("ReportProgress", self._progress().SerializeToString(), HEARTBEAT_TIMEOUT)

    async def beat(self) -> bool:
        """Sends an extra heartbeat; returns whether it was answered."""
        return await self.call("Heartbeat", self._beat, CALL_TIMEOUT_SECONDS) is not None

    @property
    def newest(self) -> int:
        """The last step that it has made or was told of."""
        return max(self.step, self.head.step if self.head is not None else 0)

    async def commit(self, step: int) -> bool:
        """Records a checkpoint; returns whether the master took it, which it does if it is newer than all before."""
        self.step = step
        # No two nodes use the same name.
        ref = pb.CheckpointRef(name=f"step-{self.step}.e{self.epoch}.{self.number}", digest=secrets.token_hex(32))
        checkpoint = checkpoint_of(ref, self.run_id, self.step, self.epoch, self.nodes, self.observer.settings)
        checkpoint.generation = self.generation
        request = pb.CommitRequest(caller=self._next_caller(), checkpoint=checkpoint)
        return await self.call("CommitCheckpoint", request.SerializeToString(), CALL_TIMEOUT_SECONDS) is not None

    def _send(self, method: str, request: Message | None) -> None:
        """Puts a call into the outbox. None: the progress as it will be when its turn comes."""
        self._outbox.append((method, request))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        with contextlib.suppress(Fenced):
            while self._outbox:
                method, request = self._outbox[0]
                if request is not None:
                    await self._answered(method, request)
                else:
                    self.step += 1
                    await self._answered(method, self._progress())
                if self._outbox:
                    self._outbox.popleft()

    async def _answered(self, method: str, request: Message) -> bytes | None:
        """Repeats a call with the same number until the master answers. None: it refused. Raises Fenced."""
        data, pause = request.SerializeToString(), FIRST_PAUSE
        while True:
            try:
                return await self._calls[method](data, timeout=CALL_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                self._note(method, error)
                if self._fenced:
                    raise Fenced from error
                if method == "Register" and error.code() not in (*RETRIED, grpc.StatusCode.ALREADY_EXISTS):
                    raise  # the settings make no sense, which no simulated node can mend
                if error.code() not in RETRIED:
                    return None
            await asyncio.sleep(pause * random.uniform(0.7, 1.3))
            pause = min(2 * pause, LAST_PAUSE)

    async def call(self, method: str, data: bytes, seconds: float) -> bytes | None:
        """Makes one attempt, and tells the observer how long it took. None: it failed."""
        began = time.monotonic()
        try:
            reply = await self._calls[method](data, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            self._note(method, error)
            return None
        self.observer.answered(method, time.monotonic() - began)
        if method in ("Heartbeat", "ReportProgress"):
            self._told(reply)
        return reply

    def _told(self, reply: bytes) -> None:
        """Takes the pace that the master wants; older masters give none."""
        ack = pb.Ack.FromString(reply)
        self._pace.told(ack.pace, asyncio.get_running_loop().time())
        self.pace = ack.pace.progress_seconds

    def _note(self, method: str, error: grpc.aio.AioRpcError) -> None:
        """Counts an error; one kind of them ends this incarnation."""
        self.observer.failed(method, error.code().name)
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION and (error.details() or "").startswith("fenced"):
            self._set_fenced()


def some_of(order: pb.Gather) -> tuple[int, ...]:
    """The parts that were asked for, if there are more."""
    return tuple(part.group_rank for part in order.parts) if order.partly else ()
