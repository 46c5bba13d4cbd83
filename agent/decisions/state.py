"""The state on which the agent decides. Collections are immutable and replaced, so a shallow copy is a full one."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from dalsegno.protos import control_pb2
from dalsegno.protos.contract import CONNECT_TIMEOUT_SECONDS, MASTER_OUTAGE_TIMEOUT_SECONDS, JobSettings

from .events import HeldChanged


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
    """The agent's settings. Durations are in seconds."""

    nproc: int = 1
    # As the user gave it; empty: the master gives one.
    node_name: str = ""
    drain_timeout: float = JobSettings.drain_timeout
    # What its script saves on a notice becomes the run's, although it has no session.
    adopts: bool = False
    # Asks workers without a session to save before they are ended; empty: they are not asked.
    save_signal: str = ""
    # Silence of the master after which this node's workers stop, even if nobody hears it; 0: they go on.
    self_fence: float = 0.0
    master_outage_timeout: float = MASTER_OUTAGE_TIMEOUT_SECONDS
    # Where the master was looked for, for a person (empty: it is the job's own), what to say if none answers there, and
    # behind that if another program does; and the token's file, if it has one.
    addresses: str = ""
    hint: str = ""
    advice: str = ""
    token_file: str = ""
    # How long the first registration may go without any answer.
    connect_timeout: float = CONNECT_TIMEOUT_SECONDS
    # How long a leaver whose part is safe still waits for the master's word.
    release_timeout: float = 5.0
    # How long it may take to save what workers without a session left in memory, once they are gone.
    save_timeout: float = 0.0


@dataclass
class Door:
    """A registration under way, and why it takes long; made anew when it has succeeded."""

    registering: bool = False
    # For the first registration: when people are told that the checkpoint directory keeps it waiting. Then, once it is
    # sent: until when a master must have answered, and the last reason why it was put off.
    look_told_at: float | None = None
    told_look: bool = False
    answer_deadline: float | None = None
    # Behind a long stop of this process there was time for an answer once.
    granted: bool = False
    # People know that nobody has answered yet.
    told: bool = False
    postponed: str = ""
    # If another live node holds the user's node name: when to ask again, and until when.
    register_at: float | None = None
    name_deadline: float | None = None
    # This node's address before and behind a move that the master may not know: since it asked, or while it was alone.
    moved: tuple[str, str] | None = None


@dataclass(frozen=True)
class Join:
    """An answer to the master's order to join: prepared, then sent. Each preparation makes another one."""

    round: int
    # Digest of the checkpoint that is looked for; empty if there is none.
    resume: str = ""
    # It is looked for without an end: the master knows that it is not in sight.
    patient: bool = False
    # Its parts are fetched from the memory of nodes; which ones, where this node needs some only.
    gathers: bool = False
    some: frozenset[int] | None = None
    sent: bool = False
    # How often it could not be prepared; it was sent without what was to be fetched.
    failures: int = 0
    lacks: bool = False
    # When the same Join is prepared again.
    again_at: float | None = None
    # In this epoch it first takes over what the script saved last; 0: nobody has asked for that.
    takes: int = 0

    def answers(self, round: int, resume: str) -> bool:
        """Whether it answers this order."""
        return (self.round, self.resume) == (round, resume)


@dataclass
class Admission:
    """How this node gets a place in a world; made anew when it has one, and with each registration."""

    # What the master wants: a Join, or to wait for a place.
    order: control_pb2.Gather | control_pb2.Wait | None = None
    # What this agent prepares or has sent.
    join: Join | None = None
    # Digest of the checkpoint that the last Join was asked about and did not have in sight.
    unseen: str = ""


@dataclass(frozen=True)
class Spill:
    """What a leaver writes to the disk of its memory; made anew for each step that it writes."""

    digest: str
    # It is over; and it went well, so that the step is on the disk as a whole. Or these parts are.
    over: bool = False
    sealed: bool = False
    written: tuple[int, ...] = ()
    # It failed, so that nothing new is there: when it is tried again. And what people were told about that last.
    again_at: float | None = None
    said: str = ""


