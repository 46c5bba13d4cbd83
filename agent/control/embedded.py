"""The embedded master: the job's agents on one machine find it, start it and start it again.

Only a master that has ended or is stopped (SIGSTOP) is replaced. A master that lives and does not answer waits for its
disk, or for this machine. If it were killed, its successor would have to start, and wait for the same disk. So agents
wait for it, and say so once.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from pathlib import Path

import grpc

from dalsegno.elastic.checkpoint.errors import is_full
from dalsegno.elastic.checkpoint.mounts import is_away, mount_point
from dalsegno.protos.shortage import CannotStartError, starting

from ..storage.private import NotPrivateError, check_private
from .awake import AwakeTime
from .claim import Claim, ClaimFile, not_looked_for, served_elsewhere
from .connection import Credentials
from .inquiry import ANSWER_TIMEOUT_SECONDS, MasterInquiry
from .locks import LockGivenUp, LockTimeout
from .machine import LocksUnavailable, Machine
from .spawning import (
    COMMAND,
    LOOPBACK,
    MasterError,
    SpawnedMaster,
    is_made,
    last_words,
    make_token,
    read_token,
    start_master,
    with_limit,
)

__all__ = ["EmbeddedMaster", "MasterError"]

# Seconds.
_LOCK_TIMEOUT_SECONDS = 90.0
# How long a living master may be silent before people are told.
_SILENCE_SECONDS = 5.0
_RENEWAL_SECONDS = 2.0
# The least time for which a claim is watched if its master cannot be seen: over NFS its counter moves late.
_LEAST_WATCH_SECONDS = 10.0
# Between two looks at a claim, and at a master that does not answer.
_LOOK_PAUSE_SECONDS = 0.5
# The longest wait for the death of a process that was killed.
_DEATH_TIMEOUT_SECONDS = 6.0
# Between two attempts after one failed.
_RETRY_PAUSE_SECONDS = 1.0
logger = logging.getLogger(__name__)


class _Standing(Enum):
    """The state of a claim's master, as far as it can be seen from here."""

    SERVES = "it answers"
    GONE = "nobody holds the job: no claim, or a copied one, or its process has ended"
    STOPPED = "its process was stopped, and can hold the store's lock"
    ESTRANGED = "its process lives and does not know the job's token: nobody can ever reach it"
    SILENT = "its process lives, and does not answer"
    HIDDEN = "it would be reached from here, but does not answer, and its process cannot be seen"
    ELSEWHERE = "on another machine, or in another container: cannot be reached from here"


_REPLACED = (_Standing.GONE, _Standing.STOPPED, _Standing.ESTRANGED)


