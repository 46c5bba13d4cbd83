"""The edge answers in a thread of its own: what readers cost is not paid by the master's loop."""

from __future__ import annotations

import asyncio
import http.client
import json
import time

import pytest

pytest.importorskip("fastapi", reason="needs the extra http")
pytest.importorskip("uvicorn", reason="needs the extra http")

from google.protobuf.message import Message

from dalsegno.master.brain.events import Reply
from dalsegno.master.http.across import Across
from dalsegno.master.http.api import Api
from dalsegno.master.http.edge import Edge
from tests.unit.master.http.test_http import Small, done, event, get, ids, opened, post, serving, status

pytestmark = pytest.mark.timeout(60)


async def longest_hold(until: asyncio.Task[object]) -> float:
    """The longest time between two turns of the running loop until the task has ended, in seconds."""
    longest, then = 0.0, time.perf_counter()
    while not until.done():
        await asyncio.sleep(0.01)
        now = time.perf_counter()
        longest, then = max(longest, now - then), now
    return longest


def test_a_reader_that_takes_long_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master's loop goes on while the edge's is busy with an answer."""

    async def slow(self: Api) -> dict[str, object]:
        time.sleep(3)  # why: stands for work that lets nobody else have this loop
        return {}

    monkeypatch.setattr(Api, "_job", slow)

    async def scene() -> None:
        async with serving(Reply("OK", "", status())) as edge:
            asked = asyncio.create_task(get(edge, "/api/v1/job"))
            assert await longest_hold(asked) < 2
            assert asked.result() == (200, "{}")

    asyncio.run(scene())


def test_whoever_has_the_answer_to_an_order_sees_its_events() -> None:
    """They come over in the order in which they became true."""

    class Orders(Small):
        async def call(self, message: Message) -> Reply:
            known = self.feed.newest
            self.feed.show((*self.feed.after(0, known), event(known + 1)))
            return await super().call(message)

    async def scene() -> None:
        master = Orders(Reply("OK", "", status()), done())
        async with serving(master) as edge:
            for number in range(1, 51):
                assert (await post(edge, "/api/v1/stop"))[0] == 200
                assert json.loads((await get(edge, "/api/v1/events"))[1])["newest"] == number

    asyncio.run(scene())


def test_what_is_read_elsewhere_is_not_the_master_s_own() -> None:
    """The master writes into its message again while readers look at theirs."""

    async def scene() -> None:
        shown = status()
        across = Across(Small(Reply("OK", "", shown)), asyncio.get_running_loop())
        reply = await across.status()
        shown.store_trouble = "later"
        assert reply.message == status()

    asyncio.run(scene())


def test_an_edge_that_has_ended_is_told_nothing_more() -> None:
    """A turn that shows its events does not fail for it."""

    async def scene() -> None:
        master = Small(Reply("OK", "", status()))
        edge = Edge(master, "127.0.0.1", 0, None, loopback=True)
        edge.start()
        assert (await get(edge, "/healthz"))[0] == 200
        assert len(master.feed._followers) == 1
        await edge.close()
        master.feed.show((event(1),))
        assert master.feed._followers == []

    asyncio.run(scene())


def test_the_end_of_an_edge_that_streams_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """A page that is open when the master stops leaves no traceback in its log."""

    async def scene() -> None:
        master = Small(Reply("OK", "", status()))
        master.feed.show((event(1),))
        async with serving(master) as edge:
            waiting = asyncio.create_task(get(edge, "/api/v1/events?after=1&wait=9"))
            reader, writer = await opened(edge)
            assert await ids(reader, 1) == [1]
        writer.close()
        with pytest.raises((http.client.HTTPException, OSError)):
            await asyncio.wait_for(waiting, 10)

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

    asyncio.run(scene())
