"""What one agent was told on its command line, checked and typed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalsegno.protos import control_pb2

__all__ = ["DEFAULT_SETTINGS", "AgentConfig", "differences"]

# As `control_pb2.Settings`: durations in seconds, negative for "auto" or "for ever".
DEFAULT_SETTINGS: dict[str, Any] = {
    "node_unit": 1,
    "node_timeout": 15.0,
    "drain_timeout": 30.0,
    "join_timeout": 60.0,
    "stall_timeout": 600.0,
    "grow_interval": -1.0,
    "grow_wait": 300.0,
    "wait_for_nodes": -1.0,
    "quiet_time": 1.0,
    "max_restarts": 3,
    "universal_checkpoint": False,
    "keep_checkpoints": 3,
}


@dataclass(frozen=True)
class AgentConfig:
    """Durations in seconds.

    Attributes:
        settings: what all agents of the job must agree on.
        log_dir: the agent's own log, and those of standby workers and the converter.
        node_name: empty: the master gives one.
        local_addr: where other nodes reach this one; None: found out.
        new_run: start over although the job's last run is finished or has failed.
        connect_timeout: how long the first registration may take.
        script_flag: where the job was told `--universal-checkpoint`, add it to the script's own arguments when it
            resumes from universal files.
        expects_session: the script's text says that it may call `session()`, however late.
    """

    job_id: str
    nproc: int
    settings: control_pb2.Settings
    checkpoint_dir: Path
    log_dir: Path
    node_name: str = ""
    local_addr: str | None = None
    new_run: bool = False
    master_outage_timeout: float = 60.0
    connect_timeout: float = 60.0
    script_flag: bool = False
    expects_session: bool = False


def differences(mine: control_pb2.Settings, job: control_pb2.Settings) -> str:
    """What an agent was told otherwise than its job has it, as one line for the person; empty where they agree."""
    found = []
    if (mine.min_nodes, mine.max_nodes) != (job.min_nodes, job.max_nodes):
        found.append(f"--nnodes={job.min_nodes}:{job.max_nodes}, not {mine.min_nodes}:{mine.max_nodes}")
    for name in DEFAULT_SETTINGS:
        ours, theirs = getattr(mine, name), getattr(job, name)
        if ours != theirs:
            found.append(f"--{name.replace('_', '-')}={_as_flag(theirs)}, not {_as_flag(ours)}")
    return f"the job's settings count: {'; '.join(found)}" if found else ""


def _as_flag(value: float | bool) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "no limit or auto" if value < 0 else f"{value:g}"
