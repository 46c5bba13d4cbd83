"""A master's start where its store is a service, which may come later: it waits, and hears signals meanwhile.

What is the first process of a container would not be ended by a signal for which it has no handler.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from .record.etcd_store import EtcdStore
from .record.store import StoreAway
from .serving import stopping

__all__ = ("StartEnded", "StoreWait")

log = logging.getLogger(__name__)

# Seconds between two tries to read a store that is away.
STORE_PAUSE_SECONDS = 1.0


class StartEnded(Exception):
    """A signal came before anything was served: there is nothing to end well."""


class StoreWait:
    """Hears signals until somebody else does in the same loop, who then asks `check`.

    Args:
        store: of no use any more once a signal has come.
    """

    def __init__(self, store: EtcdStore) -> None:
        self._store, self._over = store, threading.Event()
        loop = asyncio.get_running_loop()
        for signum in stopping():
            loop.add_signal_handler(signum, self._end)

    async def record(self) -> dict[str, bytes]:
        """All of the store, once it could be read. Raises StartEnded, StoreError."""
        try:
            found = await asyncio.to_thread(self._read)
        except StoreAway:
            self.check()
            raise
        self.check()
        return found

    def check(self) -> None:
        """Raises StartEnded if a signal has come."""
        if self._over.is_set():
            raise StartEnded

    def _end(self) -> None:
        self._over.set()
        # A try may last for as long as all members of etcd have.
        self._store.give_up()

    def _read(self) -> dict[str, bytes]:
        said = False
        while True:
            try:
                return self._store.load()
            except StoreAway as error:
                if self._over.is_set():
                    raise
                if not said:
                    log.warning("%s; waiting for it", error)
                said = True
            self._over.wait(STORE_PAUSE_SECONDS)
