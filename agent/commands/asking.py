"""Asks a job's master on behalf of a command: which master that is, with which credentials, and what it answers."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from dalsegno.elastic.checkpoint import CheckpointStore, Manifest
from dalsegno.protos import control_pb2, control_pb2_grpc
from dalsegno.protos.addresses import addresses_of
from dalsegno.protos.contract import Variable
from dalsegno.protos.plain_json import plain
from dalsegno.protos.text import one_line

from ..control.claim import ClaimFile
from ..control.connection import RETRIED, Credentials, code_of, detail_of, leader_of
from ..control.credentials import CredentialFiles
from ..control.handshake import mismatch
from ..control.places import MasterPlaces
from ..control.spawning import events_on_record, read_token
from ..decisions.contact import is_stranger
from ..decisions.events import EXIT_FAILED, EXIT_FINISHED
from ..storage.complaint import of_another
from ..storage.private import PRIVATE
from ..storage.survey import runs_in_order
from .endpoint import answers

__all__ = ["AskedMaster", "NoAnswer", "is_over", "put", "show"]

TIMEOUT_SECONDS = 5.0
# How long a leader that is gone may be named by those who stand by, and the pause between two tries: its lease, and the
# time that etcd takes to find a leader of its own where that is gone, too.
CHANGE_SECONDS, CHANGE_PAUSE_SECONDS = 9.0, 0.5
# Seconds in which a listener at an embedded master's address must answer.
_LOOK_SECONDS = 1.0
# Status codes with which the master did answer, so that the detail is the line to print.
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND)
_ANSWERED = (*_REFUSED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED)
# Status codes behind which another master is asked: one of several may have another token than the job's.
_ASK_ANOTHER = RETRIED | {grpc.StatusCode.UNAUTHENTICATED}
# Kinds of events behind which a job is over, and those behind which it is not.
_OVER = frozenset({"finished", "ended", "stopped"})
_TELL_OF_END = _OVER | {"resumed", "registered", "formed"}


def is_over(events: Iterable[control_pb2.Event], before: bool = False) -> bool:
    """Whether a job has ended, by what happened to it last. `before`: whether it had ended before these events."""
    told = [event.kind for event in events if event.kind in _TELL_OF_END]
    return told[-1] in _OVER if told else before


class NoAnswer(Exception):
    """What the last master said that was asked, instead of an answer.

    `is_sent_on`: a master that stands by has named one that leads, and that one does not answer.
    """

    def __init__(self, address: str, error: grpc.RpcError, is_sent_on: bool = False) -> None:
        super().__init__(f"{code_of(error).name}: {detail_of(error)}")
        self.address, self.error, self.is_sent_on = address, error, is_sent_on

    @property
    def is_from_master(self) -> bool:
        """Whether a master has said it; else nobody was reached."""
        refuses = code_of(self.error) is grpc.StatusCode.UNAUTHENTICATED
        return refuses or (isinstance(self.error, grpc.Call) and bool(self.error.trailing_metadata()))

    @property
    def is_in_vain(self) -> bool:
        """Whether the call was certainly not carried out: nobody listened, or a master has refused it."""
        code, detail = code_of(self.error), detail_of(self.error)
        if code is grpc.StatusCode.UNAVAILABLE:
            return self.is_from_master or detail.startswith("failed to connect")
        return code in _ANSWERED

    @property
    def is_away(self) -> bool:
        """Whether no master could be reached."""
        return code_of(self.error) is grpc.StatusCode.UNAVAILABLE


class NobodyAsked(NoAnswer):
    """No master serves the directory, so that nobody was called."""

    is_from_master, is_in_vain, is_away = False, True, True

    def __init__(self) -> None:
        super().__init__("", grpc.RpcError("no master serves the directory"))


@dataclass(frozen=True)
class JobOnDisk:
    """How a job stands whose master is gone.

    Attributes:
        text: One line.
        run: The last run's name; empty: there is none.
        newest: Its newest checkpoint.
        finished: Whether the run reached its end.
    """

    text: str
    run: str = ""
    newest: Manifest | None = None
    finished: bool = False


class AskedMaster:
    """The master that a person's options name.

    Args:
        options: Of the command line. `job_id` is filled in where only one job can be meant.

    Raises:
        ValueError: There is no master to ask, or what was given cannot be used; one line.
        OSError: A file cannot be read.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._addresses, self._credentials = _master_of(options)
        # A master may have carried out a call that it has not answered.
        self._is_uncertain = False

    def call(self, method: str, request: Any, more_seconds: float = 0.0) -> Any:
        """The answer of the master that leads: of several the others name it. Raises NoAnswer.

        While a leader that is gone is still named another one may be about to lead: that is waited for.

        `more_seconds`: how long the call may wait by itself.
        """
        request.job_id = self._options.job_id or ""
        until = time.monotonic() + CHANGE_SECONDS + more_seconds
        while True:
            try:
                return self._call(method, request, more_seconds)
            except NoAnswer as said:
                if said.is_away and self._look_again() and said.is_in_vain:
                    continue
                if not said.is_sent_on or time.monotonic() >= until:
                    raise
            time.sleep(CHANGE_PAUSE_SECONDS)  # why: nobody tells who is about to lead

    @property
    def is_embedded(self) -> bool:
        """Whether agents host the master: where it dies they start another one, and where all are gone nobody does."""
        return not self._options.master

    def _look_again(self) -> bool:
        """Reads the claim of an embedded master again. Whether it names another address now."""
        before = self._addresses
        if self.is_embedded:
            with contextlib.suppress(ValueError, OSError):  # it is just being replaced, or its directory has gone
                self._addresses, self._credentials = _master_of(self._options)
        return self._addresses != before

    def _call(self, method: str, request: Any, more_seconds: float) -> Any:
        if not self._addresses:
            raise NobodyAsked
        ways, asked, is_sent_on = self._ways(), set[tuple[str, str]](), False
        way, before = next(ways), None
        while True:
            asked.add(way)
            with self._credentials.channel(*way) as channel:
                try:
                    call = getattr(control_pb2_grpc.ControlStub(channel), method)
                    return call(request, timeout=TIMEOUT_SECONDS + more_seconds, metadata=self._credentials.metadata)
                except grpc.RpcError as error:
                    # Whoever is named comes first, unless that one was asked.
                    code, named = code_of(error), (leader_of(error), "")
                    is_sent_on = code in RETRIED and (is_sent_on or bool(named[0]))
                    said = NoAnswer(way[0], error, is_sent_on)
                    self._is_uncertain = self._is_uncertain or not said.is_in_vain
                    if code in RETRIED and not is_sent_on and before is not None and before.is_from_master:
                        # A master that stands by knows more than that one more is gone.
                        said = before
                    before = said
                    way = next((one for one in chain([named], ways) if one[0] and one not in asked), ("", ""))
                    if not way[0] or code not in _ASK_ANOTHER:
                        raise said from error

    def _ways(self) -> Iterator[tuple[str, str]]:
        """Whom to ask: each name that was given, at each of its addresses."""
        for address in self._addresses:
            for target in MasterPlaces().targets(address):
                yield address, target

    def why(self, said: NoAnswer, order: bool = False) -> str:
        """Why there is no answer, for a person; of an `order` also whether it was taken."""
        error = said.error
        text = f"the master at {said.address} does not answer: {said}"
        if said.is_from_master:
            text = f"the master at {said.address} says: {detail_of(error)}"
        if code_of(error) is grpc.StatusCode.UNIMPLEMENTED and is_stranger(detail_of(error)):
            text = (
                f"what answers at {said.address} is not Dal Segno's dlrover-master, or too old for this: check"
                f" --master, or {Variable.MASTER}, which DLRover's operator sets for a master of DLRover's"
            )
        if said.is_away and (known := self.without_master()):
            text = known.text
        if code_of(error) in _REFUSED:
            text = detail_of(error)
        return one_line(mismatch(said.address, self._credentials) or f"{text}{self._fate(said) if order else ''}")

    def _fate(self, said: NoAnswer) -> str:
        """What has become of an order that was not answered; empty: what is said tells it."""
        if code_of(said.error) in _ANSWERED:
            return ""
        if self._is_uncertain:
            return "; the order may have been taken: look with dalsegno events once a master answers"
        return "; the order was not taken: give it again once a master answers" if self._options.master else ""

    def without_master(self) -> JobOnDisk | None:
        """How a job stands that has no master just now, by its directory. None: its directory is not known."""
        if self._options.master:
            return None
        return _without_master(Path(self._options.checkpoint_dir) / self._options.job_id)

    def stopped_on_record(self) -> str:
        """What the record says of a job that was stopped by order and not taken up again; empty: it is not."""
        told = [event for event in self.events_without_master().events if event.kind in _TELL_OF_END]
        return told[-1].text if told and told[-1].kind == "stopped" else ""

    def events_without_master(self) -> control_pb2.EventsReply:
        """What happened to it, as far as its record says."""
        job = self._options.job_id
        return events_on_record(Path(self._options.checkpoint_dir) / PRIVATE / job, job)


