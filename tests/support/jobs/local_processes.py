"""Processes of this machine that a test started, found by a mark in their environment. Nobody is found by name."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from dalsegno.protos.processes import status_of

LOOK_EVERY = 0.05
# What follows these words is executed with all signals blocked.
_BLOCK = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); os.execvp({0}[0], {0})"
)
BLOCKS = (sys.executable, "-c", _BLOCK.format("sys.argv[1:]"))


def carriers(mark: str) -> list[int]:
    """Live processes (no zombies) whose initial environment has `mark` ("NAME=value"); not this one."""
    wanted, found = mark.encode(), []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # Gone meanwhile, or another user's.
            if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0") and is_alive(int(entry)):
                found.append(int(entry))
    return found


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the third (state) on; empty for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()


def is_alive(pid: int) -> bool:
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in "ZX"


def process_state(pid: int) -> str | None:
    """One letter, as in proc(5); None when it is gone."""
    status = status_of(pid)
    return status.state if status else None


def is_same_process(pid: int, started: int) -> bool:
    """Whether `pid` still is the live process that began at `started`."""
    status = status_of(pid)
    return status is not None and status.is_of(started)


def children(pid: int) -> list[int]:
    """Live direct children."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [one for one in pids if (fields := stat_fields(one)) and fields[0] not in "ZX" and int(fields[1]) == pid]


def open_files(pid: int) -> list[Path]:
    """Names of the files that a process has open."""
    found = []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(Path(os.readlink(link)))
    return found


def send(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Signals those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(gone)"


def seconds_until(condition: Callable[[], bool], limit: float) -> float:
    """How long it took, not counting the time in which this process itself got no CPU; `limit` when it did not come.

    So a bound of the product's can be asserted on a machine that is overloaded by others.
    """
    elapsed, last = 0.0, time.monotonic()
    while elapsed < limit:
        if condition():
            return elapsed
        time.sleep(LOOK_EVERY / 2)
        now = time.monotonic()
        elapsed, last = elapsed + min(now - last, 2 * LOOK_EVERY), now
    return limit


@contextlib.contextmanager
def many_open_files(count: int = 1100) -> Iterator[None]:
    """So many files more are open here: what is opened then has large numbers. Skipped where that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/proc/self/fd")) + count + 256
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"the hard limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            opened.enter_context(open(os.devnull))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
