"""Requests to a nursery that takes nothing for a while, and a part of one."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from dalsegno.agent.standby.nursery import _Nursery, receive
from dalsegno.agent.standby.request_writer import RequestWriter
from dalsegno.protos.contract import FRAME

# More than a channel takes without a reader.
LARGE = "x" * (1 << 20)


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The agent's end, which waits for a short time, and the nursery's."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 100_000))
    with ours, theirs:
        yield ours, theirs


def drain(end: socket.socket) -> bytes:
    taken = b""
    while True:
        try:
            taken += end.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return taken


def messages(data: bytes) -> list[Any]:
    found = []
    while data:
        (length,) = FRAME.unpack_from(data)
        found.append(json.loads(data[FRAME.size : FRAME.size + length]))
        data = data[FRAME.size + length :]
    return found


def test_the_rest_of_a_request_goes_before_the_next_one(channel: tuple[socket.socket, socket.socket]) -> None:
    """Its nursery read the next one as that rest, and ended with all ranks."""
    ours, theirs = channel
    writer = RequestWriter(ours)
    with pytest.raises(OSError, match="temporarily unavailable"):
        writer.send({"start": 1, "arguments": LARGE})
    assert writer.cut
    with pytest.raises(OSError, match="temporarily unavailable"):
        writer.send({"start": 2})
    assert not writer.cut, "nothing of this one was taken, and it is not sent later"
    taken = b""
    for number in range(3, 100):
        taken += drain(theirs)
        try:
            writer.send({"start": number})
            break
        except OSError:
            continue
    taken += drain(theirs)
    assert [message["start"] for message in messages(taken)] == [1, number]


def test_a_request_of_which_nothing_was_taken_is_not_owed(channel: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = channel
    ours.setblocking(False)
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += ours.send(b"x" * 1000)
    writer = RequestWriter(ours)
    with pytest.raises(BlockingIOError):
        writer.send({"place": 1})
    assert not writer.cut
    assert len(drain(theirs)) == filled
    writer.send({"place": 2})
    assert receive(theirs) == {"place": 2}


def test_a_nursery_waits_for_no_rest_of_a_request(channel: tuple[socket.socket, socket.socket]) -> None:
    """Its workers may end meanwhile."""
    ours, theirs = channel
    nursery: Any = object.__new__(_Nursery)
    nursery._channel, nursery._received, nursery._requests = theirs, bytearray(), []
    data = json.dumps({"start": 1}).encode()
    frame = FRAME.pack(len(data)) + data
    theirs.settimeout(20)
    ours.sendall(frame[:3])
    assert nursery._take_requests()
    ours.sendall(frame[3:-1])
    assert nursery._take_requests()
    assert nursery._requests == []
    ours.sendall(frame[-1:] + frame + frame[:5])
    assert nursery._take_requests()
    assert nursery._requests == [{"start": 1}, {"start": 1}]
    ours.close()
    assert not nursery._take_requests()