def show(
    options: argparse.Namespace, method: str, request: Any, lines_of: Callable[[Any], list[str]], *, order: bool = False
) -> int:
    """Makes one call to the job's master, perhaps an order, prints the answer, and returns the exit code.

    Raises:
        ValueError, OSError: see `AskedMaster`.
    """
    asked = AskedMaster(options)
    try:
        reply = asked.call(method, request)
    except NoAnswer as said:
        known = asked.without_master() if said.is_away else None
        if known is not None and known.finished and method == "GetStatus":
            put(options, _as_reply(options.job_id, known), lambda reply: [reply.reason])
            return EXIT_FINISHED
        print(f"dalsegno: {asked.why(said, order=order)}", file=sys.stderr)
        return EXIT_FAILED
    put(options, reply, lines_of)
    return EXIT_FINISHED


def put(options: argparse.Namespace, reply: Message, lines_of: Callable[[Any], list[str]]) -> None:
    """Prints an answer: as JSON where that is asked for, else for a person."""
    if options.json:
        print(json.dumps(plain(reply)), flush=True)
        return
    for line in lines_of(reply):
        print(line, flush=True)


def _master_of(options: argparse.Namespace) -> tuple[list[str], Credentials]:
    """Addresses and credentials: those given, or those in the embedded master's claim. Raises as `AskedMaster` does.

    No address: the claim came with a directory that was copied or moved, and its master is not asked.
    """
    if options.master:
        files = CredentialFiles.given(options, os.environ.get(Variable.TOKEN))
        files.check()
        return addresses_of(options.master), files.read()
    root = Path(options.checkpoint_dir)
    try:
        return _claimed(options, root / PRIVATE)
    except PermissionError as error:
        raise ValueError(of_another(root, error) or str(error)) from error


