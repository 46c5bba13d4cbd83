"""The master's state: `Job` is durable, `Live` is not.

`Job` holds no times, only durations and facts, so that a master that starts again can go on with it: every deadline
then starts anew, and every node of the stored world is presumed alive for one node-timeout (docs/architecture.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Phase(str, Enum):
    """The job's phases; see `phases` for what each waits for."""

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


# A heartbeat comes a second after the last word, and is given 3 s before the next one is sent: one that got lost must
# be no death. Agents refuse less on their own command line, too.
LEAST_NODE_TIMEOUT = 5.0


@dataclass
class Settings:
    """As `dalsegno.control.v1.Settings`; durations in seconds, negative for "auto" or "for ever"."""

    min_nodes: int = 1
    max_nodes: int = 1
    node_unit: int = 1
    node_timeout: float = 15.0
    drain_timeout: float = 30.0
    join_timeout: float = 60.0
    stall_timeout: float = 600.0
    grow_interval: float = -1.0
    grow_wait: float = 300.0
    wait_for_nodes: float = -1.0
    quiet_time: float = 1.0
    max_restarts: int = 3
    # Universal files at each change of shape, also where ranks could re-shard; agents hand scripts the flag then.
    universal_checkpoint: bool = False
    keep_checkpoints: int = 3

    @property
    def problem(self) -> str:
        """What is wrong with them, in one line; empty where nothing is."""
        if not 1 <= self.min_nodes <= self.max_nodes:
            return f"--nnodes={self.min_nodes}:{self.max_nodes}: MIN must be at least 1 and at most MAX"
        if self.node_unit < 1 or self.max_nodes < self.node_unit:
            return f"--node-unit={self.node_unit} does not fit --nnodes={self.min_nodes}:{self.max_nodes}"
        if not self.node_timeout >= LEAST_NODE_TIMEOUT:
            return (
                f"--node-timeout={self.node_timeout:g}: an agent whose heartbeat was lost is heard again within "
                f"{LEAST_NODE_TIMEOUT:g} s, so that is the least"
            )
        return ""


@dataclass
class Joined:
    """A node's answer to one round: the fresh store it offers and the checkpoints it has in sight (digests)."""

    round: int
    resume: str
    store_host: str
    store_port: int
    seen: list[str] = field(default_factory=list)


@dataclass
class Node:
    """A registered agent."""

    name: str
    incarnation: str
    host: str
    nproc: int
    # Registrations are numbered: newcomers keep the order of their arrival.
    order: int
    sees_directory: bool = True
    # Content of the probe file as this node reads it.
    probe: str = ""
    joined: Joined | None = None
    warm: bool = False
    leaving: bool = False
    # The resume point that this node alone could not read.
    unreadable: str = ""
    # What its agent tells its person about this registration.
    remark: str = ""
    # The last changing call and its answer, so that a repeat has no second effect.
    request: int = 0
    answer: tuple[str, str] = ("OK", "")


@dataclass
class Member:
    """A node in a world."""

    node: str
    incarnation: str
    host: str
    nproc: int
    group_rank: int
    part: Part = Part.RUNNING


@dataclass
class World:
    """The nodes of one epoch with their group ranks, and what they start from."""

    epoch: int
    members: list[Member]
    store_host: str
    store_port: int
    # Digest of the resume point, "" for step 0, and how it is loaded.
    resume: str = ""
    universal: bool = False
    resharded: bool = False
    resumed_step: int = 0
    causes: list[str] = field(default_factory=list)
    # The step that the run had reached when the world before this one ended.
    left_step: int = 0
    grown: bool = False
    # Its first step was heard, and said.
    announced: bool = False
    # It was said to have started, as nothing is heard of its steps.
    presented: bool = False
    # It was said that nobody can tell whether it is stuck.
    doubted: bool = False

    @property
    def size(self) -> int:
        return sum(member.nproc for member in self.members)

    def member(self, incarnation: str) -> Member | None:
        return next((member for member in self.members if member.incarnation == incarnation), None)


