"""Who may fetch a large part from here at a time, and where those find it who may not: with those who have.

Where many nodes want the same part, a few take it from those who hold it, and the others from these: so it is
everywhere after a time that grows with the logarithm of the number of nodes, and not with that number.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import grpc

from .holdings import StepPart
from .incoming import PartRefusedError

__all__ = ["MOST_NAMED", "Turnstile"]

# Run, name of the checkpoint, group rank, digest.
Key = tuple[str, str, int, str]

# From so many bytes on a transfer takes longer than to ask another node.
LARGE_BYTES = 16 << 20
# Fetches of one large part at a time, and after how many seconds there may be another one: one by one is fastest, but a
# caller that is slow must not hold all others up for long.
AT_ONCE, TURN_SECONDS = 4, 10.0
# So many of those who have fetched a part are named, and so many parts are remembered.
MOST_NAMED, MOST_PARTS = 64, 64


class Turnstile:
    """Thread-safe.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # By part, when the fetches that are under way began.
        self._under_way: dict[Key, list[float]] = {}
        # By part, who has fetched it, the last one last.
        self._fetched: OrderedDict[Key, list[str]] = OrderedDict()

    @contextlib.contextmanager
    def passing(self, part: StepPart, address: str) -> Iterator[None]:
        """A fetch of a part, by the agent that is reached at `address` (empty: it does not say).

        Raises:
            PartRefusedError: others fetch it just now; names those who have.
        """
        if not is_large(part):
            yield
            return
        key = key_of(part)
        began = self._clock()
        with self._lock:
            others = self._under_way.setdefault(key, [])
            if len(others) >= AT_ONCE or (others and began < others[-1] + TURN_SECONDS):
                raise PartRefusedError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"others fetch {part} just now",
                    tuple(known for known in self._fetched.get(key, ()) if known != address),
                )
            others.append(began)
        try:
            yield
        finally:
            with self._lock:
                others.remove(began)
                if not others:
                    del self._under_way[key]

    def fetched(self, part: StepPart, address: str) -> None:
        """The agent that is reached at `address` has this part now."""
        if not address or not is_large(part):
            return
        key = key_of(part)
        with self._lock:
            known = [one for one in self._fetched.pop(key, []) if one != address]
            self._fetched[key] = [*known, address][-MOST_NAMED:]
            while len(self._fetched) > MOST_PARTS:
                self._fetched.popitem(last=False)


def is_large(part: StepPart) -> bool:
    return sum(entry.size for entry in part.entries) >= LARGE_BYTES


def key_of(part: StepPart) -> Key:
    return (*part.key, part.manifest.digest)
