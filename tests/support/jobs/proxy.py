"""A TCP proxy that a test can cut, or that remembers: one node loses its way to the master, and nobody else does."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial


class Proxy:
    """Passes connections on to ``target``.

    Args:
        target: ``HOST:PORT``.
        remembers: Keep what passes.
        connect: Makes a connection to a target; raises OSError.

    Attributes:
        seen: What has passed, of each direction of each connection.
        accepted: How many connections there were.
    """

    def __init__(
        self,
        target: str,
        remembers: bool = False,
        connect: Callable[[tuple[str, int]], socket.socket] = partial(socket.create_connection, timeout=5),  # noqa: B008
    ) -> None:
        self._connect = connect
        self._target, self._remembers = self._parsed(target), remembers
        self.seen: list[bytearray] = []
        self.accepted = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._is_cut = False
        self._delay = 0.0
        self._flowing = threading.Event()
        self._flowing.set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.getsockname()[1]}"

    @staticmethod
    def _parsed(target: str) -> tuple[str, int]:
        host, _, port = target.rpartition(":")
        return host, int(port)

    def lead_to(self, target: str) -> None:
        """New connections go there."""
        self._target = self._parsed(target)

    def cut(self) -> None:
        """Ends all connections; new ones are accepted and closed at once."""
        with self._lock:
            self._is_cut = True
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def freeze(self) -> None:
        """Nothing comes through any more, and nobody is told: as when a cable is pulled."""
        self._flowing.clear()

    def delay(self, seconds: float) -> None:
        """Each piece of an answer comes so much later from now on, one after the other."""
        self._delay = seconds

    def mend(self) -> None:
        """New connections are passed on again, and what was frozen flows."""
        with self._lock:
            self._is_cut = False
        self._flowing.set()

    def close(self) -> None:
        self.cut()
        self._flowing.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # it wakes the thread that accepts; closing alone does not
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._server.accept()
                with self._lock:
                    self.accepted += 1
                    cut = self._is_cut
                if cut:
                    near.close()
                    continue
                try:
                    far = self._connect(self._target)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                with self._lock:
                    self._open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(one, other, one is far), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        seen = bytearray()
        self.seen.append(seen)
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                if answers and self._delay:
                    time.sleep(self._delay)  # why: this is the delay
                if self._remembers:
                    seen += data
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy(target: str, remembers: bool = False) -> Iterator[Proxy]:
    """One, closed in the end."""
    made = Proxy(target, remembers)
    try:
        yield made
    finally:
        made.close()
