"""The agent's side of workers that run their script before a world opens, by local rank."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Sequence

from dalsegno.protos.contract import is_of_a_world
from dalsegno.protos.shortage import starting

from .nursery_client import Nursery, StandbyProcess
from .worker_main import Assignment

__all__ = ["AHEAD_PATIENCE_SECONDS", "AheadWorkers", "place_of"]

# Seconds that a script may take until it needs its place.
AHEAD_PATIENCE_SECONDS = 600.0
# Seconds that a waiting worker may take to take its place, which includes checking what it has looked at. A worker that
# was stopped, or is stuck in the kernel, is replaced after that.
_TAKE_PATIENCE_SECONDS = 20.0
# After so many starts in a row in which files that the script looked at had changed meanwhile, nothing runs ahead.
_MOST_STALE = 2

logger = logging.getLogger(__name__)


def place_of(ahead: Assignment, wanted: Assignment) -> dict[str, object] | None:
    """What a worker that runs `ahead` must be told to become the `wanted` one; None: it cannot become that. Pure."""
    if (ahead.arguments, ahead.module, ahead.cwd) != (wanted.arguments, wanted.module, wanted.cwd):
        return None
    old, new = ahead.environment, wanted.environment
    changed = {name: value for name, value in new.items() if old.get(name) != value}
    dropped = [name for name in old if name not in new]
    if not all(is_of_a_world(name) for name in (*changed, *dropped)):
        return None
    return {"environment": changed, "drop": dropped, "stdout": wanted.stdout, "stderr": wanted.stderr}


class AheadWorkers:
    """The workers of one node that run ahead.

    Args:
        on_settled: called on any thread when one of them waits for its place, or has ended.
        patience: seconds until those that still run are given up.
        take_patience: seconds that a worker may take to take its place.
    """

    def __init__(
        self,
        on_settled: Callable[[], None],
        patience: float = AHEAD_PATIENCE_SECONDS,
        take_patience: float = _TAKE_PATIENCE_SECONDS,
    ) -> None:
        self._on_settled = on_settled
        self._patience_seconds = patience
        self._take_patience_seconds = take_patience
        self._lock = threading.Lock()
        self._workers: dict[int, tuple[Nursery, Assignment, StandbyProcess]] = {}
        self._timer: threading.Timer | None = None
        # Timers of workers that got their place and have not said that they took it.
        self._late: dict[StandbyProcess, threading.Timer] = {}
        # Why nothing runs ahead any more.
        self._given_up = ""
        self._stale = 0

    @property
    def settled(self) -> bool:
        """Whether each of them waits for its place, or has ended."""
        with self._lock:
            return all(one.parked or one.returncode is not None for _, _, one in self._workers.values())

    def forget_ended(self) -> None:
        """Forgets workers that have ended, so that they count as missing."""
        with self._lock:
            self._workers = {rank: known for rank, known in self._workers.items() if known[2].returncode is None}

    def run(self, nursery: Nursery, wanted: Sequence[Assignment]) -> None:
        """Starts the missing workers; does nothing once running ahead has turned out to be in vain."""
        with self._lock:
            missing = [rank for rank in range(len(wanted)) if rank not in self._workers]
            if self._given_up or not missing:
                return
            started: dict[int, StandbyProcess] = {}
            try:
                with starting("a thread for workers that run ahead"):
                    self._start_timer()
                for rank in missing:
                    started[rank] = nursery.start_worker(wanted[rank], ahead=True)
            except OSError as error:
                logger.warning("no more workers run ahead: %s", error)
            self._workers |= {rank: (nursery, wanted[rank], worker) for rank, worker in started.items()}
        for rank, worker in started.items():
            worker.when_settled(lambda rank=rank, worker=worker: self._settled(rank, worker))  # type: ignore[misc]

    def take(self, rank: int, wanted: Assignment) -> StandbyProcess | None:
        """Gives the worker of this local rank its place. None: no worker could take it."""
        with self._lock:
            known = self._workers.pop(rank, None)
        if known is None:
            return None
        nursery, ahead, worker = known
        place = place_of(ahead, wanted)
        if place is None:
            logger.info("worker %d has run ahead as another one than is wanted now", rank)
        elif worker.returncode is None and nursery.place(worker, place):
            late = threading.Timer(self._take_patience_seconds, self._too_late, (rank, worker))
            late.daemon = True
            with self._lock:
                self._late[worker] = late
            with contextlib.suppress(RuntimeError):  # without a thread for the timer it is waited for without an end
                late.start()
            return worker
        worker.discard()
        return None

    def _too_late(self, rank: int, worker: StandbyProcess) -> None:
        with self._lock:
            self._late.pop(worker, None)
        if not worker.taken and worker.returncode is None:
            logger.warning(
                "worker %d has not taken its place within %.0f s: replaced", rank, self._take_patience_seconds
            )
            worker.signal_group(signal.SIGKILL)

    def close(self) -> None:
        """Ends all of them, for good."""
        with self._lock:
            self._given_up = self._given_up or "closed"
            self._stop_timer()
            for late in self._late.values():
                late.cancel()
            workers = [worker for _, _, worker in self._workers.values()]
            self._workers.clear()
        for worker in workers:
            worker.discard()

    def _settled(self, rank: int, worker: StandbyProcess) -> None:
        """Handles a worker that waits, has taken its place, or has ended without one."""
        with self._lock:
            late = self._late.pop(worker, None) if worker.taken or worker.returncode is not None else None
            if late is not None:
                late.cancel()
            if worker.taken:
                self._stale = 0
            elif worker.parked and worker.returncode is None:
                logger.info("worker %d has run ahead and waits: %s", rank, worker.parked)
            elif worker.failed:
                self._give_up(f"worker {rank} failed ahead of its place: {worker.failed}")
            elif worker.stale:
                logger.info("worker %d has run ahead in vain: %s has changed since", rank, worker.stale)
                self._stale += 1
                if self._stale >= _MOST_STALE:
                    self._give_up(f"{worker.stale} changes between one start and the next")
        if self.settled:
            self._stop_timer()
        self._on_settled()

    def _give_up(self, why: str) -> None:
        if not self._given_up:
            self._given_up = why
            logger.warning("%s; from now on scripts start when their place is known", why)

    def _out_of_patience(self) -> None:
        with self._lock:
            slow = [worker for _, _, worker in self._workers.values() if not worker.parked]
            if slow:
                self._give_up(f"the script has not needed its place within {self._patience_seconds:.0f} s")
        for worker in slow:
            worker.discard()
        self._on_settled()

    def _start_timer(self) -> None:
        self._stop_timer()
        timer = threading.Timer(self._patience_seconds, self._out_of_patience)
        timer.daemon = True
        timer.start()
        self._timer = timer

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
