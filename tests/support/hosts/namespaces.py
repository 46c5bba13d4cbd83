"""A process of another process's namespaces: how to get there, and how to tell its end from outside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from ..forks.forked import Forked

__all__ = ["Inside", "as_child_in", "children_of", "enter", "network_of", "words_in"]

# In this order: what is seen of /proc changes with the mounts.
KINDS = ("net", "uts", "pid", "mnt")
_PATIENCE = 20.0
_libc = ctypes.CDLL(None, use_errno=True)


def _join(descriptor: int) -> None:
    if _libc.setns(descriptor, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def enter(pid: int) -> None:
    """Goes where that process is; as to process numbers only children of this process will be there.

    Raises:
        OSError: It is gone, or this process is not root.
    """
    there = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in KINDS]
    for descriptor in there:
        _join(descriptor)
        os.close(descriptor)


@contextlib.contextmanager
def network_of(pid: int) -> Iterator[None]:
    """Sockets that this thread makes meanwhile are in that process's network, and stay there."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            _join(there)
            yield
        finally:
            os.close(there)
            _join(here)
    finally:
        os.close(here)


def as_child_in(pid: int) -> None:
    """Returns in a child of this process, in that process's namespaces; this process ends as the child does."""
    enter(pid)
    child = os.fork()
    if child:
        _end_as(child)


def words_in(pid: int, command: Sequence[str], cwd: Path) -> list[str]:
    """The command line that runs a command in that process's namespaces and this directory."""
    # nsenter goes to the root directory of the mounts that it enters.
    inside = ["env", f"--chdir={cwd}", *command]
    return ["nsenter", f"--target={pid}", *(f"--{kind}" for kind in ("net", "uts", "mount", "pid")), "--", *inside]


def _end_as(child: int) -> NoReturn:
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def children_of(pid: int) -> list[int]:
    """Of its main thread; empty for a process that is gone."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    return []


class Inside:
    """A process inside namespaces, whose parent waits outside and ends as it does (`nsenter`, or `as_child_in`).

    The part of `subprocess.Popen`'s interface that tests use; process numbers are those of outside.

    Args:
        outer: the parent.
    """

    def __init__(self, outer: subprocess.Popen[Any] | Forked) -> None:
        self._outer = outer
        self.pid = self._inner()

    def _inner(self) -> int:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            if found := children_of(self._outer.pid):
                return found[0]
            if self._outer.poll() is not None:
                return self._outer.pid  # It has ended already.
            time.sleep(0.005)  # why: nobody tells when a process has a child
        raise AssertionError(f"process {self._outer.pid} has no child after {_PATIENCE:.0f} s")

    @property
    def stdout(self) -> Any:
        return getattr(self._outer, "stdout", None)

    @property
    def stderr(self) -> Any:
        return getattr(self._outer, "stderr", None)

    @property
    def returncode(self) -> int | None:
        return self._outer.returncode

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that killed it); None while it runs."""
        return self._outer.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        return self._outer.wait(timeout)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
