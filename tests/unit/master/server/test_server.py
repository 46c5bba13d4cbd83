"""The master's shell with real gRPC on loopback, around a small brain."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from dalsegno.master import cli, waiting
from dalsegno.master.brain.events import Reply
from dalsegno.master.record.etcd_store import EtcdStore
from dalsegno.master.record.store import MemoryStore, Rows, StoreAway, StoreDamaged, StoreUnavailable, Superseded
from dalsegno.master.server import desk
from dalsegno.master.server import driver as driver_module
from dalsegno.master.server import server as server_module
from dalsegno.master.server.auth import AuthError, read_token
from dalsegno.master.server.job_brain import JobBrain
from dalsegno.master.server.lifetime import Lifetime
from dalsegno.master.server.server import BindError, ControlServer, ServerOptions
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos import control_pb2_grpc
from dalsegno.protos.contract import CONTROL_PROTOCOL, LEADER_METADATA
from tests.support.jobs.fake_brain import SOMEBODY_ELSES, FakeBrain, FakeState
from tests.support.jobs.masters import settings

pytestmark = pytest.mark.timeout(60)
TOKEN = "0123456789abcdef"


def registration(node: str = "a", incarnation: str = "1", **fields: Any) -> pb.RegisterRequest:
    """As little as the door lets in."""
    return pb.RegisterRequest(job_id="job", node=node, incarnation=incarnation, nproc=1, secret=bytes(16), **fields)


class Master:
    """A served master and its client."""

    def __init__(self, server: ControlServer, store: MemoryStore, task: asyncio.Task[None]) -> None:
        self.server = server
        self.store = store
        self.task = task
        self.channel = grpc.aio.insecure_channel(server.address)
        self.stub = control_pb2_grpc.ControlStub(self.channel)

    async def register(self, node: str = "a", incarnation: str = "1") -> None:
        await self.stub.Register(registration(node, incarnation), timeout=30)

    async def join(self, request: int, node: str = "a") -> pb.Ack:
        return await self.stub.Join(pb.JoinRequest(caller=caller(node, request=request)), timeout=30)

    def watch(self, node: str = "a", incarnation: str = "1") -> AsyncIterator[pb.Directive]:
        return aiter(self.stub.Watch(pb.WatchRequest(caller=caller(node, incarnation)), timeout=20))

    async def status(self) -> pb.StatusReply:
        return await self.stub.GetStatus(pb.StatusRequest(), timeout=30)


class SometimesFull(MemoryStore):
    """Fails every write while it is not `writable`."""

    writable = True
    attempts = 0
    saves = 0

    def save(self, rows: Rows, generation: int) -> None:
        self.attempts += 1
        if not self.writable:
            raise StoreUnavailable("cannot write the store: no space")
        self.saves += 1
        super().save(rows, generation)


def caller(node: str = "a", incarnation: str = "1", request: int = 0, protocol: int = CONTROL_PROTOCOL) -> pb.Caller:
    return pb.Caller(job_id="job", node=node, incarnation=incarnation, request=request, protocol=protocol)


@contextlib.asynccontextmanager
async def serving(
    store: MemoryStore | None = None, options: ServerOptions | None = None, brain: FakeBrain | None = None
) -> AsyncIterator[Master]:
    store = store if store is not None else MemoryStore()
    server = ControlServer("job", brain or FakeBrain(), store, options or ServerOptions())
    await server.start()
    task = asyncio.create_task(server.run())
    master = Master(server, store, task)
    try:
        yield master
    finally:
        await master.channel.close()
        server.stop()
        with contextlib.suppress(Superseded, StoreUnavailable, asyncio.CancelledError):
            await task
        await server.close()


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def fails(call: Awaitable[object], code: grpc.StatusCode, line: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() is code, error.value.details()
    details = error.value.details() or ""
    assert line in details
    assert "\n" not in details


def test_calls_are_answered_and_streams_get_what_changed() -> None:
    """One stream: the present directive first, then each change once, nothing when nothing changed."""

    async def scene() -> None:
        async with serving() as master:
            await master.register()
            stream = master.watch()
            assert (await anext(stream)).epoch == 0
            assert (await master.join(1)).generation == master.server.driver.generation
            assert (await anext(stream)).epoch == 1
            await master.stub.Heartbeat(pb.HeartbeatRequest(caller=caller()))
            await master.join(2)
            # The heartbeat changed nothing and was not sent.
            assert (await anext(stream)).epoch == 2

    asyncio.run(scene())


def test_a_repeated_call_has_no_second_effect() -> None:
    """The same request number: answered, but counted once."""

    async def scene() -> None:
        async with serving() as master:
            await master.register()
            await asyncio.gather(*(master.join(7) for _ in range(5)))
            assert (await anext(master.watch())).epoch == 1

    asyncio.run(scene())


def test_every_operation_of_the_protocol_reaches_the_brain() -> None:
    """No RPC is left at the generated code's UNIMPLEMENTED."""

    async def scene() -> None:
        async with serving() as master:
            await master.register()
            service = pb.DESCRIPTOR.services_by_name["Control"]
            for method in service.methods:
                if method.name in ("Register", "Watch", "GetStatus", "Scale", "ReportFailure"):
                    continue
                kind = getattr(pb, method.input_type.name)
                request = kind(caller=caller()) if "caller" in kind.DESCRIPTOR.fields_by_name else kind()
                if isinstance(request, pb.CommitRequest | pb.HeldRequest):
                    ref = pb.CheckpointRef(name="step-1.e1.0", digest="0" * 64)
                    request.checkpoint.MergeFrom(
                        pb.Checkpoint(ref=ref, run_id="run-0001", step=1, epoch=1, form=pb.FORM_SHARDED)
                    )
                call = getattr(master.stub, method.name)(request, timeout=30)
                if method.name == "ReportPruned":
                    await fails(call, grpc.StatusCode.NOT_FOUND, "fenced for a test")
                else:
                    assert (await call).generation == master.server.driver.generation

    asyncio.run(scene())


