"""When the agent next speaks to the master, and whether it sends a heartbeat or the newest progress. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dalsegno.protos import control_pb2
from dalsegno.protos.contract import HEARTBEAT_SECONDS, PROGRESS_SECONDS

__all__ = ["ReportPace"]

# The longest interval that the master may ask for.
_LONGEST_SECONDS = 60.0
# The share of the interval by which a heartbeat may be early.
_JITTER = 0.05
# The share of the interval after which a message that was not heard is repeated. Not at once, because the master may be
# overloaded.
_AGAIN = 1 / 3
# The longest slot that the master may ask for, in intervals.
_LONGEST_SLOT = 1 / 10
# How many reports of an epoch are sent at once: that the script has a session, and its first step.
_FIRST_REPORTS = 3


@dataclass
class ReportPace:
    """Times are monotonic seconds. A heartbeat or a progress report proves this agent alive, so either one will do."""

    beat_at: float
    progress_at: float
    heartbeat: float = HEARTBEAT_SECONDS
    progress: float = PROGRESS_SECONDS
    # What the last report said besides the step, and how many reports its epoch has had.
    said: tuple[object, ...] = ()
    reports: int = 0
    # The next report is not sent before this time, however urgent it is.
    soonest: float = float("-inf")
    # Other agents may be in step with this one, so the next interval is a random part of a whole one.
    spread: bool = True

    def due(self, progress: control_pb2.ProgressRequest | None) -> float:
        """When the next message is sent."""
        if progress is None:
            return self.beat_at
        soon = self.progress_at if not self.is_urgent(progress) else min(self.progress_at, self.soonest)
        return min(self.beat_at, soon)

    def is_urgent(self, progress: control_pb2.ProgressRequest) -> bool:
        """Whether it says more than that a step or some bytes more are done."""
        says = _beside_the_step(progress)
        return says != self.said or self.reports < _FIRST_REPORTS

    def spoke(self, now: float, progress: control_pb2.ProgressRequest | None, jitter: float = 0.0) -> None:
        """Notes that a message is sent. `jitter`, 0 to 1, spreads agents that began or changed pace together."""
        self.beat_at = now + self.heartbeat * (1 - (1 if self.spread else _JITTER) * jitter)
        self.spread = False
        if progress is None:
            return
        self.progress_at = now + self.progress
        self.soonest = now + PROGRESS_SECONDS
        says = _beside_the_step(progress)
        if not self.said or says[0] != self.said[0]:
            self.reports = 0
        self.said = says
        self.reports += 1

    def unanswered(self, now: float) -> None:
        """Notes that the last message was not heard: the next one does not wait for a whole interval."""
        self.beat_at = min(self.beat_at, now + max(HEARTBEAT_SECONDS, self.heartbeat * _AGAIN))

    def told(self, pace: control_pb2.Pace, now: float) -> None:
        """Takes the pace that the master wants."""
        if pace.heartbeat_seconds > 0:
            before, self.heartbeat = (
                self.heartbeat,
                min(max(HEARTBEAT_SECONDS, pace.heartbeat_seconds), _LONGEST_SECONDS),
            )
            self.spread = self.spread or self.heartbeat > before
        if pace.progress_seconds > 0:
            self.progress = min(max(PROGRESS_SECONDS, pace.progress_seconds), _LONGEST_SECONDS)
        if 0 < pace.slot_seconds <= self.heartbeat * _LONGEST_SLOT and math.isfinite(pace.slot_in_seconds):
            early = (self.beat_at - now - pace.slot_in_seconds) % pace.slot_seconds
            self.beat_at = max(now, self.beat_at - early)

    def begin(self, now: float) -> None:
        """Begins a session: its first message is due."""
        self.beat_at = now
        self.spread = True


def _beside_the_step(progress: control_pb2.ProgressRequest) -> tuple[object, ...]:
    news = (progress.draining, progress.has_session, progress.training_ended, progress.expects_session, progress.cold)
    return (progress.caller.epoch, *news)
