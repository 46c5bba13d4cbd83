"""The real server, driver, watchers and service in a simulated process; only gRPC, the disk and the clock are ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import grpc
import grpc.aio
from google.protobuf.message import Message

from dalsegno.master.brain.events import Called, Event, Reply
from dalsegno.master.brain.live import State
from dalsegno.master.brain.state import Job
from dalsegno.master.record.store import MemoryStore, Rows, StoreError, StoreUnavailable
from dalsegno.master.server import server
from dalsegno.master.server.job_brain import JobBrain
from dalsegno.master.server.server import ControlServer, ServerOptions
from dalsegno.protos import control_pb2 as pb

from .loop import VirtualLoop
from .network import Stream

if TYPE_CHECKING:
    from .world import Simulation

# What gRPC and the loop spend on one call beside the code that is seen, in seconds.
CALL_COST = 150e-6
DIRECTIVE_COST = 100e-6


class Aborted(Exception):
    """What `context.abort` raises."""

    def __init__(self, code: grpc.StatusCode, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code.name, detail


class Context:
    """`grpc.aio.ServicerContext`, as far as the service uses it."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: object = ()) -> None:
        raise Aborted(code, details)


@dataclass(frozen=True)
class Details:
    """`grpc.HandlerCallDetails`."""

    method: str
    invocation_metadata: tuple[()] = ()


CONTROL = pb.DESCRIPTOR.services_by_name["Control"]
METHODS = {getattr(pb, one.input_type.name): f"/{CONTROL.full_name}/{one.name}" for one in CONTROL.methods}


class Server:
    """`grpc.aio.Server`: finds the handlers by the type of their request."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._desk: Any = None

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        (self._desk,) = handlers

    def handler(self, kind: type[Message]) -> Any:
        found = self._desk.service(Details(METHODS[kind]))
        return found.unary_unary or found.unary_stream

    def add_insecure_port(self, address: str) -> int:
        return 1

    async def start(self) -> None:
        """Nothing listens: the network calls the handlers."""

    async def stop(self, grace: float | None) -> None:
        """As above."""


class Brain(JobBrain):
    """The product's, which lets the checks see the state."""

    job: Job | None = None
    sim: Simulation

    def begin(self, rows: dict[str, bytes], generation: int, now: float) -> State:
        state = super().begin(rows, generation, now)
        self.job = state.job
        return state

    def handle_all(self, state: State, events: list[Event], now: float) -> tuple[State, list[Reply | None]]:
        begun = state.job.epoch > 0
        state, replies = super().handle_all(state, events, now)
        self.job = state.job
        if not begun:
            self.sim.ledger.heard(state.job)
        for fault in state.faults:
            self.sim.ledger.violated("no event is set aside", fault)
        return state, replies


class Shell(ControlServer):
    """Tells the ledger of every turn that may have changed what is durable."""

    sim: Simulation

    def _publish(self) -> None:
        assert isinstance(self._brain, Brain)
        if self._brain.job is not None:
            with self.sim.master.loop.meter.apart():
                self.sim.ledger.master_moved(self._brain.job)
        super()._publish()