def test_scaling_needs_no_registration_and_the_right_job() -> None:
    """A person's tool may call it; another job's master refuses."""

    async def scene() -> None:
        async with serving() as master:
            assert (await master.stub.Scale(pb.ScaleRequest(nodes=3), timeout=30)).limit == 3
            other = master.stub.Scale(pb.ScaleRequest(job_id="other", nodes=3), timeout=30)
            await fails(other, grpc.StatusCode.INVALID_ARGUMENT, "not 'other'")

    asyncio.run(scene())


@pytest.mark.slow
def test_no_effect_leaves_before_it_is_durable() -> None:
    """While the store cannot be written neither a reply nor a directive goes out; then one write serves all."""

    async def scene() -> None:
        store = SometimesFull()
        async with serving(store) as master:
            await master.register()
            stream = master.watch()
            await anext(stream)
            store.writable = False
            first = asyncio.ensure_future(master.join(1))
            directive = asyncio.ensure_future(anext(stream))
            await until(lambda: _true(store.attempts > 2))
            # These arrive during the write and share the next one.
            later = [asyncio.ensure_future(master.join(number)) for number in range(2, 30)]
            await until(lambda: _true(len(master.server.driver._queue) == len(later)))
            assert not any(task.done() for task in (first, directive, *later))
            saves = store.saves
            store.writable = True
            await asyncio.gather(first, *later)
            assert (await directive).epoch >= 1
            assert store.saves - saves <= 3

    asyncio.run(scene())


async def _true(value: bool) -> bool:
    return value


def test_the_queue_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing can be decided, calls beyond the limit are told to come again instead of piling up."""
    monkeypatch.setattr(driver_module, "QUEUE_LIMIT", 5)

    async def scene() -> None:
        store = SometimesFull()
        async with serving(store) as master:
            await master.register()
            store.writable = False
            calls = [asyncio.ensure_future(master.join(1))]
            await until(lambda: _true(store.attempts > 1))
            calls += [asyncio.ensure_future(master.join(number)) for number in range(2, 7)]
            await until(lambda: _true(len(master.server.driver._queue) == 5))
            await fails(master.join(9), grpc.StatusCode.RESOURCE_EXHAUSTED, "try again")
            store.writable = True
            await asyncio.gather(*calls)

    asyncio.run(scene())


@pytest.mark.slow
def test_calls_of_many_nodes_wait_while_the_master_is_busy() -> None:
    """gRPC would cancel some as soon as 1,000 wait, and all from 3,000 on: a change of a large world brings more."""
    count = 3_500

    def ask(address: str, asked: threading.Event) -> Counter[str]:
        own = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.insecure_channel(address, options=own) for _ in range(50)]
        stubs: list[Any] = [control_pb2_grpc.ControlStub(channel) for channel in channels]
        calls = [stubs[n % len(stubs)].GetStatus.future(pb.StatusRequest(), timeout=50) for n in range(count)]
        asked.set()
        codes = Counter(call.code().name for call in calls)
        for channel in channels:
            channel.close()
        return codes

    async def scene() -> None:
        async with serving() as master:
            asked = threading.Event()
            codes = asyncio.get_running_loop().run_in_executor(None, ask, master.server.address, asked)
            assert asked.wait(30), "nothing of this runs on the master's loop, which stands still meanwhile"
            time.sleep(1.0)  # why: what was sent arrives, and nobody takes it
            assert await codes == {"OK": count}

    asyncio.run(scene())


def test_a_store_that_stays_unwritable_ends_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a bounded time it gives up with the store's line, and nobody is left waiting."""
    monkeypatch.setattr(driver_module, "SAVE_TIMEOUT_SECONDS", 0.3)

    class Full(MemoryStore):
        def save(self, rows: Rows, generation: int) -> None:
            raise StoreUnavailable("cannot write the store: no space")

    async def scene() -> None:
        async with serving(Full()) as master:
            first = asyncio.ensure_future(fails(master.join(1), grpc.StatusCode.UNAVAILABLE, "try again"))
            await asyncio.sleep(0.1)
            # Queued behind the turn that never ends.
            await fails(master.join(2), grpc.StatusCode.UNAVAILABLE, "try again")
            await first
            with pytest.raises(StoreUnavailable, match="no space"):
                await master.task
            await fails(master.join(3), grpc.StatusCode.UNAVAILABLE, "try again")

    asyncio.run(scene())


