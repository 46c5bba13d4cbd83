"""What the agent's decisions receive (events) and what they ask for (actions). Plain values, no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass

from google.protobuf.message import Message

from dalsegno.protos import control_pb2, worker_pb2
from dalsegno.protos.contract import COMMAND_INTERRUPTED as COMMAND_INTERRUPTED
from dalsegno.protos.contract import EXIT_FAILED as EXIT_FAILED
from dalsegno.protos.contract import EXIT_FINISHED as EXIT_FINISHED
from dalsegno.protos.contract import EXIT_LEFT as EXIT_LEFT
from dalsegno.protos.contract import EXIT_LEFT_UNSAVED as EXIT_LEFT_UNSAVED
from dalsegno.protos.contract import EXIT_USAGE as EXIT_USAGE
from dalsegno.protos.contract import WORKER_BAD_CHECKPOINT as WORKER_BAD_CHECKPOINT
from dalsegno.protos.contract import WORKER_DRAINED as WORKER_DRAINED

from .interfaces import AddressChanged as AddressChanged
from .interfaces import MoveTo as MoveTo
from .memory_events import Doubt as Doubt
from .memory_events import Doubted as Doubted
from .memory_events import HeldChanged as HeldChanged
from .memory_events import HoldPart as HoldPart
from .memory_events import KeepInMemory as KeepInMemory
from .memory_events import MadeDurable as MadeDurable
from .memory_events import MakeDurable as MakeDurable
from .memory_events import Replication as Replication
from .memory_events import SendPart as SendPart
from .memory_events import StopWriting as StopWriting
from .storage_events import Look as Look
from .storage_events import ManifestRead as ManifestRead
from .storage_events import MarkFinished as MarkFinished
from .storage_events import Prune as Prune
from .storage_events import Pruned as Pruned
from .storage_events import ReadManifest as ReadManifest
from .storage_events import RoomMissing as RoomMissing
from .storage_events import Sighted as Sighted
from .storage_events import Sweep as Sweep
from .storage_events import VerificationDone as VerificationDone
from .storage_events import VerificationMoved as VerificationMoved
from .storage_events import Verify as Verify
from .storage_events import WriteLatest as WriteLatest

# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """The agent's process is up, and must register."""


@dataclass(frozen=True)
class Registered:
    """The master has admitted this agent. The shell opens `Watch` for this incarnation before it delivers this."""

    incarnation: str
    reply: control_pb2.RegisterReply


@dataclass(frozen=True)
class Postponed:
    """`Register` was answered "not yet"; the shell repeats it."""

    detail: str


@dataclass(frozen=True)
class Refused:
    """`Register` was answered with an error that repeating does not cure."""

    code: str
    detail: str


@dataclass(frozen=True)
class Directed:
    """A directive came in on the stream."""

    directive: control_pb2.Directive


@dataclass(frozen=True)
class CallFailed:
    """A call was answered with an error status. An unreachable master is no error, because the outbox repeats."""

    method: str
    code: str
    detail: str


@dataclass(frozen=True)
class LinkChanged:
    """The master is heard (again), or no longer. `refused`: it answers, but does not take our token."""

    up: bool
    refused: bool = False


@dataclass(frozen=True)
class RecordingChanged:
    """The master that is heard can record what it decides (again), or no longer, as its store is away."""

    records: bool


@dataclass(frozen=True)
class Broken:
    """A bug of ours: this agent cannot speak with its master any more."""

    detail: str


@dataclass(frozen=True)
class WorkerSaid:
    """A message from one of this node's ranks; `epoch` is what its Hello said."""

    epoch: int
    rank: int
    message: worker_pb2.ToAgent


@dataclass(frozen=True)
class WorkerExited:
    """One rank ended. `code` is its exit status, negative for a signal (as in `subprocess`).

    `tells_of_a_peer`: the text of its errors suggests that another rank was gone, which is a guess.
    `had_stayed`: its process had been in the world before.
    """

    epoch: int
    local_rank: int
    code: int
    message: str = ""
    tells_of_a_peer: bool = False
    had_stayed: bool = False


