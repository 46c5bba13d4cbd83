"""Ports for stores that a test's ranks open by themselves, perhaps seconds later."""

from __future__ import annotations

import random
import socket

# Below the range from which Linux takes ports of its own choice, for listeners and for every outgoing connection.
_FIRST, _LAST = 10_000, 32_000


def free_port() -> int:
    """Nobody listens there, and the kernel gives it to nobody who has not asked for it."""
    draw = random.SystemRandom()
    for _ in range(100):
        port = draw.randint(_FIRST, _LAST)
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port between {_FIRST} and {_LAST}")