def test_what_a_person_can_do_about_a_store_that_is_away_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its reasons differ with each try: the first one is said, and later ones where they say what to do."""
    reasons = [StoreAway("no answer"), StoreAway("no answer from h2"), StoreAway("full (make room)", "make room")]
    reasons += [StoreAway("no answer"), StoreAway("h2 is full (make room)", "make room")]

    class Away(MemoryStore):
        def save(self, rows: Rows, generation: int) -> None:
            if reasons:
                raise reasons.pop(0)
            super().save(rows, generation)

    async def scene() -> None:
        async with serving(Away()) as master:
            await master.register()

    with caplog.at_level(logging.WARNING, logger="dalsegno"):
        asyncio.run(scene())
    said = [record.message for record in caplog.records if record.name == driver_module.log.name]
    assert [*said[:2], len(said)] == ["no answer; trying again", "full (make room); trying again", 3]
    assert "the store takes writes again" in said[2]


@pytest.mark.parametrize("before", [-3600.0, 3600.0], ids=["an hour ago", "the clock was set back"])
def test_a_new_master_logs_what_is_old_as_old(caplog: pytest.LogCaptureFixture, before: float) -> None:
    """With when it was. It was logged again as if it had happened now, warnings as warnings."""
    store, unix = MemoryStore(), [time.time() + before]

    async def scene(node: str, nodes: int) -> list[tuple[int, str]]:
        caplog.clear()
        brain: Any = JobBrain("job", (1, 4), unix=lambda: unix[0])
        async with serving(store, brain=brain) as master:
            request = registration(node, node, settings=settings(), protocol=CONTROL_PROTOCOL, probe="p")
            await master.stub.Register(request, timeout=30)
            await master.stub.Scale(pb.ScaleRequest(job_id="job", nodes=nodes, protocol=CONTROL_PROTOCOL), timeout=30)
            who = caller(node, node)
            who.secret = request.secret
            directive = await anext(aiter(master.stub.Watch(pb.WatchRequest(caller=who), timeout=20)))
            assert directive.notices
        return [(record.levelno, record.message) for record in caplog.records if record.name == server_module.log.name]

    with caplog.at_level(logging.INFO, logger="dalsegno"):
        first = asyncio.run(scene("a", 2))
        unix[0] = time.time()
        second = asyncio.run(scene("b", 3))
    told = [text for _, text in first if "scaled" in text]
    assert told
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix[0] + before))
    again = [(level, text) for level, text in second if any(old in text for old in told)]
    assert [(level, text[:26]) for level, text in again] == [(logging.INFO, f"earlier, {when[:17]}")] * len(told)
    assert "scaled to 3 nodes" in [text for _, text in second], "news are logged as ever"


def test_two_masters_on_one_store() -> None:
    """The older one's next write fails: it answers nothing, ends, and what it decided is not part of the job."""

    async def scene() -> None:
        store = MemoryStore()
        async with serving(store) as old:
            await old.register()
            await old.join(1)
            async with serving(store.share()) as new:
                await fails(old.join(2), grpc.StatusCode.UNAVAILABLE, "try again")
                with pytest.raises(Superseded):
                    await old.task
                await new.register()
                assert (await anext(new.watch())).epoch == 1
                assert (await new.join(2)).generation > 1

    asyncio.run(scene())


