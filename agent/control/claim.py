"""The claim of an embedded master: who serves a job whose master was not started by hand.

The claim is one small file per job in the checkpoint directory, replaced as a whole. An agent that sees the master's
process, or reaches the master, moves the counter in it. So others can tell a served job from an abandoned one without
comparing clocks. There are two locks (`locks`). An agent that starts a master holds `starting`, perhaps for long. The
other one is held only while the file is replaced, so that the counter can move meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.elastic.checkpoint.files import move_over
from dalsegno.protos.processes import is_of_earlier_boot

from ..storage.complaint import is_forbidden, of_another, user
from ..storage.private import open_private
from .locks import JobLocks
from .machine import Machine, ProcessPlace
from .spawning import TOKEN

__all__ = ["Claim", "ClaimFile", "not_looked_for", "served_elsewhere"]

_WRITE_LOCK, _START_LOCK = "claim.lock", "start.lock"
# Seconds.
_WRITE_TIMEOUT_SECONDS = 10.0
_READS, _READ_PAUSE_SECONDS = 5, 0.02
# For longer than a FUSE mount keeps what it has seen (a second), and not as long as the counter stands still.
_COMPARISONS, _COMPARISON_PAUSE_SECONDS = 15, 0.1
# The most bytes of a claim, which has a few hundred.
_MOST_READ_BYTES = 1 << 16
# The most characters of a host name, an address or a namespace; and of a path, escaped.
_LONGEST, _LONGEST_PATH = 256, 1 << 15


@dataclass(frozen=True)
class Claim:
    """The master that serves the job.

    Attributes:
        host, boot_id: the machine, and its present boot.
        pid, start_time: the master's process there (clock ticks since boot).
        generation: the master's.
        counter: moves every two seconds.
        address: HOST:PORT.
        pid_ns, net_ns: the master's, see `ProcessPlace`; empty in claims of older versions, which knew none.
        machine: the master's, see `ProcessPlace`; empty in claims of older versions.
        directory, inode: where the claim was written, see `ClaimFile.place`; empty in claims of older versions.
    """

    host: str
    boot_id: str
    pid: int
    start_time: int
    generation: int
    counter: int
    address: str
    pid_ns: str = ""
    net_ns: str = ""
    machine: str = ""
    directory: str = ""
    inode: str = ""

    @classmethod
    def parse(cls, text: bytes) -> Claim:
        """Parses the content of a claim file. Keys of later versions are ignored.

        Raises:
            ValueError, TypeError: it is no claim.
        """
        values = json.loads(text)
        claim = cls(**{one.name: values[one.name] for one in fields(cls) if one.name in values})
        for one in fields(cls):
            value = getattr(claim, one.name)
            if type(value).__name__ != one.type or (isinstance(value, int) and not 0 <= value < 1 << 63):
                raise ValueError(f"a claim with {one.name} {value!r}")
            # People are shown where the job is served.
            longest = _LONGEST_PATH if one.name == "directory" else _LONGEST
            if isinstance(value, str) and (len(value) > longest or not value.isprintable()):
                raise ValueError(f"a claim with {one.name} {value[:_LONGEST]!r}")
        return claim

    def is_reached_from(self, place: ProcessPlace) -> bool:
        """Whether the address, a loopback address, means the master at that place, too."""
        same_machine = (self.host, self.boot_id) == (place.host, place.boot_id)
        return same_machine and _same(self.net_ns, place.net_ns)

    def is_seen_from(self, place: ProcessPlace) -> bool:
        """Whether `pid` and the address mean the master at that place, too."""
        return self.is_reached_from(place) and _same(self.pid_ns, place.pid_ns)

    def ended_with_boot(self, place: ProcessPlace) -> bool:
        """Whether the master's machine is this one and has booted since: then the master is gone."""
        return is_of_earlier_boot(self, place)

    def is_of(self, other: Claim | None) -> bool:
        """Whether both are claims of the same master, whatever their counters are."""
        return other is not None and replace(self, counter=0) == replace(other, counter=0)


def served_elsewhere(claim: Claim, place: ProcessPlace, job_id: str) -> str:
    """What to say where the master of a job cannot be reached from this place."""
    where = f"on {claim.host}"
    if (claim.host, claim.boot_id) == (place.host, place.boot_id):
        where = f"in another container of this machine ({claim.host}), whose loopback address is its own"
    return (
        f"job {job_id} is served by an agent {where}; to span machines or containers start a master that all"
        " can reach (dlrover-master --host ADDRESS) and give its address with --master HOST:PORT"
    )


def not_looked_for(directory: Path, error: Exception) -> str:
    """Why an agent cannot look for the job's master, for people.

    Args:
        directory: the job's private one.
        error: what came of an attempt.
    """
    if not isinstance(error, OSError) or not is_forbidden(error):
        return str(error)
    theirs = of_another(directory.parents[1], error)
    why = f"{error.filename} cannot be used ({error.strerror}): `chmod -R u+rwX {directory}`"
    if theirs:
        why = f"{theirs}. For this run, give {directory} back to {user(os.geteuid())}, with all in it"
    return (
        "the job's master cannot be looked for, so this agent starts no other one if it ends; training goes on"
        f" meanwhile. {why}"
    )


