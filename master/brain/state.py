"""The master's durable state. What is not durable is in `live`.

`Job` holds no times, only durations and facts, so that a master that starts again can go on with it: every deadline
then starts anew, and every node of the stored world is presumed alive for one node-timeout (docs/architecture.md).

Everything below `Job` is immutable and replaced whole. So a copy of the job is a shallow one (`Job.copy`), the state
before an event is at hand when the event turns out to be one too many, and what is to be stored is what was replaced.

What belongs together is one object, which is made and dropped whole, so that nothing of it can be left behind:

| object | from | to |
|---|---|---|
| `Run` | step 0 | the next run's beginning |
| `Opened` | the opening of a world | the next opening, or the start of an ended job |
| `Drain` | the order to save and stop | the end of the phase DRAINING |
| `NextWorld` | the opening of a world, or the job's start | the next opening, or the job's end |
| `Recollection` | what agents say of a lost store | the opening of a world |
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from dalsegno.protos.contract import JobSettings

from .entries import Checkpoint, Checkpoints, Joined, Node, Nodes

__all__ = (
    "LEAST_NODE_TIMEOUT",
    "Budget",
    "Checkpoint",
    "Checkpoints",
    "Conversion",
    "Drain",
    "EpochRecord",
    "Failure",
    "Job",
    "Joined",
    "Member",
    "NextWorld",
    "Node",
    "Nodes",
    "Notice",
    "Opened",
    "Part",
    "Phase",
    "Recollection",
    "Run",
    "Settings",
    "Told",
    "Verification",
    "World",
)


class Phase(str, Enum):
    """The job's phases: what each waits for, and what ends it.

    WAITING: for as many nodes as a world needs. Ended by the node that makes them enough (`forming`); by
        --wait-for-nodes, which fails the job.
    FORMING: for the Joins of all who are to be in the next world, and beside them for a form of the resume point that
        it can load (`forming`). Ended by the opening of the world; by --join-timeout, which drops who has not joined.
    RUNNING: for nothing; the world trains. Ended by a failure, a leave, a growth or a scale-down, by the last part's
        end, or by --stall-timeout (`running`).
    DRAINING: for one save of all ranks at one boundary (`running`). Ended by the last part's end; by the leaver's
        notice, or for growths and scale-downs by a withdrawal.
    SUCCEEDED, FAILED: for late agents, who are told how it ended. FAILED ends where an agent registers anew.
    """

    WAITING = "waiting"
    FORMING = "forming"
    RUNNING = "running"
    DRAINING = "draining"
    SUCCEEDED = "succeeded"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED)

    @property
    def has_workers(self) -> bool:
        """The last opened world's workers are meant to be running."""
        return self in (Phase.RUNNING, Phase.DRAINING)


class Part(str, Enum):
    """How one member's ranks of the open epoch fare."""

    RUNNING = "running"
    DRAINED = "drained"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"
    # Gone when its notice was over, or before, while the ranks saved: the others see whether its part is there.
    LEFT = "left"


# A heartbeat comes a second after the last word, and is given 3 s before the next one is sent: one that got lost must
# be no death. Agents refuse less on their own command line, too.
LEAST_NODE_TIMEOUT = 5.0