def test_the_generation_rises_above_what_agents_know() -> None:
    """A store that was lost: the reply's generation is above the agent's, and the store has it before the reply."""

    async def scene() -> None:
        async with serving() as master:
            request = registration(generation=17)
            reply = await master.stub.Register(request)
            assert reply.generation == 18
            await master.join(1)
            assert master.store.share().raise_generation() == 19

    asyncio.run(scene())


def test_a_newer_stream_of_an_incarnation_replaces_the_older() -> None:
    """The older ends, and its end is not told to the brain as a lost node."""

    async def scene() -> None:
        async with serving() as master:
            await master.register()
            older = master.watch()
            await anext(older)
            newer = master.watch()
            await anext(newer)
            await fails(anext(older), grpc.StatusCode.ABORTED, "a newer stream")
            await master.join(1)
            assert (await anext(newer)).epoch == 1
            assert (await master.status()).reason == "StreamOpened a/1; StreamOpened a/1"

    asyncio.run(scene())


def test_a_closed_stream_becomes_an_event() -> None:
    """The peer hangs up: the brain hears of it at once."""

    async def scene() -> None:
        async with serving() as master:
            await master.register()
            call = master.stub.Watch(pb.WatchRequest(caller=caller()))
            await call.read()
            call.cancel()

            async def heard() -> bool:
                return "StreamClosed a/1" in (await master.status()).reason

            await until(heard, 2.0)
            assert len(master.server.watchers) == 0

    asyncio.run(scene())


def test_an_unknown_incarnation_is_told_that_it_is_fenced() -> None:
    """A stream of an incarnation that the brain does not know (any more) gets one directive and ends."""

    async def scene() -> None:
        async with serving() as master:
            await master.register("a", "1")
            known = master.watch("a", "1")
            await anext(known)
            unknown = [directive async for directive in master.watch("a", "0")]
            assert [directive.WhichOneof("order") for directive in unknown] == ["fenced"]
            await master.register("a", "2")
            rest = [directive async for directive in known]
            assert [directive.WhichOneof("order") for directive in rest] == ["fenced"]

    asyncio.run(scene())


@pytest.mark.slow
def test_the_brain_is_woken_when_it_asked_for_it() -> None:
    """A Tick comes at the time that the state names, once."""

    async def scene() -> None:
        async with serving() as master:
            await master.register()
            start = time.monotonic()
            await master.stub.Leave(pb.LeaveRequest(caller=caller(request=1), notice=0.3))

            async def ticked() -> bool:
                return "Tick" in (await master.status()).reason

            await until(ticked)
            assert time.monotonic() - start >= 0.3
            await asyncio.sleep(0.2)
            assert (await master.status()).reason.count("Tick") == 1

    asyncio.run(scene())


@pytest.mark.slow
def test_a_master_that_was_held_up_tells_the_brain_first() -> None:
    """The loop stands still past a deadline: the brain hears of it before the Tick and before what was queued."""

    async def scene() -> None:
        async with serving(options=ServerOptions(held_up_after=0.3)) as master:
            await master.register()
            stream = master.watch()
            await anext(stream)
            await master.stub.Leave(pb.LeaveRequest(caller=caller(request=1), notice=0.2))
            time.sleep(0.8)

            async def ticked() -> bool:
                return "Tick" in (await master.status()).reason

            await until(ticked)
            # On a busy machine it may be held up once more.
            told = (await master.status()).reason.split("; ")
            assert told[told.index("Tick") - 1] == "HeldUp"

    asyncio.run(scene())


@pytest.mark.slow
def test_status_and_heartbeats_do_not_wait_for_the_store() -> None:
    """While it cannot be written, both are answered: an agent must not take a slow disk for a dead master."""

    async def scene() -> None:
        store = SometimesFull()
        async with serving(store) as master:
            await master.register()
            store.writable = False
            join = asyncio.ensure_future(master.join(1))
            await until(lambda: _true(store.attempts > 2))
            assert (await master.status()).job_id == "job"
            await master.stub.Heartbeat(pb.HeartbeatRequest(caller=caller()), timeout=30)
            assert not join.done()
            store.writable = True
            await join

    asyncio.run(scene())


