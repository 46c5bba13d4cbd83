"""The HTTP edge with real HTTP, around a small brain."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import math
import time
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("fastapi", reason="needs the extra http")
pytest.importorskip("uvicorn", reason="needs the extra http")

from google.protobuf.message import Message

from dalsegno.master.brain.chronicle import EVENTS, REMARKS, JobEvent, Kind, PausePart
from dalsegno.master.brain.events import Reply
from dalsegno.master.http import across, api, stream
from dalsegno.master.http.encoded import finite
from dalsegno.master.http.guard import LARGEST_BODY_BYTES
from dalsegno.master.http.looking import CURVE_POINTS, Curve, Looking
from dalsegno.master.http.metrics import metrics
from dalsegno.master.http.page import PAGE
from dalsegno.master.http.site import Site
from dalsegno.master.record.descriptors import HTTP_CONNECTIONS
from dalsegno.master.server import listener
from dalsegno.master.server.feed import Feed
from dalsegno.master.server.listener import Listener
from dalsegno.protos import control_pb2 as pb

pytestmark = pytest.mark.timeout(60)
TOKEN = "0123456789abcdef"


def status(step: int = 7, epoch: int = 2, phase: pb.Phase = pb.PHASE_RUNNING, loss: float = 1.5) -> pb.StatusReply:
    return pb.StatusReply(
        job_id="job",
        phase=phase,
        epoch=epoch,
        step=step,
        loss=loss,
        nodes=[pb.NodeStatus(node="a", role="member"), pb.NodeStatus(node="<b>", role="spare")],
        history=[pb.EpochRecord(epoch=1, paused=1.5, lost_steps=2), pb.EpochRecord(epoch=2, paused=0.5)],
    )


class Small:
    """A master with one answer to everybody who looks, and to each order the brain's."""

    def __init__(self, answer: Reply, ordered: Reply | None = None) -> None:
        self.answer, self.ordered, self.feed = answer, ordered, Feed()
        self.orders: list[Message] = []
        self.looks = self.turns = 0

    async def status(self) -> Reply:
        self.looks += 1
        return self.answer

    async def call(self, message: Message) -> Reply:
        self.orders.append(message)
        assert self.ordered is not None
        return self.ordered


def done(text: str = "done", step: int = 0) -> Reply:
    return Reply("OK", "", pb.OrderReply(text=text, step=step))


def event(sequence: int, **about: object) -> JobEvent:
    return JobEvent(sequence, f"event {sequence}", **about)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def serving(answer: Reply | Small, token: str | None = None, host: str = "127.0.0.1") -> AsyncIterator[Site]:
    master = answer if isinstance(answer, Small) else Small(answer)
    edge = Site(master, Listener.open(host, 0), token, loopback=True)
    edge.start()
    try:
        yield edge
    finally:
        await edge.close()


async def get(edge: Site, path: str, **headers: str) -> tuple[int, str]:
    return await asks(edge, "GET", path, **headers)


async def post(edge: Site, path: str, body: object = None, **headers: str) -> tuple[int, str]:
    data = b"" if body is None else json.dumps(body).encode()
    return await asks(edge, "POST", path, data, **{"content-type": "application/json", **headers})


