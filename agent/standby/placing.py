"""Giving a process that waits for one its place in a world."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading

from dalsegno.protos.contract import is_of_a_world

from .nursery_client import Nursery, StandbyProcess
from .patience import waited
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
        patience_seconds: seconds that a worker may take to take its place. Those in which this process stands still
            do not count.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        # Of workers that got their place and have not said that they took it: set once they have.
        self._late: dict[StandbyProcess, threading.Event] = {}

    def give(self, rank: int, nursery: Nursery, worker: StandbyProcess, place: dict[str, object]) -> bool:
        """Gives a worker that waits its place. False: it has ended, or its nursery is gone."""
        if worker.returncode is not None or not nursery.place(worker, place):
            return False
        settled = threading.Event()
        late = threading.Thread(target=self._watch, args=(rank, worker, settled), name="placing", daemon=True)
        with self._lock:
            self._late[worker] = settled
        with contextlib.suppress(RuntimeError):  # without a thread for that it is waited for without an end
            late.start()
        return True

    def settled(self, worker: StandbyProcess) -> None:
        """Notes that it has taken its place, or has ended."""
        with self._lock:
            settled = self._late.pop(worker, None)
        if settled is not None:
            settled.set()

    def close(self) -> None:
        """Stops looking after them."""
        with self._lock:
            late, self._late = self._late, {}
        for settled in late.values():
            settled.set()

    def _watch(self, rank: int, worker: StandbyProcess, settled: threading.Event) -> None:
        if not waited(settled, self._patience_seconds):
            self._too_late(rank, worker)

    def _too_late(self, rank: int, worker: StandbyProcess) -> None:
        with self._lock:
            self._late.pop(worker, None)
        if not worker.taken and worker.returncode is None:
            logger.warning("worker %d has not taken its place within %.0f s: replaced", rank, self._patience_seconds)
            worker.signal_group(signal.SIGKILL)
