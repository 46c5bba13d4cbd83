"""Whether processes that were told to end still do something that is worth waiting for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dalsegno.protos.room import field_of

from .proc import seen_fields

__all__ = ["DiskWrites", "Sign", "Work", "written_bytes"]

# Whether there was a sign since the last look. It gets all processes that are left, workers and their descendants.
Sign = Callable[[Sequence[int]], bool]

# Who has written fewer bytes than this since the last sign does not save: it may write a log.
_LEAST_WRITTEN_BYTES = 1 << 20
# Who has computed for less than this since the last look, in seconds, waits for something, and now and then looks up.
_LEAST_WORK_SECONDS = 0.05


def written_bytes(pid: int) -> int:
    """Bytes that a process and its ended children have had written to disks so far (proc(5) io); 0 if it is gone."""
    return field_of(Path(f"/proc/{pid}/io"), "write_bytes:", unit=1) or 0


class DiskWrites:
    """They have had something written to a disk."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}

    def __call__(self, pids: Sequence[int]) -> bool:
        now = {pid: written_bytes(pid) for pid in pids}
        new = sum(max(0, count - self._before.get(pid, count)) for pid, count in now.items())
        if new >= _LEAST_WRITTEN_BYTES:
            self._before = now
            return True
        self._before = {**now, **{pid: count for pid, count in self._before.items() if pid in now}}
        return False


class Work:
    """They have computed."""

    def __init__(self) -> None:
        self._before: dict[int, float] = {}

    def __call__(self, pids: Sequence[int]) -> bool:
        now = {pid: _cpu_seconds(pid) for pid in pids}
        new = sum(max(0.0, seconds - self._before.get(pid, seconds)) for pid, seconds in now.items())
        self._before = now
        return new >= _LEAST_WORK_SECONDS


def _cpu_seconds(pid: int) -> float:
    """Seconds of a processor that a process has had (proc(5) stat); 0 if it is gone or hidden."""
    fields = seen_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0
