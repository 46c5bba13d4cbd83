"""The master's shell against callers that break rules: real gRPC on loopback, around a small brain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from dalsegno.agent.control.connection import channel_options
from dalsegno.master.record.store import MemoryStore, StoreStarved
from dalsegno.master.server import driver as driver_module
from dalsegno.master.server import server as server_module
from dalsegno.master.server import service as service_module
from dalsegno.master.server import watchers as watchers_module
from dalsegno.master.server.server import ControlServer, ServerOptions
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos import control_pb2_grpc
from dalsegno.protos.limits import MESSAGE_BYTES
from tests.support.jobs.fake_brain import FakeBrain, FakeState
from tests.support.jobs.proxy import proxy
from tests.unit.master.server.test_server import TOKEN, caller, fails, registration, serving, until

pytestmark = pytest.mark.timeout(90)
SERVICE = "/dalsegno.control.v1.Control"
INVALID = grpc.StatusCode.INVALID_ARGUMENT
METHODS = pb.DESCRIPTOR.services_by_name["Control"].methods


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x0f"], ids=repr)
def test_bytes_that_are_no_message_are_one_line(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Cut off, not UTF-8, or a length that lies: INVALID_ARGUMENT for every call, and no traceback anywhere."""

    async def scene() -> None:
        async with serving() as master:
            for method in METHODS:
                path = f"{SERVICE}/{method.name}"
                if method.server_streaming:
                    call = anext(aiter(master.channel.unary_stream(path)(data, timeout=30)))
                else:
                    call = master.channel.unary_unary(path)(data, timeout=30)
                await fails(call, grpc.StatusCode.INVALID_ARGUMENT, "no such message")
            await master.register()

    asyncio.run(scene())
    assert not caplog.records


def test_the_door_stands_before_every_call() -> None:
    """Whatever the operation, a number near the end of 64 bits does not reach the brain."""

    async def scene() -> None:
        async with serving() as master:
            await master.register()
            for method in METHODS:
                kind = getattr(pb, method.input_type.name)
                if "caller" not in kind.DESCRIPTOR.fields_by_name:
                    continue
                request = kind(caller=caller(request=2**64 - 1))
                call = getattr(master.stub, method.name)(request, timeout=30)
                line = (
                    "request is 18446744073709551615"
                    if kind not in (pb.CommitRequest, pb.HeldRequest)
                    else kind.__name__
                )
                await fails(anext(aiter(call)) if method.server_streaming else call, INVALID, line)
            await fails(master.stub.Register(registration(generation=2**63), timeout=30), INVALID, "generation")
            await fails(master.stub.Scale(pb.ScaleRequest(job_id="x\n" * 999)), INVALID, "not 'x x x")

    asyncio.run(scene())


def test_what_is_left_out_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A repeated registration does not fill the log, nor do many that lie in different ways."""
    monkeypatch.setattr(service_module, "MOST_SAID", 3)
    caplog.set_level(logging.WARNING, "dalsegno")

    async def scene() -> None:
        async with serving() as master:
            for number in (1, 1, 1, 2, 3, 4, 5):
                lie = pb.Checkpoint(ref=pb.CheckpointRef(name=f"../{number}\n"))
                await master.stub.Register(registration(inventory=[lie]), timeout=30)

    asyncio.run(scene())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert lines[0].startswith("RegisterRequest of a: ../1 is left out: name is ")


def test_a_message_that_is_too_long_is_refused() -> None:
    """Above the limit gRPC itself answers; at the limit the door does."""

    async def scene() -> None:
        async with serving() as master:
            long = registration(node="x" * (MESSAGE_BYTES - 500))
            await fails(master.stub.Register(long, timeout=30), INVALID, "node is 1048076 long")
            longer = registration(node="x" * MESSAGE_BYTES)
            await fails(master.stub.Register(longer, timeout=30), grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max")

    asyncio.run(scene())


def test_a_refusal_without_a_token_waits_for_no_message() -> None:
    """The token is looked at before a body is read: the answer comes although no request was ever sent."""

    async def scene() -> None:
        async with serving(options=ServerOptions(token=TOKEN)) as master:
            for method in METHODS:
                call = master.channel.stream_stream(f"{SERVICE}/{method.name}")(timeout=30)
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(scene())


class BrokenView(FakeBrain):
    """Runs into a bug when it is asked what node `b` should do."""

    def directive(self, common: FakeState, node: str) -> pb.Directive:
        if node == "b":
            raise OverflowError("a bug\nin one view")
        return super().directive(common, node)


def traced(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The master's own lines with a traceback. gRPC's poller may stumble over a loop that another test has closed."""
    return [one.getMessage() for one in caplog.records if one.exc_info and one.name.startswith("dalsegno.")]


def test_one_nodes_directive_that_fails_costs_one_stream(caplog: pytest.LogCaptureFixture) -> None:
    """Its stream ends with INTERNAL, the others get theirs, and the log has one traceback, not one for each turn."""

    async def scene() -> None:
        async with serving_broken() as stub:
            for node in ("a", "b"):
                await stub.Register(registration(node), timeout=30)
            good = aiter(stub.Watch(pb.WatchRequest(caller=caller("a")), timeout=20))
            assert (await anext(good)).epoch == 0
            for _ in range(3):
                bad = aiter(stub.Watch(pb.WatchRequest(caller=caller("b")), timeout=20))
                await fails(anext(bad), grpc.StatusCode.INTERNAL, "the master failed on this node's directive")
            await stub.Join(pb.JoinRequest(caller=caller("a", request=1)), timeout=30)
            assert (await anext(good)).epoch == 1

    asyncio.run(scene())
    assert traced(caplog) == ["no directive for b"]


