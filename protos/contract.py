"""What agent, master and workers assume about one another, each thing once (for people: docs/contracts.md).

Standard library only, and nothing that takes time: every process of a job imports this.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, fields

__all__ = (
    "COMMAND_INTERRUPTED",
    "CONNECT_TIMEOUT_SECONDS",
    "CONTROL_PROTOCOL",
    "COUNTED_BY_TORCHRUN",
    "EXIT_FAILED",
    "EXIT_FINISHED",
    "EXIT_LEFT",
    "EXIT_LEFT_UNSAVED",
    "EXIT_USAGE",
    "FIRST_OF_SURVIVORS",
    "FRAME",
    "GROW_SOON_SECONDS",
    "HEARTBEAT_SECONDS",
    "LEADER_METADATA",
    "LEAST_NODE_TIMEOUT_SECONDS",
    "MASTER_HUNG",
    "MASTER_OUTAGE_TIMEOUT_SECONDS",
    "MASTER_SUPERSEDED",
    "PROGRESS_SECONDS",
    "STEP_COUNT",
    "WORKER_BAD_CHECKPOINT",
    "WORKER_DRAINED",
    "WORKER_PROTOCOL",
    "JobSettings",
    "Variable",
    "is_of_a_world",
    "run_name",
    "run_number",
    "semaphores_of",
    "step_count_name",
)

# Exit codes of `dlrover-run`.
EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_LEFT = 75
EXIT_LEFT_UNSAVED = 76
# Exit code of `dalsegno` after Ctrl-C, as shells say it.
COMMAND_INTERRUPTED = 130
# Exit codes of `dlrover-master`, besides EXIT_FINISHED (it was told to stop, or its job is over) and EXIT_USAGE: it
# failed, or its event loop hung and another master can go on from the store; or the job has another master already.
MASTER_HUNG = EXIT_FAILED
MASTER_SUPERSEDED = 3
# Exit codes of a worker.
WORKER_DRAINED = 83
WORKER_BAD_CHECKPOINT = 84

# Versions of control.proto (agent and master) and of worker.proto (worker and agent). They are raised when an older
# peer would misunderstand a newer one; a master answers UNIMPLEMENTED to a newer agent. Since version 2 of
# control.proto a world names only the place of the node that gets the message.
CONTROL_PROTOCOL = 2
WORKER_PROTOCOL = 1
# Seconds between an agent's heartbeats, and at least between its reports of steps, until the master asks for more.
HEARTBEAT_SECONDS = 1.0
PROGRESS_SECONDS = 0.1
# The trailing metadata in which a master that stands by names the address (HOST:PORT) of the one that leads.
LEADER_METADATA = "dalsegno-leader"
# The shortest --node-timeout. A heartbeat comes a second after the last word, and has 3 s before the next one is sent:
# one lost heartbeat must not mean death.
LEAST_NODE_TIMEOUT_SECONDS = 5.0
# Defaults of --master-outage-timeout and --connect-timeout, which each node has for itself.
MASTER_OUTAGE_TIMEOUT_SECONDS = 60.0
CONNECT_TIMEOUT_SECONDS = 60.0
# From here on attempts in names of checkpoints are those of ranks that have saved by themselves, one for each node.
FIRST_OF_SURVIVORS = 1000
# The header of each message on a socket between processes of one node, and between agents: its length in bytes.
FRAME = struct.Struct(">I")


# Content of the file in which a rank notes its last step. The file lies beside the agent's socket and outlives the
# rank.
STEP_COUNT = struct.Struct("<Q")


def step_count_name(epoch: int, rank: int) -> str:
    """Name of the file in which a rank notes its last step (see `STEP_COUNT`)."""
    return f"steps-{epoch}-{rank}"


_RUN_NAME = re.compile(r"run-([0-9]{4,9})", re.ASCII)


def semaphores_of(socket_directory: str, pid: int | None = None) -> str:
    """How the names of a rank's semaphores begin, without the slash; without `pid`: those of all ranks of its agent.

    Args:
        socket_directory: name of the directory of the agent's socket.
    """
    return f"mp-{socket_directory}." + ("" if pid is None else f"{pid}-")


def run_name(number: int) -> str:
    """Name of a run, and of its directory."""
    return f"run-{number:04d}"


def run_number(name: str) -> int | None:
    """The number in a run's name. None: it is no run's."""
    match = _RUN_NAME.fullmatch(name)
    return int(match[1]) if match else None


# What `grow_wait` is where a person has set none, and no commit can ever come: the script has no session, and saves
# nothing where it is looked for. It goes on from what it finds itself, as under torchrun. Seconds.
GROW_SOON_SECONDS = 5.0

# What `max_restarts` is where torchrun counts the restarts of each node against its own limit: none of the job's.
COUNTED_BY_TORCHRUN = 2**31 - 1


@dataclass(frozen=True)
class JobSettings:
    """What all agents of a job must agree on, with the defaults: `Settings` of control.proto.

    Each is a flag of `dlrover-run`; min and max are --nnodes. Durations in seconds; negative is "auto" or "for ever".
    """

    min_nodes: int = 1
    max_nodes: int = 1
    node_unit: int = 1
    node_timeout: float = 15.0
    drain_timeout: float = 30.0
    join_timeout: float = 60.0
    stall_timeout: float = 600.0
    grow_interval: float = -1.0
    grow_wait: float = -1.0
    wait_for_nodes: float = -1.0
    quiet_time: float = 1.0
    max_restarts: int = 3
    # Make universal files at each change of shape, even where ranks could re-shard, and give scripts the flag.
    universal_checkpoint: bool = False
    keep_checkpoints: int = 3
    # How many other nodes hold each node's part of a memory checkpoint; 0: there are no memory checkpoints.
    memory_replicas: int = 0
    # A world opens only when they are there, also where its ranks could re-shard (--universal-checkpoint=gate).
    universal_gate: bool = False

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all settings, in the order of the fields."""
        return tuple(field.name for field in fields(cls))


