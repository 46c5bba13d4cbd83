"""What readers get, as JSON: each event and each look at the job is encoded once for all of them.

It happens in a loop that answers others as well: readers, and in a Commander the agents of its runs. So that loop is
let go every few milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable, MutableSequence, Sequence
from typing import Any

from google.protobuf.message import Message

from dalsegno.protos.plain_json import plain

from ..brain.chronicle import KEPT, JobEvent
from ..brain.shown import event_proto
from ..server.feed import Feed

__all__ = ("EncodedEvents", "dumped", "finite", "message_json")

# The longest that the loop is held at a time, but for one event or node.
PIECE_SECONDS = 0.002
# How many texts are kept of events that are not: dropping them looks at all.
_SPARE = 200


class _Pieces:
    """Work that lets the loop go on in between."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def between(self) -> None:
        """Lets the loop go on, if it was held for long enough."""
        if time.perf_counter() - self._since > PIECE_SECONDS:
            await asyncio.sleep(0)
            self._since = time.perf_counter()


class EncodedEvents:
    """The texts of events. Everything happens in the readers' loop.

    Args:
        feed: Whose events they are.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        # By sequence number. A record that was lost begins with the same numbers again, so the event stands beside it.
        self._texts: dict[int, tuple[JobEvent, bytes]] = {}
        # One reader encodes at a time, and the next one finds what is done.
        self._turn = asyncio.Lock()

    async def of(self, events: Sequence[JobEvent]) -> list[bytes]:
        """Each event as JSON, in this order."""
        async with self._turn:
            pieces, found = _Pieces(), []
            for event in events:
                known, text = self._texts.get(event.sequence, (None, b""))
                if known is not event:
                    text = dumped(plain(event_proto(event)))
                    self._texts[event.sequence] = event, text
                found.append(text)
                await pieces.between()
            if len(self._texts) > KEPT + _SPARE:
                # Not all numbers from the oldest: what agents said stays for longer.
                kept = {event.sequence for event in self._feed.events}
                self._texts = {sequence: text for sequence, text in self._texts.items() if sequence in kept}
            return found


async def message_json(message: Message, more: dict[str, Any]) -> bytes:
    """A message as JSON with all its fields, and these beside or instead of single ones; lists piece by piece."""
    shallow = type(message)()
    shallow.CopyFrom(message)
    # Of messages; maps are no sequences.
    long = {
        field.name: of for field, of in message.ListFields() if field.message_type and isinstance(of, MutableSequence)
    }
    for name in long:
        shallow.ClearField(name)
    texts = {key: dumped(value) for key, value in (plain(shallow) | finite(more)).items()}
    pieces = _Pieces()
    for name, of in long.items():
        items = []
        for item in of:
            items.append(dumped(plain(item)))
            await pieces.between()
        texts[name] = b"[" + b",".join(items) + b"]"
    return b"{" + b",".join(_entries(texts.items())) + b"}"


def _entries(texts: Iterable[tuple[str, bytes]]) -> Iterable[bytes]:
    return (dumped(key) + b":" + text for key, text in texts)


def dumped(value: Any) -> bytes:
    """Compact JSON in one line. Raises ValueError for what JSON does not have."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def finite(value: Any) -> Any:
    """The value with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