class BrokenLook(FakeBrain):
    """Runs into a bug, some times, when it is asked what all nodes should do."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def look(self, state: FakeState) -> FakeState:
        if self.times:
            self.times -= 1
            raise KeyError("a bug in all views")
        return super().look(state)


def test_a_bug_in_all_directives_ends_no_master(caplog: pytest.LogCaptureFixture) -> None:
    """Calls are answered meanwhile, each kind of error is logged once, and the next turn that can tells everybody."""

    async def scene() -> None:
        async with serving_broken(BrokenLook(4)) as stub:
            await stub.Register(registration("a"), timeout=30)
            stream = aiter(stub.Watch(pb.WatchRequest(caller=caller("a")), timeout=20))
            for number in range(1, 6):
                await stub.Join(pb.JoinRequest(caller=caller("a", request=number)), timeout=30)
            epoch = 0
            while epoch < 5:
                epoch = (await anext(stream)).epoch

    asyncio.run(scene())
    assert traced(caplog) == ["no directives for anybody"]


@contextlib.asynccontextmanager
async def serving_broken(brain: FakeBrain | None = None) -> AsyncIterator[control_pb2_grpc.ControlStub]:
    server = ControlServer("job", brain or BrokenView(), MemoryStore(), ServerOptions())
    await server.start()
    task = asyncio.create_task(server.run())
    channel = grpc.aio.insecure_channel(server.address)
    try:
        yield control_pb2_grpc.ControlStub(channel)
    finally:
        await channel.close()
        server.stop()
        await task
        await server.close()


def test_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused with a line; one that takes its own older one's place is not."""
    monkeypatch.setattr(watchers_module, "MOST_STREAMS", 2)

    async def scene() -> None:
        async with serving() as master:
            streams = []
            for node in ("a", "b"):
                await master.register(node)
                streams.append(master.watch(node))
                await anext(streams[-1])
            await fails(
                anext(master.watch("c")), grpc.StatusCode.RESOURCE_EXHAUSTED, "2 streams of directives are open"
            )
            again = master.watch("a")
            assert (await anext(again)).generation

    asyncio.run(scene())


@pytest.mark.slow
def test_idle_connections_end() -> None:
    """Who says nothing, or speaks HTTP/2 but calls nothing; an agent's stream stays."""

    async def scene() -> None:
        async with serving() as master:
            await master.register()
            stream = aiter(master.stub.Watch(pb.WatchRequest(caller=caller()), timeout=60))
            await anext(stream)
            host, port = master.server.address.split(":")
            preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
            acknowledged = preface + b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"

            async def ended(hello: bytes) -> None:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(hello)
                await asyncio.wait_for(reader.read(), 30)
                writer.close()

            await asyncio.gather(*map(ended, (b"", preface, acknowledged)))
            await master.join(1)
            assert (await anext(stream)).epoch == 1

    asyncio.run(scene())


@pytest.mark.slow
def test_a_peer_that_vanished_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packets stop and no FIN comes: the server's own pings end the stream. One that answers them keeps its own."""
    monkeypatch.setattr(server_module, "PING_EVERY_SECONDS", 3.0)
    monkeypatch.setattr(server_module, "PING_TIMEOUT_SECONDS", 2.0)

    async def scene() -> None:
        async with serving() as master:
            with proxy(master.server.address) as between:
                for node in ("a", "b"):
                    await master.register(node)
                # Agents' own pings are the more frequent ones: many of them, and nothing else, are no attack.
                options = list((dict(channel_options()) | {"grpc.keepalive_time_ms": 1100}).items())
                near = grpc.aio.insecure_channel(master.server.address, options=options)
                far = grpc.aio.insecure_channel(between.address, options=options)
                streams = [
                    control_pb2_grpc.ControlStub(channel).Watch(pb.WatchRequest(caller=caller(node)))
                    for node, channel in (("a", near), ("b", far))
                ]
                for stream in streams:
                    await stream.read()
                between.freeze()

                async def closed() -> bool:
                    return "StreamClosed b/1" in (await master.status()).reason

                await until(closed, 25.0)
                assert "StreamClosed a/1" not in (await master.status()).reason
                await master.join(1)
                assert (await streams[0].read()).epoch == 1
                await near.close()
                await far.close()

    asyncio.run(scene())


class Starved(MemoryStore):
    """Has no descriptor left for the first writes."""

    refusals = 8

    def save(self, *arguments: object) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StoreStarved("cannot write the store: no file descriptor is left")
        super().save(*arguments)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_starved_store_is_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Longer than for one that fails: a new process would have no more of them. It is said once, and by the status."""
    monkeypatch.setattr(driver_module, "SAVE_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(driver_module, "STATUS_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(driver_module, "MAX_SAVE_PAUSE_SECONDS", 0.1)
    caplog.set_level(logging.WARNING, "dalsegno")

    async def scene() -> None:
        async with serving(Starved()) as master:
            registering = asyncio.ensure_future(master.register())
            while not (trouble := (await master.status()).store_trouble):
                assert not registering.done()
            assert "no file descriptor is left" in trouble
            await registering
            await master.join(1)
            assert (await master.status()).store_trouble == ""

    asyncio.run(scene())
    lines = [record.getMessage() for record in caplog.records]
    assert ["no file descriptor" in lines[0], "takes writes again" in lines[1], len(lines)] == [True, True, 2]