@dataclass(frozen=True)
class StepsCounted:
    """A rank of this epoch has ended, and this is the last step that it made. Comes before its exit."""

    epoch: int
    step: int


@dataclass(frozen=True)
class EndedWell:
    """A rank of this epoch has ended with exit code 0. Comes before its exit, which waits for its last save."""

    epoch: int
    rank: int


@dataclass(frozen=True)
class WorkersStopped:
    """All processes of this epoch's workers are gone after `StopWorkers`.

    Attributes:
        flash_step: what they had in memory of DLRover's Flash Checkpoint is on the disk as of this step; 0: nothing.
        flash_part: the step of this node's part of it, 0 if torn or not there. None: no other node has a part.
        answered: they were asked to save, did, and it is taken.
    """

    epoch: int
    flash_step: int = 0
    flash_part: int | None = None
    answered: bool = False


@dataclass(frozen=True)
class FlashSaved:
    """The answer to `SaveFlash`: this step's part is on the disk; 0: it could not be written."""

    epoch: int
    step: int


@dataclass(frozen=True)
class StartFailed:
    """The workers of this epoch could not be started at all. `unfit`: nor will any others be, on this node."""

    epoch: int
    message: str
    unfit: bool = False


@dataclass(frozen=True)
class SessionImported:
    """A worker of this epoch imports `dalsegno.elastic`: it may call session(), however late."""

    epoch: int


@dataclass(frozen=True)
class Signalled:
    """One of --signals-to-handle reached the agent: a notice to leave."""

    number: int
    # When it came, on the clock of the decisions; None: now. It may be handled later.
    at: float | None = None


@dataclass(frozen=True)
class StandbyWarm:
    """All standby workers of this node have imported what they need and run the script as far as possible.

    Attributes:
        epoch: the epoch whose successors they are; 0: those of this agent's first world.
    """

    epoch: int = 0


@dataclass(frozen=True)
class JoinPrepared:
    """The answer to `PrepareJoin`: a fresh store, and what this node sees now. See `JoinRequest`."""

    round: int
    resume_digest: str
    store_host: str
    store_port: int
    probe: str
    inventory: tuple[control_pb2.Checkpoint, ...]
    unusable: tuple[control_pb2.UnusableCheckpoint, ...] = ()
    # It could not be fetched from the memory of nodes.
    lacks: bool = False
    # The epoch of `PrepareJoin.take`; 0: there was none.
    took: int = 0
    # Which parts were fetched from the memory of nodes, where some of them only were asked for.
    parts: frozenset[int] | None = None


@dataclass(frozen=True)
class JoinFailed:
    """What `PrepareJoin` asked for is not available now."""

    round: int
    resume_digest: str
    message: str
    # See `JoinPrepared`.
    parts: frozenset[int] | None = None


@dataclass(frozen=True)
class LooksAgain:
    """Before it registers, this node looks at the checkpoint directory again, as the file system fails for `reason`."""

    reason: str


@dataclass(frozen=True)
class Asked:
    """The checkpoint directory could be read, and a master is asked to register this node for the first time."""


@dataclass(frozen=True)
class Remark:
    """Something that people must be told about this node, or about what their script does."""

    text: str
    warning: bool = True


@dataclass(frozen=True)
class ConversionUpdate:
    """The conversion job moved, or ended. `checkpoint` describes the sealed universal form if it is READY."""

    lease: int
    state: control_pb2.ConversionState.ValueType
    files_done: int = 0
    files_total: int = 0
    message: str = ""
    checkpoint: control_pb2.Checkpoint | None = None
    # Bytes read, written and synced so far.
    bytes_done: int = 0


@dataclass(frozen=True)
class Tick:
    """The time that `AgentState.wake` names has come."""


