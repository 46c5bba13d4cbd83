"""The claim of an embedded master: who serves a job whose master was not started by hand (DESIGN section 5).

One small file per job in the checkpoint directory, replaced as a whole. Its counter moves as long as an agent on the
master's machine lives, so that another machine can tell a served job from an abandoned one without comparing clocks.
Two locks: `starting` is held by whoever looks for a master and starts one, which may take long; the other only while
the file is replaced, so that the counter moves meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dalsegno.elastic.checkpoint.files import move_over

__all__ = ["Claim", "ClaimFile", "LockTimeout"]

# flock has no wait with a deadline.
_LOCK_PAUSE = 0.05
_WRITE_LOCK, _START_LOCK = "claim.lock", "start.lock"
# Seconds.
_WRITE_TIMEOUT = 10.0
_READS, _READ_PAUSE = 5, 0.02


class LockTimeout(Exception):
    """Somebody holds the claim's lock for longer than anything under it takes."""


@dataclass(frozen=True)
class Claim:
    """Who serves the job.

    Attributes:
        host, boot_id: the machine, and since when it is up.
        pid, start_time: the master's process there (clock ticks since boot).
        generation: of the master.
        counter: moves every two seconds.
        address: HOST:PORT.
    """

    host: str
    boot_id: str
    pid: int
    start_time: int
    generation: int
    counter: int
    address: str


class ClaimFile:
    """The claim of one job."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.path = directory / "claim.json"

    def read(self) -> Claim | None:
        """The claim; None when there is none, or none that can be read (then nobody holds the job by it)."""
        for _ in range(_READS):
            try:
                return Claim(**json.loads(self.path.read_text(encoding="utf-8")))
            except FileNotFoundError:
                return None
            except (ValueError, TypeError):
                # why: half written, where the mount cannot rename; no event says when it is whole
                time.sleep(_READ_PAUSE)
        # A damaged disk, or another program's.
        return None

    def write(self, claim: Claim, closing: threading.Event) -> None:
        """Replaces the claim.

        Raises:
            LockTimeout: another process is writing it, for much longer than that takes.
        """
        with self._lock(_WRITE_LOCK, _WRITE_TIMEOUT, closing):
            self._replace(claim)

    def _replace(self, claim: Claim) -> None:
        aside = self._directory / f"claim.{secrets.token_hex(8)}"
        try:
            with open(aside, "x", encoding="utf-8") as file:
                json.dump(asdict(claim), file)
                file.flush()
                os.fsync(file.fileno())
            move_over(aside, self.path)
        finally:
            aside.unlink(missing_ok=True)

    def bump(self, host: str, boot_id: str) -> bool:
        """Moves the counter of a claim of this machine. False: the claim is another machine's, or locked just now."""
        with self._try_lock(_WRITE_LOCK) as held:
            claim = self.read() if held else None
            if claim is None or (claim.host, claim.boot_id) != (host, boot_id):
                return False
            self._replace(replace(claim, counter=claim.counter + 1))
            return True

    def starting(self, timeout: float, closing: threading.Event) -> contextlib.AbstractContextManager[None]:
        """Held while a master is looked for or started. The kernel frees it when the holder dies.

        Raises:
            LockTimeout: on entering: not within `timeout` seconds, or `closing` was set.
        """
        return self._lock(_START_LOCK, timeout, closing)

    @contextlib.contextmanager
    def _lock(self, name: str, timeout: float, closing: threading.Event) -> Iterator[None]:
        deadline = time.monotonic() + timeout
        while True:
            with self._try_lock(name) as held:
                if held:
                    yield
                    return
            if time.monotonic() >= deadline or closing.wait(_LOCK_PAUSE):
                raise LockTimeout(f"{self.path} is locked by another process for more than {timeout:.0f} s")

    @contextlib.contextmanager
    def _try_lock(self, name: str) -> Iterator[bool]:
        fd = os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield _flock(fd)
        finally:
            os.close(fd)


class RenewerLock:
    """Held by the one agent of a machine that moves the counter; freed by the kernel with its process."""

    def __init__(self, directory: Path, host: str) -> None:
        # Per host: on another machine another agent renews its own machine's claim.
        self._path = directory / f"renewer.{host}.lock"
        self._fd: int | None = None

    def try_hold(self) -> bool:
        """Whether this process holds it now."""
        if self._fd is None:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not _flock(fd):
                os.close(fd)
                return False
            self._fd = fd
        return True

    def release(self) -> None:
        """Lets another agent take over."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