async def asks(edge: Site, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
    def ask() -> tuple[int, str]:
        connection = http.client.HTTPConnection(edge.address, timeout=10)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    return await asyncio.to_thread(ask)


def test_the_job_is_shown() -> None:
    """Health, metrics, JSON and page of a running job; what JSON cannot say is null."""

    async def scene() -> None:
        async with serving(Reply("OK", "", status(loss=math.nan))) as edge:
            assert await get(edge, "/healthz") == (200, "ok\n")
            code, text = await get(edge, "/api/v1/job")
            job = json.loads(text)
            assert (code, job["job_id"], job["step"], job["phase"]) == (200, "job", 7, "PHASE_RUNNING")
            assert job["curve"] == [[7, None]]
            assert job["history"][0]["paused"] == 1.5
            # As a string: a bare NaN is no JSON, and a browser would refuse all of it.
            assert job["loss"] == "NaN"
            code, text = await get(edge, "/metrics")
            assert (code, "dalsegno_step 7.0\n" in text) == (200, True)
            code, text = await get(edge, "/")
            assert (code, text) == (200, PAGE)

    asyncio.run(scene())


def test_with_a_token_only_health_and_the_empty_page_are_open() -> None:
    """Everything that shows the job asks for the token."""

    async def scene() -> None:
        async with serving(Reply("OK", "", status()), TOKEN) as edge:
            for path in ("/api/v1/job", "/metrics"):
                assert (await get(edge, path))[0] == 401
                assert (await get(edge, path, authorization="Bearer wrong"))[0] == 401
                assert (await get(edge, path, authorization=f"Bearer {TOKEN}"))[0] == 200
            assert (await get(edge, "/healthz"))[0] == 200
            assert (await get(edge, "/"))[0] == 200

    asyncio.run(scene())


def test_a_foreign_name_for_this_machine_is_refused() -> None:
    """A web page whose own name was pointed at loopback cannot read the job."""

    async def scene() -> None:
        async with serving(Reply("OK", "", status())) as edge:
            assert (await get(edge, "/api/v1/job", Host="evil.example"))[0] == 400
            assert (await get(edge, "/api/v1/job", Host="localhost:1"))[0] == 200

    asyncio.run(scene())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_each_loopback_address_is_its_own_name(host: str) -> None:
    """Whatever --host says; and an IPv6 one in its brackets."""

    async def scene() -> None:
        async with serving(Reply("OK", "", status()), host=host) as edge:
            for name in (edge.address, "[::1]:8080"):
                assert (await get(edge, "/healthz", Host=name))[0] == 200
            assert (await get(edge, "/healthz", Host="127.0.0.3"))[0] == 400

    asyncio.run(scene())


def test_a_master_that_cannot_answer_is_not_healthy() -> None:
    """Stopping, or stuck on its store: 503."""

    async def scene() -> None:
        async with serving(Reply("UNAVAILABLE", "the master is stopping", None)) as edge:
            code, text = await get(edge, "/healthz")
            assert (code, "stopping" in text) == (503, True)

    asyncio.run(scene())


def test_metrics_are_prometheus_text() -> None:
    """Every sample has its HELP and TYPE; counters end in _total; sums are over the epochs."""
    told = status()
    told.goodput = 0.5
    for epoch in told.history:
        epoch.parts.add(name="saved", seconds=0.25)
    lines = metrics(told).splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    described = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {name.partition("{")[0] for name in samples} == described
    assert float(samples["dalsegno_lost_steps_total"]) == float(samples["dalsegno_paused_seconds_total"]) == 2
    assert float(samples["dalsegno_goodput_ratio"]) == 0.5
    assert float(samples['dalsegno_nodes{role="spare"}']) == 1
    assert float(samples['dalsegno_paused_part_seconds_total{part="saved"}']) == 0.5
    assert "dalsegno_goodput_ratio" not in metrics(status())


def test_the_curve_has_each_step_once() -> None:
    """Repeated steps, and what is said while nobody trains, are not drawn again; the oldest points go."""
    curve = Curve()
    for step in (1, 2, 2, 1, 3):
        curve.see(status(step=step))
    curve.see(status(step=9, phase=pb.PHASE_FORMING))
    assert [step for step, _ in curve.points] == [1, 2, 3]
    for step in range(4, CURVE_POINTS + 10):
        curve.see(status(step=step))
    assert len(curve.points) == CURVE_POINTS


def test_the_curve_of_another_run_begins_anew() -> None:
    """As after `--new-run`, which begins at its first step."""
    curve = Curve()
    for run, step, loss in (("one", 8, 1.0), ("one", 9, 0.5), ("two", 1, 4.0), ("two", 2, 3.0)):
        seen = status(step=step, epoch=2 if run == "one" else 3, loss=loss)
        seen.run_id = run
        curve.see(seen)
    assert list(curve.points) == [(1, 4.0), (2, 3.0)]


def test_the_curve_of_a_run_that_goes_back_goes_on_from_there() -> None:
    """Heard of only at a step of the new world, or before its first one: then `step` is the one that it began from."""
    for unheard in (False, True):
        curve = Curve()
        for step in (10, 20, 30):
            curve.see(status(step=step))
        # It is not another world yet.
        curve.see(status(step=20, phase=pb.PHASE_FORMING))
        assert [step for step, _ in curve.points] == [10, 20, 30]
        if unheard:
            began = status(step=20, epoch=3, loss=0.0)
            began.unheard = True
            curve.see(began)
            assert list(curve.points) == [(10, 1.5), (20, 1.5)]
        for step in (21, 22):
            curve.see(status(step=step, epoch=3, loss=2.0))
        assert list(curve.points) == [(10, 1.5), (20, 1.5), (21, 2.0), (22, 2.0)]


def test_many_who_look_are_served_by_one_look() -> None:
    """The status of a large job costs the brain milliseconds."""

    async def scene() -> None:
        master = Small(Reply("OK", "", status()))
        async with serving(master) as edge:
            await get(edge, "/healthz")
            before = master.looks
            answers = await asyncio.gather(*(get(edge, "/api/v1/job") for _ in range(20)))
            assert {code for code, _ in answers} == {200}
            assert master.looks - before < 20

    asyncio.run(scene())


def test_who_ordered_sees_what_followed() -> None:
    """A look from before a turn serves nobody who asks after it, also one that is still under way."""

    class Slow(Small):
        async def status(self) -> Reply:
            answer = await super().status()
            if self.wait is not None:
                begun.set()
                await self.wait.wait()
            return answer

        wait: asyncio.Event | None = None

    begun = asyncio.Event()

    async def scene() -> None:
        master = Slow(Reply("OK", "", status(step=7)))
        looking = Looking(master)
        assert (await looking.now()).step == 7
        master.answer, master.turns = Reply("OK", "", status(step=8)), 1
        assert (await looking.now()).step == 8
        assert ((await looking.now()).step, master.looks) == (8, 2)
        master.turns, master.wait = 2, asyncio.Event()
        early = asyncio.create_task(looking.now())
        await begun.wait()
        slow, master.wait, master.turns = master.wait, None, 3
        master.answer = Reply("OK", "", status(step=9))
        assert (await looking.now()).step == 9
        slow.set()
        assert (await early).step == 8
        assert (await looking.now()).step == 9

    asyncio.run(scene())


# ---- orders ---------------------------------------------------------------------------------------------------------


def test_orders_reach_the_brain_as_calls() -> None:
    """Each path is one call; the answer is the brain's."""

    async def scene() -> None:
        master = Small(Reply("OK", "", status()), done("so be it", 7))
        async with serving(master) as edge:
            for path, kind in (
                ("nodes/host-0/drain", pb.DrainNodeRequest),
                ("stop", pb.StopRequest),
                ("start", pb.StartRequest),
                ("checkpoint", pb.SaveNowRequest),
            ):
                code, text = await post(edge, f"/api/v1/{path}")
                assert (code, json.loads(text)) == (200, {"text": "so be it", "step": 7})
                assert type(master.orders[-1]) is kind
            assert master.orders[0].node == "host-0"  # type: ignore[attr-defined]
            master.ordered = Reply("OK", "", pb.ScaleReply(limit=3, nodes=4))
            assert json.loads((await post(edge, "/api/v1/scale", {"nodes": 3}))[1]) == {"limit": 3, "nodes": 4}
            assert master.orders[-1].nodes == 3  # type: ignore[attr-defined]
            assert (await get(edge, "/api/v1/stop"))[0] == 405

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("code", "expected"),
    [("FAILED_PRECONDITION", 409), ("NOT_FOUND", 404), ("INVALID_ARGUMENT", 400), ("UNAVAILABLE", 503)],
)
def test_a_refusal_has_its_reason(code: str, expected: int) -> None:
    """One line, as on a command line."""

    async def scene() -> None:
        async with serving(Small(Reply("OK", "", status()), Reply(code, "it cannot be"))) as edge:
            assert await post(edge, "/api/v1/stop") == (expected, '{"detail":"it cannot be"}')

    asyncio.run(scene())