@dataclass
class Leave:
    """A notice: this node goes, at the latest when the notice ends. Made with the first signal, or by an order."""

    deadline: float
    # A signal has come; before that it was an order of the master's. Then the whole job may be stopped.
    signalled: bool = True
    # When the first came: what comes with it is the same notice.
    signalled_at: float = float("-inf")
    stop: bool = False
    # Only SIGHUP has come. It may overtake the SIGTERM that belongs to it.
    hung_up: bool = False
    # The master refuses this node's token.
    refused: bool = False
    # This node can start no workers any more.
    unfit: bool = False
    # Workers were running when it came: without their save the run goes back to its last commit.
    unsaved: bool = False
    # Behind a long stop of this process there was time for what lay unread once.
    granted: bool = False
    # Until when this node waits for the master's word, once its part is safe.
    release_deadline: float | None = None
    # The master has let it go.
    released: bool = False
    spill: Spill | None = None


@dataclass(frozen=True)
class DrainOrder:
    """The master's order to save and stop; dropped with the next order of another kind."""

    # How its save ends, as `control.Ending`.
    ending: int = control_pb2.ENDING_TOGETHER
    # All other nodes that still save have a notice, too, or there are none.
    all_leave: bool = False
    # Its save goes to memory.
    to_memory: bool = False
    # The master knew of this node's own notice when it said so, and some other node has none.
    others_stay: bool = False


@dataclass(frozen=True)
class MasterContact:
    """The connection to the master; made anew when it is lost, and when it is back."""

    up: bool = True
    lost_at: float | None = None
    # This node drains because it alone has lost the master.
    drain: bool = False
    # It answers, and refuses this node's token.
    refused: bool = False
    # It could record what it decides when it was heard last: else it gives no orders, though it is heard.
    records: bool = True


@dataclass(frozen=True)
class DurableOrder:
    """The master's order to bring a step to the disk: see `control.MakeDurable`."""

    ref: control_pb2.CheckpointRef
    write: tuple[int, ...] = ()
    seal: bool = False
    look: bool = False

    @property
    def digest(self) -> str:
        return self.ref.digest

    def covers(self, other: DurableOrder) -> bool:
        """Whether who carries this out carries out the other one, too."""
        less = bool(other.write) and set(other.write) <= set(self.write) and self.look == other.look
        return self.digest == other.digest and (self == other or less)


@dataclass
class NodeMemory:
    """What this node's memory has of checkpoints. It outlives ranks, worlds and incarnations, as its files do."""

    # The job keeps checkpoints in memory.
    in_use: bool = False
    # What is held here, by digest.
    held: Mapping[str, HeldChanged] = field(default_factory=dict)
    # The epoch and the digests that are kept, as was said last.
    kept: tuple[int, frozenset[str]] = (0, frozenset())
    # What is being written to the disk because the master asked, and what has been, while it still asks.
    writing: DurableOrder | None = None
    wrote: DurableOrder | None = None
    # Digest of a step that could not be loaded from here, while it is looked at.
    doubting: str = ""
    # When parts of a step that this node gathers were last told; the step of which more have come since.
    parts_told_at: float = float("-inf")
    parts_untold: str = ""
    # When the master last heard that this node gathers.
    gathering_told_at: float = 0.0
    # The newest commit, if it is in memory alone.
    head: control_pb2.CheckpointRef | None = None
    # Names: the best checkpoint as of the newest commit, and what was on its way to the disk to be that.
    best: str = ""
    candidate: str = ""


@dataclass(frozen=True)
class FlashPart:
    """What the workers left on this node of a Flash Checkpoint whose other parts are on other nodes."""

    step: int  # 0: nothing
    # Until when the master's word, and then the disk, is waited for.
    deadline: float
    saving: bool = False
    over: bool = False


@dataclass(frozen=True)
class SaveInFlight:
    """How far the ranks have come with a save; made anew when it ends, even for the next one of the same name."""

    name: str = ""
    # By rank: bytes of its part; bytes in the save's files, as it sees them (0, or no entry: there are none); why it
    # cannot write its part, while it waits for the others.
    parts: Mapping[int, int] = field(default_factory=dict)
    written_bytes: Mapping[int, int] = field(default_factory=dict)
    problems: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """How long the ranks took to start."""

    # When the agent began to start them; seconds until the last had opened its session, and had loaded.
    began: float = 0.0
    session_seconds: float = 0.0
    loaded_seconds: float = 0.0


