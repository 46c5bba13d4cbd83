"""State that only the master's process knows and that is not stored. Each object lives as long as what it describes.

Times with `_at` are real (monotonic seconds of this process). Times named `heard`, `moved` and the like are those of
the listening clock (`listening`), which measures everything that waits for an agent to speak.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from dalsegno.protos import control_pb2

from .gathering import Gathering
from .listening import ListeningClock
from .presences import Presences
from .state import Checkpoint, Job

__all__ = (
    "ConversionLife",
    "ConversionWait",
    "DrainLife",
    "EpochLife",
    "Held",
    "HeldStep",
    "LeaseLife",
    "Live",
    "Missing",
    "Named",
    "Pause",
    "Replicas",
    "RunLife",
    "Sending",
    "State",
    "VerificationLife",
    "Waiting",
)


# How many names of deleted checkpoints a process remembers, of the last ones that are on the record.
PRUNED_NAMES_KEPT = 64


@dataclass
class AwaitedSave:
    """A drain's save that is waited for: since when, when people are told next, the most bytes that its files had."""

    since: float
    told_at: float
    written_bytes: int


@dataclass
class DrainLife:
    """The drain under way: made and dropped with `Job.drain`."""

    # The time by which a boundary must be agreed, or the leavers be gone.
    deadline: float
    awaited: AwaitedSave | None = None


@dataclass
class EpochLife:
    """The open epoch: what its ranks report."""

    epoch: int = 0
    # When it was opened, by the listening clock.
    opened: float = 0.0
    # By node: the last step, bytes saved, signs of life between steps.
    steps: dict[str, int] = field(default_factory=dict)
    saved_bytes: dict[str, int] = field(default_factory=dict)
    beats: dict[str, int] = field(default_factory=dict)
    # Bytes in the files of a save under way, as each node sees it; 0: none is under way.
    written_bytes: dict[str, int] = field(default_factory=dict)
    # Why a rank of each node cannot write its part of it; empty, or no entry: none says so.
    save_problems: dict[str, str] = field(default_factory=dict)
    # By incarnation: the step that its workers left in memory of Flash Checkpoint, once they are gone.
    flash: dict[str, int] = field(default_factory=dict)
    # Nodes whose ranks have no step left to make: what the script still does makes no steps.
    ended: set[str] = field(default_factory=set)
    # People know that a full disk cannot be helped here, and why the last save failed: told anew behind a commit.
    shortage_told: bool = False
    failure_told: str = ""
    # How many times in a row nothing of what was to be deleted went, and since when, by the listening clock.
    failed_deletions: int = 0
    deletion_fails_since: float = 0.0
    # The step whose save failed last, and why if that was not the first time.
    failed_step: int = 0
    tried_again: str = ""
    top_step: int = 0
    # Loss of the last step; NaN: nobody has reported one.
    loss: float = math.nan
    # The longest step, save or evaluation.
    longest_seconds: float = 0.0
    first_step_at: float | None = None
    # The same time by the listening clock.
    first_step_heard: float = 0.0
    stepped_at: float | None = None
    # An earlier master opened it, and no step is reported yet: the first report may be an old one.
    is_taken_over: bool = False
    # So far this master knows the newest step from a node's first report: it may have been made long before.
    heard_late: bool = False
    # When anybody last made progress.
    moved: float = 0.0
    # The node that advanced last, when it did, and when another one did. A step is a collective, so it proves the
    # others alive.
    advanced_by: str = ""
    advanced: float = float("-inf")
    advanced_by_others: float = float("-inf")
    # A rank failed or was lost, so a node that falls silent now is suspect.
    trouble: bool = False
    # Ranks have agreed to save and stop, whoever told them. Their steps stand still until then.
    stopping: bool = False
    # The last boundary at which a drain came to nothing: late reports that it was agreed are not about the next one.
    given_up_at: int = 0
    # Nodes whose standby workers for the next epoch are not ready yet.
    cold: set[str] = field(default_factory=set)
    # The script's loop saves nothing: a drain would lose its steps.
    saves_nothing: bool = False
    # Newcomers of which people know what they wait for.
    growth_told: frozenset[str] = frozenset()
    # When that is said again, if the wait has no set end.
    growth_told_at: float = 0.0
    # The lost steps of the change are counted exactly, not only their least number.
    lost_exactly: bool = False
    drain: DrainLife | None = None
    # A growth or a scale-down was put off, and is tried again with the next commit.
    put_off: bool = False
    # When the first of its members had saved and stopped.
    drained_at: float | None = None
    # When all of its ranks had finished, by the listening clock.
    finished_at: float | None = None
    # Seconds until the ranks of the slowest node had opened their sessions, and until they had loaded.
    started_seconds: float = 0.0
    loaded_seconds: float = 0.0

    def advance(self, name: str, step: int, now: float, heard: float) -> None:
        """A node's ranks have reached this step. A step that nobody had reported proves that all took part in it."""
        self.moved, self.stepped_at = heard, now
        if step <= self.top_step:
            return
        self.top_step = step
        self.heard_late = self.is_taken_over or (self.heard_late and name not in self.steps)
        if self.is_taken_over:
            self.is_taken_over = False
            return
        if name != self.advanced_by:
            self.advanced_by_others, self.advanced_by = self.advanced, name
        self.advanced = heard

    def proof(self, name: str) -> float:
        """When a node other than this one made its last step."""
        return self.advanced_by_others if name == self.advanced_by else self.advanced


