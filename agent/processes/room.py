"""How much memory can still be had here."""

from __future__ import annotations

from pathlib import Path

from dalsegno.protos.shortage import own_cgroups

__all__ = ["available_bytes", "field_of"]

_MEMINFO = Path("/proc/meminfo")
# Of control groups of version 2 and 1: the limit, what is used, and how much of that is cache.
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes() -> int:
    """What can still be had: of the machine, or of the container or job (its control groups) where that is less."""
    found = [field_of(_MEMINFO, "MemAvailable:") or 0]
    found += [left for group in own_cgroups("memory") if (left := _left_in(group)) is not None]
    return min(found)


def field_of(path: Path, name: str, unit: int = 1024) -> int | None:
    """The number behind `name` in a file of the kernel's, times the file's unit in bytes; None: it is not there."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * unit for line in lines if line.startswith(name)), None)


def _left_in(group: Path) -> int | None:
    """What a control group lets its processes have, its file cache included; None: it has no limit."""
    for most, now, cache in _LIMITS:
        limit, used = _number(group / most), _number(group / now)
        if limit is not None and used is not None:
            return max(0, limit - used + (field_of(group / "memory.stat", cache, unit=1) or 0))
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # There is none, or it is "max".
