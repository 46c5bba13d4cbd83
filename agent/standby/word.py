"""A worker's way to its nursery: messages over a socket that the script does not know."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

from dalsegno.protos.ready import readable

__all__ = ["MAX_MESSAGE_BYTES", "Word"]

# The most bytes of a message: a worker's place is some variables and two paths.
MAX_MESSAGE_BYTES = 1 << 17


class Word:
    """One end of a socket pair of messages (SOCK_SEQPACKET) in a forked worker.

    A script may close every descriptor that it does not know, and the number may then be another file's: nothing is
    written to that.
    """

    def __init__(self, end: socket.socket) -> None:
        self._fd = end.detach()
        self._stat = os.fstat(self._fd)

    def say(self, message: dict[str, object]) -> bool:
        """Sends a message. False: nobody is there to receive it."""
        try:
            return self._is_ours() and os.write(self._fd, json.dumps(message).encode()) > 0
        except OSError:
            return False

    def hear(self) -> dict[str, Any] | None:
        """Waits for a message. None: the nursery is gone."""
        try:
            data = os.read(self._fd, MAX_MESSAGE_BYTES) if self._is_ours() else b""
        except OSError:
            return None
        return dict(json.loads(data)) if data else None

    def waits(self, seconds: float) -> bool:
        """Whether something can be received within so many seconds, even if it is only the end."""
        try:
            return not self._is_ours() or readable(self._fd, seconds)
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        """Closes it, when there is nothing more to say."""
        with contextlib.suppress(OSError):
            if self._is_ours():
                os.close(self._fd)

    def _is_ours(self) -> bool:
        return os.path.samestat(os.fstat(self._fd), self._stat)
