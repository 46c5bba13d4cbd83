"""The master's durable state. What is not durable is in `live`.

`Job` holds no times, only durations and facts, so that a master that starts again can go on with it: every deadline
then starts anew, and every node of the stored world is presumed alive for one node-timeout (docs/architecture.md).

Everything below `Job` is immutable and replaced whole. So a copy of the job is shallow (`Job.copy`), the state before
an event is still there if the event must be set aside, and what must be stored is what was replaced.

What belongs together is one object, which is made and dropped whole, so that no part of it can be left behind:

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
from itertools import islice

from dalsegno.protos.contract import LEAST_NODE_TIMEOUT_SECONDS, JobSettings, run_name

from .chronicle import NOTICES, EpochRecord, JobEvent
from .entries import Checkpoint, Checkpoints, Joined, Node, Nodes
from .next_world import Conversion, NextWorld, Verification
from .over import Ending
from .published import Milestone, Pruned
from .tried import FailedShape, Shapes

__all__ = (
    "LEAST_NODE_TIMEOUT_SECONDS",
    "Budget",
    "Checkpoint",
    "Checkpoints",
    "Conversion",
    "Drain",
    "Ending",
    "EpochRecord",
    "FailedShape",
    "Failure",
    "GoneBack",
    "Job",
    "JobEvent",
    "Joined",
    "Member",
    "MemberState",
    "Milestone",
    "NextWorld",
    "Node",
    "Nodes",
    "Opened",
    "Phase",
    "Pruned",
    "Recollection",
    "Run",
    "SaveOrder",
    "Settings",
    "Shapes",
    "Told",
    "Verification",
    "World",
)


class Phase(str, Enum):
    """The job's phases: what each waits for, and what ends it.

    WAITING: waits for as many nodes as a world needs. Ended by the node that makes them enough (`forming`), or by
        --wait-for-nodes, which fails the job.
    FORMING: waits for the Joins of all nodes of the next world, and beside them for a form of the resume point that it
        can load (`forming`). Ended by the opening of the world; --join-timeout drops nodes that have not joined.
    RUNNING: waits for nothing; the world trains. Ended by a failure, a leave, a growth or a scale-down, by the last
        part's end, or by --stall-timeout (`running`).
    DRAINING: waits for one save of all ranks at one boundary (`running`). Ended by the last part's end, by the leaver's
        notice, or for growths and scale-downs by a withdrawal.
    SUCCEEDED, FAILED, STOPPED: wait for late agents, which are told how it ended. FAILED ends when an agent registers
        anew; so does STOPPED of an embedded master, and otherwise by the order to start (`orders`).
    """

    WAITING = "waiting"
    FORMING = "forming"
    RUNNING = "running"
    DRAINING = "draining"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_terminal(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.STOPPED)

    @property
    def has_workers(self) -> bool:
        """Whether the last opened world's workers are meant to be running."""
        return self in (Phase.RUNNING, Phase.DRAINING)


