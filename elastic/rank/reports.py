"""What a rank tells its agent about its steps, and about the time between them."""

from __future__ import annotations

import time

from dalsegno.protos import trace, worker_pb2

from .exchange import Boundary
from .link import Link
from .step_count import StepCount

# Least seconds between two reports of a rank, except at boundaries at which the ranks agreed on something.
PROGRESS_SECONDS = 0.05
# Least seconds between two signs of life between steps.
BUSY_SECONDS = 0.5


class Reports:
    """The reports of one session.

    Args:
        link: The connection to the agent; None: nothing is reported.
        count: The count of steps that the agent reads.

    Attributes:
        loss: The present step's loss, for people.
        may_keep: This rank may be able to save the last boundary alone.
        saves_nothing: The script's loop saves nothing, not even at a drain.
    """

    def __init__(self, link: Link | None, count: StepCount | None = None) -> None:
        self.loss = float("nan")
        self.may_keep = self.saves_nothing = False
        self._link, self._count = link, count
        self._mark = self._heard = time.monotonic()
        self._told, self._longest_seconds = 0.0, 0.0
        self._beats, self._beat_told, self._master_seen = 0, 0.0, False
        self._drains_at = -1

    def begin(self) -> None:
        """The first step begins now."""
        trace.mark("ready")
        self.send(worker_pb2.ToAgent(ready=worker_pb2.Ready()), droppable=True)
        self._mark = self._heard = time.monotonic()

    def lap(self) -> float:
        """A step has ended, or a save and what came between the step and it. Returns the seconds since the last lap."""
        before, self._mark = self._mark, time.monotonic()
        self._sign(self._mark)
        return self._mark - before

    def step(self, boundary: Boundary, seconds: float) -> None:
        """A step is done that took so many seconds."""
        if self._count is not None:
            self._count.set(boundary.step)
        trace.mark(trace.STEP, step=boundary.step)
        first, now = self._told == 0.0, time.monotonic()
        if first or boundary.exchanged or now - self._told >= PROGRESS_SECONDS:
            self._told = now
            if boundary.exchanged:  # in between nothing is known of it
                self._master_seen = boundary.master_seen
            self.send(self._progress(boundary.step, seconds), droppable=not first)
        if boundary.drain:
            self.draining(boundary.step)

    def draining(self, step: int) -> None:
        """All ranks have agreed to save ``step`` and stop. Said once of each step."""
        if step != self._drains_at:
            self._drains_at = step
            self.send(worker_pb2.ToAgent(draining=worker_pb2.Draining(step=step)))

    def busy(self, step: int) -> None:
        """Sends a sign of life after ``step``."""
        self._beats += 1
        now = time.monotonic()
        self._sign(now)
        if now - self._beat_told >= BUSY_SECONDS:
            self._beat_told = now
            self.send(self._progress(step, 0.0), droppable=True)

    def keeps_nothing(self, step: int) -> None:
        """The world has broken, and this rank saves nothing of ``step`` alone: nobody is to wait for that."""
        self.may_keep = False
        self.send(self._progress(step, 0.0))

    def send(self, message: worker_pb2.ToAgent, *, droppable: bool = False) -> None:
        """Sends a message to the agent. A droppable one is dropped if the agent does not read."""
        if self._link is not None:
            self._link.send(message, droppable=droppable)

    def _sign(self, now: float) -> None:
        """Notes a sign of this rank, and how long the silence before it was if that is the longest."""
        self._longest_seconds, self._heard = max(self._longest_seconds, now - self._heard), now

    def _progress(self, step: int, seconds: float) -> worker_pb2.ToAgent:
        progress = worker_pb2.Progress(
            step=step,
            loss=self.loss,
            seconds=seconds,
            longest=self._longest_seconds,
            anyone_sees_master=self._master_seen,
            beats=self._beats,
            may_keep=self.may_keep,
            saves_nothing=self.saves_nothing,
        )
        return worker_pb2.ToAgent(progress=progress)
