"""Frames between the master and the process of its HTTP edge: a header as JSON, and the bytes of a protobuf message.

No pickle: the edge faces the network, so nothing that it sends may be executable.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

__all__ = ("LONGEST_LINE", "READY", "EdgeWire", "WireError")

# Bytes of a header, and of a body from either end.
LONGEST_HEADER_BYTES = 256 << 10
LARGEST_ASK_BYTES = 64 << 10
LARGEST_ANSWER_BYTES = 256 << 20
# The most characters of a line of the edge's for the master's log.
LONGEST_LINE = 20_000
# Before the first frame: the edge says it when it ends with its master, which sends it back with the listening socket.
READY = b"."
_LENGTHS = struct.Struct(">II")


class WireError(Exception):
    """The other end sent what is no frame; one line."""


class EdgeWire:
    """One end of a pair of sockets. Frames are sent one at a time by its only owner."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, largest_bytes: int) -> None:
        self._reader, self._writer, self._largest = reader, writer, largest_bytes

    @classmethod
    async def over(cls, end: socket.socket, largest_bytes: int) -> EdgeWire:
        """A wire over this end, which reads bodies of at most so many bytes. Raises OSError."""
        reader, writer = await asyncio.open_connection(sock=end)
        return cls(reader, writer, largest_bytes)

    async def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Sends a frame, once the other end has read most of those before. Raises OSError."""
        text = json.dumps(header).encode()
        self._writer.write(_LENGTHS.pack(len(text), len(body)) + text + body)
        # Otherwise an end that reads nothing would cost the memory of this one.
        await self._writer.drain()

    async def receive(self) -> tuple[dict[str, Any], bytes] | None:
        """The next frame; None: the other end has gone. Raises WireError, OSError."""
        try:
            head, size = _LENGTHS.unpack(await self._reader.readexactly(_LENGTHS.size))
            if head > LONGEST_HEADER_BYTES or size > self._largest:
                raise WireError(f"a frame of {head} and {size} bytes is too large")
            text, body = await self._reader.readexactly(head), await self._reader.readexactly(size)
        except asyncio.IncompleteReadError:
            return None
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WireError("a frame's header is no JSON") from error
        if not isinstance(header, dict):
            raise WireError("a frame's header is no object")
        return header, body

    def end(self) -> None:
        """Ends it at once; the other end sees that. Safe twice."""
        self._writer.transport.abort()
