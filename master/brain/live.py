"""State that only the master's process knows and nobody stores. Each object lives as long as the thing it describes.

Times with `_at` are real (monotonic seconds of this process). Times named `heard`, `moved` and the like are the
listening clock's (`listening`): what waits for a word of an agent is measured by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .listening import ListeningClock
from .presences import Presences
from .state import Job

__all__ = (
    "ConversionLife",
    "DrainLife",
    "EpochLife",
    "Gathering",
    "LeaseLife",
    "Live",
    "Missing",
    "Pause",
    "RunLife",
    "State",
    "VerificationLife",
    "Wait",
)


# Losses of one name that lie so close together are a loop (seconds).
CRASH_LOOP = 60.0


@dataclass
class AwaitedSave:
    """A drain's save that is waited for: since when, when that is said next, the most that its files held."""

    since: float
    told_at: float
    written_bytes: int


@dataclass
class DrainLife:
    """The drain that is under way: made and dropped with `Job.drain`."""

    # When it runs out: until then a boundary must be agreed, or the leavers be gone.
    deadline: float
    awaited: AwaitedSave | None = None


@dataclass
class EpochLife:
    """The open epoch: what its ranks report."""

    epoch: int = 0
    # By node: the last step, bytes saved, signs of life between steps.
    steps: dict[str, int] = field(default_factory=dict)
    saved_bytes: dict[str, int] = field(default_factory=dict)
    beats: dict[str, int] = field(default_factory=dict)
    # What a save that is under way has in its files, as each node sees it; 0: none is.
    written_bytes: dict[str, int] = field(default_factory=dict)
    # Nodes whose ranks have no step left to make: what the script still does, it does without steps.
    ended: set[str] = field(default_factory=set)
    top_step: int = 0
    # Of the last step; NaN: nobody has told of one.
    loss: float = math.nan
    # The longest step, save or evaluation.
    longest_seconds: float = 0.0
    first_step_at: float | None = None
    # The same by the listening clock.
    first_step_heard: float = 0.0
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
    # Nodes whose standby workers are not ready yet to follow those of this epoch.
    cold: set[str] = field(default_factory=set)
    # Newcomers of which was said what they wait for.
    growth_told: frozenset[str] = frozenset()
    # When that is said again, where it has no end of its own.
    growth_told_at: float = 0.0
    # The steps that the change has cost are counted, not only the least that they can be.
    lost_exactly: bool = False
    drain: DrainLife | None = None
    # A growth or a scale-down was put off: it is tried again with the next commit.
    put_off: bool = False

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
    # Until when agents are heard out that remember a lost store.
    listen_until: float | None = None
    # When the job ends, because nobody will be able to convert what it would go on from.
    vain_until: float | None = None
    # The last steps of the world before are known: counted on some node behind their end, or drained at a boundary.
    counted: bool = False

    def is_crash_looping(self, name: str, now: float) -> bool:
        """Lost in this very round, lately, and more than once."""
        return sum(now - at < CRASH_LOOP for at in self.lost.get(name, ())) > 1

    def note_loss(self, name: str, now: float) -> None:
        self.lost[name] = (*self.lost.get(name, ()), now)[-2:]


@dataclass
class LeaseLife:
    """How the owner of a conversion's lease gets on."""

    moved: float = 0.0
    # The most that it has reported: files finished, bytes moved.
    files: int = -1
    bytes: int = 0


@dataclass(frozen=True)
class Wait:
    """All else is ready, and only a conversion is waited for: since when, and after how many seconds that is said."""

    since: float
    said_after: float


@dataclass
class ConversionLife:
    """The conversion that the gate wants, or that is owed: made with it."""

    lease: LeaseLife = field(default_factory=LeaseLife)
    # After a failure: when it is tried again, and after how long.
    retry_at: float = 0.0
    retry_pause_seconds: float = 0.0
    wait: Wait | None = None
    # Newcomers know that they wait for it.
    growth_told: bool = False


@dataclass
class VerificationLife:
    """One order to verify, or what lies before the next one: made with it."""

    # When the verifier was asked, or last read something new; and how much it has read.
    moved: float = 0.0
    bytes: int = 0
    # When somebody is asked again, after one who could not tell.
    retry_at: float = 0.0


@dataclass(frozen=True)
class Pause:
    """Nobody trains: from the last step of a world to the first of the next."""

    since: float
    # It was longer, and more steps may be lost: the process before this one saw the last of them.
    costs_more: bool = False


@dataclass(frozen=True)
class Missing:
    """What WAITING lacks, as agents were told last, and when."""

    text: str = ""
    at: float = float("-inf")


@dataclass
class RunLife:
    """The run, as this process has seen it: made with `Job.run`."""

    # When its world grew last.
    growth_done_at: float | None = None
    # The first and the last of its epochs, one after the other, that lost members before their first step.
    stillborn: tuple[int, int] = (0, -1)


@dataclass
class Live:
    """Replaced whole by a new process; its parts with what they are about."""

    clock: ListeningClock = field(default_factory=ListeningClock)
    nodes: Presences = field(default_factory=Presences)
    run: RunLife = field(default_factory=RunLife)
    epoch: EpochLife = field(default_factory=EpochLife)
    gathering: Gathering = field(default_factory=Gathering)
    conversion: ConversionLife = field(default_factory=ConversionLife)
    verification: VerificationLife = field(default_factory=VerificationLife)
    pause: Pause | None = None
    missing: Missing = Missing()
    held_until: dict[str, float] = field(default_factory=dict)
    lost_at: dict[str, list[float]] = field(default_factory=dict)
    phase_since: float = 0.0
    phase_heard: float = 0.0
    last_arrival: float = 0.0
    grow_hold_until: float = 0.0
    committed: float = 0.0
    # People know that a save takes a good part of a leaver's notice.
    slow_save_told: bool = False
    # Internal errors that people were told of.
    said: set[str] = field(default_factory=set)
    tick_pause_seconds: float = 0.0


@dataclass
class State:
    """All that the brain knows: what is stored, and what is not."""

    job: Job
    live: Live = field(default_factory=Live)
    # When the brain wants a Tick, monotonic seconds; None: not before the next event.
    wake: float | None = None
    # Tracebacks of events that were set aside, for the shell's log.
    faults: list[str] = field(default_factory=list)
