"""Facts about processes of this machine, read from /proc. Standard library only."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from dalsegno.protos.processes import stat_fields, status_of

__all__ = [
    "belongs_to",
    "is_same_process",
    "kill_group",
    "owner_of",
    "process_state",
    "start_time",
]


def start_time(pid: int) -> int | None:
    """See `Status`; None when it is gone."""
    status = status_of(pid)
    return status.started if status else None


def process_state(pid: int) -> str | None:
    """See `Status`; None when it is gone."""
    status = status_of(pid)
    return status.state if status else None


def belongs_to(pid: int, root: int) -> bool:
    """Whether `pid` is the process `root`, comes from it, or is in the session that it leads.

    Of a process that is gone nobody can tell any more; it counts as one that did.
    """
    seen: set[int] = set()
    while pid != root:
        fields = stat_fields(pid)
        if fields is None:
            return True
        seen.add(pid)
        # Its session; then on to its parent. Process ids are reused, so that a chain may end in itself.
        if int(fields[3]) == root:
            return True
        pid = int(fields[1])
        if pid <= 1 or pid in seen:
            return False
    return True


def is_same_process(pid: int, started: int) -> bool:
    """Whether `pid` still is the live process that began at `started`."""
    status = status_of(pid)
    return status is not None and status.is_of(started)


def kill_group(pgid: int, signum: int = signal.SIGKILL) -> bool:
    """Signals a whole process group. False when no process of it is left."""
    try:
        os.killpg(pgid, signum)
    except ProcessLookupError:
        return False
    return True


def owner_of(pid: int) -> int | None:
    """The effective user of a process (`Uid` of proc(5) status); None when it is gone or hidden."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    found = [line.split() for line in text.splitlines() if line.startswith("Uid:")]
    return int(found[0][2]) if found else None
