"""Facts about processes of this machine, read from /proc. Standard library only."""

from __future__ import annotations

import os
import signal
from pathlib import Path

__all__ = [
    "belongs_to",
    "boot_id",
    "is_same_process",
    "kill_group",
    "kill_same_process",
    "owner_of",
    "process_state",
    "start_time",
]


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third (state) on, or None for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name (second field) may contain blanks and brackets: count from its closing bracket.
    return text[text.rindex(")") + 2 :].split()


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot (field 22 of proc(5) stat); None when it is gone."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def process_state(pid: int) -> str | None:
    """One-letter state of proc(5) ("R", "S", "T" stopped, "Z" zombie, ...); None when it is gone."""
    fields = _stat_fields(pid)
    return fields[0] if fields else None


def belongs_to(pid: int, root: int) -> bool:
    """Whether `pid` is the process `root`, comes from it, or is in the session that it leads.

    Of a process that is gone nobody can tell any more; it counts as one that did.
    """
    seen: set[int] = set()
    while pid != root:
        fields = _stat_fields(pid)
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


def boot_id() -> str:
    """The kernel's identifier of the present boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def is_same_process(pid: int, started: int) -> bool:
    """Whether `pid` still is the live process that began at `started` (a reused number or a zombie is not)."""
    fields = _stat_fields(pid)
    return fields is not None and int(fields[19]) == started and fields[0] not in ("Z", "X")


def kill_same_process(pid: int, started: int, signum: int = signal.SIGKILL) -> bool:
    """Signals a process if it is still the one that began at `started`. True when the signal was sent."""
    if not is_same_process(pid, started):
        return False
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


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
