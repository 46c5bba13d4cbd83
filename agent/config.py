"""What one agent was told on its command line, checked and typed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dalsegno.protos import control_pb2

__all__ = ["AgentConfig"]


@dataclass(frozen=True)
class AgentConfig:
    """Durations in seconds.

    Attributes:
        settings: what all agents of the job must agree on.
        log_dir: the agent's own log, and those of standby workers and the converter.
        node_name: empty: the master gives one.
        local_addr: where other nodes reach this one; None: found out.
        new_run: start over although the job's last run is finished.
        connect_timeout: how long the first registration may take.
        script_flag: add `--universal-checkpoint` to the script's own arguments when it resumes from universal files.
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
