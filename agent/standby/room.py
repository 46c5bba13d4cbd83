"""Whether there is memory for standby workers that run a script ahead, beside those that train."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from dalsegno.protos.shortage import own_cgroups

__all__ = ["available_bytes", "has_room_beside", "is_enough", "private_bytes"]

# Memory that must remain available, as a share of what the new workers need: workers grow, and so do caches.
_RESERVE = 0.5
_MEMINFO = Path("/proc/meminfo")
# Files of control groups of version 2 and 1: the limit, what is used, and how much of that is cache.
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

logger = logging.getLogger(__name__)


def is_enough(available: int, needed: int) -> bool:
    """Whether a reserve remains after `needed` more bytes. Pure."""
    return needed * (1 + _RESERVE) <= available


def has_room_beside(pids: Iterable[int]) -> bool:
    """Whether as much memory is available as these processes have for themselves."""
    needed = sum(private_bytes(pid) for pid in pids)
    available = available_bytes()
    if is_enough(available, needed):
        return True
    logger.info("nothing runs ahead: it would take %d MB, and %d MB are available", needed >> 20, available >> 20)
    return False


def private_bytes(pid: int) -> int:
    """Anonymous memory of a process in bytes; 0 if it is gone."""
    return _field(Path(f"/proc/{pid}/status"), "RssAnon:") or 0


def available_bytes() -> int:
    """Bytes that are available on the machine, or in the container or job (its control groups) if that is less."""
    found = [_field(_MEMINFO, "MemAvailable:") or 0]
    found += [left for group in own_cgroups("memory") if (left := _left_in(group)) is not None]
    return min(found)


def _left_in(group: Path) -> int | None:
    """Bytes that a control group leaves its processes, including its file cache; None: it has no limit."""
    for most, now, cache in _LIMITS:
        limit, used = _number(group / most), _number(group / now)
        if limit is not None and used is not None:
            return max(0, limit - used + (_field(group / "memory.stat", cache, unit=1) or 0))
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # there is no such file, or it says "max"


def _field(path: Path, name: str, unit: int = 1024) -> int | None:
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * unit for line in lines if line.startswith(name)), None)
