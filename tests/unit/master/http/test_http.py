"""The HTTP edge with real HTTP, around a small brain."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import math
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("fastapi", reason="needs the extra http")
pytest.importorskip("uvicorn", reason="needs the extra http")

from dalsegno.master.brain.events import Reply
from dalsegno.master.http.edge import Edge, Trace, finite, metrics
from dalsegno.master.http.page import PAGE
from dalsegno.master.record.descriptors import HTTP_CONNECTIONS
from dalsegno.master.server import listener
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


@contextlib.asynccontextmanager
async def serving(answer: Reply, token: str | None = None) -> AsyncIterator[Edge]:
    async def status() -> Reply:
        return answer

    edge = Edge(status, "127.0.0.1", 0, token, loopback=True)
    edge.start()
    try:
        yield edge
    finally:
        await edge.close()


async def get(edge: Edge, path: str, **headers: str) -> tuple[int, str]:
    def ask() -> tuple[int, str]:
        connection = http.client.HTTPConnection(edge.address, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    return await asyncio.to_thread(ask)


def test_the_job_is_shown() -> None:
    """Health, metrics, JSON and page of a running job; what JSON cannot say is null."""

    async def scene() -> None:
        async with serving(Reply("OK", "", status(loss=math.nan))) as edge:
            assert await get(edge, "/healthz") == (200, "ok\n")
            code, text = await get(edge, "/api/job")
            job = json.loads(text)
            assert (code, job["job_id"], job["step"], job["phase"]) == (200, "job", "7", "PHASE_RUNNING")
            assert job["curve"] == [[7, None]]
            assert job["history"][0]["paused"] == 1.5
            # As a string: a bare NaN is no JSON, and a browser would refuse all of it.
            assert job["loss"] == "NaN"
            code, text = await get(edge, "/metrics")
            assert (code, "dalsegno_step 7\n" in text) == (200, True)
            code, text = await get(edge, "/")
            assert (code, text) == (200, PAGE)

    asyncio.run(scene())


def test_with_a_token_only_health_and_the_empty_page_are_open() -> None:
    """Everything that shows the job asks for the token."""

    async def scene() -> None:
        async with serving(Reply("OK", "", status()), TOKEN) as edge:
            for path in ("/api/job", "/metrics"):
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
            assert (await get(edge, "/api/job", Host="evil.example"))[0] == 400
            assert (await get(edge, "/api/job", Host="localhost:1"))[0] == 200

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
    lines = metrics(status(), 0.5).splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    described = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {name.partition("{")[0] for name in samples} == described
    assert samples["dalsegno_lost_steps_total"] == samples["dalsegno_paused_seconds_total"] == "2"
    assert samples["dalsegno_goodput_ratio"] == "0.5"
    assert samples['dalsegno_nodes{role="spare"}'] == "1"


def test_goodput_counts_only_steps_that_bring_the_run_forward() -> None:
    """Pauses and repeated steps are time without progress."""
    trace = Trace()
    assert trace.goodput(5.0) is None
    for now in range(11):
        trace.see(status(step=now + 1, epoch=1), float(now))
    assert trace.goodput(10.0) == 1.0
    trace.see(status(step=11, epoch=1, phase=pb.PHASE_FORMING), 12.0)
    # Five seconds until the new world's first step; it starts at step 9.
    for offset, step in enumerate((9, 10, 11, 12, 13)):
        trace.see(status(step=step, epoch=2), 15.0 + offset)
    assert trace.goodput(20.0) == pytest.approx(11 / 20)
    assert [step for step, _ in trace.curve] == [*range(1, 14)]


def test_the_page_loads_nothing_from_elsewhere() -> None:
    """Self-contained, and nothing of the job is ever parsed as markup."""
    assert "://" not in PAGE.replace('"http://www.w3.org/2000/svg"', "")
    assert "innerHTML" not in PAGE


def test_what_json_does_not_have_becomes_null() -> None:
    """At any depth."""
    assert finite({"a": [math.nan, (1.0, math.inf)], "b": "NaN"}) == {"a": [None, [1.0, None]], "b": "NaN"}


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


def test_no_connection_stays_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that sends its request a byte at a time."""
    monkeypatch.setattr(listener, "LONGEST_CONNECTION_SECONDS", 1.0)

    async def scene() -> None:
        async with serving(Reply("OK", "", status())) as edge:
            host, port = edge.address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /healthz HTTP/1.1\r\n")
            assert await asyncio.wait_for(reader.read(), 15) == b""
            writer.close()
            assert await get(edge, "/healthz") == (200, "ok\n")

    asyncio.run(scene())