@pytest.mark.slow
def test_status_shows_nothing_that_a_crash_takes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked while a decision is being stored, it is answered once that is stored."""
    monkeypatch.setattr(driver_module, "STATUS_PATIENCE_SECONDS", 30.0)

    async def scene() -> None:
        store = SometimesFull()
        async with serving(store) as master:
            await master.register()
            store.writable = False
            finished = pb.FinishedRequest(caller=caller(request=1))
            end = asyncio.ensure_future(master.stub.ReportFinished(finished, timeout=30))
            await until(lambda: _true(store.attempts > 2))
            seen = [asyncio.ensure_future(master.status()) for _ in range(3)]
            await until(lambda: _true(master.server.driver._asked is not None))
            assert not any(status.done() for status in seen)
            store.writable = True
            assert {(await status).phase for status in seen} == {pb.PHASE_SUCCEEDED}
            assert store.saves == 2
            await end

    asyncio.run(scene())


class Ordered(FakeBrain):
    """Keeps the orders that it has decided on."""

    def _called(self, state: FakeState, message: Message, now: float) -> Reply:
        if isinstance(message, pb.ScaleRequest):
            state.job[f"scaled to {message.nodes}"] = 1
        return super()._called(state, message, now)


def test_an_order_does_not_wait_for_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits behind a turn is withdrawn, and what is in one may be stored yet. Over HTTP it is the same."""
    monkeypatch.setattr(driver_module, "ORDER_PATIENCE_SECONDS", 0.3)

    async def scene() -> None:
        store = SometimesFull()
        async with serving(store, brain=Ordered()) as master:
            store.writable = False
            refusal = grpc.StatusCode.FAILED_PRECONDITION
            line = (
                "the order may not have been taken, as the master cannot record it: cannot write the store: no space;"
            )
            await fails(master.stub.Scale(pb.ScaleRequest(nodes=2), timeout=30), refusal, line)
            line = "the order was not taken, as the master cannot record it: cannot write the store: no space; give it"
            await fails(master.stub.Scale(pb.ScaleRequest(nodes=3), timeout=30), refusal, line)
            await fails(master.stub.Stop(pb.StopRequest(), timeout=30), refusal, line)
            over_http = await master.server.call(pb.ScaleRequest(nodes=4))
            assert (over_http.code, over_http.detail.startswith(line)) == ("UNAVAILABLE", True)
            # So it is where the caller hangs up: nobody wants it any more.
            monkeypatch.setattr(driver_module, "ORDER_PATIENCE_SECONDS", 30.0)
            hung_up = asyncio.ensure_future(master.server.call(pb.ScaleRequest(nodes=4)))
            await until(lambda: _true(len(master.server.driver._queue) == 1))
            hung_up.cancel()
            await until(lambda: _true(not master.server.driver._queue))
            store.writable = True
            assert (await master.stub.Scale(pb.ScaleRequest(nodes=5), timeout=30)).limit == 5
            assert {node.node for node in (await master.status()).nodes} == {"scaled to 2", "scaled to 5"}

    asyncio.run(scene())


def test_an_order_whose_master_ends_meanwhile_goes_to_the_next() -> None:
    """At once: whether its turn was stored or not, another master may be given it, as orders may be repeated."""

    async def scene() -> None:
        store = SometimesFull()
        async with serving(store, brain=Ordered()) as master:
            store.writable = False
            decided = asyncio.ensure_future(master.server.call(pb.ScaleRequest(nodes=2)))
            await until(lambda: _true(store.attempts > 1))
            waiting = asyncio.ensure_future(master.server.call(pb.ScaleRequest(nodes=3)))
            await until(lambda: _true(len(master.server.driver._queue) == 1))
            master.server.stop()
            for reply in (await decided, await waiting):
                assert (reply.code, "stopping or starting: try again" in reply.detail) == ("UNAVAILABLE", True)

    asyncio.run(scene())


def test_nobody_watches_for_another() -> None:
    """A stream with another secret is refused; the agent's own goes on."""

    async def scene() -> None:
        async with serving() as master:
            await master.register()
            own = master.watch()
            await anext(own)
            foreign = caller()
            foreign.secret = SOMEBODY_ELSES
            stream = aiter(master.stub.Watch(pb.WatchRequest(caller=foreign), timeout=30))
            await fails(anext(stream), grpc.StatusCode.PERMISSION_DENIED, "only the agent that registered a")
            await master.join(1)
            assert (await anext(own)).epoch == 1

    asyncio.run(scene())


