"""Agents without ranks, all in one thread: they know all masters' addresses.

They note what masters have told them, and what was promised.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from benchmarks.swarm_node import FIRST_PAUSE, HEARTBEAT_TIMEOUT, LAST_PAUSE, METHODS, SERVICE, Fenced, Node
from dalsegno.agent.control.connection import channel_options
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.contract import LEADER_METADATA

T = TypeVar("T")
# After these another master is asked, as agents do it.
_AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)
# Seconds between two changes of the master: several calls fail together.
_REST = 0.3
# Seconds that a call may take at most.
_GRACE = 12.0


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """That of all crews of this process: gRPC still calls a loop on which it has had channels."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


@dataclass
class Light(Node):
    """One agent. `held`: methods that it does not call for now."""

    addresses: Sequence[str] = ()
    held: set[str] = field(default_factory=set)
    # What all have committed, by digest.
    disk: dict[str, pb.Checkpoint] = field(default_factory=dict)
    # Generation and step of each commit that was answered, and what each directive has said: generation, epoch, step.
    promised: list[tuple[int, int]] = field(default_factory=list)
    told: list[tuple[int, int, int]] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    incarnations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._address = self.observer.address
        self._moved_at = 0.0
        self._moved = False
        self._closing: set[asyncio.Future[None]] = set()

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            await asyncio.gather(*(one for one in self._closing if one.cancel()), return_exceptions=True)

    async def _register(self) -> None:
        await super()._register()
        self.incarnations.append(self.incarnation)

    def _go(self, address: str) -> None:
        """To another master; the stream is opened anew there."""
        now = asyncio.get_running_loop().time()
        if now < self._moved_at + _REST:
            return
        before, self._address, self._moved_at = self._channel, address, now
        self._channel = grpc.aio.insecure_channel(address, options=channel_options())
        self._calls = {name: self._channel.unary_unary(SERVICE + name) for name in METHODS}
        self._watch = self._channel.unary_stream(SERVICE + "Watch")
        self._moved = True
        if self._stream is not None:
            self._stream.cancel()
        # Its calls end by themselves: closed at once, it would cancel who waits for them.
        self._closing.add(closing := asyncio.ensure_future(before.close(_GRACE)))
        closing.add_done_callback(self._closing.discard)

    def _note(self, method: str, error: grpc.aio.AioRpcError) -> None:
        super()._note(method, error)
        if error.code() in _AWAY:
            found = [value for key, value in error.trailing_metadata() or () if key == LEADER_METADATA]
            if found:
                if found[0] != self._address:
                    self._go(str(found[0]))
                return
            at = self.addresses.index(self._address) if self._address in self.addresses else -1
            self._go(self.addresses[(at + 1) % len(self.addresses)])

    async def _watch_on(self) -> None:
        pause = FIRST_PAUSE
        while not self._fenced:
            self._moved = False
            self._stream = self._watch(pb.WatchRequest(caller=self.caller()).SerializeToString())
            try:
                while (raw := await self._stream.read()) is not grpc.aio.EOF:
                    pause = FIRST_PAUSE
                    self._directed(raw)
            except grpc.aio.AioRpcError as error:
                self._note("Watch", error)
            except asyncio.CancelledError:
                if not (self._fenced or self._moved):
                    raise
            if not self._fenced:
                await asyncio.sleep(pause * random.uniform(0.7, 1.3))
                pause = min(2 * pause, LAST_PAUSE)

    def _directed(self, raw: bytes) -> None:
        directive = pb.Directive.FromString(raw)
        if directive.generation < self.generation:
            # A master that has been replaced: agents refuse what it says.
            self._note_stale()
            return
        self.told.append((directive.generation, directive.epoch, directive.head.step))
        self.orders.append(directive.WhichOneof("order") or "none")
        super()._directed(raw)

    def _note_stale(self) -> None:
        at = self.addresses.index(self._address)
        self._go(self.addresses[(at + 1) % len(self.addresses)])

    def _join(self, round_: int, resume: pb.CheckpointRef, parts: tuple[int, ...] = ()) -> None:
        # All see one directory, also what is no longer the newest.
        head, self.head = self.head, self.disk.get(resume.digest, self.head)
        super()._join(round_, resume, parts)
        self.head = head

    async def _answered(self, method: str, request: Message) -> bytes | None:
        while method in self.held:
            await asyncio.sleep(0.05)
        return await super()._answered(method, request)

    async def report(self) -> None:
        """Says which step it has made, if it is in a world."""
        if self.epoch and self.orders[-1:] == ["run"]:
            await self.call("ReportProgress", self._progress().SerializeToString(), HEARTBEAT_TIMEOUT)

    async def commits(self, step: int) -> bool:
        """Commits until it is answered; whether the master took it. Raises Fenced."""
        self.step = max(self.step, step)
        checkpoint = pb.Checkpoint(
            ref=pb.CheckpointRef(
                name=f"step-{step}.e{self.epoch}.{self.number}", digest=f"{self.epoch:032x}{step:032x}"
            ),
            run_id=self.run_id,
            step=step,
            epoch=self.epoch,
            form=pb.FORM_SHARDED,
            shape=pb.Shape(world_size=self.nodes, strategy="ddp", any_world_size=True),
            generation=self.generation,
        )
        self.disk[checkpoint.ref.digest] = checkpoint
        request = pb.CommitRequest(caller=self._next_caller(), checkpoint=checkpoint)
        raw = await self._answered("CommitCheckpoint", request)
        if raw is None or request.caller.request != self._request:
            # Refused; or a Join has overtaken it, so that its answer promises nothing. Real agents call one by one.
            return False
        self.promised.append((pb.Ack.FromString(raw).generation, step))
        return True


