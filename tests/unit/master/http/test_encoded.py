"""What readers get: encoded once for all of them, and never for long at a time."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra http")

from google.protobuf.json_format import MessageToDict

from dalsegno.master.brain.chronicle import EVENTS, JobEvent, Kind, PausePart
from dalsegno.master.brain.events import Reply
from dalsegno.master.http import encoded
from dalsegno.master.http.encoded import EncodedEvents, message_json
from dalsegno.master.http.looking import Looking
from dalsegno.master.server.feed import Feed
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.plain_json import plain


def events(*sequences: int) -> tuple[JobEvent, ...]:
    return tuple(JobEvent(sequence, f"event {sequence}") for sequence in sequences)


def status(nodes: int) -> pb.StatusReply:
    made = pb.StatusReply(job_id="job", step=7, loss=math.nan, epoch=2)
    made.nodes.extend(pb.NodeStatus(node=f"node-{number}", role="member") for number in range(nodes))
    made.history.add(epoch=1, paused=1.5)
    return made


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All messages that are encoded."""
    found: list[Any] = []

    def counting(message: Any) -> dict[str, Any]:
        found.append(message)
        return plain(message)

    monkeypatch.setattr(encoded, "plain", counting)
    return found


def test_each_event_is_encoded_once_for_all(counted: list[Any]) -> None:
    """Also for those who ask at the same time; an event with an old number is another event."""

    async def scene() -> None:
        feed, shown = Feed(), events(*range(1, 51))
        texts = EncodedEvents(feed)
        feed.show(shown)
        all_texts = await asyncio.gather(*(texts.of(shown) for _ in range(10)))
        assert len(counted) == 50
        assert all(one == all_texts[0] for one in all_texts)
        assert json.loads(all_texts[0][9])["sequence"] == 10
        again = (replace(shown[0], text="of the next record"),)
        assert json.loads((await texts.of(again))[0])["text"] == "of the next record"

    asyncio.run(scene())


def test_texts_go_with_their_events() -> None:
    """A long job has many more events than are kept."""

    async def scene() -> None:
        feed = Feed()
        texts = EncodedEvents(feed)
        for first in range(1, 4 * EVENTS, 100):
            # What an agent said of its node stays for longer.
            shown = events(0, *range(first, first + 100))
            feed.show(shown)
            await texts.of(shown)
        assert len(texts._texts) < 2 * EVENTS

    asyncio.run(scene())


def test_an_event_has_all_fields() -> None:
    """64-bit numbers are numbers, and each text is one line."""
    event = JobEvent(
        2**40, "two\nlines", kind=Kind.FORMED, nodes=("a",), parts=(PausePart("saved", 0.5),), step=3, seconds=math.nan
    )
    (text,) = asyncio.run(EncodedEvents(Feed()).of([event]))
    found = json.loads(text)
    assert b"\n" not in text
    assert (found["sequence"], found["text"], found["kind"], found["step"]) == (2**40, "two\nlines", "formed", 3)
    assert (found["parts"], found["seconds"]) == ([{"name": "saved", "seconds": 0.5}], "NaN")


@pytest.mark.parametrize("nodes", [0, 3])
def test_a_look_says_what_the_message_says(nodes: int) -> None:
    """Piece by piece it is the same; empty lists are there, too."""
    text = asyncio.run(message_json(status(nodes), {"goodput": math.nan, "curve": [(1, math.inf)]}))
    whole = MessageToDict(status(nodes), preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    numbers = {"step": 7, "epoch": 2, "generation": 0, "save_order": 0}
    (epoch,) = whole["history"]
    wide = ("epoch", "resumed_step", "lost_steps", "first_step", "last_step")
    past = {"history": [epoch | {name: int(epoch[name]) for name in wide}]}
    assert json.loads(text) == whole | numbers | past | {"goodput": None, "curve": [[1, None]]}


def test_one_look_is_encoded_once(counted: list[Any]) -> None:
    """A reader who hangs up does not end it for the others."""

    class Shown:
        feed, turns = Feed(), 0

        async def status(self) -> Reply:
            return Reply("OK", "", status(30))

        async def call(self, message: Any) -> Reply:
            raise NotImplementedError

    async def scene() -> None:
        looking = Looking(Shown())
        await looking.now()
        readers = [asyncio.create_task(looking.as_json()) for _ in range(5)]
        await asyncio.sleep(0)
        readers[0].cancel()
        found = await asyncio.gather(*readers[1:])
        # The message itself, its nodes, and one epoch.
        assert len(counted) == 32
        assert len(set(found)) == 1

    asyncio.run(scene())


def test_the_loop_is_let_go_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others get their turn after each piece."""
    monkeypatch.setattr(encoded, "PIECE_SECONDS", 0.0)

    async def scene() -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await EncodedEvents(Feed()).of(events(*range(1, 101)))
        assert turns >= 100
        await message_json(status(100), {})
        assert turns >= 200
        task.cancel()

    asyncio.run(scene())