@dataclass
class Checkpoint:
    """A committed checkpoint: what its manifest says, its later form, and whether it may still be chosen."""

    name: str
    digest: str
    step: int
    epoch: int
    world_size: int
    strategy: str = ""
    any_world_size: bool = False
    # Ranks of another world can take their ranges of it. No longer once such a world failed before its first step.
    reshards: bool = False
    data_epoch: int = 0
    samples: int = 0
    resumed_from: str = ""
    bytes: int = 0
    # 0: not known.
    largest_file: int = 0
    metric: float | None = None
    # Name of the run's best checkpoint as of this one; empty where no metric is tracked.
    best: str = ""
    # How many checkpoints the script wants kept; None: as the job's settings have it.
    keep: int | None = None
    universal_name: str = ""
    universal_digest: str = ""
    # Digests of later forms that turned out to be damaged: never adopted again.
    dropped: list[str] = field(default_factory=list)
    retired: bool = False
    # Retired because it is damaged: its files stay until a newer checkpoint is committed.
    damaged: bool = False


@dataclass
class Conversion:
    """The universal form of `source` is wanted. `owner` holds the lease `lease`; 0 when nobody does."""

    source: str
    lease: int = 0
    owner: str = ""
    # Names of the nodes on which it failed although the source verifies.
    failed: list[str] = field(default_factory=list)
    # Directories of leases on the same source that came before.
    earlier: list[str] = field(default_factory=list)
    blocked: bool = False
    reason: str = ""


@dataclass
class Verification:
    """One node could not load a checkpoint; another looks at it before anything is concluded."""

    number: int
    digest: str
    universal: bool
    reporter: str
    verifier: str = ""
    message: str = ""
    # Names of those that could not tell, as often as they were asked.
    unable: list[str] = field(default_factory=list)


@dataclass
class Drain:
    """Why the open world is saving and stopping."""

    growth: bool
    reason: str
    # For a limit that the world exceeds.
    shrink: bool = False
    agreed: bool = False
    # The last step known when it began: its boundary comes later, and what speaks of an earlier one is late news.
    after: int = 0

    @property
    def optional(self) -> bool:
        """Nobody goes: if it cannot be done now, the ranks train on, and it is tried again."""
        return self.growth or self.shrink


@dataclass
class Failure:
    """A failure of the closed epoch that may count against the budget."""

    epoch: int
    node: str
    message: str
    step: int


@dataclass
class Notice:
    """One line for all consoles."""

    sequence: int
    text: str
    warning: bool = False


@dataclass
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
    # After a lost store: the epoch of which the settings in force are remembered; -1 where nobody's memory says them.
    settings_epoch: int = -1
    run: int = 1
    # It was begun by --new-run.
    begun_anew: bool = False
    # So often it was taken up again after it had failed, since it committed something.
    reopened: int = 0
    phase: Phase = Phase.WAITING
    epoch: int = 0
    world: World | None = None
    nodes: dict[str, Node] = field(default_factory=dict)
    arrivals: int = 0
    # Content of the probe file as the nodes that count read it.
    probe: str = ""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    # What closed epochs sealed too late: it never counted, and its files may go.
    late: list[Checkpoint] = field(default_factory=list)
    conversion: Conversion | None = None
    leases: int = 0
    conversion_failures: int = 0
    verification: Verification | None = None
    verifications: int = 0
    drain: Drain | None = None
    # A start, or out of WAITING: agents nobody has heard of may be on their way.
    quiet: bool = True
    listening: bool = False
    # The highest epoch that agents remember of a lost store.
    listening_epoch: int = 0
    ever_stepped: bool = False
    # The script's workers have said hello: it can drain, and its steps are heard of.
    has_session: bool = False
    failures: int = 0
    last_failure_step: int = 0
    pending_failure: Failure | None = None
    # Incarnations that had not answered when the world after a failure opened: were they lost, or only slow?
    doubtful: list[str] = field(default_factory=list)
    # How often each node name was lost after its world had made a step.
    losses: dict[str, int] = field(default_factory=dict)
    # Names that are spares for now, and for how long (seconds; begins anew with a new master).
    holds: dict[str, float] = field(default_factory=dict)
    stalls: int = 0
    growths: int = 0
    growth_cost: float = 0.0
    causes: list[str] = field(default_factory=list)
    grown: bool = False
    left_step: int = 0
    message: str = ""
    notices: list[Notice] = field(default_factory=list)
    noticed: int = 0
    history: list[EpochRecord] = field(default_factory=list)

    @property
    def run_id(self) -> str:
        return f"run-{self.run:04d}"

    @property
    def most_nodes(self) -> int:
        """Of a world: --nnodes' maximum, or what the job was scaled to."""
        return min(self.limit or self.settings.max_nodes, self.settings.max_nodes)

    @property
    def round(self) -> int:
        """The epoch that would be opened next."""
        return self.epoch + 1

    def checkpoint(self, digest: str) -> Checkpoint | None:
        return next((record for record in self.checkpoints if record.digest == digest), None)

    def node_by(self, incarnation: str) -> Node | None:
        return next((node for node in self.nodes.values() if node.incarnation == incarnation), None)


