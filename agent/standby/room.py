"""Whether there is memory for standby workers that run a script ahead, beside those that train."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from dalsegno.protos.room import available_bytes, field_of

__all__ = ["has_room_beside", "is_enough", "private_bytes"]

# Memory that must remain available, as a share of what the new workers need: workers grow, and so do caches.
_RESERVE = 0.5

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
    """Anonymous memory of a process; 0 where it is gone."""
    return field_of(Path(f"/proc/{pid}/status"), "RssAnon:") or 0
