"""The agent's side of workers that run their script before a world opens, by local rank."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from dalsegno.protos.shortage import starting

from .nursery_client import Nursery, StandbyProcess
from .patience import waited
from .placing import TAKE_PATIENCE_SECONDS, Placing, place_of
from .worker_main import Assignment

__all__ = ["AHEAD_PATIENCE_SECONDS", "AheadWorkers"]

# Seconds that a script may take until it needs its place.
AHEAD_PATIENCE_SECONDS = 600.0
# After so many starts in a row in which files that the script looked at had changed meanwhile, nothing runs ahead.
_MOST_STALE = 2

logger = logging.getLogger(__name__)


class AheadWorkers:
    """The workers of one node that run ahead.

    Args:
        on_settled: called on any thread when one of them waits for its place, or has ended.
        patience_seconds: seconds until those that still run are given up. Those in which this process stands still
            do not count.
    """

    def __init__(self, on_settled: Callable[[], None], patience_seconds: float = AHEAD_PATIENCE_SECONDS) -> None:
        self._on_settled = on_settled
        self._patience_seconds = patience_seconds
        self._placing = Placing(TAKE_PATIENCE_SECONDS)
        self._lock = threading.Lock()
        self._workers: dict[int, tuple[Nursery, Assignment, StandbyProcess]] = {}
        # Set where nobody runs ahead any more for whom the patience counts.
        self._over: threading.Event | None = None
        # Why nothing runs ahead any more.
        self._given_up = ""
        # Whether TrainingArguments are left as they are, because a script has failed where they were not.
        self._plainly = False
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
                    started[rank] = nursery.start_worker(wanted[rank], ahead=True, plainly=self._plainly)
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
        elif self._placing.give(rank, nursery, worker, place):
            return worker
        worker.discard()
        return None

    def close(self) -> None:
        """Ends all of them, for good."""
        with self._lock:
            self._given_up = self._given_up or "closed"
            self._stop_timer()
            self._placing.close()
            workers = [worker for _, _, worker in self._workers.values()]
            self._workers.clear()
        for worker in workers:
            worker.discard()

    def _settled(self, rank: int, worker: StandbyProcess) -> None:
        """Handles a worker that waits, has taken its place, or has ended without one."""
        if worker.taken or worker.returncode is not None:
            self._placing.settled(worker)
        with self._lock:
            if worker.taken:
                self._stale = 0
            elif worker.parked and worker.returncode is None:
                logger.info("worker %d has run ahead and waits: %s", rank, worker.parked)
            elif worker.failed and worker.plainly:
                logger.info("worker %d runs less far ahead from now on: %s", rank, worker.failed)
                self._plainly = True
                self._workers = {one: known for one, known in self._workers.items() if known[2] is not worker}
            elif worker.failed:
                self._give_up(f"worker {rank} failed ahead of its place: {worker.failed}")
            elif worker.late:
                logger.info("worker %d has its place too early: %s", rank, worker.late)
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
        over = threading.Event()
        threading.Thread(target=self._watch, args=(over,), name="ahead-patience", daemon=True).start()
        self._over = over

    def _watch(self, over: threading.Event) -> None:
        if not waited(over, self._patience_seconds):
            self._out_of_patience()

    def _stop_timer(self) -> None:
        if self._over is not None:
            self._over.set()
            self._over = None
