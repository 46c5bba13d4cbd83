"""The locks in the private directory of a job with a master of its own. Their holders say in them who they are.

The kernel frees the lock of a process that ends, but not of one that is stopped (SIGSTOP, Ctrl-Z). So whoever waits
tells people which process it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from ..storage.private import open_private
from .awake import AwakeTime
from .machine import Machine

__all__ = ["JobLocks", "LockGivenUp", "LockTimeout"]

# Seconds between two tries, because flock cannot wait with a deadline.
_LOCK_PAUSE_SECONDS = 0.05
# Seconds of waiting after which people are told for whom, and seconds between two looks at that.
_SILENCE_SECONDS, _LOOK_SECONDS = 5.0, 1.0
# The most bytes of what a holder writes, which are about two hundred; the most characters of a word in it.
_MOST_READ_BYTES, _LONGEST = 1 << 12, 256


class LockTimeout(Exception):
    """Another process holds the lock for longer than any work under it takes."""


class LockGivenUp(Exception):
    """Whoever waited for the lock was told to go: nothing is wrong, and there is nothing to say."""


@dataclass(frozen=True)
class _Holder:
    """The process that took the lock last: what identifies it (see `ProcessPlace`)."""

    host: str
    boot_id: str
    pid_ns: str
    pid: int
    started: int


class JobLocks:
    """The locks of one directory, for one process.

    Args:
        directory: private to the job.
        machine: stands for the kernel.
        undisturbed: held from before a lock is taken until it is free again: whoever stops this process (Ctrl-Z) is to
            do so before or after.
    """

    def __init__(
        self,
        directory: Path,
        machine: Machine,
        undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._directory = directory
        self._machine = machine
        self._undisturbed = undisturbed
        self._us: _Holder | None = None

    @contextlib.contextmanager
    def hold(
        self,
        name: str,
        timeout_seconds: float,
        closing: threading.Event,
        slow: Callable[[str], None] = lambda who: None,
    ) -> Iterator[None]:
        """Holds a lock, for which it waits.

        Args:
            name: its file's.
            timeout_seconds: seconds to wait. Those in which this process is stopped do not count.
            closing: once it is set, nobody waits any more.
            slow: called with who holds the lock, each second, once it has been waited for for 5 seconds.

        Raises:
            LockTimeout: it could not be taken within `timeout_seconds`.
            LockGivenUp: `closing` was set.
            LocksUnavailable, OSError: see `Machine.lock`.
        """
        waited, look_at = AwakeTime(), _SILENCE_SECONDS
        while True:
            with self.try_hold(name) as held:
                if held:
                    yield
                    return
            if (seconds := waited.seconds()) >= timeout_seconds:
                path, who = self._directory / name, self._holder_of(name)
                raise LockTimeout(f"{path} is locked by {who} for more than {timeout_seconds:.0f} s")
            if seconds >= look_at:
                look_at = seconds + _LOOK_SECONDS
                slow(self._holder_of(name))
            if closing.wait(_LOCK_PAUSE_SECONDS):
                raise LockGivenUp

    @contextlib.contextmanager
    def try_hold(self, name: str) -> Iterator[bool]:
        """Holds a lock if it is free. Gives whether it was. Raises LocksUnavailable, OSError."""
        # Each try by itself, not the wait between them.
        with self._undisturbed():
            free = self._machine.lock(self._directory / name)
            try:
                if free is not None:
                    self._sign(name)
                yield free is not None
            finally:
                if free is not None:
                    free()

    def _sign(self, name: str) -> None:
        """Writes into its file that this process holds it, for people only: a full disk does not matter."""
        if self._us is None:
            place, pid = self._machine.place(), self._machine.pid()
            status = self._machine.status(pid)
            started = status.started if status is not None else 0
            self._us = _Holder(place.host, place.boot_id, place.pid_ns, pid, started)
        text = json.dumps(asdict(self._us)).encode()
        with contextlib.suppress(OSError), open(open_private(self._directory / name, os.O_RDWR), "r+b") as file:
            if file.read(_MOST_READ_BYTES) != text:
                file.seek(0)
                file.truncate()
                file.write(text)

    def _holder_of(self, name: str) -> str:
        """Who holds a lock, for people, and what to do if it is stopped. "another process", if that is not known."""
        try:
            with open(open_private(self._directory / name, os.O_RDONLY), "rb") as file:
                values = json.loads(file.read(_MOST_READ_BYTES))
            holder = _Holder(**values)
            words = (holder.host, holder.boot_id, holder.pid_ns)
            if not all(isinstance(word, str) and word.isprintable() and len(word) <= _LONGEST for word in words):
                return "another process"
            if not (isinstance(holder.pid, int) and isinstance(holder.started, int) and holder.pid > 0):
                return "another process"
        except (OSError, ValueError, TypeError, RecursionError):
            return "another process"
        here = self._machine.place()
        if (holder.host, holder.boot_id) != (here.host, here.boot_id):
            return f"process {holder.pid} on {holder.host}"
        if holder.pid_ns != here.pid_ns:
            return f"process {holder.pid} in another container of this machine ({holder.host})"
        if not self._machine.is_same_process(holder.pid, holder.started):
            return "another process"  # Somebody has taken it since, and could not sign.
        stopped = self._machine.is_stopped(holder.pid)
        return f"process {holder.pid} of this machine{' (it is stopped: `fg`, or end it)' if stopped else ''}"
