"""A port of this machine that behaves as one of a machine that is off."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def unreachable() -> Iterator[str]:
    """An address where nobody answers: as behind a firewall, or of a machine that is off."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as waiting:
        address = listener.getsockname()
        while True:
            one = waiting.enter_context(socket.socket())
            one.settimeout(0.5)
            try:
                one.connect(address)
            except TimeoutError:
                break
        yield f"127.0.0.1:{address[1]}"
