"""What the agent's decisions are made on. Collections are immutable and replaced, so a shallow copy is a full one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from dalsegno.protos import control_pb2


class Workers(str, Enum):
    """What this node's workers are doing."""

    NONE = "none"
    RUNNING = "running"
    # They were told to stop: until the shell says that they are gone, at the latest until `stop_deadline`.
    STOPPING = "stopping"


class Outcome(str, Enum):
    """How the workers of the last started epoch ended on this node."""

    NONE = "none"
    DRAINED = "drained"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class AgentSettings:
    """Durations in seconds."""

    nproc: int = 1
    # As the user gave it; empty: the master gives one.
    node_name: str = ""
    drain_timeout: float = 30.0
    master_outage_timeout: float = 60.0
    # Where the master was looked for, for a person.
    addresses: str = ""
    # How long the first registration may go without any answer.
    connect_timeout: float = 60.0
    # How long a leaver without a word from the master still waits for one, once its part is safe.
    release_timeout: float = 5.0


@dataclass
class Door:
    """A registration that is under way, and why it takes long; made anew when the door has opened."""

    registering: bool = False
    # Of the first registration: until when a master must have answered it, and what it was put off with.
    answer_deadline: float | None = None
    postponed: str = ""
    # The user's node name is held by another live node: when to ask again, and until when.
    register_at: float | None = None
    name_deadline: float | None = None


@dataclass(frozen=True)
class Join:
    """An answer to the master's order to join: prepared, then sent. Each preparation makes another one."""

    round: int
    # Digest of the checkpoint that is looked for; empty where there is none.
    resume: str = ""
    # Looked for without an end: the master knows that it is not in sight.
    patient: bool = False
    sent: bool = False
    # When the same one is prepared again.
    again_at: float | None = None

    def answers(self, round: int, resume: str) -> bool:
        """Whether it is for this order."""
        return (self.round, self.resume) == (round, resume)


@dataclass
class Place:
    """How this node comes by a place in a world; made anew when it has one, and with each registration."""

    # What the master wants: a Join, or to wait for a place.
    order: control_pb2.Gather | control_pb2.Wait | None = None
    # What this agent prepares or has sent.
    join: Join | None = None
    # Digest of the checkpoint that the last Join was asked about and did not have in sight.
    unseen: str = ""


@dataclass
class Leave:
    """A notice: this node goes, at the latest at its end. Made with the first signal."""

    deadline: float
    # Workers were running when it came: without their save the run goes back to its last commit.
    unsaved: bool = False
    # Until when the master's word is waited for, once this node's part is safe.
    release_deadline: float | None = None


@dataclass
class Epoch:
    """How the ranks fare that this agent started last; made anew with each start."""

    outcome: Outcome = Outcome.NONE
    exits: tuple[tuple[int, int], ...] = ()
    drained_ranks: frozenset[int] = frozenset()
    finished_ranks: frozenset[int] = frozenset()
    drained: control_pb2.CheckpointRef | None = None
    # What these ranks drained into came too late: a newer epoch was open already.
    refused: bool = False
    # The last step of this epoch that a rank of this node has sealed, and that the master says is committed.
    sealed_step: int = 0
    committed_step: int = 0
    step: int = 0
    # `step` is the last that was made: it was read behind the end of a rank.
    counted: bool = False
    loss: float = 0.0
    longest_seconds: float = 0.0
    # Of all saves so far; the one in flight, and how far each rank's part of it is, by rank.
    saved_bytes: int = 0
    saving: str = ""
    saving_parts: Mapping[int, int] = field(default_factory=dict)
    # Size of the files of the one in flight, as each rank sees them; 0, or nothing: there is none.
    written_bytes: Mapping[int, int] = field(default_factory=dict)
    # Signs of life between steps, by rank.
    beats: Mapping[int, int] = field(default_factory=dict)
    has_session: bool = False
    # A rank has imported what session() comes from, which its script's text did not say.
    expects_session: bool = False
    # The standby workers that are to follow these are ready.
    warm: bool = False
    agreed: bool = False
    anyone_sees_master: bool = False
    bad_reported: bool = False
    # What all ranks agreed that they must not train, by the ranks that said so and have made no step since.
    refusals: Mapping[int, str] = field(default_factory=dict)
    # Ranks that end because a connection to another one broke, by their own word, and have made no step since.
    peer_lost: frozenset[int] = frozenset()
    # The flags as the workers were told last.
    told: tuple[bool, bool, int] = (False, False, 0)


@dataclass
class AgentState:
    """Everything the agent decides on. Collections are immutable and replaced.

    Attributes:
        door: of a registration.
        epoch: of the ranks that were started last.
        place: in the world that comes next.
        leave: of a notice; None: none came.
    """

    settings: AgentSettings = field(default_factory=AgentSettings)
    node: str = ""
    incarnation: str = ""
    generation: int = 0
    door: Door = field(default_factory=Door)
    run_id: str = ""
    phase: int = control_pb2.PHASE_UNSPECIFIED
    # The world whose workers this agent started last, and how they fare.
    world: control_pb2.World | None = None
    started: int = 0
    workers: Workers = Workers.NONE
    epoch: Epoch = field(default_factory=Epoch)
    # Of STOPPING: when it is over, whatever became of the processes.
    stop_deadline: float = 0.0
    # Some rank that this agent ever started has opened a session: the script has one, even before its hello.
    session_known: bool = False
    drain_ordered: bool = False
    # How its save ends, a `control.Ending`.
    ending: int = 0
    # The other nodes that still save have a notice, too, or there are none.
    all_leave: bool = False
    drain_for_outage: bool = False
    place: Place = field(default_factory=Place)
    # What the person heard last of why this node waits, and of why a Join could not be prepared: each once.
    wait_said: str = ""
    join_problem: str = ""
    warm: bool = False
    # Manifests being read before their commit is sent; a drain is reported after them.
    reading: frozenset[str] = frozenset()
    # How long they took to save, by name.
    took_seconds: Mapping[str, float] = field(default_factory=dict)
    lease: int = 0
    verified: int = 0
    pruning: tuple[str, ...] = ()
    # Digest of the checkpoint that this node was asked to look for last.
    sighting: str = ""
    head: str = ""
    # The run has a committed checkpoint.
    has_head: bool = False
    notice: int = 0
    # Of the last directive.
    heard_generation: int = 0
    # A directive has come in before.
    directed: bool = False
    link_up: bool = True
    link_lost_at: float | None = None
    leave: Leave | None = None
    fenced: bool = False
    ended: bool = False
    wake: float | None = None

    def copy(self) -> AgentState:
        """The state as it is now, whatever becomes of this one."""
        other = copy.copy(self)
        other.door, other.epoch = copy.copy(self.door), copy.copy(self.epoch)
        other.place, other.leave = copy.copy(self.place), copy.copy(self.leave)
        return other

    @property
    def leaving(self) -> bool:
        """A notice has come."""
        return self.leave is not None


def fresh(settings: AgentSettings) -> AgentState:
    """The state of an agent that has just started."""
    return AgentState(settings=settings)