class MemberState(str, Enum):
    """How one member's ranks of the open epoch fare."""

    RUNNING = "running"
    DRAINED = "drained"
    FINISHED = "finished"
    FAILED = "failed"
    LOST = "lost"
    # The member left when its notice was over, or earlier, during the save: the others see whether its part is there.
    LEFT = "left"


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
        """What is wrong with the settings, in one line; empty if nothing is."""
        if not 1 <= self.min_nodes <= self.max_nodes:
            return f"--nnodes={self.min_nodes}:{self.max_nodes}: MIN must be at least 1 and at most MAX"
        if self.node_unit < 1 or self.least_nodes > self.max_nodes:
            return (
                f"--node-unit={self.node_unit} does not fit --nnodes={self.min_nodes}:{self.max_nodes}: worlds have a"
                " multiple of it, and none lies between MIN and MAX"
            )
        if not self.node_timeout >= LEAST_NODE_TIMEOUT_SECONDS:
            return (
                f"--node-timeout={self.node_timeout:g}: an agent whose heartbeat was lost is heard again within "
                f"{LEAST_NODE_TIMEOUT_SECONDS:g} s, so that is the least"
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
    # Digest of the resume point, "" for step 0; and how it is loaded.
    resume: str = ""
    universal: bool = False
    resharded: bool = False
    resumed_step: int = 0
    causes: tuple[str, ...] = ()
    # The step that the run had reached when the previous world ended.
    left_step: int = 0
    grown: bool = False
    # How many members were not in the world before.
    arrived: int = 0

    @cached_property
    def size(self) -> int:
        """Number of workers."""
        return sum(member.nproc for member in self.members)

    @cached_property
    def by_incarnation(self) -> dict[str, Member]:
        return {member.incarnation: member for member in self.members}

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """For each member the global rank of its first worker."""
        firsts, first = [], 0
        for member in self.members:
            firsts.append(first)
            first += member.nproc
        return tuple(firsts)

    def member(self, incarnation: str) -> Member | None:
        return self.by_incarnation.get(incarnation)


@dataclass(frozen=True)
class Told:
    """What people have been told about the open world, each thing once."""

    # Its first step was reported.
    first_step: bool = False
    # It has started, and no step of it is reported yet.
    unheard: bool = False
    # It counts as a world whose steps are not reported: its script may have no session.
    start: bool = False
    # Nobody can tell whether it is stuck.
    doubt: bool = False


@dataclass(frozen=True)
class Opened:
    """The world that was opened last: made when it opens, dropped when the next opens or an ended job starts anew."""

    world: World
    # The state of its members by incarnation. It changes in place, so `Job.copy` copies it.
    parts: dict[str, MemberState]
    told: Told = Told()


@dataclass(frozen=True)
class Drain:
    """Why the open world is saving and stopping."""

    growth: bool
    reason: str
    # It began because the world exceeds a limit.
    shrink: bool = False
    agreed: bool = False
    # The last step known when it began. Its boundary comes later, so a report of an earlier one is old news.
    after: int = 0
    # It began for newcomers, so the next world has grown, no matter who leaves meanwhile.
    grown: bool = False

    @property
    def subject(self) -> str:
        """What waits for it, for a person."""
        return "growing" if self.growth else "scaling down" if self.shrink else f"the drain ({self.reason})"

    @property
    def optional(self) -> bool:
        """Whether nobody leaves: if it cannot be done now, the ranks train on, and it is tried again."""
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
    # All ranks agree to refuse: another start would end in the same way.
    refused: bool = False


@dataclass(frozen=True)
class SaveOrder:
    """Somebody wants a save: it stands until a step after `after` is committed."""

    number: int
    after: int


@dataclass(frozen=True)
class Budget:
    """Failures without progress, see `failures`."""

    failures: int = 0
    # Step of the last failure that counted. A commit beyond it, or beyond `saved_step`, refills the budget.
    last_step: int = 0
    pending: Failure | None = None
    # Incarnations that had not answered when the world after a failure opened: were they lost, or only slow?
    doubtful: tuple[str, ...] = ()
    # The failure that people were told of in full last. The furthest save that has counted as progress.
    told: str = ""
    saved_step: int = 0


@dataclass(frozen=True)
class GoneBack:
    """A start of the run asked for an earlier step, for the nth time, when this was the last opened epoch."""

    step: int
    time: int
    epoch: int


@dataclass(frozen=True)
class Run:
    """One training from step 0 to its end; dropped when the next one begins."""

    number: int = 1
    # It was begun by --new-run.
    begun_anew: bool = False
    # How often it was resumed after a failure since its last commit.
    reopened: int = 0
    ever_stepped: bool = False
    # The script's workers have said hello: it can drain, and reports its steps.
    has_session: bool = False
    budget: Budget = Budget()
    stalls: int = 0
    growths: int = 0
    # Cost of the last growth.
    growth_cost_seconds: float = 0.0
    # The step that it had reached when its last world ended.
    left_step: int = 0
    # The earlier steps that it went back to, in order.
    gone_back: tuple[GoneBack, ...] = ()
    shapes: Shapes = field(default_factory=Shapes)
    # The last ones, oldest first.
    milestones: tuple[Milestone, ...] = ()


@dataclass(frozen=True)
class Recollection:
    """What agents remember of a store that was lost; kept until a world opens."""

    # The master hears all of them out before it opens a world.
    listening: bool = False
    # The highest epoch that they remember.
    epoch: int = 0
    # The epoch as of which the settings in force are remembered; -1 if nobody remembers them.
    settings_epoch: int = -1


@dataclass
class Job:
    """Everything that outlives the master's process."""

    job_id: str
    embedded: bool = False
    generation: int = 0
    settings: Settings = field(default_factory=Settings)
    # --nnodes was given to the master, so agents do not set it.
    fixed_nnodes: bool = False
    # The most nodes that a world may have, if fewer than max; 0: max.
    limit: int = 0
    settled: bool = False
    run: Run = field(default_factory=Run)
    phase: Phase = Phase.WAITING
    epoch: int = 0
    opened: Opened | None = None
    drain: Drain | None = None
    next: NextWorld = field(default_factory=lambda: NextWorld(quiet=True))
    recollection: Recollection = Recollection()
    nodes: Nodes = field(default_factory=Nodes)
    arrivals: int = 0
    # Content of the probe file as the nodes that count read it.
    probe: str = ""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    # What closed epochs sealed too late: it never counted, and its files may be deleted.
    late: tuple[Checkpoint, ...] = ()
    # What was committed and is deleted, oldest first: it may still become a milestone.
    pruned: tuple[Pruned, ...] = ()
    # Numbers of leases and of orders to verify so far; each has a number of its own.
    leases: int = 0
    verifications: int = 0
    # Growths in a row for which nobody could convert.
    conversion_failures: int = 0
    # How often each node name was held because it was lost after its world had made a step.
    losses: dict[str, int] = field(default_factory=dict)
    # Names that are spares for now, and for how many seconds (which begin anew with a new master).
    holds: dict[str, float] = field(default_factory=dict)
    # How it ended.
    message: str = ""
    # It has failed, and ends when what it has in memory alone is on the disk.
    ending: Ending | None = None
    # Everybody was told to save and go: nobody is let in any more, and the job is STOPPED when all have gone.
    stopping: bool = False
    save_order: SaveOrder | None = None
    events: tuple[JobEvent, ...] = ()
    # What agents said about their own nodes.
    remarks: tuple[JobEvent, ...] = ()
    # Numbers of the last event, and of the last one that consoles show.
    sequence: int = 0
    noticed: int = 0
    history: tuple[EpochRecord, ...] = ()

    def copy(self) -> Job:
        """A copy that later changes of this one do not affect."""
        other = copy.copy(self)
        other.nodes, other.checkpoints = self.nodes.copy(), self.checkpoints.copy()
        other.losses, other.holds = dict(self.losses), dict(self.holds)
        if self.opened is not None:
            other.opened = replace(self.opened, parts=dict(self.opened.parts))
        return other

    @property
    def run_id(self) -> str:
        return run_name(self.run.number)

    @property
    def world(self) -> World | None:
        """The last opened world."""
        return self.opened.world if self.opened is not None else None

    @property
    def parts(self) -> dict[str, MemberState]:
        """The state of the members of `world`, by incarnation; empty if there is no world."""
        return self.opened.parts if self.opened is not None else {}

    @property
    def told(self) -> Told:
        """What people have been told about `world`."""
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
        """Whether the next world will have grown, as things stand."""
        return self.next.grown or (self.drain is not None and self.drain.grown)

    @property
    def most_nodes(self) -> int:
        """The most nodes of a world: --nnodes' maximum, or what the job was scaled to."""
        return min(self.limit or self.settings.max_nodes, self.settings.max_nodes)

    @property
    def round(self) -> int:
        """The epoch that would be opened next."""
        return self.epoch + 1

    @property
    def notices(self) -> tuple[JobEvent, ...]:
        """The newest events that consoles show, oldest first."""
        said = islice((event for event in reversed(self.events) if event.said), NOTICES)
        return tuple(reversed(tuple(said)))

    def checkpoint(self, digest: str) -> Checkpoint | None:
        return self.checkpoints.get(digest)

    def node_by(self, incarnation: str) -> Node | None:
        return self.nodes.by(incarnation)

    def part(self, member: Member) -> MemberState:
        return self.parts[member.incarnation]
