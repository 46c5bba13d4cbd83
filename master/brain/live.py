"""What only the master's process knows: nothing of it is stored. Each object lives as long as what it is about.

Times with `_at` are real (monotonic seconds of this process). Times named `heard`, `moved` and the like are the
listening clock's (`listening`): what waits for a word of an agent is measured by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .listening import ListeningClock
from .presences import Presences
from .state import Job

__all__ = ("EpochLife", "Gathering", "Live", "State")


# Losses of one name that lie so close together are a loop (seconds).
CRASH_LOOP = 60.0


@dataclass
class AwaitedSave:
    """A drain's save that is waited for: since when, when that is said next, the most that its files held (bytes)."""

    since: float
    told_at: float
    written: int


@dataclass
class EpochLife:
    """The open epoch: what its ranks report."""

    epoch: int = 0
    # By node: the last step, bytes saved, signs of life between steps.
    steps: dict[str, int] = field(default_factory=dict)
    saved_bytes: dict[str, int] = field(default_factory=dict)
    beats: dict[str, int] = field(default_factory=dict)
    # What a save that is under way has in its files, as each node sees it, bytes; 0: none is.
    written: dict[str, int] = field(default_factory=dict)
    # Nodes whose ranks have no step left to make: what the script still does, it does without steps.
    ended: set[str] = field(default_factory=set)
    top_step: int = 0
    # Of the last step; NaN: nobody has told of one.
    loss: float = math.nan
    longest: float = 0.0
    first_step_at: float | None = None
    stepped_at: float | None = None
    # A master before this one opened it, and nobody has told of a step yet: the first may be an old one.
    is_taken_over: bool = False
    # The last sign of progress of anybody.
    moved: float = 0.0
    # Who advanced last, when, and when somebody else did: a step is a collective, so it proves the others alive.
    advanced_by: str = ""
    advanced: float = float("-inf")
    advanced_by_others: float = float("-inf")
    # A rank failed or was lost: whoever falls silent now is suspect.
    trouble: bool = False
    # Ranks have agreed to save and stop, whoever told them: their steps stand still until then.
    stopping: bool = False
    # Newcomers of which was said when everybody is restarted for them.
    growth_told: frozenset[str] = frozenset()
    # When that is said again, where it has no end of its own.
    growth_told_at: float = 0.0
    # When its drain runs out: until then a boundary must be agreed, or the leavers be gone.
    drain_deadline: float | None = None
    # The drain's save, while it is waited for.
    awaited: AwaitedSave | None = None

    def advance(self, name: str, step: int, now: float, heard: float) -> None:
        """A node's ranks have come to this step. One of which nobody had told proves that all took part in it."""
        self.moved, self.stepped_at = heard, now
        if step <= self.top_step:
            return
        self.top_step = step
        if self.is_taken_over:
            self.is_taken_over = False
            return
        if name != self.advanced_by:
            self.advanced_by_others, self.advanced_by = self.advanced, name
        self.advanced = heard

    def proof(self, name: str) -> float:
        """When another node than this one made its last step."""
        return self.advanced_by_others if name == self.advanced_by else self.advanced


@dataclass
class Gathering:
    """One round: from the end of a world to the opening of the next."""

    # When each node was first asked, and who has not answered in time.
    asked: dict[str, float] = field(default_factory=dict)
    overdue: set[str] = field(default_factory=set)
    # When each name was lost in this round: one that comes back again and again holds nobody up.
    lost: dict[str, tuple[float, ...]] = field(default_factory=dict)
    # Since when only the quiet time holds the opening up.
    complete_at: float | None = None
    # Since when nobody has had the resume point in sight.
    unseen: float | None = None
    # The last steps of the world before are known: counted on some node behind their end, or drained at a boundary.
    counted: bool = False

    def is_crash_looping(self, name: str, now: float) -> bool:
        """Lost in this very round, lately, and more than once."""
        return sum(now - at < CRASH_LOOP for at in self.lost.get(name, ())) > 1

    def note_loss(self, name: str, now: float) -> None:
        self.lost[name] = (*self.lost.get(name, ()), now)[-2:]


@dataclass
class Live:
    """Replaced whole by a new process; its parts with what they are about."""

    clock: ListeningClock = field(default_factory=ListeningClock)
    nodes: Presences = field(default_factory=Presences)
    epoch: EpochLife = field(default_factory=EpochLife)
    gathering: Gathering = field(default_factory=Gathering)
    held_until: dict[str, float] = field(default_factory=dict)
    lost_at: dict[str, list[float]] = field(default_factory=dict)
    # The first and the last of the epochs, one after the other, that lost members before their first step.
    stillborn: tuple[int, int] = (0, -1)
    phase_since: float = 0.0
    phase_heard: float = 0.0
    last_arrival: float = 0.0
    growth_done_at: float | None = None
    grow_hold_until: float = 0.0
    grow_after_commit: bool = False
    committed: float = 0.0
    # People know that a save takes a good part of a leaver's notice.
    slow_save_told: bool = False
    conversion_moved: float = 0.0
    # The most that the lease's owner has reported: files finished, bytes moved.
    conversion_done: tuple[int, int] = (-1, 0)
    retry_at: float = 0.0
    retry_pause: float = 0.0
    # When the job ends, because nobody will be able to convert what it would go on from.
    vain_until: float | None = None
    # When the verifier was asked, or last read something new; and how much it has read, bytes.
    verify_moved: float = 0.0
    verify_bytes: int = 0
    verify_retry_at: float = 0.0
    listen_until: float | None = None
    paused_since: float | None = None
    # It was longer, and more steps may be lost: the process before this one saw the last of them.
    costs_more: bool = False
    # The steps that the change has cost are counted, not only the least that they can be.
    lost_exactly: bool = False
    # What WAITING lacks, as agents were told last, and when.
    missing: str = ""
    missing_at: float = float("-inf")
    # Internal errors that people were told of.
    said: set[str] = field(default_factory=set)
    tick_pause: float = 0.0


@dataclass
class State:
    """All that the brain knows: what is stored, and what is not."""

    job: Job
    live: Live = field(default_factory=Live)
    # When the brain wants a Tick, monotonic seconds; None: not before the next event.
    wake: float | None = None
    # Tracebacks of events that were set aside, for the shell's log.
    faults: list[str] = field(default_factory=list)