def test_a_bug_in_one_decision_costs_one_call() -> None:
    """The caller gets INTERNAL, the traceback is in the log, streams stay, and the others go on."""

    async def scene() -> None:
        async with serving() as master:
            await master.register()
            stream = master.watch()
            await anext(stream)
            await master.join(1)
            await fails(
                master.stub.ReportFailure(pb.FailureRequest(caller=caller(request=2))),
                grpc.StatusCode.INTERNAL,
                "RuntimeError('a bug')",
            )
            status = await master.status()
            assert status.reason == "StreamOpened a/1"
            await master.join(2)
            assert (await anext(stream)).epoch == 1
            assert (await anext(stream)).epoch == 2

    asyncio.run(scene())


def test_who_is_let_in() -> None:
    """Token, protocol version and job are checked on every call, and each refusal is one clear line."""

    async def scene() -> None:
        async with serving(options=ServerOptions(token=TOKEN)) as master:
            join, watch = pb.JoinRequest(caller=caller(request=1)), pb.WatchRequest(caller=caller())
            good = (("authorization", f"Bearer {TOKEN}"),)
            for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", TOKEN),)):
                for call in (
                    master.stub.Join(join, metadata=metadata),
                    anext(aiter(master.stub.Watch(watch, metadata=metadata))),
                    master.stub.GetStatus(pb.StatusRequest(), metadata=metadata),
                ):
                    await fails(call, grpc.StatusCode.UNAUTHENTICATED, "missing or wrong token")
            assert await master.stub.Join(join, metadata=good)
            newer = pb.JoinRequest(caller=caller(protocol=CONTROL_PROTOCOL + 1))
            line = f"speaks protocol {CONTROL_PROTOCOL + 1}, this master only {CONTROL_PROTOCOL}"
            await fails(master.stub.Join(newer, metadata=good), grpc.StatusCode.UNIMPLEMENTED, line)
            register = pb.RegisterRequest(job_id="job", protocol=CONTROL_PROTOCOL + 1)
            await fails(master.stub.Register(register, metadata=good), grpc.StatusCode.UNIMPLEMENTED, line)
            other = pb.HeartbeatRequest(caller=pb.Caller(job_id="other"))
            await fails(master.stub.Heartbeat(other, metadata=good), grpc.StatusCode.INVALID_ARGUMENT, "not 'other'")
            foreign = pb.WatchRequest(caller=pb.Caller(job_id="other"))
            await fails(
                anext(aiter(master.stub.Watch(foreign, metadata=good))), grpc.StatusCode.INVALID_ARGUMENT, "not 'other'"
            )

    asyncio.run(scene())


def test_nobody_listens_beyond_this_machine_by_accident() -> None:
    """Without a token only loopback, unless told so."""
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(AuthError, match="--token-file"):
            ControlServer("job", FakeBrain(), MemoryStore(), ServerOptions(host=host))
        ControlServer("job", FakeBrain(), MemoryStore(), ServerOptions(host=host, token=TOKEN))
        ControlServer("job", FakeBrain(), MemoryStore(), ServerOptions(host=host, insecure=True))
    for host in ("127.0.0.1", "::1", "localhost"):
        ControlServer("job", FakeBrain(), MemoryStore(), ServerOptions(host=host))


def test_a_port_in_use_is_one_line_and_supersedes_nobody() -> None:
    """The second master fails before it touches the store."""

    async def scene() -> None:
        async with serving() as master:
            port = int(master.server.address.rpartition(":")[2])
            second = ControlServer("job", FakeBrain(), master.store.share(), ServerOptions(port=port))
            with pytest.raises(BindError, match=f"port {port}: Address already in use"):
                await second.start()
            await second.close()
            await master.register()
            await master.join(1)

    asyncio.run(scene())


