"""Messages between agents, and what becomes of them on a line that changes bits."""

from __future__ import annotations

import zlib

import pytest

from dalsegno.agent.memory.frames import Garbled, packed, parsed
from dalsegno.protos import peer_pb2

HEADER = peer_pb2.Header(
    job_id="j", run_id="r", epoch=3, name="step-1", digest="d", group_rank=2, manifest_bytes=9, paths=["a.pt", "b.pt"]
)
MESSAGES = {
    "hold": peer_pb2.Call(hold=HEADER),
    "fetch": peer_pb2.Call(fetch=peer_pb2.FetchRequest(job_id="j", run_id="r", name="n", digest="d", patient=True)),
    "header": peer_pb2.Answer(header=HEADER),
    "here": peer_pb2.Answer(here=True),
    "complete": peer_pb2.Answer(complete=True),
    "refused": peer_pb2.Answer(code=15, detail="a checksum was wrong"),
    "empty": peer_pb2.Answer(),
}


def plain(message: peer_pb2.Call | peer_pb2.Answer) -> bytes:
    """All that it says, but for its checksum."""
    copy = type(message)()
    copy.CopyFrom(message)
    copy.ClearField("checksum")
    copy.DiscardUnknownFields()  # type: ignore[attr-defined]
    return copy.SerializeToString(deterministic=True)


@pytest.mark.parametrize("which", MESSAGES)
def test_a_message_comes_as_it_was_sent(which: str) -> None:
    message = MESSAGES[which]
    assert plain(parsed(type(message), packed(message))) == plain(message)


@pytest.mark.parametrize("which", MESSAGES)
def test_no_flipped_bit_is_believed(which: str) -> None:
    """It is refused, unless it is one of the checksum's own tag: then all that the message says is right."""
    message = MESSAGES[which]
    frame = packed(message)
    garbled = 0
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            got = parsed(type(message), bytes(flipped))
        except Garbled:
            garbled += 1
        except ValueError:
            pass
        else:
            assert bit // 8 == len(frame) - 5
            assert plain(got) == plain(message)
    assert garbled >= 32


def test_older_and_newer_agents_are_understood() -> None:
    """Older ones send no checksum, and newer ones may send fields that this one does not know."""
    older = MESSAGES["hold"].SerializeToString()
    assert parsed(peer_pb2.Call, older) == MESSAGES["hold"]
    newer = peer_pb2.Answer(complete=True).SerializeToString() + b"\x72\x02ok"  # field 14, a text
    frame = newer + b"\x7d" + zlib.crc32(newer).to_bytes(4, "little")
    assert parsed(peer_pb2.Answer, frame).complete
    with pytest.raises(Garbled):
        parsed(peer_pb2.Answer, frame.replace(b"ok", b"oh"))


def test_a_hello_has_none() -> None:
    """What a stranger says first is looked at as it is: a wrong credential is refused anyhow."""
    hello = peer_pb2.Hello(credential="x")
    assert packed(hello) == hello.SerializeToString()
