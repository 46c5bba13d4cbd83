"""What happened to the job: typed events, the history of its worlds, and what follows from them. Pure values.

Consoles, the HTTP edge's page and `/api/v1/events` are all made from these; what an agent says about its own node comes
back as one of them (`remarks`). They are part of the job's record, so they outlive the master's process. Times are Unix
seconds by the clock of the master that saw the event: they are for people, and decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, pairwise

__all__ = (
    "EVENTS",
    "HISTORY",
    "KEPT",
    "NOTICES",
    "REMARKS",
    "EpochRecord",
    "JobEvent",
    "Kind",
    "PausePart",
    "goodput",
    "in_order",
    "parts_of",
)

# The most events and epochs that are kept, and the most lines for the consoles of agents that connect later.
EVENTS = 1000
HISTORY = 500
NOTICES = 40
# The most lines of agents about their own nodes: they have a place of their own, so that they push out nothing else.
REMARKS = 300
# The most of both, which one answer may hold.
KEPT = EVENTS + REMARKS


class Kind(str, Enum):
    """What an event is about."""

    # A node registered, gave notice, has left, or is lost.
    REGISTERED = "registered"
    LEAVING = "leaving"
    LEFT = "left"
    LOST = "lost"
    # The ranks were told to save and stop. The next world was opened. It made its first step: the change is complete.
    DRAINING = "draining"
    FORMED = "formed"
    STEPPED = "stepped"
    # A checkpoint was recorded; its universal form was.
    COMMITTED = "committed"
    CONVERTED = "converted"
    # A checkpoint was published elsewhere.
    MILESTONE = "milestone"
    # Ranks failed, or stood still.
    FAILED = "failed"
    # Somebody gave an order.
    SCALED = "scaled"
    ORDERED = "ordered"
    # The job ended, or was taken up again.
    FINISHED = "finished"
    ENDED = "ended"
    STOPPED = "stopped"
    RESUMED = "resumed"
    # Any other line for people.
    REMARK = "remark"


@dataclass(frozen=True)
class PausePart:
    """One part of a pause, in seconds."""

    name: str
    seconds: float


@dataclass(frozen=True)
class JobEvent:
    """One thing that happened. `said`: consoles show it."""

    sequence: int
    text: str
    warning: bool = False
    kind: Kind = Kind.REMARK
    said: bool = True
    at: float = 0.0
    epoch: int = 0
    nodes: tuple[str, ...] = ()
    step: int | None = None
    # Of a change of the world: seconds without a step, where they went, and how many steps were done again.
    seconds: float = 0.0
    parts: tuple[PausePart, ...] = ()
    lost_steps: int = 0
    checkpoint: str = ""


@dataclass(frozen=True)
class EpochRecord:
    """One opened world and what opening it cost (`paused` in seconds)."""

    epoch: int
    nodes: int
    world_size: int
    cause: str
    resumed_step: int
    universal: bool
    paused: float
    lost_steps: int
    first_step: int
    last_step: int
    # Some node has reported its steps; otherwise first and last step have no meaning.
    heard: bool = True
    # Nobody has reported the last steps of the previous world: at least `lost_steps` were lost.
    lost_more: bool = False
    # Where the pause went, in order.
    parts: tuple[PausePart, ...] = ()
    # When its first step was heard, and its last one when it was over; 0: not known.
    stepped_at: float = 0.0
    ended_at: float = 0.0


def in_order(*logs: Iterable[JobEvent]) -> tuple[JobEvent, ...]:
    """All of them by their numbers."""
    return tuple(sorted(chain(*logs), key=lambda event: event.sequence))


def parts_of(began: float, marks: Sequence[tuple[str, float]]) -> tuple[PausePart, ...]:
    """The parts of a pause, from when each ended. None is negative, and their sum is the time until the last mark."""
    parts, then = [], began
    for name, at in marks:
        parts.append(PausePart(name, round(max(0.0, at - then), 3)))
        then = max(then, at)
    return tuple(parts)


def goodput(history: Sequence[EpochRecord], now: float, *, over: bool) -> float | None:
    """Share of the time since the first step that brought the run forward, 0 to 1; None: not known.

    Pauses did not, and neither did the steps that were done again: of each world's time as many steps count as the next
    ones went on from. Of the present world all counts so far.

    Args:
        history: The run's worlds, oldest first.
        now: Unix seconds.
        over: The job has ended, with its last world.
    """
    stepped = [record for record in history if record.stepped_at > 0]
    if not stepped or any(not record.heard for record in history):
        return None
    ended = stepped[-1].ended_at or now
    total = (ended if over else now) - stepped[0].stepped_at
    if total <= 0:
        return None
    productive = max(0.0, ended - stepped[-1].stepped_at)
    lost = 0
    for following, record in pairwise(reversed(stepped)):
        made = max(1, record.last_step - record.first_step + 1)
        # What is more than this world made, earlier ones made.
        lost += following.lost_steps
        gone = min(made, lost)
        lost -= gone
        productive += max(0.0, record.ended_at - record.stepped_at) * (made - gone) / made
    return min(1.0, productive / total)
