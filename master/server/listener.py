"""A listening socket that keeps a bounded number of connections, and none for long.

uvicorn does not limit silent connections, and asyncio lets a TLS handshake take a minute. A request of a person or a
scraper takes milliseconds. So if there are too many connections, the one whose last request began first is closed, and
idle ones keep nobody out. (A flood of new connections can, but nothing depends on this page.)
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from dalsegno.protos.addresses import address_of

from ..record.descriptors import HTTP_CONNECTIONS

__all__ = ("Listener",)

# Seconds that a request may take, and a connection until its first one: more than any answer does (an order has 30).
LONGEST_REQUEST_SECONDS = 40.0


class Listener(socket.socket):
    """A listening socket for asyncio, which accepts from it and closes what it accepted."""

    def __init__(self, family: int = -1, kind: int = -1, fileno: int | None = None) -> None:
        super().__init__(family, kind, fileno=fileno)
        # HOST:PORT, where it listens.
        self.address = ""
        # By the other end's host and port: when its last request began, or it came. The oldest first.
        self._accepted: dict[tuple[str, int], tuple[float, socket.socket]] = {}

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
        self._accepted = {key: entry for key, entry in self._accepted.items() if entry[1].fileno() >= 0}
        if len(self._accepted) >= HTTP_CONNECTIONS:
            self._end_oldest()
        self._put(address[:2], connection)
        return connection, address

    def begin(self, client: tuple[str, int]) -> None:
        """A request of this host and port begins, and has all of its time: the one before may have lasted long."""
        if client in self._accepted:
            self._put(client, self._accepted[client][1])

    def drop_old(self) -> None:
        """Ends connections whose last request began longer ago than any takes."""
        now = time.monotonic()
        while self._accepted and now - next(iter(self._accepted.values()))[0] > LONGEST_REQUEST_SECONDS:
            self._end_oldest()

    def end_all(self) -> None:
        """Ends all connections: whoever answers one of them hears that its reader has gone."""
        while self._accepted:
            self._end_oldest()

    def _put(self, client: tuple[str, int], connection: socket.socket) -> None:
        _, before = self._accepted.pop(client, (0.0, connection))
        if before is not connection:  # that one has gone, or came to another address of ours
            _end(before)
        self._accepted[client] = time.monotonic(), connection

    def _end_oldest(self) -> None:
        _end(self._accepted.pop(next(iter(self._accepted)))[1])


def _end(connection: socket.socket) -> None:
    """Ends a connection: its reader sees the end and closes it, as does asyncio, whose socket this is."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