def test_a_loopback_without_its_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose master serves there has no flag for another address (dlrover-run); any other address has one."""

    def bind(self: socket.socket, address: object) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket.socket, "bind", bind)

    async def refused(host: str) -> str:
        options = ServerOptions(host=host, insecure=True)
        server = ControlServer("job", FakeBrain(), MemoryStore(), options)
        with pytest.raises(BindError) as error:
            await server.start()
        await server.close()
        return str(error.value)

    assert "this machine's loopback has no 127.0.0.1" in asyncio.run(refused("127.0.0.1"))
    assert asyncio.run(refused("192.0.2.1")).endswith("choose another --port or --host")


def test_an_embedded_master_names_the_flags_of_dlrover_run() -> None:
    """A person gave the port to that program, which has neither --port nor --host."""

    async def refused(port: int) -> str:
        options = ServerOptions(port=port, embedded=True)
        server = ControlServer("job", FakeBrain(), MemoryStore(), options)
        with pytest.raises(BindError) as error:
            await server.start()
        await server.close()
        return str(error.value)

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        text = asyncio.run(refused(holder.getsockname()[1]))
    assert text.endswith(
        "Address already in use: choose another port in --rdzv-endpoint or --master-port (the same on all nodes)"
    )


@pytest.mark.parametrize(
    "flag",
    ["relay", "etcd-ca", "etcd-cert", "etcd-key", "token-file", "tls-ca", "tls-cert", "tls-key", "log-file"],
)
def test_a_flag_of_the_master_that_names_a_file_is_not_empty(flag: str, capfd: pytest.CaptureFixture[str]) -> None:
    """As of a variable of the shell that is not set: a master without a token, or in plaintext, would serve."""
    assert cli.main(["--store=sqlite:///never", "--job-id=job", f"--{flag}="]) == 2
    assert f"argument --{flag}: the name is empty: is a variable unset?" in capfd.readouterr().err


def test_two_masters_never_share_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when both looked at the same time: gRPC would by default let both listen."""
    monkeypatch.setattr(server_module, "_probe", lambda host, port, embedded: None)

    async def scene() -> None:
        async with serving() as master:
            port = int(master.server.address.rpartition(":")[2])
            second = ControlServer("job", FakeBrain(), master.store.share(), ServerOptions(port=port))
            try:
                with pytest.raises(BindError):
                    await second.start()
            finally:
                await second.close()

    asyncio.run(scene())


@pytest.mark.parametrize("content", ["", "short", "0123456789 abcdef", "0123456789abcdéf"])
def test_a_bad_token_file_is_refused(tmp_path: Path, content: str) -> None:
    """Empty, short, or not fit for a header."""
    file = tmp_path / "token"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(AuthError, match="openssl rand -hex 32"):
        read_token(file)
    with pytest.raises(AuthError, match="cannot read"):
        read_token(tmp_path / "none")
    file.write_text(f"{TOKEN}\n")
    assert read_token(file) == TOKEN


def test_a_stopping_master_says_so_to_its_streams() -> None:
    """Streams and calls end with UNAVAILABLE: agents look for the next master."""

    async def scene() -> None:
        async with serving() as master:
            await master.register()
            stream = master.watch()
            await anext(stream)
            master.server.stop()
            await master.task
            closing = asyncio.create_task(master.server.close())
            await fails(anext(stream), grpc.StatusCode.UNAVAILABLE, "the master is stopping")
            await closing

    asyncio.run(scene())


@pytest.mark.slow
def test_an_embedded_master_ends_when_it_is_alone() -> None:
    """Not while a stream is open; status questions of people do not keep it."""

    async def scene() -> None:
        async with serving() as master:
            await master.register()
            call = master.stub.Watch(pb.WatchRequest(caller=caller()))
            await call.read()
            life = asyncio.create_task(Lifetime(master.server, idle_timeout=0.4, linger=9).run())
            await asyncio.sleep(1.5)
            assert not life.done()
            call.cancel()
            await asyncio.wait_for(asyncio.gather(life, master.task), 4)

    asyncio.run(scene())


@pytest.mark.slow
def test_an_embedded_master_ends_without_its_store() -> None:
    """Not at once, because a directory may be listed late; and whoever is connected goes to the next one."""
    there = [True]

    async def scene() -> None:
        async with serving() as master:
            await master.register()
            call = master.stub.Watch(pb.WatchRequest(caller=caller()))
            await call.read()
            life = asyncio.create_task(
                Lifetime(master.server, idle_timeout=60, linger=60, is_there=lambda: there[0]).run()
            )
            for seconds in (1.2, 1.2):
                there[0] = not there[0]
                await asyncio.sleep(seconds)
            assert not life.done()
            there[0] = False
            await asyncio.wait_for(asyncio.gather(life, master.task), 6)

    asyncio.run(scene())


def test_a_look_at_a_disk_that_does_not_answer_holds_nobody_up() -> None:
    answers = threading.Event()

    async def scene() -> None:
        async with serving() as master:
            life = asyncio.create_task(
                Lifetime(master.server, idle_timeout=60, linger=60, is_there=lambda: answers.wait(30)).run()
            )
            await asyncio.sleep(1.2)
            await asyncio.wait_for(master.register(), 2)
            life.cancel()

    began = time.monotonic()
    asyncio.run(scene())
    answers.set()
    assert time.monotonic() - began < 20


