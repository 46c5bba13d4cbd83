"""Who may fetch a large part from here at a time, and where those find it who may not: with those who have.

Where many nodes want the same part, a few take it from those who hold it, and the others from these, also while it
still comes there (`arrivals`): so it is everywhere after little more than the time of one transfer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

import grpc

from .arrivals import Key
from .incoming import PartRefusedError

__all__ = ["MOST_NAMED", "Turnstile", "Wanted"]

# From so many bytes on a transfer takes longer than to ask another node.
LARGE_BYTES = 16 << 20
# Fetches of one large part at a time, and after how many seconds there may be another one: one by one is fastest, but a
# caller that is slow must not hold all others up for long.
AT_ONCE, TURN_SECONDS = 4, 10.0
# Who takes longer than so many seconds does not count: some slow callers must not keep a part from all others.
SLOW_SECONDS = 60.0
# So many callers wait here for their turn, and so long at most: then they ask again, or somebody else.
MOST_WAITING, WAIT_SECONDS = 4, 2.0
# So many are named to who asks, and so many parts are remembered. Each of them may be gone, and costs who asks it some
# seconds then.
MOST_NAMED, MOST_PARTS = 8, 64
# Of these so many that were sent away, and to which it may come by now.
MOST_SENT_AWAY = 3


class Wanted(Protocol):
    """A part that is here, or on its way here."""

    @property
    def identity(self) -> Key: ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...


class Turnstile:
    """Thread-safe.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        # How many callers wait for their turn.
        self._waiting = 0
        # By part, when the fetches that are under way began, and where who fetches is reached.
        self._under_way: dict[Key, list[tuple[float, str]]] = {}
        # By part, who has fetched it, and who was told to look elsewhere, the last one last.
        self._fetched: OrderedDict[Key, list[str]] = OrderedDict()
        self._sent_away: OrderedDict[Key, list[str]] = OrderedDict()

    @contextlib.contextmanager
    def passing(self, part: Wanted, address: str, patient: bool = False) -> Iterator[None]:
        """A fetch of a part, by the agent that is reached at `address` (empty: it does not say).

        `patient`: it may wait for its turn a little.

        Raises:
            PartRefusedError: others fetch it just now; names those who have, and who may have some of it.
        """
        if not is_large(part):
            yield
            return
        key = part.identity
        with self._changed:
            if not (self._is_free(key) or (patient and self._turn_comes(key))):
                others = self._others(key, address)
                _note(self._sent_away, key, address, MOST_SENT_AWAY)
                raise PartRefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"others fetch {part} just now", others)
            began = self._clock(), address
            self._under_way.setdefault(key, []).append(began)
        try:
            yield
        finally:
            with self._changed:
                self._under_way[key].remove(began)
                if not self._under_way[key]:
                    del self._under_way[key]
                self._changed.notify_all()

    def fetched(self, part: Wanted, address: str) -> None:
        """The agent that is reached at `address` has this part now."""
        if not is_large(part):
            return
        with self._changed:
            _note(self._fetched, part.identity, address, MOST_NAMED)

    def _turn_comes(self, key: Key) -> bool:
        """Waits a little until a fetch may begin; whether it may. It ends when another node has the part."""
        known, until = self._fetched.get(key, [])[-1:], self._clock() + WAIT_SECONDS
        if self._waiting >= MOST_WAITING:
            return False
        self._waiting += 1
        try:
            while (left := until - self._clock()) > 0:
                self._changed.wait(left)
                if self._is_free(key):
                    return True
                if self._fetched.get(key, [])[-1:] != known:
                    return False
            return False
        finally:
            self._waiting -= 1

    def _is_free(self, key: Key) -> bool:
        others = [began for began, _ in self._under_way.get(key, ()) if self._clock() < began + SLOW_SECONDS]
        return not others or (len(others) < AT_ONCE and self._clock() >= others[-1] + TURN_SECONDS)

    def _others(self, key: Key, address: str) -> tuple[str, ...]:
        """Where a part may be had, the best one last: there it is asked for first."""
        at_it = [other for _, other in self._under_way.get(key, ())]
        known = [*self._sent_away.get(key, ()), *at_it, *self._fetched.get(key, ())]
        found = dict.fromkeys(one for one in reversed(known) if one and one != address)
        return tuple(reversed([*found][:MOST_NAMED]))


def _note(known: OrderedDict[Key, list[str]], key: Key, address: str, most: int) -> None:
    """As the last one."""
    if not address:
        return
    before = [one for one in known.pop(key, []) if one != address]
    known[key] = [*before, address][-most:]
    while len(known) > MOST_PARTS:
        known.popitem(last=False)


def is_large(part: Wanted) -> bool:
    return part.size >= LARGE_BYTES
