"""When the agent speaks again to the master, and whether it sends a heartbeat or the newest progress. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.protos import control_pb2

__all__ = ["HEARTBEAT_INTERVAL", "Pace"]

# Seconds, until the master says otherwise.
HEARTBEAT_INTERVAL = 1.0
# Between two progress reports; more often nobody reads them.
PROGRESS_INTERVAL = 0.1
# What the master may ask for at most.
_LONGEST = 60.0
# The share of the interval by which a heartbeat may be early.
_JITTER = 0.3
# So many reports of an epoch go out at once: that the script has a session, its first step.
_FIRST_REPORTS = 3


@dataclass
class Pace:
    """Times are monotonic seconds. Either word proves this agent alive, so progress takes the place of a heartbeat."""

    beat_at: float
    progress_at: float
    heartbeat: float = HEARTBEAT_INTERVAL
    progress: float = PROGRESS_INTERVAL
    # What the last report said beside the step, and how many reports its epoch has had.
    said: tuple[object, ...] = ()
    reports: int = 0
    # The next report goes out not before that, however urgent.
    soonest: float = float("-inf")

    def due(self, progress: control_pb2.ProgressRequest | None) -> float:
        """When the next word goes out."""
        if progress is None:
            return self.beat_at
        soon = self.progress_at if not self.is_urgent(progress) else min(self.progress_at, self.soonest)
        return min(self.beat_at, soon)

    def is_urgent(self, progress: control_pb2.ProgressRequest) -> bool:
        """It says more than that a step or some bytes more are done."""
        says = _beside_the_step(progress)
        return says != self.said or self.reports < _FIRST_REPORTS

    def spoke(self, now: float, progress: control_pb2.ProgressRequest | None, jitter: float = 0.0) -> None:
        """A word goes out. `jitter`, 0 to 1: agents that were told the same pace at once must not stay in step."""
        self.beat_at = now + self.heartbeat * (1 - _JITTER * jitter)
        if progress is None:
            return
        self.progress_at = now + self.progress
        self.soonest = now + PROGRESS_INTERVAL
        says = _beside_the_step(progress)
        if not self.said or says[0] != self.said[0]:
            self.reports = 0
        self.said = says
        self.reports += 1

    def told(self, pace: control_pb2.Pace) -> None:
        """The master wants to be spoken to as often as this."""
        if pace.heartbeat_seconds > 0:
            self.heartbeat = min(max(HEARTBEAT_INTERVAL, pace.heartbeat_seconds), _LONGEST)
        if pace.progress_seconds > 0:
            self.progress = min(max(PROGRESS_INTERVAL, pace.progress_seconds), _LONGEST)

    def begin(self, now: float) -> None:
        """A new session: its first word is due."""
        self.beat_at = now


def _beside_the_step(progress: control_pb2.ProgressRequest) -> tuple[object, ...]:
    return progress.caller.epoch, progress.draining, progress.has_session, progress.training_ended
