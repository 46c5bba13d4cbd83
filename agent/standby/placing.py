"""Giving a process that waits for one its place in a world."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading

from dalsegno.protos.contract import is_of_a_world

from .nursery_client import Nursery, StandbyProcess
from .worker_main import Assignment

__all__ = ["TAKE_PATIENCE_SECONDS", "Placing", "place_of"]

# Seconds that a waiting worker may take to take its place, which includes checking what it has looked at. A worker that
# was stopped, or is stuck in the kernel, is replaced after that.
TAKE_PATIENCE_SECONDS = 20.0

logger = logging.getLogger(__name__)


def place_of(before: Assignment, wanted: Assignment) -> dict[str, object] | None:
    """What a worker with the assignment `before` must be told to become the `wanted` one; None: it cannot. Pure."""
    if (before.arguments, before.module, before.cwd) != (wanted.arguments, wanted.module, wanted.cwd):
        return None
    old, new = before.environment, wanted.environment
    changed = {name: value for name, value in new.items() if old.get(name) != value}
    dropped = [name for name in old if name not in new]
    if not all(is_of_a_world(name) for name in (*changed, *dropped)):
        return None
    return {"environment": changed, "drop": dropped, "stdout": wanted.stdout, "stderr": wanted.stderr}


class Placing:
    """Gives places, and replaces workers that do not take theirs.

    Args:
        patience_seconds: seconds that a worker may take to take its place.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        # Timers of workers that got their place and have not said that they took it.
        self._late: dict[StandbyProcess, threading.Timer] = {}

    def give(self, rank: int, nursery: Nursery, worker: StandbyProcess, place: dict[str, object]) -> bool:
        """Gives a worker that waits its place. False: it has ended, or its nursery is gone."""
        if worker.returncode is not None or not nursery.place(worker, place):
            return False
        late = threading.Timer(self._patience_seconds, self._too_late, (rank, worker))
        late.daemon = True
        with self._lock:
            self._late[worker] = late
        with contextlib.suppress(RuntimeError):  # without a thread for the timer it is waited for without an end
            late.start()
        return True

    def settled(self, worker: StandbyProcess) -> None:
        """Notes that it has taken its place, or has ended."""
        with self._lock:
            late = self._late.pop(worker, None)
        if late is not None:
            late.cancel()

    def close(self) -> None:
        """Stops looking after them."""
        with self._lock:
            late, self._late = self._late, {}
        for timer in late.values():
            timer.cancel()

    def _too_late(self, rank: int, worker: StandbyProcess) -> None:
        with self._lock:
            self._late.pop(worker, None)
        if not worker.taken and worker.returncode is None:
            logger.warning("worker %d has not taken its place within %.0f s: replaced", rank, self._patience_seconds)
            worker.signal_group(signal.SIGKILL)