@dataclass(frozen=True)
class OwnSave:
    """What the ranks can save by themselves when their world has broken."""

    # Ranks that may be able to save the last boundary, and those that have begun to.
    keepers: frozenset[int] = frozenset()
    writers: frozenset[int] = frozenset()
    # Writers whose processes then leave the world, and wait for a place in the next one.
    stayers: frozenset[int] = frozenset()
    # The world has broken: until when these ranks have time for that.
    until: float | None = None


@dataclass(frozen=True)
class SealedInMemory:
    """A step that a rank has sealed in this node's memory."""

    digest: str
    # Until when it is waited for to be held; None: nobody has waited for that yet.
    until: float | None = None


@dataclass(frozen=True)
class SentSteps:
    """Digests of the steps in memory that nodes send to each other; empty: there is none. See `control.Replication`."""

    sending: str = ""
    sent: str = ""
    replicated: str = ""
    # What the master was told of and has not answered yet, oldest first.
    asked: tuple[str, ...] = ()
    # Which master has said so; and what earlier ones had sent last, since they may have told others that it outlives a
    # node.
    generation: int = 0
    earlier: tuple[str, ...] = ()
    # What this master has named before: an answer that names one of these again was overtaken on its way.
    past: tuple[str, ...] = ()

    @property
    def newest(self) -> str:
        """What is sent now, or was sent last."""
        return self.sending or self.sent


@dataclass
class Epoch:
    """What is known of the ranks that this agent started last; made anew with each start."""

    outcome: Outcome = Outcome.NONE
    exits: tuple[tuple[int, int], ...] = ()
    drained_ranks: frozenset[int] = frozenset()
    finished_ranks: frozenset[int] = frozenset()
    # Why they failed, and when people are told here, if the master has not answered by then.
    untold_failure: tuple[str, float] | None = None
    # Those that have ended with exit code 0, whose exits may be reported only later.
    ended_well: frozenset[int] = frozenset()
    drained: control_pb2.CheckpointRef | None = None
    # That is in memory. Until when its part is waited for before the drain is reported.
    drained_in_memory: bool = False
    part_deadline: float | None = None
    # Digest of what this node, which stays, writes to the disk because it hears no master.
    spilled: str = ""
    # They were stopped because nobody heard the master; it does not know that yet.
    self_fenced: bool = False
    # They have saved when they were asked to, before they were ended.
    answered: bool = False
    # What these ranks drained into came too late: a newer epoch was open already.
    refused: bool = False
    # Steps in memory that the agents are to bring to the disk, by digest.
    to_disk: Mapping[str, int] = field(default_factory=dict)
    # The last step of this epoch that a rank of this node has sealed, and the last that the master says is committed.
    sealed_step: int = 0
    committed_step: int = 0
    # The last of these that is on the disk, and not in memory alone.
    durable_step: int = 0
    step: int = 0
    # The step that Flash Checkpoint's saver has brought to the disk after the end of these ranks.
    flash_step: int = 0
    flash_part: FlashPart | None = None
    # Whether `step` is exactly the last one made, because it was read after a rank's end.
    counted: bool = False
    loss: float = math.nan
    longest_seconds: float = 0.0
    # Bytes of all saves so far.
    saved_bytes: int = 0
    saving: SaveInFlight = SaveInFlight()
    # Signs of life between steps, by rank.
    beats: Mapping[int, int] = field(default_factory=dict)
    has_session: bool = False
    start: Start = Start()
    # The script's loop saves nothing, at a drain either.
    saves_nothing: bool = False
    # A rank has imported session(), although its script's text did not say so.
    expects_session: bool = False
    # The standby workers for the next epoch are ready.
    warm: bool = False
    agreed: bool = False
    # The step of the last save that failed, and why.
    save_failure: tuple[int, str] = (0, "")
    # The step of the last one that was no drain's, as the first rank here tells; and whether it had failed before.
    failed_step: int = 0
    tried_again: bool = False
    anyone_sees_master: bool = False
    bad_reported: bool = False
    # Refusals that all ranks agreed on, by the ranks that reported them and have made no step since.
    refusals: Mapping[int, str] = field(default_factory=dict)
    # Ranks that reported that they end because a connection to another rank broke, and have made no step since.
    peer_lost: frozenset[int] = frozenset()
    own_save: OwnSave = OwnSave()
    # What was sealed in memory last, until it is known to be held; None: nothing was.
    sealed_in_memory: SealedInMemory | None = None
    sent_steps: SentSteps = SentSteps()
    # The flags as the workers were told last.
    told: tuple[bool, bool, int, bool, bool, int] = (False, False, 0, False, False, 0)