@dataclass
class Live:
    """What only this process knows; times are monotonic seconds of this process."""

    heard: dict[str, float] = field(default_factory=dict)
    # Nodes of the stored state that have not spoken to this process yet.
    presumed: set[str] = field(default_factory=set)
    closed: dict[str, float] = field(default_factory=dict)
    # Nodes that have registered and not opened their stream yet.
    unopened: set[str] = field(default_factory=set)
    joined_at: dict[str, float] = field(default_factory=dict)
    asked_at: dict[str, float] = field(default_factory=dict)
    unexpected: set[str] = field(default_factory=set)
    held_until: dict[str, float] = field(default_factory=dict)
    lost_at: dict[str, list[float]] = field(default_factory=dict)
    # Steps of the open epoch, by node, and when each node advanced last.
    steps: dict[str, int] = field(default_factory=dict)
    advanced: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0
    longest: float = 0.0
    saved_bytes: dict[str, int] = field(default_factory=dict)
    beats: dict[str, int] = field(default_factory=dict)
    # Nodes whose ranks have no step left to make: what the script still does, it does without steps.
    ended: set[str] = field(default_factory=set)
    trouble: bool = False
    first_step_at: float | None = None
    moved_at: float = 0.0
    phase_since: float = 0.0
    last_arrival: float = 0.0
    drain_deadline: float | None = None
    # When leavers are gone, by node.
    leave_by: dict[str, float] = field(default_factory=dict)
    growth_done_at: float | None = None
    grow_hold_until: float = 0.0
    grow_after_commit: bool = False
    # Newcomers of which was said when everybody is restarted for them.
    growth_told: set[str] = field(default_factory=set)
    committed_at: float = 0.0
    conversion_moved: float = 0.0
    # The most that the lease's owner has reported: files finished, bytes moved.
    conversion_done: tuple[int, int] = (-1, 0)
    retry_at: float = 0.0
    retry_pause: float = 0.0
    # When the verifier was asked, or last read something new; and how much it has read, bytes.
    verify_moved: float = 0.0
    verify_bytes: int = 0
    listen_until: float | None = None
    paused_since: float | None = None
    deaf: bool = False
    # Ranks of the open epoch have agreed to save and stop, whoever told them: their steps stand still until then.
    stopping: bool = False
    # When everybody's time began anew, because nobody could be heard before.
    forgiven_at: float = float("-inf")


@dataclass
class State:
    """All that the brain knows: what is stored, and what is not."""

    job: Job
    live: Live = field(default_factory=Live)
    # When the brain wants a Tick, monotonic seconds; None: not before the next event.
    wake: float | None = None
