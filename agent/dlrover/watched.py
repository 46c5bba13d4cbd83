"""Tells whether a worker died while it held a lock of the saver, and so maybe in the middle of a write."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["watch"]


def watch(lock: Any, died: Callable[[], None]) -> None:
    """Has a lock say when its holder is gone.

    Args:
        lock: a `SharedLock` that serves others, each on a thread of its own. It releases a lock whose holder's
            connection has ended, and says nothing of that.
        died: called on that thread, before the lock is free.
    """
    serve, release = lock._deal_shared_lock_msg, lock.release
    served = threading.local()

    def serving(connection: socket.socket) -> None:
        served.connection = connection
        serve(connection)

    def releasing() -> None:
        connection = getattr(served, "connection", None)
        if connection is not None and _is_gone(connection):
            died()
        release()

    lock._deal_shared_lock_msg, lock.release = serving, releasing


def _is_gone(connection: socket.socket) -> bool:
    """Whether the other end has closed it. A process that asks for a release waits for the answer."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
