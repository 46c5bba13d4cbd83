"""A world's store as torch's agent sees it: nobody waits there for a world that is over.

Before torch's agents start their workers, they tell each other their roles at the store, and each waits for all others;
behind the workers' end they wait for each other again. If a node dies in between, the others would stand there until
the store's timeout, and then end with an error.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    DistStoreError,
    TCPStore,
)

from ..workers.worker_env import WorldPlace

__all__ = ["WorldStore", "connect"]

# Seconds between two looks at what the others have set: at first, and at most.
LOOK_SECONDS = (0.02, 0.5)
# Seconds that a connection may take, and the pause before what has failed is tried anew.
CONNECT_SECONDS = 3.0
PAUSE_SECONDS = 0.1
# Where torch's agents put what they tell each other (`SimpleElasticAgent._assign_worker_ranks`).
ROLES, RANKS = "torchelastic/role_info/", "torchelastic/assigned_ranks/"

Answer = TypeVar("Answer")


def connect(host: str, port: int, timeout_seconds: float, is_over: Callable[[], bool]) -> TCPStore | None:
    """Connects to a world's store on another node. None: the world is over, or it took longer than `timeout_seconds`.

    Args:
        is_over: whether the world is over; its node may have died before anybody had connected.
    """
    deadline = time.monotonic() + timeout_seconds
    while not is_over() and time.monotonic() < deadline:
        try:
            # torch's client tries for several times its timeout, with a warning for each.
            socket.create_connection((host, port), CONNECT_SECONDS).close()
            return TCPStore(host, port, None, False, timedelta(seconds=CONNECT_SECONDS))
        except (OSError, DistError):
            time.sleep(PAUSE_SECONDS)  # why: nobody tells when a port opens
    return None


class WorldStore:
    """What torch's agent uses of a store. Where a world is over it hears that all nodes are like this one.

    So it starts its workers, asks whether to go on, and is told to stop them: only there does it listen. They know the
    place that this node has in a world of several nodes, so they meet nobody and do nothing.

    Args:
        store: the store itself.
        place: this node's place in its world.
        timeout_seconds: seconds that an operation may take while the world lasts.
        is_over: whether the world is over.
    """

    def __init__(self, store: TCPStore, place: WorldPlace, timeout_seconds: float, is_over: Callable[[], bool]) -> None:
        # Some of its methods are unknown to torch's stubs.
        self._store: Any = store
        self._place = place
        self._is_over = is_over
        self._own_role: Any = b""
        # Why the store cannot be reached any more.
        self._broken: DistError | None = None
        self.timeout = timedelta(seconds=timeout_seconds)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long an operation may take."""
        self.timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """As the store's; it does nothing in a world that is over."""
        if key.startswith(ROLES):
            self._own_role = value
        self._try(lambda: self._store.set(key, value))

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        """As the store's; it does nothing in a world that is over."""
        self._try(lambda: self._store.multi_set(list(keys), list(values)))

    def add(self, key: str, amount: int) -> int:
        """As the store's; 0 in a world that is over."""
        return self._try(lambda: int(self._store.add(key, amount))) or 0

    def get(self, key: str) -> Any:
        """As the store's, which waits for the key; in a world that is over what torch's agent can go on with.

        Raises:
            DistError: It was not there in time; or the world is over, and it is no key of that exchange.
        """
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[Any]:
        """As `get`, for several keys."""
        if self._awaits(keys):
            found = self._try(lambda: self._store.multi_get(list(keys)))
            if found is not None:
                return list(found)
        return [self._made_up(key) for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """As the store's, but it returns when the world is over, too: then nobody has to be waited for.

        Raises:
            DistError: They were not there in time.
        """
        self._awaits(keys, timeout)

    def _awaits(self, keys: Sequence[str], timeout: timedelta | None = None) -> bool:
        """Waits for the keys. False: the world is over."""
        deadline = self._deadline(timeout)
        pause = LOOK_SECONDS[0]
        while not (here := self._try(lambda: bool(self._store.check(list(keys))))):
            if here is None or self._is_over():
                return False
            if time.monotonic() >= deadline:
                raise DistStoreError(f"nobody has set {', '.join(keys)} in time")
            time.sleep(pause)  # why: a wait in the store itself ends only with a key, or with a warning for each look
            pause = min(2 * pause, LOOK_SECONDS[1])
        return True

    def _try(self, operation: Callable[[], Answer]) -> Answer | None:
        """What an operation on the store returns. None: the world is over.

        A store that cannot be reached is not the end: if its node is gone, the master knows soon.

        Raises:
            DistError: the store cannot be reached, and the world has lasted on.
        """
        if self._broken is None:
            try:
                return operation()
            except DistError as error:
                self._broken = error
        deadline = self._deadline()
        while not self._is_over():
            if time.monotonic() >= deadline:
                raise self._broken
            time.sleep(PAUSE_SECONDS)  # why: the word comes to another thread, and not to this object
        return None

    def _deadline(self, timeout: timedelta | None = None) -> float:
        return time.monotonic() + (timeout or self.timeout).total_seconds()

    def _made_up(self, key: str) -> Any:
        if key.startswith(ROLES):
            return self._own_role
        if key.startswith(RANKS):
            first, size = self._place.first_rank, self._place.world_size
            return json.dumps([first, size, first, size])
        raise DistStoreError(f"the world is over: nobody will set {key}")