def _same(one: str, other: str) -> bool:
    return one == other or not one or not other


class ClaimFile:
    """The claim of one job.

    Args:
        directory: private to the job.
        machine: stands for the kernel.
        undisturbed: see `JobLocks`.
    """

    def __init__(
        self,
        directory: Path,
        machine: Machine | None = None,
        undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._directory = directory
        self._locks = JobLocks(directory, machine or Machine(), undisturbed)
        self.path = directory / "claim.json"

    def read(self) -> Claim | None:
        """The claim; None if there is none, or none that can be read (then nobody holds the job by it).

        Raises:
            NotPrivateError: the file belongs to somebody else.
            OSError: it cannot be read now.
        """
        for _ in range(_READS):
            try:
                with open(open_private(self.path, os.O_RDONLY), "rb") as file:
                    return Claim.parse(file.read(_MOST_READ_BYTES))
            except FileNotFoundError:
                return None
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                # why: half written, where the mount cannot rename; no event says when it is whole
                time.sleep(_READ_PAUSE_SECONDS)
        # The disk is damaged, or another program has written it.
        return None

    def place(self) -> tuple[str, str]:
        """The directory's real path, escaped, and its inode's number; both empty: it is gone, or cannot be seen."""
        try:
            return printable(os.path.realpath(self._directory)), str(os.stat(self._directory).st_ino)
        except OSError:
            return "", ""

    def is_copied(self, claim: Claim) -> bool:
        """Whether the claim was written in another directory, of which this one is a copy: its master serves that one.

        One of the two that is the same tells that it is this one: another container may know it by another path, and a
        file system may number it anew. Two mounts may do both: then it can be seen at the other path.
        """
        there, here = (claim.directory, claim.inode), self.place()
        elsewhere = all(there) and all(here) and there[0] != here[0] and there[1] != here[1]
        return elsewhere and not self._is_also_at(Path(claim.directory))

    def _is_also_at(self, path: Path) -> bool:
        """Whether this directory can be seen at that path, too, and not one that it was copied from.

        No copy has its token at the same moment (`ctime`), unless the file system keeps no such time or it is a hard
        link. Then the claims tell: an original's moves on.
        """
        other = ClaimFile(path)
        with contextlib.suppress(OSError):
            one, two = os.stat(self._directory / TOKEN), os.stat(path / TOKEN)
            if (one.st_ctime_ns, one.st_mtime_ns) != (two.st_ctime_ns, two.st_mtime_ns):
                return False
            for _ in range(_COMPARISONS):
                if (claim := self.read()) is not None and claim == other.read():
                    return True
                time.sleep(_COMPARISON_PAUSE_SECONDS)  # why: no event tells when a mount sees what another one wrote
        return False

    def wait_until_free(self, closing: threading.Event) -> None:
        """Returns once the claim can be written: one that is stopped as it writes it holds its lock.

        Raises: what `write` does.
        """
        with self._locks.hold(_WRITE_LOCK, _WRITE_TIMEOUT_SECONDS, closing):
            pass

    def write(self, claim: Claim, closing: threading.Event) -> None:
        """Replaces the claim.

        Raises:
            LockTimeout: another process has been writing it for much longer than that takes.
            LockGivenUp: `closing` was set.
            LocksUnavailable, OSError: see `bump`.
        """
        with self._locks.hold(_WRITE_LOCK, _WRITE_TIMEOUT_SECONDS, closing):
            self._replace(claim)

    def _replace(self, claim: Claim) -> None:
        aside = self._directory / f"claim.{secrets.token_hex(8)}"
        try:
            with open(aside, "x", encoding="utf-8") as file:
                json.dump(asdict(claim), file)
                file.flush()
                os.fsync(file.fileno())
            move_over(aside, self.path)
        except OSError as error:
            # Not the error's text, which has a new file name with every attempt.
            raise OSError(error.errno, error.strerror or str(error), str(self.path)) from error
        finally:
            with contextlib.suppress(OSError):  # it hid what failed first
                aside.unlink()

    def bump(self, before: Claim) -> Claim | None:
        """Moves the counter of a claim that still equals `before`; returns it. None: it does not, or is locked now.

        Raises:
            LocksUnavailable: nothing can be locked here, and without locks a newer claim could be overwritten.
            OSError: the file system fails.
        """
        with self._locks.try_hold(_WRITE_LOCK) as held:
            if not held or self.read() != before:
                return None
            moved = replace(before, counter=before.counter + 1)
            self._replace(moved)
            return moved

    def starting(
        self, timeout_seconds: float, closing: threading.Event, slow: Callable[[str], None] = lambda who: None
    ) -> contextlib.AbstractContextManager[None]:
        """A lock that is held while a master is looked for or started. For the rest see `JobLocks.hold`."""
        return self._locks.hold(_START_LOCK, timeout_seconds, closing, slow)
