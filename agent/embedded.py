"""The embedded master: found, started and started again by the agents of the job on one machine (DESIGN section 5)."""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from dalsegno.elastic.checkpoint.files import publish, read_published
from dalsegno.protos import control_pb2, control_pb2_grpc

from .claim import Claim, ClaimFile, LockTimeout, RenewerLock
from .connection import PROTOCOL, RETRIED, Credentials, code_of
from .keeper import DEAF_TO
from .lifeline import LIFELINE_VARIABLE
from .processes import boot_id, is_same_process, kill_same_process, process_state, start_time
from .signals import held_back

__all__ = ["EmbeddedMaster", "MasterError"]

# Seconds.
_START_TIMEOUT = 60.0
_LOCK_TIMEOUT = 90.0
_ANSWER_TIMEOUT = 2.0
# How long a living master may be silent before its successor takes its place; a stopped one gets no time.
_SILENCE = 6.0
_RENEWAL = 2.0
# Another machine's claim is watched at least this long: over NFS its counter is seen to move late.
_LEAST_WATCH = 10.0
# Between two attempts after one failed.
_RETRY_PAUSE = 1.0
# What the environment variables of `dlrover-master` begin with.
_SERVICE_VARIABLES = "DALSEGNO_MASTER_"

logger = logging.getLogger(__name__)


class MasterError(Exception):
    """No master can be had; one line that says why and what to change."""