@pytest.mark.slow
def test_orders_need_the_token_and_come_from_no_other_page() -> None:
    """A page that a browser of this machine shows could send them, too; nothing of them reaches the brain."""

    async def scene() -> None:
        master = Small(Reply("OK", "", status()), done())
        async with serving(master, TOKEN) as edge:
            knows = {"authorization": f"Bearer {TOKEN}"}
            assert (await post(edge, "/api/v1/stop"))[0] == 401
            for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
                assert (await post(edge, "/api/v1/stop", origin=origin, **knows))[0] == 403
            assert not master.orders
            assert (await post(edge, "/api/v1/stop", origin=f"http://{edge.address}", **knows))[0] == 200
        async with serving(master) as edge:
            before = len(master.orders)
            assert (await post(edge, "/api/v1/stop", origin="https://evil.example"))[0] == 403
            assert (await post(edge, "/api/v1/stop", Host="evil.example"))[0] == 400
            assert len(master.orders) == before

    asyncio.run(scene())


def test_large_and_wrong_bodies_are_refused() -> None:
    """Unread if they say how large they are, and so is one that does not say."""

    async def scene() -> None:
        master = Small(Reply("OK", "", status()), done())
        async with serving(master) as edge:
            large = b"x" * (LARGEST_BODY_BYTES + 1)
            assert (await asks(edge, "POST", "/api/v1/scale", large))[0] == 413
            host, port = edge.address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                f"POST /api/v1/scale HTTP/1.1\r\nhost: {edge.address}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
            )
            assert b" 413 " in await asyncio.wait_for(reader.readline(), 10)
            writer.close()
            for body in ({}, {"nodes": 0}, {"nodes": "2"}, {"nodes": True}, {"nodes": 2.0}, [], {"nodes": 2**40}):
                assert (await post(edge, "/api/v1/scale", body))[0] == 422
            for raw in (b'{"nodes": NaN}', b'{"nodes": "\\ud800"}'):  # what an answer could not repeat
                kind = {"content-type": "application/json"}
                code, text = await asks(edge, "POST", "/api/v1/scale", raw, **kind)
                assert (code, json.loads(text)["detail"][0]["loc"]) == (422, ["body", "nodes"])
            assert (await post(edge, f"/api/v1/nodes/{'x' * 300}/drain"))[0] == 422
            assert (await post(edge, "/api/v1/nodes/a%0Ab/drain"))[0] == 400
            assert not master.orders

    asyncio.run(scene())


