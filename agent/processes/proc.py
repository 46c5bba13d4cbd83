"""Facts about processes of this machine, read from /proc. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dalsegno.protos.processes import exists, stat_fields, status_of

__all__ = [
    "adopt_orphans",
    "belongs_to",
    "descendants",
    "end_descendants",
    "is_stopped",
    "kill_group",
    "listeners",
    "owner_of",
    "seen_fields",
    "start_time",
]


_PR_SET_CHILD_SUBREAPER = 36
_SCAN_PAUSE_SECONDS = 0.02


def start_time(pid: int) -> int | None:
    """Start time of a process, see `Status`; None if it is gone."""
    status = status_of(pid)
    return status.started if status else None


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it; not a debugger (state "t"), which lets it go on."""
    status = status_of(pid)
    return status is not None and status.state == "T"


def seen_fields(pid: int) -> list[str] | None:
    """See `stat_fields`; None also where the system hides it (`hidepid` of proc(5)): another user's, as a rule."""
    try:
        return stat_fields(pid)
    except PermissionError:
        return None


def belongs_to(pid: int, root: int) -> bool:
    """Whether `pid` is the process `root`, descends from it, or is in the session that it leads.

    Nobody can tell that of a process that is gone; it counts as one that did. One that is hidden does not: it is
    another user's, and so may be what descends from it.
    """
    seen: set[int] = set()
    while pid != root:
        fields = seen_fields(pid)
        if fields is None:
            return not exists(pid)
        seen.add(pid)
        # Look at its session, then go on to its parent. Process ids are reused, so a chain may end in itself.
        if int(fields[3]) == root:
            return True
        pid = int(fields[1])
        if pid <= 1 or pid in seen:
            return False
    return True


def kill_group(pgid: int, signum: int = signal.SIGKILL) -> bool:
    """Signals a whole process group. False when no process of it is left.

    SIGKILL ends what it may: what is left may be another user's, as with a worker that is `sudo`.

    Raises:
        PermissionError: all of it is another user's, and is not told what another signal says.
    """
    try:
        os.killpg(pgid, signum)
    except ProcessLookupError:
        return False
    except PermissionError:
        if signum != signal.SIGKILL:
            raise
    return True


def owner_of(pid: int) -> int | None:
    """The effective user of a process (`Uid` of proc(5) status); None if it is gone or hidden."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    found = [line.split() for line in text.splitlines() if line.startswith("Uid:")]
    return int(found[0][2]) if found else None


def adopt_orphans() -> None:
    """Makes descendants of this process whose parents end its children from now on (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(*roots: int) -> list[int]:
    """Live processes that descend from one of `roots` and can be seen, without these and without zombies."""
    children, dead = _processes()
    return [pid for pid in _below(children, roots) if pid not in dead]


def _processes() -> tuple[dict[int, list[int]], set[int]]:
    """The children of each process, from one look at all that can be seen; and which processes are zombies."""
    children: dict[int, list[int]] = {}
    dead: set[int] = set()
    for name in os.listdir("/proc"):
        fields = seen_fields(int(name)) if name.isdigit() else None
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(name))
            if fields[0] in "ZX":
                dead.add(int(name))
    return children, dead


def _below(children: Mapping[int, Sequence[int]], roots: Iterable[int]) -> list[int]:
    """All that descend from `roots`. A number may have been reused during the look, so a chain may end in itself."""
    found: list[int] = []
    ahead = list(roots)
    seen = set(ahead)
    while ahead:
        of = [pid for pid in children.get(ahead.pop(), ()) if pid not in seen]
        seen.update(of)
        found += of
        ahead += of
    return found


def listeners(roots: Iterable[int], signum: int) -> list[int]:
    """The processes that are to be sent a signal that asks for something: those that handle it.

    A launcher or a helper that does not would die of it. Of a process and its descendants that all handle it, as
    forked ones do, only the first. One look at all processes is enough for all roots: it may take long.

    Args:
        roots: they themselves and their descendants are meant. 0, as of a process that does not exist yet: nobody.
    """
    # What descends from number 0 is all that runs on this machine.
    roots = [root for root in roots if root > 0]
    if not roots:
        return []
    children, dead = _processes()
    mask, found = 1 << (signum - 1), []
    for root in roots:
        left = {root, *_below(children, [root])} - dead
        for pid in [root, *sorted(left - {root})]:
            if pid in left and _handled(pid) & mask:
                found.append(pid)
                left.difference_update(_below(children, [pid]))
    return found


def _handled(pid: int) -> int:
    """The signals that a process handles, as a set of bits (`SigCgt` of proc(5) status)."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return sum(int(line.split()[1], 16) for line in text.splitlines() if line.startswith("SigCgt:"))


def end_descendants(seconds: float) -> list[int]:
    """Kills all descendants of this process, which has adopted orphans. Returns those left after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # why: no event tells of the death of a process that was adopted; the scan has to come again.
        time.sleep(_SCAN_PAUSE_SECONDS)
    return left