def _claimed(options: argparse.Namespace, private: Path) -> tuple[list[str], Credentials]:
    jobs = sorted(path.parent.name for path in private.glob("*/claim.json"))
    job = options.job_id or _the_one(private, jobs)
    if job is None:
        known = f"known here: {', '.join(jobs)}"
        if not jobs:
            _enter_all(private)
            known = f"no embedded master has left a claim in {private}; --checkpoint-dir says where else"
        raise ValueError(f"name a job with --job-id, or a master with --master HOST:PORT ({known})")
    options.job_id = job
    file = ClaimFile(private / job)
    claim = file.read()
    if claim is None:
        raise ValueError(f"job {job} has no embedded master's claim in {private}; use --master HOST:PORT")
    if file.is_copied(claim):
        return [], Credentials()
    return [claim.address], Credentials(read_token(private / job))


def _enter_all(private: Path) -> None:
    """Raises PermissionError where a job may have a claim that this user cannot see."""
    for name in os.listdir(private) if private.is_dir() else ():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(private / name / "claim.json")


def _the_one(private: Path, jobs: Sequence[str]) -> str | None:
    """The job that a person means who names none: the only one, or the only one that has a master now."""
    if len(jobs) > 1:
        jobs = [job for job in jobs if is_served(private / job)]
    return jobs[0] if len(jobs) == 1 else None


def is_served(private: Path) -> bool:
    """Whether a process listens where the claim in a job's private directory says that its master is."""
    file = ClaimFile(private)
    claim = file.read()
    return claim is not None and not file.is_copied(claim) and answers(claim.address, _LOOK_SECONDS)


def _without_master(runs: Path) -> JobOnDisk:
    """How the last run of a job stands that has no master just now, by its directory."""
    job, names = runs.name, runs_in_order(os.listdir(runs) if runs.is_dir() else ())
    if not names:
        # There may have been a run: one that failed before it saved anything.
        text = f"nobody runs job {job} just now, and nothing of it was saved: its dlrover-run command begins at step 0"
        return JobOnDisk(text)
    run = CheckpointStore(runs / names[-1])
    newest = run.newest()
    kept = f"its newest checkpoint is {newest.name}" if newest is not None else "it has no checkpoint"
    if run.finished:
        text = f"job {job}, {names[-1]}: finished; {kept}; the same dlrover-run command with --new-run trains again"
        return JobOnDisk(text, names[-1], newest, finished=True)
    goes_on = f"step {newest.step}" if newest is not None else "step 0"
    text = f"nobody runs job {job} just now: {names[-1]} is not finished, {kept}; the dlrover-run command that began it"
    return JobOnDisk(f"{text} goes on from {goes_on}", names[-1], newest)


def _as_reply(job: str | None, known: JobOnDisk) -> control_pb2.StatusReply:
    """What a master would say of a finished job, as far as its directory tells."""
    reply = control_pb2.StatusReply(job_id=job or "", run_id=known.run, phase=control_pb2.PHASE_SUCCEEDED)
    reply.reason = one_line(known.text)
    if known.newest is not None:
        reply.step, reply.epoch = known.newest.step, known.newest.epoch
    return reply
