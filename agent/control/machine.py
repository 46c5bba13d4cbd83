"""What the agents of an embedded master ask this machine's kernel: where processes live, and locks.

All of it goes through one object, so that the simulator can replace it by machines, containers and reboots of its own.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dalsegno.protos.processes import Status, boot_id, machine, namespace, status_of

from ..processes.proc import owner_of
from ..storage.private import open_private

__all__ = ["LocksUnavailable", "Machine", "ProcessPlace"]

# Errors of flock if the mount has no locks, or its lock server is away.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


class LocksUnavailable(Exception):
    """The file system has no locks; one line that says what to change."""


@dataclass(frozen=True)
class ProcessPlace:
    """Where a process lives: with whom it shares process numbers, and with whom the loopback address.

    Containers may share host name and kernel but neither of these.

    Attributes:
        host, boot_id: the machine, and its present boot.
        pid_ns, net_ns: namespaces(7) as the kernel names them; empty: not known.
        machine: identifies the machine over its boots; empty: not known.
    """

    host: str
    boot_id: str
    pid_ns: str = ""
    net_ns: str = ""
    machine: str = ""


class Machine:
    """This machine. The first methods ask the kernel; the others follow from them."""

    def place(self) -> ProcessPlace:
        """Where this process lives."""
        return ProcessPlace(socket.gethostname(), boot_id(), namespace("pid"), namespace("net"), machine())

    def pid(self) -> int:
        """The number of this process."""
        return os.getpid()

    def user(self) -> int:
        """The user on whose behalf this process acts."""
        return os.geteuid()

    def status(self, pid: int) -> Status | None:
        """State and start of a process; None if it is gone."""
        return status_of(pid)

    def owner_of(self, pid: int) -> int | None:
        """The effective user of a process; None if it is gone or hidden."""
        return owner_of(pid)

    def signal(self, pid: int, signum: int) -> None:
        """Sends a signal. Raises ProcessLookupError, PermissionError."""
        os.kill(pid, signum)

    def lock(self, path: Path) -> Callable[[], None] | None:
        """Takes the lock of the private file at `path`; the kernel frees it when this process ends.

        Returns: a function that frees it; None if another process holds it.

        Raises:
            LocksUnavailable: nothing can be locked there.
            OSError: the file system fails, or the file belongs to somebody else.
        """
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            if error.errno in _NO_LOCKS:
                raise LocksUnavailable(
                    f"the file system of {path.parent} has no file locks ({error.strerror}), which an embedded master"
                    " and its store need: choose another with --checkpoint-dir, mount it with locks, or start a master"
                    " by hand (dlrover-master with its --store on a local disk) and give its address with --master"
                    " HOST:PORT"
                ) from error
            raise
        return functools.partial(os.close, fd)

    # ---- what follows -----------------------------------------------------------------------------------------------

    def is_same_process(self, pid: int, started: int) -> bool:
        """Whether `pid` still is the live process that began at `started` (a reused number or a zombie is not)."""
        status = self.status(pid)
        return status is not None and status.is_of(started)

    def is_stopped(self, pid: int) -> bool:
        """Whether a signal has stopped it. State "t" does not count: a debugger holds that process, and releases it."""
        status = self.status(pid)
        return status is not None and status.state == "T"

    def is_ours(self, pid: int) -> bool:
        """Whether it belongs to the user of this process."""
        return self.owner_of(pid) == self.user()

    def kill(self, pid: int, started: int) -> bool:
        """Kills a process if it is still the one that began at `started`. True when the signal was sent."""
        if not self.is_same_process(pid, started):
            return False
        try:
            self.signal(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True
