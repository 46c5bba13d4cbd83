"""Fresh key-value stores for worlds: one TCPStore server for each round of Joins, served by the agent itself.

A store that is kept across worlds contains stale keys, over which torch's own agents stumble. Here a Join offers a
store that nobody has used. The world that opens uses the one of its group rank 0, and the others are closed.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Hashable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dalsegno.protos import control_pb2

from .torch_versions import LIBUV_LISTENS

__all__ = ["StoreServers"]

logger = logging.getLogger(__name__)
# The most open offers: the newest, and those of rounds before it that this node had no part in.
_MOST_OFFERED = 8
# What an operation on a store may take.
_TIMEOUT = timedelta(seconds=300)


class StoreServers:
    """The stores of one agent: those offered that wait for a world, and the one in use. Any thread.

    Args:
        address: where to bind; never all interfaces.

    Attributes:
        address: Where the next one is bound.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._waiting: dict[int, TCPStore] = {}
        # By what each was opened for, and its address: the port.
        self._ports: dict[Hashable, int] = {}
        self._used: TCPStore | None = None
        # The last offers that are over: port, and what ended them.
        self._closed: deque[tuple[int, str]] = deque(maxlen=2 * _MOST_OFFERED)

    def open(self, world: Hashable) -> tuple[str, int]:
        """Opens a store for the next world, or finds the one that is open for it; returns where it listens.

        A node joins anew each time the resume point moves, and the world may open with any of its Joins: dozens of
        commits may arrive at once behind an outage. So all of them name one store, which nobody uses before that world.
        Earlier offers stay for now, because a world may just be opening with one of them.

        Args:
            world: Equal for all Joins of which one world at most comes.

        Raises:
            OSError: the address cannot be bound.
        """
        with self._lock:
            key = world, self.address
            port = self._ports.get(key, 0)
            if port not in self._waiting:
                store, port = self._serve()
                self._waiting[port], self._ports[key] = store, port
                self._drop_oldest()
            return self.address, port

    def _drop_oldest(self) -> None:
        while len(self._waiting) > _MOST_OFFERED:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._closed.append((oldest, "for newer ones"))
        self._ports = {key: port for key, port in self._ports.items() if port in self._waiting}

    def _serve(self) -> tuple[TCPStore, int]:
        """A store, and the port at which it listens. Raises OSError."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # We bind it, because a TCPStore would listen on all interfaces.
            listener.bind((self.address, 0))
            port = int(listener.getsockname()[1])
            store = TCPStore(
                self.address,
                port,
                None,
                True,
                _TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener.fileno(),
                use_libuv=LIBUV_LISTENS,
            )
        except BaseException:
            listener.close()
            raise
        # The store owns the descriptor now.
        listener.detach()
        return store, port

    def use(self, world: control_pb2.World, mine: bool) -> TCPStore | None:
        """The store of a world if this node serves it (`mine`), else None. Closes stores that are no longer needed."""
        with self._lock:
            self._used = self._waiting.pop(world.store_port, None) if mine else None
            if mine and self._used is None:
                # What was offered tells who is wrong.
                open_ones, closed = sorted(self._waiting), list(self._closed)
                logger.error(
                    "epoch %d wants port %d; open: %s; closed: %s", world.epoch, world.store_port, open_ones, closed
                )
            if self._used is not None:
                self._closed.append((world.store_port, f"used by epoch {world.epoch}"))
            self._closed += [(port, f"for epoch {world.epoch}") for port in self._waiting]
            self._waiting.clear()
            self._ports.clear()
            return self._used

    def close(self) -> None:
        """Closes all stores."""
        self._waiting.clear()
        self._used = None