class Crew:
    """Light agents of one job; ended with `close`."""

    def __init__(self, job_id: str, addresses: Sequence[str], settings: pb.Settings) -> None:
        self.job_id, self.addresses, self.settings = job_id, list(addresses), settings
        self.agents: dict[str, Light] = {}
        self._disk: dict[str, pb.Checkpoint] = {}
        self.errors: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._reports: set[asyncio.Task[None]] = set()
        self._loop = _loop()

    # What the nodes tell an observer.
    @property
    def address(self) -> str:
        return self.addresses[0]

    def registered(self) -> None: ...
    def joined(self, round_: int) -> None: ...
    def directed(self, order: str, size: int) -> None: ...
    def running(self, epoch: int, nodes: int) -> None: ...
    def left(self, epoch: int) -> None: ...
    def answered(self, method: str, seconds: float) -> None: ...

    def failed(self, method: str, code: str) -> None:
        self.errors.append(f"{method} {code}")

    def start(self, name: str, *held: str) -> Light:
        """An agent that does not call these methods yet."""

        async def begin() -> Light:
            agent = Light(self, name, len(self.agents), addresses=self.addresses, held=set(held), disk=self._disk)
            self._tasks.append(asyncio.create_task(agent.run()))
            return agent

        self.agents[name] = self.do(begin())
        return self.agents[name]

    def train(self, every: float) -> None:
        """From now on the first agent commits, again and again, and all make steps."""

        async def go_on() -> None:
            step = 0
            while True:
                await asyncio.sleep(every)
                first, *others = self.agents.values()
                if not first.epoch or first.orders[-1:] != ["run"]:
                    continue
                step = max(step, *(agent.newest for agent in (first, *others))) + 1
                for agent in others:
                    agent.step = step
                with contextlib.suppress(Fenced):
                    await first.commits(step)

        async def report() -> None:
            # Also after a change of the master, which must hear of a step before it takes newcomers in. Each by itself:
            # one whose calls hang keeps no other one from being heard.
            while True:
                await asyncio.sleep(every)
                working = [one for one in self.agents.values() if one.epoch and one.orders[-1:] == ["run"]]
                # Ranks train on while a commit waits for its answer. That proves those alive who are not heard.
                made = 1 + max((one.newest for one in working), default=0)
                for agent in working:
                    agent.step = made
                    if agent.name not in reporting:
                        reporting.add(agent.name)
                        one = asyncio.create_task(agent.report())
                        one.add_done_callback(lambda _, name=agent.name: reporting.discard(name))
                        self._reports.add(one)
                        one.add_done_callback(self._reports.discard)

        reporting: set[str] = set()

        async def begin() -> None:
            self._tasks += [asyncio.create_task(go_on()), asyncio.create_task(report())]

        self.do(begin())

    def release(self) -> None:
        """All agents call what they were not to call."""
        for agent in self.agents.values():
            agent.held.clear()

    def do(self, work: Coroutine[Any, Any, T], seconds: float = 20.0) -> T:
        """Has the agents' loop do it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def close(self) -> None:
        """Ends all agents."""

        async def end() -> None:
            running = [*self._tasks, *self._reports]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

        self.do(end())