class EmbeddedMaster:
    """One agent's view of its job's embedded master.

    Args:
        directory: private to the job, in the checkpoint directory.
        job_id: the job's.
        node_timeout: how long a claim whose master cannot be seen is watched before it counts as abandoned; at least
            10 seconds, which is a few moves of its counter.
        say: prints one line for people.
        command: starts a master.
        patience_seconds: seconds after which this agent gives up, for this time, a living master that does not answer.
        machine: stands for the kernel.
        listen: where a master that this agent starts serves.
        undisturbed: held while this process has a lock of the job's: it is not to be stopped (Ctrl-Z) inside.
    """

    def __init__(
        self,
        directory: Path,
        job_id: str,
        node_timeout: float,
        say: Callable[[str, bool], None] = lambda text, warning: None,
        command: Sequence[str] = COMMAND,
        patience_seconds: float = 60.0,
        machine: Machine | None = None,
        listen: tuple[str, int] = LOOPBACK,
        undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._directory = directory
        self._job_id = job_id
        self._watch_seconds = max(node_timeout, _LEAST_WATCH_SECONDS)
        self._say = say
        # Messages said since the master was found last.
        self._said: set[str] = set()
        self._command = tuple(command)
        self._listen = listen
        # A watched claim must have time to show that it stands still.
        self._patience_seconds = max(patience_seconds, self._watch_seconds + _SILENCE_SECONDS)
        self._machine = machine or Machine()
        self._place = self._machine.place()
        self._claims = ClaimFile(directory, self._machine, undisturbed)
        # The claim at the last look.
        self._known: Claim | None = None
        # That of the last master that was found or started here.
        self._last: Claim | None = None
        # Where the directory lies; None before it was made.
        self._mount: Path | None = None
        self._children: list[SpawnedMaster] = []
        self._reaping = threading.Lock()
        self._missing = threading.Event()
        self._closing = threading.Event()
        self._address = ""
        # Whether it answered when it was last asked.
        self._served = False
        self._inquiry = MasterInquiry(job_id, self.credentials, say)
        # The claim of a master that was gone when this agent came; agents that it served may know more than its store.
        self.abandoned_generation = 0
        self._threads = [
            threading.Thread(target=self._supervise, name="master-supervisor", daemon=True),
            threading.Thread(target=self._renew, name="claim-renewal", daemon=True),
        ]

    # ---- for the agent ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Finds the job's master or starts one, then keeps the claim renewed and the master alive.

        Raises:
            MasterError: the job is served where this agent cannot reach, its master does not answer, or none can be
                started.
            OSError: the directory cannot be written, or is not ours alone.
        """
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_private(self._directory)
        self._mount = mount_point(self._directory)
        self._ensure()
        for thread in self._threads:
            with starting("a thread of this agent"):
                thread.start()

    def addresses(self) -> Sequence[str]:
        """The present address; never blocks."""
        return (self._address,) if self._address else ()

    def credentials(self) -> Credentials:
        """The token that all agents of the job share through the checkpoint directory.

        Raises:
            TokenLostError, OSError: it cannot be read now.
        """
        return Credentials(token=read_token(self._directory))

    def missing(self) -> None:
        """Called when a call got no answer: looks for the master, and replaces it if it is gone."""
        self._missing.set()

    def close(self) -> None:
        """Leaves the master, which ends by itself when the job has ended or no agent is left."""
        self._closing.set()
        self._missing.set()
        deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS + _SILENCE_SECONDS
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    # ---- threads ----------------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        while True:
            self._missing.wait()
            self._missing.clear()
            if self._closing.is_set():
                return
            try:
                self._ensure()
            except (MasterError, OSError) as error:
                logger.warning("no master: %s", error)
                self._say_once(not_looked_for(self._directory, error), True)
            except Exception as error:
                # A bug of ours: without this thread no agent on this node would ever start a master again.
                logger.exception("looking for the master failed")
                self._say_once(f"looking for the master failed ({type(error).__name__}: {error})", True)
            else:
                continue
            self._missing.set()
            if self._closing.wait(_RETRY_PAUSE_SECONDS):
                return

    def _renew(self) -> None:
        said, full = "", False
        while not self._closing.wait(_RENEWAL_SECONDS):
            try:
                # Reaps a master that we started and that has ended.
                self._reap()
                # It is enough if another agent moves it. A stopped process moves nothing; it may hold the lock.
                before, self._known = self._known, self._claims.read()
                if self._known is not None and self._known == before and self._renews(before):
                    self._known = self._claims.bump(before)
                    full = False
                said = ""
            except Exception as error:
                # After any error the next attempt may succeed; a claim that stands still is taken over.
                if str(error) != said:
                    logger.warning("the claim cannot be renewed: %s", error)
                    if isinstance(error, LocksUnavailable):
                        self._say(f"the claim cannot be renewed: {error}", True)
                said = str(error)
                if not full and is_full(error):
                    full = True
                    # The master needs room for each decision, and is only silent.
                    self._say(
                        f"no room in {self._directory} ({error.strerror}): the master decides nothing until there is"
                        " some; training goes on",
                        True,
                    )

    def _reap(self) -> None:
        """Takes note of the masters of ours that have ended; of one that failed people hear its last words."""
        with self._reaping:
            ended = [child for child in self._children if child.process.poll() is not None]
            self._children = [child for child in self._children if child not in ended]
        for child in ended:
            # In a later master's time the log's last line is that one's.
            present = self._last is not None and self._last.pid == child.process.pid
            if child.process.returncode > 0 and present and (words := last_words(self._directory, child.log_begin)):
                self._say_once(f"the job's own master has ended: {with_limit(words)}", True)

    def _renews(self, claim: Claim) -> bool:
        """Whether this agent moves the claim's counter: for a master that it sees, or that answers."""
        answers = self._served and claim.address == self._address
        return claim.is_seen_from(self._place) or (claim.is_reached_from(self._place) and answers)

    def _say_who_starts(self, who: str) -> None:
        self._say_once(f"{who} starts the job's master; waiting for it", True)

    def _say_once(self, text: str, warning: bool) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text, warning)

    # ---- finding ----------------------------------------------------------------------------------------------------

    def _ensure(self) -> None:
        """Returns once a master answers, or once this is closed.

        Raises:
            MasterError, OSError: see `start`.
        """
        spent, still_since = AwakeTime(), 0.0
        watched: Claim | None = None
        while not self._closing.is_set():
            claim = self._claims.read()
            standing = self._standing(claim)
            now = spent.seconds()
            if claim != watched:
                if watched is not None and claim is not None and standing is _Standing.ELSEWHERE:
                    raise MasterError(served_elsewhere(claim, self._place, self._job_id))
                watched, still_since = claim, now
            if claim is not None and standing is _Standing.SERVES:
                self._found(claim)
                return
            self._served = False
            hidden = standing in (_Standing.HIDDEN, _Standing.ELSEWHERE)
            if standing in _REPLACED or (hidden and now - still_since >= self._watch_seconds):
                if self._replace(claim, standing):
                    return
            elif claim is not None:
                self._wait_for(claim, standing, now)

    def _found(self, claim: Claim) -> None:
        self._address, self._last = claim.address, claim
        self._served = True
        self._said.clear()

    def _wait_for(self, claim: Claim, standing: _Standing, waited: float) -> None:
        """Waits a moment for a master that may live.

        Raises:
            MasterError: this has taken too long for this time.
        """
        where = f"process {claim.pid}" if standing is _Standing.SILENT else f"in another container of {claim.host}"
        master, known = f"the master of job {self._job_id} ({where}) lives", self._inquiry.trouble
        if standing is _Standing.ELSEWHERE:
            text = f"the job was served on {claim.host}; watching for {self._watch_seconds:.0f} s whether it still is"
            self._say_once(text, False)
        elif waited >= self._patience_seconds:
            why = known or (
                f"has not answered for {self._patience_seconds:.0f} s; it is not replaced while it lives, as its disk"
                " may hang"
            )
            raise MasterError(
                f"{master} and {why}; if it never comes back, end it (kill -9), and an agent starts the next"
            )
        elif waited >= _SILENCE_SECONDS:
            why = known or "does not answer: its disk or this machine is slow"
            self._say_once(f"{master} and {why}; waiting for it", True)
        # No event tells of another process's answer, nor, over a network file system, of its claim.
        self._closing.wait(_LOOK_PAUSE_SECONDS)

    def _standing(self, claim: Claim | None) -> _Standing:
        if claim is None or claim.ended_with_boot(self._place):
            return _Standing.GONE
        if not claim.is_reached_from(self._place):
            return _Standing.ELSEWHERE
        # Only of one on this machine: another one may know the same directory by another path and number.
        if self._claims.is_copied(claim):
            return _Standing.GONE
        answer = self._inquiry.ask(claim.address)
        if answer is None:
            return _Standing.SERVES
        if not claim.is_seen_from(self._place):
            return _Standing.HIDDEN
        # The number may have been reused, or a claim may name a stranger's process on purpose.
        if not self._machine.is_ours(claim.pid) or not self._machine.is_same_process(claim.pid, claim.start_time):
            return _Standing.GONE
        if self._machine.is_stopped(claim.pid):
            return _Standing.STOPPED
        # It lives, so the port is its own: it has another token.
        return _Standing.ESTRANGED if answer is grpc.StatusCode.UNAUTHENTICATED else _Standing.SILENT

    # ---- starting ---------------------------------------------------------------------------------------------------

    def _replace(self, claim: Claim | None, standing: _Standing) -> bool:
        """Starts the successor of the claim's master. False: something has changed, look again; or this is closed.

        Raises:
            MasterError, OSError: see `start`.
        """
        try:
            self._make_again()
            with self._claims.starting(_LOCK_TIMEOUT_SECONDS, self._closing, self._say_who_starts):
                # Before anything is ended or superseded by a master that could then not be claimed.
                self._claims.wait_until_free(self._closing)
                now = self._claims.read()
                if not self._is_as_it_was(now, claim, standing):
                    return False
                if now is not None:
                    self._end(now, standing)
                elif (last := self._last) and last.is_seen_from(self._place) and self._machine.is_ours(last.pid):
                    # Its claim was deleted with its store. It would go on for a while.
                    self._end(last, _Standing.ESTRANGED)
                self._reap()
                self._spawn(now)
                return True
        except LockGivenUp:
            return False  # This agent goes.
        except (LockTimeout, LocksUnavailable) as error:
            raise MasterError(str(error)) from error
        except NotPrivateError:
            raise
        except CannotStartError as error:
            raise MasterError(str(error)) from error
        except OSError as error:
            raise MasterError(
                f"no master can be started ({error.strerror or error}): its token, log, store and claim are in"
                f" {self._directory}, which needs room and must be ours to write"
            ) from error

    def _make_again(self) -> None:
        """Makes the directory again if somebody has deleted it, but not where a mount point has lost its volume.

        A master whose store is deleted records nothing any more (SQLite looks whether the file is where it was), and
        soon ends; see ``master.server.lifetime``.

        Raises:
            MasterError: the volume is away.
            OSError: it cannot be made.
        """
        if is_made(self._directory):
            return
        if is_away(self._mount, self._directory):
            raise MasterError(
                f"no master can be started: {self._directory} is gone with the volume that the run began on, which is"
                " not mounted here any more: mount it again"
            )
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_private(self._directory)
        if self._last is not None:
            self._say(
                f"{self._directory} was deleted: it is made again, and the next master, with a new token, asks the"
                " nodes and the checkpoints how far the run is",
                True,
            )

    def _is_as_it_was(self, now: Claim | None, before: Claim | None, standing: _Standing) -> bool:
        if now is None or before is None:
            return now is before
        if standing in (_Standing.HIDDEN, _Standing.ELSEWHERE):
            # Compared with its counter.
            return now == before
        if standing is _Standing.STOPPED and not self._machine.is_stopped(now.pid):
            return False
        if standing is _Standing.ESTRANGED and self._standing(now) is not standing:
            return False
        return now.is_of(before)

    def _end(self, claim: Claim, standing: _Standing) -> None:
        """Ends a predecessor, which would be a second master if it answered again later."""
        if standing not in (_Standing.STOPPED, _Standing.ESTRANGED):
            return
        if self._machine.kill(claim.pid, claim.start_time):
            logger.warning("killed the master (process %d): %s", claim.pid, standing.value)
            deadline = time.monotonic() + _DEATH_TIMEOUT_SECONDS
            # No event tells of the death of a process that is not our child.
            while self._machine.is_same_process(claim.pid, claim.start_time) and time.monotonic() < deadline:
                self._closing.wait(0.02)

    def _spawn(self, before: Claim | None) -> None:
        """Starts a master and writes its claim; the caller holds the lock for starting."""
        if before is not None:
            self.abandoned_generation = max(self.abandoned_generation, before.generation)
        remark = make_token(self._directory)
        if remark:
            self._say(remark, True)
        started = start_master(self._directory, self._job_id, self._command, self._listen)
        process = started.process
        with self._reaping:
            self._children.append(started)
        if started.remark:
            self._say(started.remark, True)
        status = self._machine.status(process.pid)
        claim = Claim(
            self._place.host,
            self._place.boot_id,
            process.pid,
            status.started if status is not None else 0,
            started.generation,
            0 if before is None else before.counter + 1,
            started.address,
            self._place.pid_ns,
            self._place.net_ns,
            self._place.machine,
            *self._claims.place(),
        )
        self._publish(claim, process)
        self._found(claim)
        logger.info("the embedded master: process %d at %s, generation %d", claim.pid, claim.address, claim.generation)

    def _publish(self, claim: Claim, process: subprocess.Popen[bytes]) -> None:
        """Writes the claim of a master that was just started; if that fails, ends the master.

        Without a claim nobody would find it, and the next attempt would start another one beside it.
        """
        try:
            self._claims.write(claim, self._closing)
        except (LockGivenUp, LockTimeout, LocksUnavailable, OSError):
            process.kill()
            raise
