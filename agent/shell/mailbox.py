"""The queue in which every thread of the agent leaves events for the one thread that decides."""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Mailbox", "MailboxFull"]

# The most unread items; seconds that `put` waits for room.
_CAPACITY, _PATIENCE_SECONDS = 4096, 30.0

T = TypeVar("T")


class MailboxFull(queue.Full):
    """The reader did not keep up for as long as the sender could wait."""


class Mailbox(Generic[T]):
    """A bounded queue with one reader, in which a newer item may take the place of an unread older one."""

    def __init__(self) -> None:
        self._items: OrderedDict[Hashable, T] = OrderedDict()
        self._changed = threading.Condition()
        self._serial = 0

    def put(self, item: T, replaces: Hashable = None) -> None:
        """Appends an item. With `replaces`, an unread item put under the same key is dropped.

        Raises:
            MailboxFull: there was no room within the patience.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        with self._changed:
            key: Hashable = ("once", self._serial) if replaces is None else ("newest", replaces)
            self._serial += 1
            # The newer one goes to the end, because it must not overtake what was put between the two.
            self._items.pop(key, None)
            while len(self._items) >= _CAPACITY:
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise MailboxFull(f"{_CAPACITY} unread events for {_PATIENCE_SECONDS:.0f} s")
            self._items[key] = item
            self._changed.notify_all()

    def get(self, timeout_seconds: float | None) -> T | None:
        """The oldest item; None if none came within `timeout_seconds` (None: waits for ever)."""
        if timeout_seconds is not None:
            # Longer ones, such as a person's "never", are an OverflowError.
            timeout_seconds = min(timeout_seconds, threading.TIMEOUT_MAX / 2)
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout_seconds):
                return None
            _, item = self._items.popitem(last=False)
            self._changed.notify_all()
            return item

    def __len__(self) -> int:
        with self._changed:
            return len(self._items)
