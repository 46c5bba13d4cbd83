"""Writes requests to a nursery, each as a whole in the end, although writing one may be given up."""

from __future__ import annotations

import json
import socket

from dalsegno.protos.contract import FRAME

__all__ = ["RequestWriter"]


class RequestWriter:
    """Not thread-safe.

    A nursery that is stopped for a while may have taken a part of a request when its time is over. It would read the
    next request as the rest of that one, and end with its workers. So the rest goes first.

    Args:
        channel: blocks for its SO_SNDTIMEO at most.

    Attributes:
        cut: the nursery has a part of the request that was sent last.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._rest = b""
        self.cut = False

    def send(self, value: dict[str, object]) -> None:
        """Writes one request.

        Raises:
            OSError: the nursery is gone, or did not take it in time: nothing of it, unless it is `cut`.
        """
        data = json.dumps(value).encode()
        self.cut = False
        self._write(self._rest)
        try:
            self._write(FRAME.pack(len(data)) + data)
        finally:
            self.cut = bool(self._rest)

    def _write(self, data: bytes) -> None:
        begun, view = bool(self._rest), memoryview(data)
        try:
            while view:
                view = view[self._channel.send(view) :]
                begun = True
        finally:
            self._rest = bytes(view) if begun else b""