@pytest.mark.slow
@pytest.mark.parametrize("connected", [True, False])
def test_an_embedded_master_ends_with_its_job(connected: bool) -> None:
    """Soon after the last agent left, and after a while even if one stays."""

    async def scene() -> None:
        async with serving() as master:
            await master.register()
            call = master.stub.Watch(pb.WatchRequest(caller=caller()))
            await call.read()
            life = asyncio.create_task(Lifetime(master.server, idle_timeout=60, linger=1.0).run())
            await asyncio.sleep(1.2)
            assert not life.done()
            await master.stub.ReportFinished(pb.FinishedRequest(caller=caller(request=1)))
            if not connected:
                call.cancel()
            await asyncio.wait_for(asyncio.gather(life, master.task), 4)

    asyncio.run(scene())


def test_calls_wait_a_moment_for_a_leader() -> None:
    """As soon as one is known they go there, or are answered here; one that ends has nobody wait."""

    async def scene() -> None:
        server = ControlServer("job", FakeBrain(), MemoryStore(), ServerOptions())
        await server.listen()
        master = Master(server, MemoryStore(), asyncio.create_task(asyncio.sleep(0)))
        try:
            for leader, says in (("other:1", "the master at other:1 leads"), (None, "stopping or starting")):
                server.stand_by("")
                calls = [asyncio.ensure_future(call) for call in (master.register(), anext(master.watch()))]
                done, _ = await asyncio.wait(calls, timeout=0.3)
                assert not done
                server.stand_by(leader)
                for call in calls:
                    await fails(call, grpc.StatusCode.UNAVAILABLE, says)
            server.stand_by("")
            assert await server.lead() == 1
            registers = asyncio.ensure_future(master.register())
            done, _ = await asyncio.wait([registers], timeout=0.3)
            assert not done
            running = asyncio.create_task(server.run())
            await registers
            await anext(master.watch())
            server.stop()
            await running
            # Streams wait, too.
            watches = asyncio.ensure_future(anext(master.watch()))
            await asyncio.sleep(0.1)
            await server.lead()
            running = asyncio.create_task(server.run())
            assert (await watches).generation == 2
            server.stop()
            await running
        finally:
            await server.close()
            await master.channel.close()

    asyncio.run(scene())


def test_who_stands_by_names_who_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call learns the address, and gRPC does not try again; then this one leads, and after that it stands by."""
    monkeypatch.setattr(desk, "HOLD_SECONDS", 0.2)

    async def scene() -> None:
        server = ControlServer("job", FakeBrain(), MemoryStore(), ServerOptions())
        await server.listen()
        master = Master(server, MemoryStore(), asyncio.create_task(asyncio.sleep(0)))
        try:
            for leader, why in (
                ("", ": try again"),
                ("", "as etcd does not answer or refuses"),
                ("other:1", "leads, or did: etcd does not answer or refuses"),
                ("other:1", "leads"),
            ):
                server.stand_by(leader, "etcd" in why)
                for call in (master.register(), anext(master.watch())):
                    with pytest.raises(grpc.aio.AioRpcError) as error:
                        await call
                    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
                    said_why = error.value.details() or ""
                    assert "stands by" in said_why
                    assert why in said_why
                    said = dict(error.value.trailing_metadata() or ())
                    assert said.get(LEADER_METADATA, "") == leader
                    assert said["grpc-retry-pushback-ms"] == "-1"
            assert (await server.status()).code == "UNAVAILABLE"
            for generation in (1, 2):
                assert await server.lead() == generation
                running = asyncio.create_task(server.run())
                await master.register()
                stream = master.watch()
                await anext(stream)
                server.stop()
                await running
                await fails(anext(stream), grpc.StatusCode.UNAVAILABLE, "stopping")
                await fails(master.register(), grpc.StatusCode.UNAVAILABLE, "stands by")
        finally:
            await master.channel.close()
            await server.close()

    asyncio.run(scene())


def test_a_store_that_goes_while_a_master_begins_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also behind its first word: that is no wrong command line, which a supervisor would not start again."""

    class Away(EtcdStore):
        def __init__(self) -> None:
            self.tries = 0

        def load(self) -> dict[str, bytes]:
            self.tries += 1
            if self.tries == 1:
                return {}
            if self.tries == 2:
                raise StoreAway("etcd is away")
            raise StoreDamaged("so it was read again")

        def close(self) -> None:
            """There is nothing to close."""

    monkeypatch.setattr(waiting, "STORE_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(cli, "open_store", lambda *_: Away())
    assert cli.main(["--job-id=job", "--store=etcd://127.0.0.1:1"]) == 2
    for handler in logging.getLogger("dalsegno").handlers:
        handler.flush()
    assert capfd.readouterr().err.splitlines()[-1] == "dlrover-master: so it was read again"
