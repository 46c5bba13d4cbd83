"""The agent's side of workers that have drained and stay for the next world, by local rank."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Mapping

from dalsegno.elastic.checkpoint.layout import CheckpointName
from dalsegno.protos.contract import Variable

from .nursery_client import Nursery, StandbyProcess
from .placing import TAKE_PATIENCE_SECONDS, Placing, place_of
from .worker_main import Assignment

__all__ = ["StayedWorkers", "fits", "held_by"]

# Seconds that a process that has no place after all may take to end, as any process that has drained.
_LEAVE_SECONDS = 5.0
# What a process that stays holds, in the words in which a world says what it resumes from.
_HELD = (Variable.RESUME_NAME, Variable.RESUME_DIGEST)

logger = logging.getLogger(__name__)


def held_by(assignment: Assignment) -> dict[str, str]:
    """What a process must hold that stays for this: the checkpoint that its world resumes from."""
    return {name: assignment.environment.get(name, "") for name in _HELD}


def fits(holds: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Whether a process that holds this has a place in a world that resumes from what is wanted."""
    if holds == wanted:
        return True
    try:
        one, other = (CheckpointName.parse(held.get(Variable.RESUME_NAME, "")) for held in (holds, wanted))
    except ValueError:
        return False
    # Each node's survivor has saved, under a name of its own, and one of them was chosen.
    same = (one.step, one.epoch, one.form) == (other.step, other.epoch, other.form)
    return same and one.by_survivor and other.by_survivor


class StayedWorkers:
    """The workers of one node that have stayed."""

    def __init__(self) -> None:
        self._placing = Placing(TAKE_PATIENCE_SECONDS)
        self._lock = threading.Lock()
        self._workers: dict[int, tuple[Nursery, Assignment, StandbyProcess]] = {}

    def add(self, rank: int, before: Assignment, successor: tuple[Nursery, StandbyProcess]) -> None:
        """Takes over a worker that has drained.

        Args:
            rank: its local rank.
            before: what it was started or placed with.
            successor: its nursery, and what it is from now on.
        """
        nursery, worker = successor
        with self._lock:
            known = self._workers.pop(rank, None)
            self._workers[rank] = (nursery, before, worker)
        if known is not None:
            _leave(known[0], known[2])
        worker.when_settled(lambda: self._settled(worker))

    def take(self, rank: int, wanted: Assignment) -> StandbyProcess | None:
        """Gives the worker of this local rank its place. None: there is none, or it cannot take this place."""
        with self._lock:
            known = self._workers.pop(rank, None)
        if known is None:
            return None
        nursery, before, worker = known
        place = place_of(before, wanted)
        if place is None or not fits(worker.holds, held_by(wanted)):
            logger.info("worker %d has stayed for another world than the one that opens", rank)
            _leave(nursery, worker)
            return None
        if self._placing.give(rank, nursery, worker, place):
            return worker
        # Its nursery may have a part of that. An order to leave would follow the rest: it would take the place beside
        # the one that has it then.
        worker.discard()
        return None

    def dismiss(self) -> list[StandbyProcess]:
        """Lets all end, as nobody wants them: in order, within some seconds. Returns them."""
        with self._lock:
            workers, self._workers = self._workers, {}
        for nursery, _, worker in workers.values():
            _leave(nursery, worker)
        return [worker for _, _, worker in workers.values()]

    def close(self) -> None:
        """Ends all of them, for good."""
        self._placing.close()
        deadline = time.monotonic() + _LEAVE_SECONDS
        for worker in self.dismiss():
            try:
                worker.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.discard()

    def _settled(self, worker: StandbyProcess) -> None:
        if worker.taken or worker.returncode is not None:
            self._placing.settled(worker)


def _leave(nursery: Nursery, worker: StandbyProcess) -> None:
    """Lets a worker end as one that has drained: its script may have something to close."""
    if worker.returncode is not None:
        return
    if not nursery.place(worker, {"leave": True}):
        worker.discard()
        return
    timer = threading.Timer(_LEAVE_SECONDS, worker.discard)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:
        worker.discard()  # nobody could end it later