Event = (
    Started
    | Registered
    | Postponed
    | Refused
    | Directed
    | CallFailed
    | LinkChanged
    | RecordingChanged
    | Broken
    | WorkerSaid
    | WorkerExited
    | StepsCounted
    | EndedWell
    | WorkersStopped
    | FlashSaved
    | StartFailed
    | Signalled
    | SessionImported
    | StandbyWarm
    | JoinPrepared
    | JoinFailed
    | ManifestRead
    | LooksAgain
    | Asked
    | Remark
    | ConversionUpdate
    | VerificationMoved
    | VerificationDone
    | Pruned
    | RoomMissing
    | Sighted
    | HeldChanged
    | Replication
    | Doubted
    | MadeDurable
    | AddressChanged
    | Tick
)

# ---- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Register:
    """Register with a new incarnation, until the master answers. Drops every unanswered call of the old one.

    `node` is the wanted name; empty: the master gives one.
    """

    previous_incarnation: str = ""
    node: str = ""


@dataclass(frozen=True)
class Call:
    """Call the master: in order, repeated until answered. The shell adds node, incarnation and request number.

    Of several `ReportProgress` only the newest is sent.
    """

    method: str
    request: Message


@dataclass(frozen=True)
class PrepareJoin:
    """Open a fresh store, read probe and inventory; look for `resume` for a bounded time; answer `JoinPrepared`.

    A patient look answers a second time if what it first saw damaged is sound after all.
    """

    round: int
    resume: control_pb2.CheckpointRef | None = None
    # Instead keep looking until it is in sight (for a spare that cannot see it).
    patient: bool = False
    # Where it is, if it is in memory: what is not here is fetched first.
    parts: tuple[control_pb2.HeldPart, ...] = ()
    # The answer is JoinPrepared, although it cannot be fetched: the master has to know.
    anyway: bool = False
    # First take over what the script saved last in this world, whose first node is gone.
    take: control_pb2.World | None = None
    # Which parts these are, if there are more, which this node does not need.
    some: frozenset[int] | None = None


@dataclass(frozen=True)
class StartWorkers:
    world: control_pb2.World


@dataclass(frozen=True)
class StopWorkers:
    """SIGTERM and `grace` seconds, then SIGKILL; 0 kills at once. Answered by `WorkersStopped`.

    SIGKILL comes earlier if they live on and write hardly anything for `still` seconds.
    `work`: nor compute.
    `save`: what they leave in memory of Flash Checkpoint may go to the disk: no newer epoch is open.
    `ask`: the signal that asks them to save first, within the same `grace`; empty: none.
    """

    epoch: int
    grace: float = 0.0
    still: float = math.inf
    save: bool = True
    ask: str = ""
    work: bool = False


@dataclass(frozen=True)
class SaveFlash:
    """Write this node's part of what the workers of the epoch left in memory of Flash Checkpoint; `FlashSaved`."""

    epoch: int
    step: int


@dataclass(frozen=True)
class TellWorkers:
    """Set the flags that the workers' next exchange carries."""

    drain: bool
    master_seen: bool
    # As `control.Ending`.
    ending: int = 0
    # The save of a drain goes to memory.
    to_memory: bool = False
    # The world has broken: save what is held, and end.
    keep: bool = False
    # Number of an order to save at the next boundary and train on; 0: none.
    save_order: int = 0


@dataclass(frozen=True)
class StartConversion:
    conversion: control_pb2.Conversion


@dataclass(frozen=True)
class StopConversion:
    lease: int


@dataclass(frozen=True)
class Say:
    """One line for the person at the console.

    `quoted`: the master makes it an event of the job. It need not where it knows that already, and cannot where it is
    about the master's own silence.
    """

    text: str
    warning: bool = False
    quoted: bool = True


@dataclass(frozen=True)
class Exit:
    """The end of this agent. `final`: the message says all, and a person who reads it need not look for an error."""

    code: int
    message: str = ""
    final: bool = False


Action = (
    Register
    | Call
    | PrepareJoin
    | StartWorkers
    | StopWorkers
    | SaveFlash
    | TellWorkers
    | ReadManifest
    | HoldPart
    | SendPart
    | Doubt
    | MakeDurable
    | StopWriting
    | KeepInMemory
    | StartConversion
    | StopConversion
    | Verify
    | Look
    | Prune
    | WriteLatest
    | Sweep
    | MarkFinished
    | MoveTo
    | Say
    | Exit
)
