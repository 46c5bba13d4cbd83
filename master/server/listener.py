"""A listening socket that keeps a bounded number of connections, and none for long.

uvicorn does not limit silent connections, and asyncio lets a TLS handshake take a minute. A request of a person or a
scraper takes milliseconds. So if there are too many connections, the oldest one is closed first, and idle ones keep
nobody out. (A flood of new connections can, but nothing depends on this page.)
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from typing import Any

from dalsegno.protos.addresses import address_of

from ..record.descriptors import HTTP_CONNECTIONS

__all__ = ("Listener",)

# Seconds that a connection may last. A page that stays open, or a scraper, connects again.
LONGEST_CONNECTION_SECONDS = 30.0


class Listener(socket.socket):
    """A listening socket for asyncio, which accepts from it and closes what it accepted."""

    def __init__(self, family: int = -1, kind: int = -1, fileno: int | None = None) -> None:
        super().__init__(family, kind, fileno=fileno)
        # HOST:PORT, where it listens.
        self.address = ""
        # The oldest first.
        self._accepted: deque[tuple[float, socket.socket]] = deque()

    @classmethod
    def open(cls, host: str, port: int) -> Listener:
        """Listens there (port 0: any free one). Raises OSError if the address is not available."""
        listener = cls(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(HTTP_CONNECTIONS)
        except OSError:
            listener.close()
            raise
        listener.address = address_of(host, listener.getsockname()[1])
        return listener

    @classmethod
    def adopt(cls, descriptor: int) -> Listener:
        """One that another process opened, from the descriptor that this one inherited. Raises OSError."""
        listener = cls(fileno=descriptor)
        listener.address = address_of(*listener.getsockname()[:2])
        return listener

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection; if there are too many, ends the oldest one."""
        connection, address = super().accept()
        self._accepted = deque(entry for entry in self._accepted if entry[1].fileno() >= 0)
        if len(self._accepted) >= HTTP_CONNECTIONS:
            _end(self._accepted.popleft()[1])
        self._accepted.append((time.monotonic(), connection))
        return connection, address

    def drop_old(self) -> None:
        """Ends connections that have been open for longer than anybody needs."""
        now = time.monotonic()
        while self._accepted and now - self._accepted[0][0] > LONGEST_CONNECTION_SECONDS:
            _end(self._accepted.popleft()[1])

    def end_all(self) -> None:
        """Ends all connections: whoever answers one of them hears that its reader has gone."""
        while self._accepted:
            _end(self._accepted.popleft()[1])


def _end(connection: socket.socket) -> None:
    """Ends a connection: its reader sees the end and closes it, as does asyncio, whose socket this is."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
