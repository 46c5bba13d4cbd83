"""How much memory can still be had here, and whom the kernel has ended for lack of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .shortage import own_cgroups
from .text import megabytes

__all__ = ["RESERVE_BYTES", "available_bytes", "ended_for_memory", "field_of", "lacks_memory", "oom_kills"]

# What checkpoints in memory leave of the machine's or container's memory, for all that trains there.
RESERVE_BYTES = 256 << 20

# Bytes, where the kernel does not say how many there are: nothing is refused for that.
_UNKNOWN = 1 << 62

_MEMINFO, _VMSTAT = Path("/proc/meminfo"), Path("/proc/vmstat")
# Where control groups of version 2 and 1 count processes that the kernel has ended for lack of memory.
_EVENTS = ("memory.events", "memory.oom_control")
# Of control groups of version 2 and 1: the limit, what is used, and the parts of that which can be taken away, as
# `MemAvailable` counts them: files in the page cache, also those that were read twice, and caches of the kernel's.
_LIMITS = (
    ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def available_bytes() -> int:
    """What can still be had: of the machine, or of the container or job (its control groups) where that is less."""
    found = [_UNKNOWN if (there := field_of(_MEMINFO, "MemAvailable:")) is None else there]
    found += [left for group in own_cgroups("memory") if (left := _left_in(group)) is not None]
    return min(found)


def lacks_memory(size: int, available: int) -> str:
    """Why so many bytes more have no place in the memory of this node; empty: they have. Pure.

    Files on a tmpfs count as memory of the machine or container. Nothing can take them away, so where they take all,
    the kernel ends who trains there.
    """
    if size + RESERVE_BYTES <= available:
        return ""
    left = max(0, available - RESERVE_BYTES)
    return (
        f"{megabytes(left)} of memory can be had, beside {megabytes(RESERVE_BYTES)} for the training;"
        " give the machine or container more, or save less there (--memory-replicas, --memory-budget)"
    )


def field_of(path: Path, name: str, unit: int = 1024) -> int | None:
    """The number behind `name` in a file of the kernel's, times the file's unit in bytes; None: it is not there."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * unit for line in lines if line.startswith(name)), None)


def oom_kills() -> dict[Path, int]:
    """How many processes the kernel has ended for lack of memory so far, by the file that counts them.

    Those of this process's control groups, from its own one up, and last the machine's.
    """
    files = [group / name for group in own_cgroups("memory") for name in _EVENTS] + [_VMSTAT]
    return {path: count for path in files if (count := field_of(path, "oom_kill ", unit=1)) is not None}


def ended_for_memory(before: Mapping[Path, int]) -> str:
    """What people are told of a process that SIGKILL has ended; empty if the kernel has ended none since `before`.

    Args:
        before: `oom_kills` as it began.
    """
    # The first file counts these processes alone; further ones count those of others, which say nothing of it.
    for path, count in list(oom_kills().items())[:1]:
        if count > before.get(path, count):
            return f"the kernel has ended it for lack of memory ({_allowed(path)}): give it more, or let it use less"
    return ""


def _allowed(counted: Path) -> str:
    """How much there is, where these processes were counted."""
    group = counted.parent
    limits = [limit for name, _, _ in _LIMITS if (limit := _number(group / name)) is not None and limit < 1 << 60]
    if counted == _VMSTAT or not limits:
        return f"this machine has {(field_of(_MEMINFO, 'MemTotal:') or 0) // 1_000_000} MB"
    return f"limit of the container or group {group}: {limits[0] // 1_000_000} MB"


def _left_in(group: Path) -> int | None:
    """What a control group lets its processes have, its caches included; None: it has no limit."""
    for most, now, caches in _LIMITS:
        limit, used = _number(group / most), _number(group / now)
        if limit is not None and used is not None:
            cached = sum(field_of(group / "memory.stat", f"{name} ", unit=1) or 0 for name in caches)
            return max(0, limit - used + cached)
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # There is none, or it is "max".