@dataclass
class LeaseLife:
    """The progress of the owner of a conversion's lease."""

    moved: float = 0.0
    # The most that it has reported: files finished, bytes moved.
    files: int = -1
    bytes: int = 0


@dataclass(frozen=True)
class ConversionWait:
    """All else is ready, and only a conversion is waited for: since when, and after how many seconds that is said."""

    since: float
    said_after: float


@dataclass
class ConversionLife:
    """The conversion that the gate wants, or that is owed: made with it."""

    lease: LeaseLife = field(default_factory=LeaseLife)
    # After a failure: when it is tried again, and how long that pause is.
    retry_at: float = 0.0
    retry_pause_seconds: float = 0.0
    wait: ConversionWait | None = None
    # Newcomers know that they wait for it.
    growth_told: bool = False


@dataclass
class VerificationLife:
    """One order to verify, or the pause before the next one; made and dropped with it."""

    # When the verifier was asked, or last read something new; and how many bytes it has read.
    moved: float = 0.0
    bytes: int = 0
    # When somebody is asked again, after a verifier without a verdict.
    retry_at: float = 0.0


@dataclass
class HeldStep:
    """A memory checkpoint, as nodes have told this process."""

    record: Checkpoint
    # By the group rank that wrote a part, the incarnations of the nodes that hold it.
    holders: dict[int, dict[str, None]] = field(default_factory=dict)
    # The same by node.
    by_node: dict[str, frozenset[int]] = field(default_factory=dict)
    # Incarnations of the nodes that could not load it; what one of them cannot load again is given up.
    doubted: set[str] = field(default_factory=set)
    # Of these, those that still look at what they have: since when, by the listening clock.
    looking: dict[str, float] = field(default_factory=dict)
    # Since when a part of it has had no holder, by the listening clock, if it is the resume point.
    missing_since: float | None = None
    # It is so for good, as far as all nodes can say, while a world trains: nothing waits for it. People know.
    gone: bool = False
    gone_said: bool = False
    # It must be on the disk before a world can open.
    urgent: bool = False
    # Nodes cannot fetch it from each other: each writes what it has.
    in_parts: bool = False
    # They need not: the same. Of some part nobody could write it then: one node writes all of it after all.
    by_parts: bool = False
    together: bool = False
    # Parts that the nodes whose ranks wrote them have said to hold.
    own: set[int] = field(default_factory=set)
    # Of these, those that are there no more, or that some buddy cannot be brought.
    unsent: set[int] = field(default_factory=set)
    # The ranks want it on the disk; the parts that nodes have said to be there.
    wanted: bool = False
    written: set[int] = field(default_factory=set)
    # In which epoch they said so: a later one has deleted what was not sealed.
    written_in: int = 0
    # Nodes that could not write it to the disk, by incarnation, and when they are asked again; of whom people know.
    unable: dict[str, float] = field(default_factory=dict)
    told: dict[str, None] = field(default_factory=dict)
    # How often nodes could not; since when nobody could write some part, by the listening clock.
    failures: int = 0
    stuck_since: float | None = None
    # Parts that nobody holds are looked for on the disk, since when (by the listening clock), and who could not look.
    sought: bool = False
    sought_since: float | None = None
    looked: set[str] = field(default_factory=set)
    # Those that seem to be there, as somebody has seen; and those that are not.
    sighted: set[int] = field(default_factory=set)
    absent: set[int] = field(default_factory=set)
    # Parts of it are not enough for a node.
    needs_all: bool = False

    def hold(self, incarnation: str, parts: Iterable[int]) -> None:
        """This node holds these parts, and no others."""
        self.looking.pop(incarnation, None)
        now = frozenset(part for part in parts if part < self.record.parts)
        before = self.by_node.pop(incarnation, frozenset())
        for part in before - now:
            del self.holders[part][incarnation]
        for part in sorted(now - before):
            self.holders.setdefault(part, {})[incarnation] = None
        if now:
            self.by_node[incarnation] = now

    def forget(self, incarnation: str) -> None:
        """This node is gone, with all that it had. That it could not load its copy is remembered."""
        self.hold(incarnation, ())
        self.looked.discard(incarnation)
        self.unable.pop(incarnation, None)
        self.told.pop(incarnation, None)

    def note_sending(self, own: int, message: control_pb2.HeldRequest) -> None:
        """Whether a member's own part can still be brought to others, as it says."""
        if message.unsent or (own in self.own and own not in message.parts):
            self.unsent.add(own)
        else:
            self.unsent.discard(own)