@dataclass(frozen=True)
class Settings(JobSettings):
    """The job's settings, and what follows from them."""

    @property
    def least_nodes(self) -> int:
        """The smallest world: a multiple of the unit, at least `min`."""
        unit = max(1, self.node_unit)
        return -(-self.min_nodes // unit) * unit

    @property
    def problem(self) -> str:
        """What is wrong with them, in one line; empty where nothing is."""
        if not 1 <= self.min_nodes <= self.max_nodes:
            return f"--nnodes={self.min_nodes}:{self.max_nodes}: MIN must be at least 1 and at most MAX"
        if self.node_unit < 1 or self.least_nodes > self.max_nodes:
            return (
                f"--node-unit={self.node_unit} does not fit --nnodes={self.min_nodes}:{self.max_nodes}: worlds have a"
                " multiple of it, and none lies between MIN and MAX"
            )
        if not self.node_timeout >= LEAST_NODE_TIMEOUT:
            return (
                f"--node-timeout={self.node_timeout:g}: an agent whose heartbeat was lost is heard again within "
                f"{LEAST_NODE_TIMEOUT:g} s, so that is the least"
            )
        return ""


@dataclass(frozen=True)
class Member:
    """A node in a world."""

    node: str
    incarnation: str
    host: str
    nproc: int
    group_rank: int
    # Its ranks have made a step of this run before this world opened.
    proven: bool = False


@dataclass(frozen=True)
class World:
    """The nodes of one epoch with their group ranks, and what they start from."""

    epoch: int
    members: tuple[Member, ...]
    store_host: str
    store_port: int
    # Digest of the resume point, "" for step 0, and how it is loaded.
    resume: str = ""
    universal: bool = False
    resharded: bool = False
    resumed_step: int = 0
    causes: tuple[str, ...] = ()
    # The step that the run had reached when the world before this one ended.
    left_step: int = 0
    grown: bool = False

    @cached_property
    def size(self) -> int:
        """How many workers."""
        return sum(member.nproc for member in self.members)

    @cached_property
    def by_incarnation(self) -> dict[str, Member]:
        return {member.incarnation: member for member in self.members}

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """Of each member, the global rank of its first worker."""
        firsts, first = [], 0
        for member in self.members:
            firsts.append(first)
            first += member.nproc
        return tuple(firsts)

    def member(self, incarnation: str) -> Member | None:
        return self.by_incarnation.get(incarnation)


@dataclass(frozen=True)
class Told:
    """What people have been told of the open world, each once."""

    # Its first step was heard.
    first_step: bool = False
    # That it has started, and that nothing is heard of its steps yet.
    unheard: bool = False
    # It counts as one whose steps are made unheard: its script may have no session.
    start: bool = False
    # That nobody can tell whether it is stuck.
    doubt: bool = False


@dataclass(frozen=True)
class Opened:
    """The world that was opened last: made when it opens, dropped when another one does or an ended job starts anew."""

    world: World
    # How its members fare, by incarnation. It changes in place, so `Job.copy` copies it.
    parts: dict[str, Part]
    told: Told = Told()


@dataclass(frozen=True)
class Conversion:
    """The universal form of `source` is wanted. `owner` holds the lease `lease`; 0 when nobody does."""

    source: str
    lease: int = 0
    owner: str = ""
    # Names of the nodes on which it failed although the source verifies.
    failed: tuple[str, ...] = ()
    # Directories of leases on the same source that came before.
    earlier: tuple[str, ...] = ()
    blocked: bool = False
    reason: str = ""
    # The open world, or the last one, has loaded `source` without it: it is owed, and the next world waits (`beside`).
    beside: bool = False


@dataclass(frozen=True)
class Verification:
    """One node could not load a checkpoint; another looks at it before anything is concluded."""

    number: int
    digest: str
    universal: bool
    reporter: str
    verifier: str = ""
    message: str = ""
    # Names of those that could not tell, as often as they were asked.
    unable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drain:
    """Why the open world is saving and stopping."""

    growth: bool
    reason: str
    # For a limit that the world exceeds.
    shrink: bool = False
    agreed: bool = False
    # The last step known when it began: its boundary comes later, and what speaks of an earlier one is late news.
    after: int = 0
    # It began for newcomers: the next world is one that has grown, whoever leaves meanwhile.
    grown: bool = False

    @property
    def subject(self) -> str:
        """What waits for it, for a person."""
        return "growing" if self.growth else "scaling down" if self.shrink else f"the drain ({self.reason})"

    @property
    def optional(self) -> bool:
        """Nobody goes: if it cannot be done now, the ranks train on, and it is tried again."""
        return self.growth or self.shrink


@dataclass(frozen=True)
class Failure:
    """A failure of the closed epoch that may count against the budget."""

    epoch: int
    node: str
    message: str
    step: int
    # The cause is on another node, which reports it or is lost.
    elsewhere: bool = False
    # All ranks know, and agree: another start would come to the same.
    refused: bool = False


@dataclass(frozen=True)
class Notice:
    """One line for all consoles."""

    sequence: int
    text: str
    warning: bool = False


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
    # Somebody has told of its steps; else first and last say nothing.
    heard: bool = True
    # Nobody has told of the last steps of the world before: `lost_steps` is the least that it can be.
    lost_more: bool = False


@dataclass(frozen=True)
class Budget:
    """Failures without progress, see `failures`."""

    failures: int = 0
    # Of the last failure that counted: a commit beyond it refills the budget.
    last_step: int = 0
    pending: Failure | None = None
    # Incarnations that had not answered when the world after a failure opened: were they lost, or only slow?
    doubtful: tuple[str, ...] = ()


@dataclass(frozen=True)
class NextWorld:
    """What is known of the world that comes next: made when one opens, dropped when this one does or the job ends."""

    # Why it comes.
    causes: tuple[str, ...] = ()
    # A drain for newcomers led to it.
    grown: bool = False
    # A start, or out of WAITING: agents nobody has heard of may be on their way.
    quiet: bool = False
    # What it needs to load the resume point, and what has to be known of that before.
    conversion: Conversion | None = None
    verification: Verification | None = None


@dataclass(frozen=True)
class Run:
    """One training from step 0 to its end; dropped when the next one begins."""

    number: int = 1
    # It was begun by --new-run.
    begun_anew: bool = False
    # So often it was taken up again after it had failed, since it committed something.
    reopened: int = 0
    ever_stepped: bool = False
    # The script's workers have said hello: it can drain, and its steps are heard of.
    has_session: bool = False
    budget: Budget = Budget()
    stalls: int = 0
    growths: int = 0
    # What the last growth cost.
    growth_cost_seconds: float = 0.0
    # The step that it had reached when its last world ended.
    left_step: int = 0


@dataclass(frozen=True)
class Recollection:
    """What agents remember of a store that was lost: of use until a world opens."""

    # The master hears all of them out before it opens one.
    listening: bool = False
    # The highest epoch that they remember.
    epoch: int = 0
    # The epoch of which the settings in force are remembered; -1 where nobody's memory says them.
    settings_epoch: int = -1


@dataclass
class Job:
    """Everything that outlives the master's process."""

    job_id: str
    embedded: bool = False
    generation: int = 0
    settings: Settings = field(default_factory=Settings)
    # --nnodes was given to the master: agents do not set it.
    fixed_nnodes: bool = False
    # The most nodes that a world may have, below max; 0: max.
    limit: int = 0
    settled: bool = False
    run: Run = field(default_factory=Run)
    phase: Phase = Phase.WAITING
    epoch: int = 0
    opened: Opened | None = None
    drain: Drain | None = None
    next: NextWorld = NextWorld(quiet=True)
    recollection: Recollection = Recollection()
    nodes: Nodes = field(default_factory=Nodes)
    arrivals: int = 0
    # Content of the probe file as the nodes that count read it.
    probe: str = ""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    # What closed epochs sealed too late: it never counted, and its files may go.
    late: tuple[Checkpoint, ...] = ()
    # So many leases and orders to verify there were: each has a number of its own.
    leases: int = 0
    verifications: int = 0
    # Growths in a row for which nobody could convert.
    conversion_failures: int = 0
    # How often each node name was held, for having been lost after its world had made a step.
    losses: dict[str, int] = field(default_factory=dict)
    # Names that are spares for now, and for how long (seconds; begins anew with a new master).
    holds: dict[str, float] = field(default_factory=dict)
    # How it ended.
    message: str = ""
    notices: tuple[Notice, ...] = ()
    noticed: int = 0
    history: tuple[EpochRecord, ...] = ()

    def copy(self) -> Job:
        """The state as it is now, whatever becomes of this one."""
        other = copy.copy(self)
        other.nodes, other.checkpoints = self.nodes.copy(), self.checkpoints.copy()
        other.losses, other.holds = dict(self.losses), dict(self.holds)
        if self.opened is not None:
            other.opened = replace(self.opened, parts=dict(self.opened.parts))
        return other

    @property
    def run_id(self) -> str:
        return f"run-{self.run.number:04d}"

    @property
    def world(self) -> World | None:
        """The last opened one."""
        return self.opened.world if self.opened is not None else None

    @property
    def parts(self) -> dict[str, Part]:
        """How the members of `world` fare, by incarnation; empty where there is no world."""
        return self.opened.parts if self.opened is not None else {}

    @property
    def told(self) -> Told:
        """What people have been told of `world`."""
        return self.opened.told if self.opened is not None else Told()

    @property
    def conversion(self) -> Conversion | None:
        return self.next.conversion

    @property
    def verification(self) -> Verification | None:
        return self.next.verification

    @property
    def has_session(self) -> bool:
        return self.run.has_session

    @property
    def grown(self) -> bool:
        """The next world will be one that has grown, as things stand."""
        return self.next.grown or (self.drain is not None and self.drain.grown)

    @property
    def most_nodes(self) -> int:
        """Of a world: --nnodes' maximum, or what the job was scaled to."""
        return min(self.limit or self.settings.max_nodes, self.settings.max_nodes)

    @property
    def round(self) -> int:
        """The epoch that would be opened next."""
        return self.epoch + 1

    def checkpoint(self, digest: str) -> Checkpoint | None:
        return self.checkpoints.get(digest)

    def node_by(self, incarnation: str) -> Node | None:
        return self.nodes.by(incarnation)

    def part(self, member: Member) -> Part:
        return self.parts[member.incarnation]
