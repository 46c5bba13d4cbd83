"""The edge is a process of its own: it costs the master's loop little, and its end costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra http")
pytest.importorskip("uvicorn", reason="needs the extra http")

from google.protobuf.message import Message

from dalsegno.master.brain.chronicle import Kind, PausePart
from dalsegno.master.brain.events import Reply
from dalsegno.master.brain.shown import event_of, event_proto
from dalsegno.master.http.across import Across
from dalsegno.master.http.edge import Edge
from dalsegno.master.http.home import MOST_LINES, Home
from dalsegno.master.http.wire import LARGEST_ANSWER_BYTES, LARGEST_ASK_BYTES, EdgeWire, WireError
from dalsegno.master.server.auth import TlsFiles
from dalsegno.protos import control_pb2 as pb
from tests.unit.master.http.test_http import TOKEN, Small, done, event, ids, opened, serving, status

pytestmark = pytest.mark.timeout(60)


@contextlib.asynccontextmanager
async def joined(master: Small) -> AsyncIterator[tuple[Across, EdgeWire]]:
    """A master, and what the edge sees of it, in one loop; the wire is the edge's end."""
    ours, theirs = socket.socketpair()
    home_wire, wire = await EdgeWire.over(ours, LARGEST_ASK_BYTES), await EdgeWire.over(theirs, LARGEST_ANSWER_BYTES)
    across = Across(wire)
    tasks = [asyncio.create_task(Home(master, home_wire, lambda: False).serve()), asyncio.create_task(across.run())]
    try:
        yield across, wire
    finally:
        home_wire.end()
        wire.end()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(true: object) -> None:
    """Returns once it is so."""
    while not true():  # type: ignore[operator]
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def edge_of(master: Small, token: str | None = None) -> AsyncIterator[Edge]:
    edge = Edge(master, "127.0.0.1", 0, token, loopback=True)
    edge.start()
    try:
        yield edge
    finally:
        await edge.close()


async def answered(edge: Edge, path: str, method: str = "GET", token: str = "") -> tuple[int, str]:
    """The answer, from the first process that gives one."""

    def ask() -> tuple[int, str]:
        while True:
            connection = http.client.HTTPConnection(edge.address, timeout=20)
            with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
                connection.request(method, path, headers={"authorization": f"Bearer {token}"})
                answer = connection.getresponse()
                return answer.status, answer.read().decode()

    return await asyncio.to_thread(ask)


