"""Who may fetch a large part from here at a time, and where those find it who may not: with those who have.

Where many nodes want the same part, a few take it from those who hold it, and the others from these: so it is
everywhere after a time that grows with the logarithm of the number of nodes, and not with that number.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator

import grpc

from .holdings import StepPart
from .incoming import PartRefusedError

__all__ = ["MOST_NAMED", "Turnstile"]

# Run, name of the checkpoint, group rank, digest.
Key = tuple[str, str, int, str]

# From so many bytes on a transfer takes longer than to ask another node.
LARGE_BYTES = 16 << 20
# Fetches of one large part at a time. With a single one, a caller that is slow would hold all others up.
AT_ONCE = 2
# So many of those who have fetched a part are named, and so many parts are remembered.
MOST_NAMED, MOST_PARTS = 64, 64


class Turnstile:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: Counter[Key] = Counter()
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
        with self._lock:
            if self._under_way[key] >= AT_ONCE:
                raise PartRefusedError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{AT_ONCE} others fetch {part} just now",
                    tuple(known for known in self._fetched.get(key, ()) if known != address),
                )
            self._under_way[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way[key] -= 1
                if not self._under_way[key]:
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