def test_the_schema_names_every_path() -> None:
    """OpenAPI, from which clients are generated; it says what can be refused."""

    async def scene() -> None:
        async with serving(Small(Reply("OK", "", status()))) as edge:
            schema = json.loads((await get(edge, "/api/v1/openapi.json"))[1])
            said = {f"{method} {path}" for path, methods in schema["paths"].items() for method in methods}
            orders = {f"post /api/v1/{name}" for name in ("nodes/{name}/drain", "scale", "stop", "start", "checkpoint")}
            looks = {f"get {path}" for path in ("/api/v1/job", "/api/v1/events", "/healthz", "/readyz", "/metrics")}
            assert said == orders | looks
            assert "409" in schema["paths"]["/api/v1/stop"]["post"]["responses"]

    asyncio.run(scene())


# ---- events ---------------------------------------------------------------------------------------------------------


def test_events_are_read_on_from_where_one_was() -> None:
    """By number, some at a time; whoever knows later ones than there are gets all: their record was lost."""

    async def scene() -> None:
        master = Small(Reply("OK", "", status()))
        parts = (PausePart("saved", 0.5), PausePart("formed", 0.0))
        master.feed.show((event(3, kind=Kind.STEPPED, parts=parts, step=7), event(4), event(6)))
        async with serving(master) as edge:

            async def read(query: str) -> dict[str, object]:
                code, text = await get(edge, f"/api/v1/events{query}")
                assert code == 200
                return dict(json.loads(text))

            async def numbers(query: str) -> list[int]:
                events = (await read(query))["events"]
                assert isinstance(events, list)
                return [one["sequence"] for one in events]

            assert await numbers("") == [3, 4, 6]
            assert await numbers("?after=3") == [4, 6]
            assert await numbers("?after=3&limit=1") == [4]
            assert await numbers("?after=6") == []
            assert await numbers("?after=99") == [3, 4, 6]
            whole = await read("?limit=1")
            assert (whole["oldest"], whole["newest"]) == (3, 6)
            (first,) = whole["events"]  # type: ignore[misc]
            assert (first["kind"], first["step"]) == ("stepped", 7)
            assert first["parts"] == [{"name": "saved", "seconds": 0.5}, {"name": "formed", "seconds": 0.0}]
            assert (await get(edge, "/api/v1/events?after=-1"))[0] == 422
            # Who asks for no pages gets all that are kept, of the job and of its agents.
            master.feed.show(tuple(event(number) for number in range(EVENTS + REMARKS)))
            assert (await numbers(""))[-1] == EVENTS + REMARKS - 1

    asyncio.run(scene())