def children() -> list[int]:
    """Process ids of the edges of this process."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"edge_process" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def test_an_event_comes_over_whole() -> None:
    """All of it but what only consoles need."""
    whole = event(7, kind=Kind.STEPPED, nodes=("a", "b"), step=0, parts=(PausePart("saved", 0.5),), checkpoint="c")
    assert event_of(event_proto(whole)) == whole
    assert event_of(event_proto(event(1))).step is None


def test_whoever_has_the_answer_to_an_order_has_its_events() -> None:
    """They come over in the order in which they became true."""

    class Orders(Small):
        async def call(self, message: Message) -> Reply:
            self.feed.show((*self.feed.events, event(self.feed.newest + 1)))
            return await super().call(message)

    async def scene() -> None:
        async with joined(Orders(Reply("OK", "", status()), done())) as (across, _):
            for number in range(1, 51):
                assert (await across.call(pb.StopRequest())).code == "OK"
                assert across.feed.newest == number

    asyncio.run(scene())


def test_a_lost_record_and_gaps_come_over() -> None:
    """Numbers begin anew, events go from the middle, and there may be more than a frame holds."""

    async def scene() -> None:
        master = Small(Reply("OK", "", status()))
        async with joined(master) as (across, _):
            many = tuple(event(number) for number in range(1, 251))
            anew = (event(1, step=9), event(2))
            for shown in (many, (*many[:100], *many[101:]), anew, ()):
                master.feed.show(shown)
                await asyncio.wait_for(until(lambda shown=shown: across.feed.events == shown), 10)

    asyncio.run(scene())


def test_nothing_else_is_asked() -> None:
    """An edge that was taken over gives no call of an agent; what is no frame of ours, or too large, ends the wire."""

    async def scene() -> None:
        master = Small(Reply("OK", "", status()), done())
        async with joined(master) as (across, _):
            assert (await across.call(pb.LeaveRequest())).code == "INVALID_ARGUMENT"
            assert not master.orders
        for header, body in (({"what": "?"}, b""), ({"what": "ask", "id": "1"}, b""), ({}, b"x" * (1 << 17))):
            ours, theirs = socket.socketpair()
            home, wire = await EdgeWire.over(ours, LARGEST_ASK_BYTES), await EdgeWire.over(theirs, LARGEST_ANSWER_BYTES)
            served = asyncio.create_task(Home(master, home, lambda: False).serve())
            await wire.send(header, body)
            with pytest.raises(WireError):
                await asyncio.wait_for(served, 10)
            home.end()
            wire.end()

    asyncio.run(scene())


def test_with_the_master_all_waits_end() -> None:
    """Nobody who asked waits for the time limit."""

    class Stuck(Small):
        async def status(self) -> Reply:
            await asyncio.Event().wait()
            raise AssertionError

    async def scene() -> None:
        async with joined(Stuck(Reply("OK", "", status()))) as (across, wire):
            asked = asyncio.create_task(across.status())
            await asyncio.sleep(0)
            wire.end()
            assert (await asyncio.wait_for(asked, 5)).code == "UNAVAILABLE"
            assert (await across.status()).code == "UNAVAILABLE"

    asyncio.run(scene())


def test_an_order_without_an_answer_is_in_doubt() -> None:
    """Its reader hears that it may be carried out; one that comes too late for the master hears to try again."""

    class Stuck(Small):
        async def call(self, message: Message) -> Reply:
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError

    begun = asyncio.Event()

    async def scene() -> None:
        async with joined(Stuck(Reply("OK", "", status()))) as (across, wire):
            asked = asyncio.create_task(across.call(pb.StopRequest()))
            await asyncio.wait_for(begun.wait(), 5)
            wire.end()
            reply = await asyncio.wait_for(asked, 5)
            assert (reply.code, "may carry it out" in reply.detail) == ("UNAVAILABLE", True)
            assert "try again" in (await across.call(pb.StopRequest())).detail

    asyncio.run(scene())


def test_an_edge_that_cannot_serve_says_why_in_the_master_s_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With its own error, and is started again and again, ever more rarely."""
    (tmp_path / "pem").write_text("no certificate\n", encoding="utf-8")

    async def scene() -> None:
        edge = Edge(
            Small(Reply("OK", "", status())), "127.0.0.1", 0, None, loopback=True, tls=TlsFiles(*2 * [tmp_path / "pem"])
        )
        edge.start()
        await asyncio.wait_for(until(lambda: "it starts again in 2 s" in caplog.text), 30)
        # Its own words come through a pipe, which another task reads.
        await asyncio.wait_for(until(lambda: "SSLError" in caplog.text), 30)
        await edge.close()

    asyncio.run(scene())
    assert "the HTTP edge cannot serve" in caplog.text