class EmbeddedMaster:
    """One agent's view of its job's embedded master.

    Args:
        directory: private to the job, in the checkpoint directory.
        job_id: of the job.
        node_timeout: how long another machine's claim is watched before it counts as abandoned; at least 10 seconds,
            which is a few moves of its counter.
        say: prints one line for the person.
        command: starts a master.
    """

    def __init__(
        self,
        directory: Path,
        job_id: str,
        node_timeout: float,
        say: Callable[[str, bool], None] = lambda text, warning: None,
        command: Sequence[str] = (sys.executable, "-m", "dalsegno.master"),
    ) -> None:
        self._directory = directory
        self._job_id = job_id
        self._watch = max(node_timeout, _LEAST_WATCH)
        self._say = say
        self._command = tuple(command)
        self._host = socket.gethostname()
        self._boot = boot_id()
        self._claims = ClaimFile(directory)
        self._renewer = RenewerLock(directory, self._host)
        self._children: list[subprocess.Popen[str]] = []
        self._missing = threading.Event()
        self._closing = threading.Event()
        self._address = ""
        # Of a claim whose master was gone when this agent came: what it served may know more than its store.
        self.abandoned_generation = 0
        self.token_file = directory / "token"
        self._threads = [
            threading.Thread(target=self._supervise, name="master-supervisor", daemon=True),
            threading.Thread(target=self._renew, name="claim-renewal", daemon=True),
        ]

    # ---- for the agent ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Finds the job's master or starts one, then keeps the claim renewed and the master alive.

        Raises:
            MasterError: another machine serves the job, or no master can be started.
            OSError: the directory cannot be written.
        """
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._ensure()
        for thread in self._threads:
            thread.start()

    def addresses(self) -> Sequence[str]:
        """The present address; never blocks."""
        return (self._address,) if self._address else ()

    def credentials(self) -> Credentials:
        """The token that all agents of the job share through the checkpoint directory."""
        return Credentials(token=self._token())

    def missing(self) -> None:
        """Somebody got no answer: the master is looked for, and replaced if it is gone."""
        self._missing.set()

    def close(self) -> None:
        """The master lives on; it ends by itself when the job has ended or no agent is left."""
        self._closing.set()
        self._missing.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_ANSWER_TIMEOUT + _SILENCE)
        self._renewer.release()

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
                self._say(str(error), True)
                self._missing.set()
                if self._closing.wait(_RETRY_PAUSE):
                    return

    def _renew(self) -> None:
        while not self._closing.wait(_RENEWAL):
            # A master that we started and that ended would stay a zombie.
            self._children = [child for child in self._children if child.poll() is None]
            try:
                if self._renewer.try_hold():
                    self._claims.bump(self._host, self._boot)
            except OSError as error:
                logger.warning("the claim cannot be renewed: %s", error)

    # ---- finding and starting ---------------------------------------------------------------------------------------

    def _token(self) -> str:
        try:
            return read_published(self.token_file).decode("ascii").strip()
        except FileNotFoundError:
            pass
        aside = self._directory / f"token.{secrets.token_hex(8)}"
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
        try:
            publish(aside, self.token_file)
        except FileExistsError:
            logger.info("another agent made the token first")
        finally:
            aside.unlink()
        return read_published(self.token_file).decode("ascii").strip()

    def _ensure(self) -> None:
        """Leaves a master that answers, or raises."""
        watched = self._claims.read()
        if watched is not None and not self._is_ours(watched):
            self._watch_elsewhere(watched)
        try:
            with self._claims.starting(_LOCK_TIMEOUT, self._closing):
                claim = self._claims.read()
                if claim is not None and self._is_ours(claim):
                    if self._answers_in_time(claim):
                        self._found(claim)
                        return
                    self._end(claim)
                elif claim is not None and claim != watched:
                    raise self._served_on(claim.host)
                self._spawn(claim)
        except LockTimeout as error:
            raise MasterError(str(error)) from error

    def _is_ours(self, claim: Claim) -> bool:
        return (claim.host, claim.boot_id) == (self._host, self._boot)

    def _found(self, claim: Claim) -> None:
        self._address = claim.address

    def _answers_in_time(self, claim: Claim) -> bool:
        """Whether the claimed master answers, now or while it is alive and its patience lasts."""
        deadline = time.monotonic() + _SILENCE
        while True:
            if self._answers(claim.address):
                return True
            if not is_same_process(claim.pid, claim.start_time) or process_state(claim.pid) in ("T", "t"):
                return False
            # It is not our child and may not listen yet: nothing tells when it answers, or ends.
            if time.monotonic() >= deadline or self._closing.wait(0.2):
                return False

    def _answers(self, address: str) -> bool:
        credentials = self.credentials()
        with credentials.channel(address) as channel:
            try:
                request = control_pb2.StatusRequest(job_id=self._job_id, protocol=PROTOCOL)
                control_pb2_grpc.ControlStub(channel).GetStatus(
                    request, timeout=_ANSWER_TIMEOUT, metadata=credentials.metadata
                )
            except grpc.RpcError as error:
                # UNAUTHENTICATED or another job: a stranger that got the port after our master was gone.
                refused = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT)
                return code_of(error) not in RETRIED and code_of(error) not in refused
            return True

    def _watch_elsewhere(self, claim: Claim) -> None:
        """Watches another machine's claim for a while; returns when it did not move.

        Raises:
            MasterError: it moved: the job is served there.
        """
        self._say(f"the job was served on {claim.host}; watching for {self._watch:.0f} s whether it still is", False)
        deadline = time.monotonic() + self._watch
        # A file that another machine replaces gives no event over a network file system.
        while time.monotonic() < deadline and not self._closing.wait(0.5):
            now = self._claims.read()
            if now is not None and now != claim:
                raise self._served_on(now.host)
        logger.warning("the claim of %s stands still: taking over with a higher generation", claim.host)

    def _served_on(self, host: str) -> MasterError:
        return MasterError(
            f"job {self._job_id} is served by an agent on {host}; to span machines start a master that all can reach "
            "(dlrover-master --host ADDRESS) and give its address with --master HOST:PORT"
        )

    def _end(self, claim: Claim) -> None:
        """A stopped predecessor can hold the store's lock; one that answers again later would be a second master."""
        if kill_same_process(claim.pid, claim.start_time):
            logger.warning("killed the master (process %d), which did not answer any more", claim.pid)
            deadline = time.monotonic() + _SILENCE
            # The death of a process that is not our child makes no event.
            while is_same_process(claim.pid, claim.start_time) and time.monotonic() < deadline:
                self._closing.wait(0.02)

    def _spawn(self, before: Claim | None) -> None:
        """Starts a master as a process of its own and writes the claim; the caller holds the claim's lock."""
        if before is not None:
            self.abandoned_generation = max(self.abandoned_generation, before.generation)
        self._token()
        log = self._directory / "master.log"
        # Not --nnodes: agents bring settings, and one that disagrees must still be able to start the job's master.
        command = [
            *self._command,
            *("--host", "127.0.0.1", "--port", "0", "--job-id", self._job_id),
            *("--store", f"sqlite:///{self._directory / 'master.sqlite'}"),
            *("--token-file", str(self.token_file), "--log-file", str(log), "--embedded"),
        ]
        # It outlives this agent: no lifeline, no terminal, no output but its first line.
        # Nor does it listen to what is meant for a master that is a service.
        ours = (LIFELINE_VARIABLE, _SERVICE_VARIABLES)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        # It outlives a notice that all processes of the node are given, from its first moment on.
        with open(log, "ab") as errors, held_back(DEAF_TO):
            begin = errors.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env=environment,
                cwd="/",
            )
        self._children.append(process)
        started = start_time(process.pid)
        line = self._first_line(process)
        try:
            said = json.loads(line)
            address, generation = str(said["address"]), int(said["generation"])
        except (ValueError, KeyError, TypeError):
            process.kill()
            process.wait()
            raise MasterError(f"the embedded master did not start: {_last_line(log, begin)} (log: {log})") from None
        counter = 0 if before is None else before.counter + 1
        claim = Claim(self._host, self._boot, process.pid, started or 0, generation, counter, address)
        self._claims.write(claim, self._closing)
        self._found(claim)
        logger.info("started the embedded master: process %d at %s, generation %d", process.pid, address, generation)

    def _first_line(self, process: subprocess.Popen[str]) -> str:
        """What it prints first; empty when it ends, or takes too long."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector, process.stdout:
            selector.register(process.stdout, selectors.EVENT_READ)
            return process.stdout.readline() if selector.select(_START_TIMEOUT) else ""


def _last_line(log: Path, begin: int) -> str:
    if log.stat().st_size < begin:
        # It began a new file; what the interpreter says of its end goes on into the one from before.
        log = log.with_name(f"{log.name}.1")
    with open(log, "rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