@dataclass
class Sending:
    """A memory checkpoint of which each node sends its part to its buddies."""

    step: HeldStep
    since: float
    # Parts that are not yet on as many nodes as the job wants, and may come there; members that have not heard of it.
    pending: set[int]
    untold: set[int]
    # When the first of these last became fewer.
    moved: float
    # Digests of newer steps that were saved meanwhile.
    later: set[str] = field(default_factory=set)


@dataclass
class Replicas:
    """How far the memory checkpoints of one epoch have come to buddies. See `replication`."""

    epoch: int = 0
    sending: Sending | None = None
    # What was sent last; the newest one of which each part is on as many nodes as the job wants.
    sent: Checkpoint | None = None
    replicated: Checkpoint | None = None
    # So many in a row were overtaken by newer ones while they were sent.
    overtaken: int = 0
    # After so many seconds without a part that has arrived the next step begins; longer each time, until one has come.
    patience: float = 0.0


@dataclass
class Unwritten:
    """Why a node cannot write to the disk, and with how many steps in a row that was so while none reached the disk."""

    why: str
    # Digest of the newest one there; "": none.
    newest: str
    steps: int = 1


@dataclass
class Held:
    """All memory checkpoints that are known, by digest."""

    steps: dict[str, HeldStep] = field(default_factory=dict)
    # Digest of the step that nodes write to the disk because the ranks want it there; empty: none.
    writing: str = ""
    # By node, why it could not write to the disk when it tried last.
    complaints: dict[str, Unwritten] = field(default_factory=dict)
    # By step and reason, the nodes that cannot write it either, which people are told of together.
    unwritten: dict[tuple[str, str], SharedLine] = field(default_factory=dict)
    # Nodes that could not fetch a resume point from memory, by incarnation, and until when drains spare them that.
    unfetched: dict[str, float] = field(default_factory=dict)
    replicas: Replicas = field(default_factory=Replicas)
    # People know that steps are saved faster than their parts reach a second node.
    slow_told: bool = False
    # Digest of the step with which a world was opened that had only the parts that it needs on each node; "": it had
    # all parts; None: that was another process.
    opened_with: str | None = None
    # Incarnations of the nodes that have said all that they hold.
    told_all: dict[str, None] = field(default_factory=dict)

    def step(self, record: Checkpoint) -> HeldStep:
        """What is known of this one; nobody may have said yet that it holds a part."""
        return self.steps.setdefault(record.digest, HeldStep(record))

    def newest_first(self) -> list[HeldStep]:
        """All of them, by age."""
        return sorted(self.steps.values(), key=lambda step: step.record.age, reverse=True)


@dataclass(frozen=True)
class Pause:
    """The time in which nobody trains: from the last step of a world to the first of the next."""

    since: float
    # It was longer, and more steps may be lost, because an earlier process saw the last of them.
    costs_more: bool = False
    # When each of its parts ended, in order.
    marks: tuple[tuple[str, float], ...] = ()
    # A world was opened meanwhile that made no step: how many the one before it had made may not be known exactly.
    more_lost: bool = False

    def with_mark(self, name: str, at: float) -> Pause:
        """The same with a part that ended at `at`; a later end of the same part counts instead."""
        return replace(self, marks=(*(mark for mark in self.marks if mark[0] != name), (name, at)))