def test_an_edge_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There was no room for a process, or for a thread that waits for it."""
    start, failures = asyncio.create_subprocess_exec, [RuntimeError("can't start new thread"), BlockingIOError("full")]

    async def full(*words: object, **options: object) -> object:
        if failures:
            raise failures.pop()
        return await start(*words, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)

    async def scene() -> None:
        async with edge_of(Small(Reply("OK", "", status()))) as edge:
            assert (await answered(edge, "/healthz"))[0] == 200

    asyncio.run(scene())
    assert "cannot be started (full)" in caplog.text
    assert "cannot be started (can't start new thread)" in caplog.text


def test_a_killed_edge_is_served_again(caplog: pytest.LogCaptureFixture) -> None:
    """On the same address, with a line that says so; and the token is in no command line and no environment."""

    async def scene() -> None:
        async with edge_of(Small(Reply("OK", "", status())), TOKEN) as edge:
            assert (await answered(edge, "/api/v1/job"))[0] == 401
            assert (await answered(edge, "/api/v1/job", token=TOKEN))[0] == 200
            (first,) = children()
            for name in ("cmdline", "environ"):
                assert TOKEN.encode() not in Path(f"/proc/{first}/{name}").read_bytes()
            os.kill(first, signal.SIGKILL)
            assert (await answered(edge, "/api/v1/job", token=TOKEN))[0] == 200
            assert children() != [first]
        assert children() == []

    asyncio.run(scene())
    assert sum("it starts again in 1 s" in record.getMessage() for record in caplog.records) == 1


def test_a_stopped_edge_holds_nobody_up() -> None:
    """SIGSTOP: the master's loop goes on showing events, and ends within the time for that."""

    async def scene() -> None:
        master = Small(Reply("OK", "", status()))
        async with edge_of(master) as edge:
            assert (await answered(edge, "/healthz"))[0] == 200
            (process,) = children()
            os.kill(process, signal.SIGSTOP)
            for turn in range(50):
                master.feed.show(tuple(event(number, checkpoint="x" * 1000) for number in range(turn, turn + 500)))
                await asyncio.sleep(0)
            await asyncio.wait_for(edge.close(), 20)
            assert children() == []

    asyncio.run(scene())


def test_the_end_of_an_edge_that_streams_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """A page that is open when the master stops leaves no traceback in its log."""

    async def scene() -> None:
        master = Small(Reply("OK", "", status()))
        master.feed.show((event(1),))
        async with serving(master) as site:
            reader, writer = await opened(site)
            assert await ids(reader, 1) == [1]
        writer.close()
        async with edge_of(master) as edge:
            assert json.loads((await answered(edge, "/api/v1/events"))[1])["newest"] == 1
            reader, writer = await opened(edge)
            assert await ids(reader, 1) == [1]
        writer.close()

    asyncio.run(scene())
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("starts", [False, True])
def test_an_edge_is_closed_at_any_moment(starts: bool) -> None:
    """Also before it answers anybody."""

    async def scene() -> None:
        edge = Edge(Small(Reply("OK", "", status())), "127.0.0.1", 0, None, loopback=True)
        if starts:
            edge.start()
        await edge.close()
        await edge.close()
        assert children() == []

    asyncio.run(scene())


# An edge that says the same again and again, and hears everything.
LIAR = """
import socket, struct, sys, threading
end = socket.socket(fileno=int(sys.argv[1]))
end.sendall(b".")
socket.recv_fds(end, 1, 1)
threading.Thread(target=lambda: all(iter(lambda: end.recv(1 << 20), b"")), daemon=True).start()
text = rb'{"what": "log", "text": "x\\udc80"}'
frames = (struct.pack(">II", len(text), 0) + text) * 2000
while True:
    end.sendall(frames)
"""


def test_an_edge_that_never_stops_talking_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its frames are read one at a time, others are served in between, and few of its lines are logged."""
    start = asyncio.create_subprocess_exec

    async def liar(*words: str, **options: object) -> object:
        return await start(sys.executable, "-c", LIAR, words[-1], **options)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", liar)

    async def scene() -> None:
        loop, longest = asyncio.get_running_loop(), 0.0
        async with edge_of(Small(Reply("OK", "", status()))):
            until = loop.time() + 3
            while (began := loop.time()) < until:
                await asyncio.sleep(0.005)
                longest = max(longest, loop.time() - began)
        assert longest < 0.5

    asyncio.run(scene())
    assert caplog.messages.count("x\\udc80") == MOST_LINES
