"""Messages between agents as bytes, each with a checksum of its own, as peer.proto has it. Pure."""

from __future__ import annotations

import struct
import zlib
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from dalsegno.protos import peer_pb2

__all__ = ["Garbled", "packed", "parsed"]

# The field `checksum` as protobuf writes it: its number and type in one byte, and its four bytes.
_CHECKSUM = struct.Struct("<BI")
_FIXED32 = 5
_TAG = peer_pb2.Call.CHECKSUM_FIELD_NUMBER << 3 | _FIXED32

Received = TypeVar("Received", bound=Message)


class Garbled(ValueError):
    """A message that is not what was sent. Another try may help."""


def packed(message: Message) -> bytes:
    """The bytes of a message, which end with their checksum where its kind has one."""
    data = message.SerializeToString()
    return data + _CHECKSUM.pack(_TAG, zlib.crc32(data)) if _has_one(type(message)) else data


def parsed(kind: type[Received], data: bytes) -> Received:
    """The message that they are.

    Raises:
        Garbled: the checksum is wrong.
        ValueError: they are none of this kind.
    """
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        raise ValueError("not a message of this protocol") from error
    # Older agents send none.
    if _has_one(kind) and message.HasField("checksum"):
        rest = data[: -_CHECKSUM.size]
        if data[-_CHECKSUM.size :] != _CHECKSUM.pack(_TAG, zlib.crc32(rest)):
            raise Garbled("the message did not arrive as it was sent")
    return message


def _has_one(kind: type[Message]) -> bool:
    return "checksum" in kind.DESCRIPTOR.fields_by_name