@dataclass(frozen=True)
class Missing:
    """What WAITING lacks, as agents were last told, and when."""

    text: str = ""
    at: float = float("-inf")


@dataclass
class Waiting:
    """Something is waited for: since when, and after how many seconds that is said."""

    since: float
    said_after: float


@dataclass
class Waits:
    """All that is waited for, by subject, and the subjects that the present look has met. See `waits`."""

    known: dict[str, Waiting] = field(default_factory=dict)
    noted: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Named:
    """A milestone that a foreign worker has named as its last one: where it is, and the step of the first such report.

    A late report of that worker, which was sent before, is of no later step.
    """

    holder: str = ""
    repo: str = ""
    revision: str = ""
    step: int = 0


@dataclass
class RunLife:
    """The run as this process has seen it; made with `Job.run`."""

    # When its world last grew.
    growth_done_at: float | None = None
    # The first and the last of consecutive epochs that lost members before their first step.
    stillborn: tuple[int, int] = (0, -1)
    # Names of the last checkpoints whose files were deleted.
    pruned: deque[str] = field(default_factory=lambda: deque(maxlen=PRUNED_NAMES_KEPT))
    # When so many workers failed last, see `shapes`.
    shape_failed_at: dict[int, float] = field(default_factory=dict)
    # What the holder of a lease named last.
    named: Named = Named()


@dataclass
class SharedLine:
    """Who says what another agent has just said, until `until`. It decides nothing, so a crash may take it."""

    until: float
    nodes: dict[str, None] = field(default_factory=dict)


@dataclass
class Live:
    """All of it. A new process replaces it whole; its parts are replaced with what they describe."""

    clock: ListeningClock = field(default_factory=ListeningClock)
    nodes: Presences = field(default_factory=Presences)
    run: RunLife = field(default_factory=RunLife)
    epoch: EpochLife = field(default_factory=EpochLife)
    gathering: Gathering = field(default_factory=Gathering)
    conversion: ConversionLife = field(default_factory=ConversionLife)
    verification: VerificationLife = field(default_factory=VerificationLife)
    held: Held = field(default_factory=Held)
    pause: Pause | None = None
    missing: Missing = Missing()
    # Lines that agents said lately, oldest first: the text, and whether it is a warning.
    lines: dict[tuple[str, bool], SharedLine] = field(default_factory=dict)
    waits: Waits = field(default_factory=Waits)
    held_until: dict[str, float] = field(default_factory=dict)
    lost_at: dict[str, list[float]] = field(default_factory=dict)
    # Incarnations of members that are in later epochs than any on the record, and in which.
    ahead: dict[str, int] = field(default_factory=dict)
    # All settings were given to this process, so that no agent sets any.
    settings_given: bool = False
    # Incarnations that were fenced for good, and why.
    shut_out: dict[str, str] = field(default_factory=dict)
    phase_since: float = 0.0
    phase_heard: float = 0.0
    last_arrival: float = 0.0
    grow_hold_until: float = 0.0
    # When a person or tool last asked for a number of nodes, by the listening clock.
    scaled_at: float = float("-inf")
    committed: float = 0.0
    # People know that a save takes a good part of a leaver's notice.
    slow_save_told: bool = False
    # Since when no node of a job that stops has been connected.
    deserted_at: float | None = None
    # Seconds for which the master's own loop stood still, in all.
    stood_seconds: float = 0.0
    # What added to this process's monotonic seconds gives Unix seconds, for people.
    unix_offset: float = 0.0
    # Number of the last event on the record when this process took it over; 0: there was none.
    earlier: int = 0
    # Internal errors that people were told of.
    said: set[str] = field(default_factory=set)
    tick_pause_seconds: float = 0.0

    def silence(self, name: str, now: float) -> float:
        """Seconds since a node was last heard, while the master's own loop did not stand still."""
        return max(0.0, now - self.stood_seconds - self.nodes[name].at)


@dataclass
class State:
    """All that the brain knows: what is stored, and what is not."""

    job: Job
    live: Live = field(default_factory=Live)
    # When the brain wants a Tick, in monotonic seconds; None: not before the next event.
    wake: float | None = None
    # Tracebacks of events that were set aside, for the shell's log.
    faults: list[str] = field(default_factory=list)