class Variable:
    """Names of environment variables."""

    # What a person may set.
    TOKEN = "DALSEGNO_TOKEN"
    # What may fence the holder of a relayed run.
    ADMIN_TOKEN = "DALSEGNO_ADMIN_TOKEN"
    MASTER = "DLROVER_MASTER_ADDR"
    # Prefixes of variables that stand for flags, followed by the flag's name in capitals: of dlrover-run, of
    # dlrover-master.
    FLAG = "PET_"
    MASTER_FLAG = "DALSEGNO_MASTER_"
    # What an agent gives its workers.
    SOCKET = "DALSEGNO_SOCKET"
    EPOCH = "DALSEGNO_EPOCH"
    JOB_ID = "DALSEGNO_JOB_ID"
    RUN_ID = "DALSEGNO_RUN_ID"
    RUN_DIR = "DALSEGNO_RUN_DIR"
    NODE = "DALSEGNO_NODE"
    GENERATION = "DALSEGNO_GENERATION"
    MIN_NODES = "DALSEGNO_MIN_NODES"
    MAX_NODES = "DALSEGNO_MAX_NODES"
    STALL_TIMEOUT = "DALSEGNO_STALL_TIMEOUT"
    # HOST:PORT of the world's store: MASTER_ADDR and MASTER_PORT, which scripts set.
    STORE = "DALSEGNO_STORE"
    NOTICES = "DALSEGNO_NOTICES"
    # The resume point, empty if the run begins; and its universal form, if there is one.
    RESUME_NAME = "DALSEGNO_RESUME_NAME"
    RESUME_DIGEST = "DALSEGNO_RESUME_DIGEST"
    RESUME_DIR = "DALSEGNO_RESUME_DIR"
    LOAD_UNIVERSAL = "DALSEGNO_DEEPSPEED_LOAD_UNIVERSAL"
    RESUME_FORM = "DALSEGNO_RESUME_FORM"
    # Hugging Face's hub, where nobody answers there; not there where somebody does.
    HUB_UNREACHABLE = "DALSEGNO_HUB_UNREACHABLE"
    UNIVERSAL_NAME = "DALSEGNO_UNIVERSAL_NAME"
    UNIVERSAL_DIGEST = "DALSEGNO_UNIVERSAL_DIGEST"
    UNIVERSAL_DIR = "DALSEGNO_UNIVERSAL_DIR"
    # Where memory checkpoints of this run are on this node; not there where there are none.
    MEMORY_DIR = "DALSEGNO_MEMORY_DIR"
    # The notice that a signal gives, in seconds (`--drain-timeout`).
    DRAIN_TIMEOUT = "DALSEGNO_DRAIN_TIMEOUT"
    # The most bytes that all that lies beside that directory may have; not there without such a limit.
    MEMORY_BUDGET = "DALSEGNO_MEMORY_BUDGET"
    # Modules of ours that change what a script imports, and how its batches are cut by DLRover's classes.
    HOOKS = "DALSEGNO_HOOKS"
    DLROVER_FIXES = "DALSEGNO_DLROVER_FIXES"
    # What every process of an agent carries, so that its keeper knows it.
    LIFELINE = "DALSEGNO_LIFELINE"
    # Directory in which all processes note what happens when (`trace`).
    TRACE = "DALSEGNO_TRACE"
    # File in which a session notes what it found, for `dalsegno doctor`.
    DOCTOR = "DALSEGNO_DOCTOR"


# The variables that tell a worker its place in a world, beside `TORCHELASTIC_…`.
_OF_A_WORLD = frozenset(
    {
        *("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT"),
        # What the classes of DLRover read.
        *("NODE_NUM", "NODE_RANK", "WORKER_NUM"),
        *(Variable.EPOCH, Variable.RUN_ID, Variable.RUN_DIR, Variable.NODE, Variable.GENERATION),
        *(Variable.MIN_NODES, Variable.MAX_NODES, Variable.STALL_TIMEOUT, Variable.STORE),
        *(Variable.RESUME_NAME, Variable.RESUME_DIGEST, Variable.RESUME_DIR, Variable.RESUME_FORM),
        *(Variable.LOAD_UNIVERSAL, Variable.HUB_UNREACHABLE),
        *(Variable.UNIVERSAL_NAME, Variable.UNIVERSAL_DIGEST, Variable.UNIVERSAL_DIR, Variable.MEMORY_DIR),
        *(Variable.MEMORY_BUDGET, Variable.DRAIN_TIMEOUT),
    }
)
_OF_THE_JOB = "TORCHELASTIC_RUN_ID"


def is_of_a_world(variable: str) -> bool:
    """Whether a variable tells a worker's place in one world: nobody knows it before that world is open."""
    return variable in _OF_A_WORLD or (variable.startswith("TORCHELASTIC_") and variable != _OF_THE_JOB)