@pytest.mark.slow
def test_a_request_for_events_may_wait_for_one() -> None:
    """It is answered as soon as there is one, and else when its time is over."""

    async def scene() -> None:
        master = Small(Reply("OK", "", status()))
        master.feed.show((event(1),))
        async with serving(master) as edge:
            waiting = asyncio.create_task(get(edge, "/api/v1/events?after=1&wait=9"))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            master.feed.show((event(1), event(2)))
            _, text = await asyncio.wait_for(waiting, 5)
            assert [one["sequence"] for one in json.loads(text)["events"]] == [2]
            _, text = await asyncio.wait_for(get(edge, "/api/v1/events?after=2&wait=0.2"), 5)
            assert json.loads(text)["events"] == []

    asyncio.run(scene())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_who_waits_again_and_again_over_one_connection_is_not_cut_off(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each request has all of its time, however long ago the connection began, and also after it was silent."""
    monkeypatch.setattr(listener, "LONGEST_REQUEST_SECONDS", 2.0)
    monkeypatch.setattr(stream, "LONGEST_STREAM_SECONDS", 1.0)

    def waits(address: str) -> None:
        connection = http.client.HTTPConnection(address, timeout=10)
        with contextlib.closing(connection):
            connection.connect()
            first = connection.sock
            for _ in range(4):
                time.sleep(0.5)
                connection.request("GET", "/api/v1/events?wait=1", headers={"accept": kind})
                answer = connection.getresponse()
                answer.read()
                assert (answer.status, connection.sock is first) == (200, True)

    async def scene() -> None:
        async with serving(Reply("OK", "", status())) as edge:
            await asyncio.to_thread(waits, edge.address)

    asyncio.run(scene())


@pytest.mark.slow
def test_an_order_is_answered_however_old_its_connection_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gives it would not know whether it was carried out."""
    monkeypatch.setattr(listener, "LONGEST_REQUEST_SECONDS", 2.0)

    class Slow(Small):
        async def call(self, message: Message) -> Reply:
            await asyncio.sleep(1.5)
            return await super().call(message)

    def orders(address: str) -> int:
        connection = http.client.HTTPConnection(address, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/healthz")
            connection.getresponse().read()
            time.sleep(1)
            connection.request("POST", "/api/v1/stop")
            return connection.getresponse().status

    async def scene() -> None:
        async with serving(Slow(Reply("OK", "", status()), done())) as edge:
            assert await asyncio.to_thread(orders, edge.address) == 200

    asyncio.run(scene())


def test_any_request_may_take_as_long_as_what_it_waits_for() -> None:
    """A wait for events, a stream, an order at the master: the answer is there before the connection is ended."""
    longest = max(api.LONGEST_WAIT_SECONDS, stream.LONGEST_STREAM_SECONDS, across.ORDER_SECONDS)
    assert longest + 5 <= listener.LONGEST_REQUEST_SECONDS


@pytest.mark.slow
def test_who_asks_over_an_old_connection_is_not_the_first_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many: a page that stays open is older than those who say nothing."""
    monkeypatch.setattr(listener, "HTTP_CONNECTIONS", 3)

    async def scene() -> None:
        async with serving(Reply("OK", "", status())) as edge:
            host, port = edge.address.split(":")

            async def asks_again() -> bytes:
                writer.write(f"GET /healthz HTTP/1.1\r\nhost: {edge.address}\r\n\r\n".encode())
                return await asyncio.wait_for(reader.readuntil(b"ok\n"), 10)

            reader, writer = await asyncio.open_connection(host, int(port))
            await asks_again()
            idlers = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
            await asks_again()
            idlers.append(await asyncio.open_connection(host, int(port)))
            assert await asyncio.wait_for(idlers[0][0].read(), 10) == b""
            assert b" 200 " in await asks_again()
            for each in (writer, *(idler for _, idler in idlers)):
                each.close()

    asyncio.run(scene())


@pytest.mark.slow
def test_what_a_request_says_of_a_proxy_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is the one that it came over."""
    monkeypatch.setattr(listener, "LONGEST_REQUEST_SECONDS", 2.0)

    def asks_late(address: str) -> int:
        connection = http.client.HTTPConnection(address, timeout=10)
        with contextlib.closing(connection):
            connection.connect()
            time.sleep(1)
            connection.request("GET", "/api/v1/events?wait=1.5", headers={"x-forwarded-for": "192.0.2.1"})
            return connection.getresponse().status

    async def scene() -> None:
        async with serving(Reply("OK", "", status())) as edge:
            assert await asyncio.to_thread(asks_late, edge.address) == 200

    asyncio.run(scene())


async def opened(edge: Site, *headers: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = edge.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = (f"host: {edge.address}", "accept: text/event-stream", *headers)
    writer.write("\r\n".join(("GET /api/v1/events HTTP/1.1", *lines, "", "")).encode())
    return reader, writer


async def ids(reader: asyncio.StreamReader, count: int) -> list[int]:
    """The numbers of the next events of a stream."""
    found: list[int] = []
    while len(found) < count:
        line = await asyncio.wait_for(reader.readline(), 10)
        assert line, found
        if line.startswith(b"id: "):
            found.append(int(line[4:]))
    return found


@pytest.mark.slow
def test_a_stream_brings_events_as_they_come_and_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that connects again with the last number loses none."""
    monkeypatch.setattr(stream, "LONGEST_STREAM_SECONDS", 1.0)

    async def scene() -> None:
        master = Small(Reply("OK", "", status()))
        master.feed.show((event(1), event(2)))
        async with serving(master) as edge:
            reader, writer = await opened(edge)
            assert await ids(reader, 2) == [1, 2]
            master.feed.show((event(1), event(2), event(3)))
            assert await ids(reader, 1) == [3]
            rest = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)
            assert b"id: " not in rest
            writer.close()
            master.feed.show((event(2), event(3), event(4)))
            reader, writer = await opened(edge, "last-event-id: 3")
            assert await ids(reader, 1) == [4]
            writer.close()

    asyncio.run(scene())


@pytest.mark.slow
def test_a_reader_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, and the loop, go on meanwhile."""
    monkeypatch.setattr(stream, "SLOWEST_READER_SECONDS", 0.5)

    async def scene() -> None:
        master = Small(Reply("OK", "", status()))
        many = tuple(event(number, checkpoint="x" * 20_000) for number in range(1, 900))
        master.feed.show(many)
        async with serving(master) as edge:
            _, writer = await opened(edge)
            for _ in range(100):
                if edge._api._readers._count == 1:
                    break
                await asyncio.sleep(0.02)
            assert edge._api._readers._count == 1
            assert await get(edge, "/healthz") == (200, "ok\n")
            for _ in range(200):
                if edge._api._readers._count == 0:
                    break
                await asyncio.sleep(0.05)
            assert edge._api._readers._count == 0
            writer.close()

    asyncio.run(scene())


@pytest.mark.slow
def test_only_so_many_wait_for_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who do not want to wait are answered all the same."""
    monkeypatch.setattr(stream, "MOST_READERS", 2)

    async def scene() -> None:
        master = Small(Reply("OK", "", status()))
        master.feed.show((event(1),))
        async with serving(master) as edge:
            streams = [await opened(edge) for _ in range(2)]
            for reader, _ in streams:
                await ids(reader, 1)
            assert (await get(edge, "/api/v1/events?after=1&wait=5"))[0] == 429
            assert (await get(edge, "/api/v1/events", accept="text/event-stream"))[0] == 429
            assert (await get(edge, "/api/v1/events"))[0] == 200
            for _, writer in streams:
                writer.close()

    asyncio.run(scene())


def test_the_page_loads_nothing_from_elsewhere() -> None:
    """Self-contained, and nothing of the job is ever parsed as markup."""
    assert "://" not in PAGE.replace('"http://www.w3.org/2000/svg"', "")
    assert "innerHTML" not in PAGE


def test_what_json_does_not_have_becomes_null() -> None:
    """At any depth."""
    assert finite({"a": [math.nan, (1.0, math.inf)], "b": "NaN"}) == {"a": [None, [1.0, None]], "b": "NaN"}


@pytest.mark.slow
def test_idle_connections_keep_nobody_out() -> None:
    """Far more than are kept: the oldest go, and whoever asks is answered."""

    async def scene() -> None:
        async with serving(Reply("OK", "", status())) as edge:
            host, port = edge.address.split(":")
            idlers = [await asyncio.open_connection(host, int(port)) for _ in range(3 * HTTP_CONNECTIONS)]
            assert await get(edge, "/healthz") == (200, "ok\n")
            for reader, _ in idlers[: 2 * HTTP_CONNECTIONS]:
                assert await asyncio.wait_for(reader.read(), 10) == b""
            for _, writer in idlers:
                writer.close()

    asyncio.run(scene())


@pytest.mark.slow
def test_no_connection_stays_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that sends its request a byte at a time."""
    monkeypatch.setattr(listener, "LONGEST_REQUEST_SECONDS", 1.0)

    async def scene() -> None:
        async with serving(Reply("OK", "", status())) as edge:
            host, port = edge.address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /healthz HTTP/1.1\r\n")
            assert await asyncio.wait_for(reader.read(), 15) == b""
            writer.close()
            assert await get(edge, "/healthz") == (200, "ok\n")

    asyncio.run(scene())
