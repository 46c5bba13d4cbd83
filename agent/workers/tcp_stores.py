"""Fresh key-value stores for worlds: one TCPStore server per Join, served by the agent itself.

A store that is kept across worlds contains stale keys, over which torch's own agents stumble. Here every Join offers a
store that nobody has used. The world that opens uses the one of its group rank 0, and the others are closed.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dalsegno.protos import control_pb2

from .torch_versions import LIBUV_LISTENS

__all__ = ["StoreServers"]

logger = logging.getLogger(__name__)
# The most open offers of a node that joins again and again without getting a place; only the newest can be meant.
_MOST_OFFERED = 8


class StoreServers:
    """The stores of one agent: those offered that wait for a world, and the one in use. Main thread only.

    Args:
        address: where to bind; never all interfaces.
        timeout_seconds: seconds that an operation on a store may take.

    Attributes:
        address: Where the next one is bound.
    """

    def __init__(self, address: str, timeout_seconds: float = 300.0) -> None:
        self.address = address
        self._timeout = timedelta(seconds=timeout_seconds)
        self._waiting: dict[int, TCPStore] = {}
        self._used: TCPStore | None = None
        # The last offers that are over: port, and what ended them.
        self._closed: deque[tuple[int, str]] = deque(maxlen=2 * _MOST_OFFERED)

    def open(self) -> tuple[str, int]:
        """Opens a fresh store and returns where it listens.

        Earlier offers stay for now, because a world may just be opening with one of them.

        Raises:
            OSError: the address cannot be bound.
        """
        store, port = self._serve(self.address)
        self._waiting[port] = store
        while len(self._waiting) > _MOST_OFFERED:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._closed.append((oldest, "for newer ones"))
        return self.address, port

    def _serve(self, address: str, port: int = 0) -> tuple[TCPStore, int]:
        """A store, and the port at which it listens: this one, or with 0 any. Raises OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Those who are connected when a store is closed leave its port in TIME_WAIT. Linux takes it again only if
            # both sockets say so.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # We bind it, because a TCPStore would listen on all interfaces.
            listener.bind((address, port))
            port = int(listener.getsockname()[1])
            store = TCPStore(
                address,
                port,
                None,
                True,
                self._timeout,
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
        """The store of a world if this node serves it (`mine`), else None. Closes stores that are no longer needed.

        An offer that is closed already is opened again at its port, as no world has used it. None: that cannot be had.
        """
        self._used = self._waiting.pop(world.store_port, None) if mine else None
        how = "used by"
        if mine and self._used is None:
            self._used, how = self._again(world), "opened again for"
        if self._used is not None:
            self._closed.append((world.store_port, f"{how} epoch {world.epoch}"))
        self._closed += [(port, f"for epoch {world.epoch}") for port in self._waiting]
        self._waiting.clear()
        return self._used

    def _again(self, world: control_pb2.World) -> TCPStore | None:
        # It was seen once that a world was told of an offer that was closed, and nobody could explain it.
        open_ones, closed = sorted(self._waiting), list(self._closed)
        logger.error("epoch %d wants port %d; open: %s; closed: %s", world.epoch, world.store_port, open_ones, closed)
        try:
            return self._serve(world.store_host, world.store_port)[0]
        except (OSError, RuntimeError) as error:
            # torch's store raises RuntimeError for a port that it cannot have.
            logger.error("and it cannot be opened again: %s", error)
            return None

    def close(self) -> None:
        """Closes all stores."""
        self._waiting.clear()
        self._used = None