class RealMaster:
    """One master at a time, over one record that may be lost. The same handle as `masters.SimMaster`."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.up = False
        self.started_at = 0.0
        # "handled": dies between deciding and saving; "saved": between saving and answering.
        self.crash_at = ""
        self.crash_events = 0
        self.downtime = 1.0
        self.loop: VirtualLoop | None = None
        self.longest_turn = 0.0
        self._store = MemoryStore()
        self._shell: Shell | None = None
        self._brain: Brain | None = None
        self._tasks: dict[Stream, asyncio.Task[None]] = {}

    @property
    def job(self) -> Job | None:
        return self._brain.job if self._brain is not None else None

    @property
    def stored(self) -> dict[str, bytes] | None:
        return self._store.load() or None

    # ---- the process ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.up:
            return
        sim = self.sim
        self.started_at = sim.clock.now
        self.up = True
        self.loop = loop = VirtualLoop(sim.clock, sim.random, sim.plan.slowness, self._disk_time)
        self._brain = Brain("job", None, embedded=sim.plan.embedded)
        self._brain.sim = sim
        store = SlowStore(self, self._store)
        self._shell = Shell("job", self._brain, store, ServerOptions(), clock=loop.time)
        self._shell.sim = sim
        loop.create_task(self._main(loop, self._shell))

    async def _main(self, loop: VirtualLoop, shell: Shell) -> None:
        try:
            await shell.start()
            with loop.meter.apart():
                self.sim.trace("master", "starts, generation {}", shell.driver.generation)
            await shell.run()
        except StoreError as error:
            if loop.dead:
                return
            self.sim.trace("master", "gives up: {}", error)
            self.sim.clock.after(0.0, self._die, loop)
        except Exception as error:
            if loop.dead:
                return
            self.sim.ledger.violated("the master lives", f"it died of {error!r}")

    def crash(self) -> None:
        """SIGKILL now; whoever supervises it starts it again after `downtime`."""
        if self.up and self.loop is not None:
            self._die(self.loop)

    def _die(self, loop: VirtualLoop) -> None:
        if not self.up or loop is not self.loop:
            return
        self.sim.trace("master", "dies (back in {:.1f} s)", self.downtime)
        self.up = False
        self.crash_at = ""
        self.longest_turn = max(self.longest_turn, loop.longest_turn)
        loop.kill()
        self.loop = self._shell = self._brain = None
        self._tasks.clear()
        self.sim.network.master_died()
        self.sim.clock.after(self.downtime, self.start)

    def longest(self) -> float:
        """How long the master was at work without a pause, seconds."""
        return max(self.longest_turn, self.loop.longest_turn if self.loop is not None else 0.0)

    def lose_store(self) -> None:
        """Only while it is down."""
        self._store = MemoryStore()
        self.sim.trace("master", "its store is lost")
        self.sim.ledger.store_lost()

    def pause(self) -> None:
        if self.up and self.loop is not None and not self.loop.frozen:
            self.sim.trace("master", "is stopped")
            self.loop.frozen = True

    @property
    def is_paused(self) -> bool:
        return self.up and self.loop is not None and self.loop.frozen

    def resume(self) -> None:
        if self.is_paused and self.loop is not None:
            self.sim.trace("master", "continues")
            self.loop.thaw()

    def _disk_time(self) -> float:
        """How long one write takes."""
        sim = self.sim
        return sim.store_delay if sim.store_delay else sim.random.uniform(0.0005, 0.004)

    # ---- calls and streams ------------------------------------------------------------------------------------------

    def receive(self, event: Called, answer: Callable[[Reply], None] | None = None) -> None:
        if self.up and self.loop is not None:
            self.loop.charge(CALL_COST)
            self.loop.create_task(self._serve(self.loop, event.message, answer))

    async def _serve(self, loop: VirtualLoop, message: Message, answer: Callable[[Reply], None] | None) -> None:
        try:
            reply = Reply("OK", "", await self._handler(message)(message, Context()))
        except Aborted as aborted:
            reply = Reply(aborted.code, aborted.detail, None)
        except Exception as error:
            reply = Reply("UNKNOWN", repr(error), None)
        if loop.dead:
            return
        if reply.code in ("UNKNOWN", "INTERNAL"):
            self.sim.ledger.violated("calls have answers", f"{type(message).__name__}: {reply.detail}")
        if answer is not None:
            with loop.meter.apart():
                answer(reply)

    def _handler(self, message: Message) -> Any:
        assert self._shell is not None
        assert isinstance(self._shell._server, Server)
        if type(message) not in METHODS:
            raise Aborted(grpc.StatusCode.UNIMPLEMENTED, type(message).__name__)
        return self._shell._server.handler(type(message))

    def stream_opened(self, stream: Stream) -> None:
        if self.up and self.loop is not None:
            self.loop.charge(CALL_COST)
            self._tasks[stream] = self.loop.create_task(self._watch(self.loop, stream))

    def stream_closed(self, stream: Stream) -> None:
        if task := self._tasks.pop(stream, None):
            task.cancel()

    async def _watch(self, loop: VirtualLoop, stream: Stream) -> None:
        assert stream.request is not None
        stream.code = "OK"
        try:
            async for directive in self._handler(stream.request)(stream.request, Context()):
                loop.charge(DIRECTIVE_COST)
                with loop.meter.apart():
                    self.sim.ledger.directive_sent(directive)
                    self.sim.network.push(stream, directive)
        except Aborted as aborted:
            stream.code = aborted.code
        if loop.dead:
            return
        self._tasks.pop(stream, None)
        self.sim.network.end(stream)


class SlowStore:
    """The record through a disk that may fail, in a process that may die beside a write."""

    def __init__(self, master: RealMaster, store: MemoryStore) -> None:
        self._master = master
        self._store = store

    def load(self) -> dict[str, bytes]:
        return self._store.load()

    def raise_generation(self, above: int = 0, owner: int | None = None) -> int:
        return self._store.raise_generation(above, owner)

    def save(self, rows: Rows, generation: int) -> None:
        master = self._master
        if master.sim.store_fails:
            raise StoreUnavailable("cannot write the store: input/output error")
        dies = bool(master.crash_at) and master.crash_events <= 1
        master.crash_events -= 1
        when = master.crash_at
        if dies and when == "handled":
            self._die(when)
        self._store.save(rows, generation)
        if dies:
            self._die(when)

    def _die(self, when: str) -> None:
        loop = self._master.loop
        self._master.sim.trace("master", "was just {}", when)
        assert loop is not None
        self._master._die(loop)
        raise StoreUnavailable("nobody hears this")

    def close(self) -> None:
        """The record outlives the process."""


@contextlib.contextmanager
def fake_grpc() -> Iterator[None]:
    """While it lasts, servers that the product makes are `Server`s, and no port is looked at."""
    with mock.patch.object(grpc.aio, "server", Server), mock.patch.object(server, "_probe", return_value=None):
        yield


__all__ = ("RealMaster", "fake_grpc")