@dataclass
class Errands:
    """What this incarnation does for the master beside its ranks; dropped whole with the incarnation.

    Answers that it has not sent by then are lost with it, and its successor is asked anew.
    """

    # Manifests being read before their commit is sent; a drain is reported after them.
    reading: frozenset[str] = frozenset()
    # Number of the last verification that the master asked for; a new master may begin with 1 again.
    verified: int = 0
    # Names of the checkpoints that are being deleted; empty: none.
    pruning: tuple[str, ...] = ()
    # Digest of the last checkpoint that this node was asked to look for.
    sighting: str = ""


@dataclass(frozen=True)
class Quotes:
    """How many lines the master was told, in seconds that end then."""

    until: float = 0.0
    count: int = 0


@dataclass
class AgentState:
    """Everything the agent decides on. Collections are immutable and replaced.

    Attributes:
        door: the registration under way.
        epoch: the ranks that were started last.
        errands: what this incarnation owes the master.
        place: the way to a place in the next world.
        drain: the master's order to save and stop; None: it has given none.
        memory: what is in the memory of this node.
        contact: the connection to the master.
        leave: the notice; None: none came.
    """

    settings: AgentSettings = field(default_factory=AgentSettings)
    node: str = ""
    incarnation: str = ""
    generation: int = 0
    door: Door = field(default_factory=Door)
    run_id: str = ""
    phase: int = control_pb2.PHASE_UNSPECIFIED
    # The world whose workers this agent started last, and what is known of them.
    world: control_pb2.World | None = None
    started: int = 0
    workers: Workers = Workers.NONE
    epoch: Epoch = field(default_factory=Epoch)
    quotes: Quotes = Quotes()
    # For STOPPING: when it is over, whatever became of the processes.
    stop_deadline: float = 0.0
    # For STOPPING, as `Door.granted`.
    stop_granted: bool = False
    # Some rank that this agent ever started has opened a session, so the script has one, even before its hello.
    session_known: bool = False
    drain: DrainOrder | None = None
    # Number of the master's order to save and train on; 0: none.
    save_order: int = 0
    memory: NodeMemory = field(default_factory=NodeMemory)
    place: Admission = field(default_factory=Admission)
    # What people were last told about why this node waits, and why a Join could not be prepared: each once.
    wait_said: str = ""
    join_problem: str = ""
    warm: bool = False
    errands: Errands = field(default_factory=Errands)
    # Seconds that the manifests being read took to save, by name.
    took_seconds: Mapping[str, float] = field(default_factory=dict)
    lease: int = 0
    # The digests of the newest commit, and of the one that this node has copied for people.
    head: str = ""
    latest: str = ""
    # The run has a committed checkpoint.
    has_head: bool = False
    notice: int = 0
    # From the last directive.
    heard_generation: int = 0
    # The last opened epoch, with this node or without.
    open_epoch: int = 0
    # Whether a directive has come in before.
    directed: bool = False
    contact: MasterContact = field(default_factory=MasterContact)
    leave: Leave | None = None
    fenced: bool = False
    ended: bool = False
    wake: float | None = None

    def copy(self) -> AgentState:
        """A copy that later changes of this one do not affect."""
        other = copy.copy(self)
        other.door, other.epoch = copy.copy(self.door), copy.copy(self.epoch)
        other.errands = copy.copy(self.errands)
        other.place, other.leave, other.memory = copy.copy(self.place), copy.copy(self.leave), copy.copy(self.memory)
        return other

    def where(self, job_id: str) -> str:
        """The present `job/node/epoch/step`, for the log."""
        return f"{job_id}/{self.node or '-'}/{self.started}/{self.epoch.step}"

    @property
    def leaving(self) -> bool:
        """Whether a notice has come."""
        return self.leave is not None


def fresh(settings: AgentSettings) -> AgentState:
    """The state of an agent that has just started."""
    return AgentState(settings=settings)
