"""What one agent was told on its command line, checked and typed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dalsegno.protos import control_pb2
from dalsegno.protos.contract import CONNECT_TIMEOUT_SECONDS, MASTER_OUTAGE_TIMEOUT_SECONDS, JobSettings

from ..storage.best_save import BestRule

__all__ = ["AgentConfig", "differences"]

# Where all nodes have only gone for a moment, the first one that comes again is not to decide for the others.
_CHANGED_BY = (
    "; to change them (but what its master was given itself), stop the job (dalsegno stop; where its master is a"
    " service then dalsegno start) and start its nodes anew"
)


@dataclass(frozen=True)
class AgentConfig:
    """Durations in seconds.

    Attributes:
        settings: what all agents of the job must agree on.
        log_dir: the agent's own log, and those of standby workers and the converter.
        node_name: empty: the master gives one.
        local_addr: address under which other nodes reach this one; None: find it out.
        new_run: start over although the job's last run is finished or has failed.
        resume_step: go back to this step, for the how manieth time; None: go on from the newest checkpoint.
        connect_timeout: how long the first registration may take.
        addresses: where the master was looked for, for people; empty: it is the job's own.
        hint: what to say where no master answers there, behind that; empty: nothing.
        advice: what to say behind that where another program answers; empty: nothing.
        token_file: the file that the token comes from; empty: it is none.
        script_flag: if the job uses `--universal-checkpoint`, add the flag to the script's own arguments when it
            resumes from universal files.
        deepspeed_load_universal: DeepSpeed loads universal files in the script's workers where it resumes from them.
        expects_session: the script's text says that it may call `session()`, however late.
        checkpoint_glob: which files or directories below `${save_dir}` are checkpoints; empty: what looks like one.
        keep_saves: of how many epochs before the present one the script's own saves stay; 0: of all.
        make_room: where the disk lacks room for the next checkpoint, the oldest ones go, except for the last two.
        save_signal: asks a script without a session to save before it is ended; empty: it is not asked.
        self_fence: seconds without a word of the master after which the workers save and stop; 0: they go on.
        best: what makes a checkpoint of such a script's the best one, which is kept; None: its age alone counts.
        initial: what such a script starts from while the run has no checkpoint; None: nothing.
        tell_fd: file descriptor on which a supervisor is told what happens; None: nobody is.
        tls: the master is spoken to over TLS, and so are other agents.
        memory_budget_bytes: the most that memory checkpoints may take on this node; None: found out.
        keeps_memory: its workers are told where memory checkpoints lie, if the job has any.
        memory_bytes_per_second: the most of them that is sent to other nodes in a second; None: no limit.
        adopts: what the script saves becomes the run's, although it has no session.
        dlrover: the script uses DLRover's trainer classes, so this node has their saver beside its workers.
        dlrover_fixes: see `Beside`.
        announcement: what people are told once the master has answered; empty: nothing.
        run_ahead: standby workers run the script up to where it needs its place in a world.
    """

    job_id: str
    nproc: int
    settings: control_pb2.Settings
    checkpoint_dir: Path
    log_dir: Path
    node_name: str = ""
    local_addr: str | None = None
    new_run: bool = False
    resume_step: tuple[int, int] | None = None
    master_outage_timeout: float = MASTER_OUTAGE_TIMEOUT_SECONDS
    connect_timeout: float = CONNECT_TIMEOUT_SECONDS
    addresses: str = ""
    hint: str = ""
    advice: str = ""
    token_file: str = ""
    script_flag: bool = False
    deepspeed_load_universal: bool = False
    expects_session: bool = False
    run_ahead: bool = False
    adopts: bool = False
    tls: bool = False
    checkpoint_glob: str = ""
    keep_saves: int = 0
    make_room: bool = False
    save_signal: str = ""
    self_fence: float = 0.0
    best: BestRule | None = None
    initial: Path | None = None
    tell_fd: int | None = None
    memory_budget_bytes: int | None = None
    keeps_memory: bool = True
    memory_bytes_per_second: int | None = None
    dlrover: bool = False
    dlrover_fixes: str = ""
    announcement: str = ""


def differences(mine: control_pb2.Settings, job: control_pb2.Settings) -> str:
    """The settings in which this agent's command line differs from its job's, in one line; empty if they agree.

    Not --drain-timeout: on a signal a node leaves by its own.
    """
    found = []
    if (mine.min_nodes, mine.max_nodes) != (job.min_nodes, job.max_nodes):
        found.append(f"--nnodes={job.min_nodes}:{job.max_nodes}, not {mine.min_nodes}:{mine.max_nodes}")
    for name in JobSettings.names()[2:]:
        ours, theirs = getattr(mine, name), getattr(job, name)
        if ours != theirs and name != "drain_timeout":
            found.append(f"--{name.replace('_', '-')}={_as_flag(theirs)}, not {_as_flag(ours)}")
    return f"the job's settings count: {'; '.join(found)}{_CHANGED_BY}" if found else ""


def _as_flag(value: float | bool) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "no limit or auto" if value < 0 else f"{value:g}"
