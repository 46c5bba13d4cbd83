"""Identifies processes by what this machine's kernel says of them, for agents and for the master.

Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

__all__ = [
    "Booted",
    "Process",
    "ProcessIdentity",
    "Status",
    "boot_id",
    "ends_with_parent",
    "exists",
    "is_gone",
    "is_of_earlier_boot",
    "machine",
    "namespace",
    "own_process",
    "stat_fields",
    "status_of",
]

_PR_SET_PDEATHSIG = 1
# The kernel's own number of the namespace that processes outside of containers are in (proc_ns.h).
_OUTSIDE = "pid:[4026531836]"


class Status(NamedTuple):
    """State and start time of one process.

    Attributes:
        state: one letter of proc(5): "R", "S", "T" stopped, "Z" zombie, ...
        started: in clock ticks since boot (field 22 of proc(5) stat).
    """

    state: str
    started: int

    def is_of(self, started: int) -> bool:
        """Whether this is the live process that began at `started` (a reused number or a zombie is not)."""
        return self.started == started and self.state not in ("Z", "X")


@dataclass(frozen=True)
class Process:
    """Identifies one process for good, as `control_pb2.Process`."""

    machine: str
    boot_id: str
    pid_ns: str
    pid: int
    start_time: int


class Booted(Protocol):
    """Anything that says on which machine it lives or lived, and during which boot."""

    @property
    def machine(self) -> str: ...
    @property
    def boot_id(self) -> str: ...


class ProcessIdentity(Booted, Protocol):
    """A `Process`, or the message `control_pb2.Process`."""

    @property
    def pid_ns(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def start_time(self) -> int: ...


def stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third (state) on, or None for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name (second field) may contain blanks and brackets: count from its closing bracket.
    return text[text.rindex(")") + 2 :].split()


def status_of(pid: int) -> Status | None:
    """State and start of a process; None when it is gone."""
    fields = stat_fields(pid)
    return Status(fields[0], int(fields[19])) if fields else None


def exists(pid: int) -> bool:
    """Whether there is such a process, also a zombie, or one of which /proc shows nothing (`hidepid` of proc(5))."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no kernel has such a number
        return False
    except PermissionError:
        pass  # Another user's.
    return True


def boot_id() -> str:
    """The kernel's identifier of the present boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def namespace(kind: str) -> str:
    """Name of a namespace of this process, as the kernel gives it (namespaces(7)); empty if it gives none."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def machine() -> str:
    """A digest that no other machine has, and that stays the same over the boots of this one (machine-id(5)).

    Empty in a container, whose files say nothing of the machine under it.
    """
    try:
        number = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    if len(number) != 32 or namespace("pid") != _OUTSIDE:
        return ""
    # The number itself must be kept secret. Copies of one disk have the same number, but hardly the same host name.
    return hashlib.sha256(f"dalsegno {number} {socket.gethostname()}".encode()).hexdigest()


def own_process() -> Process:
    """Identity of the calling process."""
    status = status_of(os.getpid())
    started = status.started if status is not None else 0
    return Process(machine(), boot_id(), namespace("pid"), os.getpid(), started)


def is_of_earlier_boot(recorded: Booted, here: Booted) -> bool:
    """Whether both are of the same machine, and it has booted between them. No process outlives a boot."""
    same_machine = bool(recorded.machine) and recorded.machine == here.machine
    return same_machine and bool(recorded.boot_id and here.boot_id) and recorded.boot_id != here.boot_id


def is_gone(recorded: ProcessIdentity, here: ProcessIdentity) -> bool:
    """Whether a process is provably gone, as seen from `here`, the calling process. What it cannot see may live."""
    if recorded.boot_id != here.boot_id:
        return is_of_earlier_boot(recorded, here)
    seen = bool(recorded.pid_ns) and recorded.pid_ns == here.pid_ns
    return seen and recorded.pid > 0 and recorded.start_time > 0 and not _may_live(recorded.pid, recorded.start_time)


def _may_live(pid: int, started: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no kernel has such a number
        return False
    except PermissionError:
        return True  # Another user's, of which /proc may show nothing.
    try:
        status = status_of(pid)
    except PermissionError:
        return True  # Hidden, as one that cannot be traced is where /proc has `hidepid=1`.
    # With `hidepid=2` such a one looks as if it were gone.
    return exists(pid) if status is None else status.is_of(started)


def ends_with_parent(signum: int, parent: int, *, own_group: bool = False) -> Callable[[], None]:
    """What a new process calls to get a signal once its parent ends (prctl(2)): safe between fork and exec.

    Args:
        signum: The signal.
        parent: Its number; who has another parent when it calls, gets the signal at once. It counts as ended when the
            thread ends that has started the process.
        own_group: It leads a process group of its own, as by Popen's `process_group`, which came with Python 3.11.
    """
    import ctypes

    prctl = ctypes.CDLL(None).prctl

    def bind() -> None:
        if own_group:
            os.setpgid(0, 0)
        prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signum)

    return bind
