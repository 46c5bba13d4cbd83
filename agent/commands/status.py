"""`dalsegno status` and `dalsegno scale`: a job as its master sees it, and how many nodes it may have."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from dalsegno.elastic.checkpoint import CheckpointStore
from dalsegno.protos import control_pb2, control_pb2_grpc
from dalsegno.protos.addresses import addresses_of
from dalsegno.protos.contract import CONTROL_PROTOCOL, Variable
from dalsegno.protos.text import one_line

from ..control.claim import Claim, ClaimFile
from ..control.connection import RETRIED, Credentials, code_of, detail_of, leader_of
from ..control.credentials import CredentialFiles
from ..control.handshake import mismatch
from ..control.spawning import read_token
from ..decisions.events import EXIT_FAILED, EXIT_FINISHED
from ..storage.survey import runs_in_order
from .endpoint import answers

__all__ = ["scale", "status"]

_TIMEOUT_SECONDS = 5.0
# Seconds in which a listener at an embedded master's address must answer.
_LOOK_SECONDS = 1.0
# Phases in which steps are made.
_TRAINS = (control_pb2.PHASE_RUNNING, control_pb2.PHASE_DRAINING)
# Status codes with which the master did answer, so that the detail is the line to print.
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


def _master_of(options: argparse.Namespace) -> tuple[list[str], Credentials]:
    """Addresses and credentials: those given, or those in the embedded master's claim.

    Raises:
        ValueError: there is no master to ask, or what was given cannot be used; one line.
        OSError: a file cannot be read.
    """
    if options.master:
        files = CredentialFiles.given(options, os.environ.get(Variable.TOKEN))
        files.check()
        return addresses_of(options.master), files.read()
    private = Path(options.checkpoint_dir) / ".dalsegno"
    jobs = sorted(path.parent.name for path in private.glob("*/claim.json"))
    job = options.job_id or _the_one(private, jobs)
    if job is None:
        known = f"known here: {', '.join(jobs)}"
        if not jobs:
            known = f"no embedded master has left a claim in {private}; --checkpoint-dir says where else"
        raise ValueError(f"name a job with --job-id, or a master with --master HOST:PORT ({known})")
    options.job_id = job
    claim = ClaimFile(private / job).read()
    if claim is None:
        raise ValueError(f"job {job} has no embedded master's claim in {private}; use --master HOST:PORT")
    return [claim.address], Credentials(read_token(private / job))


def _the_one(private: Path, jobs: Sequence[str]) -> str | None:
    """The job that a person means who names none: the only one, or the only one that has a master now."""
    if len(jobs) > 1:
        jobs = [job for job in jobs if _is_served(ClaimFile(private / job).read())]
    return jobs[0] if len(jobs) == 1 else None


def _is_served(claim: Claim | None) -> bool:
    """Whether a process listens at the claim's address."""
    return claim is not None and answers(claim.address, _LOOK_SECONDS)


def status(options: argparse.Namespace) -> int:
    """Asks the master and prints its answer; returns the exit code.

    Raises:
        ValueError, OSError: see `_master_of`.
    """
    return _ask(options, "GetStatus", control_pb2.StatusRequest(protocol=CONTROL_PROTOCOL), status_lines)


def scale(options: argparse.Namespace) -> int:
    """Tells the master how many nodes the world may have; returns the exit code.

    Raises:
        ValueError, OSError: see `_master_of`.
    """
    if options.nodes < 1:
        raise ValueError(f"a world has at least 1 node, not {options.nodes}")
    return _ask(options, "Scale", control_pb2.ScaleRequest(protocol=CONTROL_PROTOCOL, nodes=options.nodes), scale_lines)


def _ask(options: argparse.Namespace, method: str, request: Any, lines_of: Callable[[Any], list[str]]) -> int:
    """Makes one call to the job's master, and prints the answer."""
    addresses, credentials = _master_of(options)
    request.job_id = options.job_id or ""
    try:
        reply = _answer(addresses, credentials, method, request)
    except _NoAnswer as said:
        error, text = said.error, f"the master at {said.address} does not answer: {said}"
        if not options.master and code_of(error) is grpc.StatusCode.UNAVAILABLE:
            text, finished = _without_master(Path(options.checkpoint_dir) / options.job_id)
            if finished and method == "GetStatus":
                print(one_line(text))
                return EXIT_FINISHED
        if code_of(error) in _REFUSED:
            text = detail_of(error)
        print(f"dalsegno: {one_line(mismatch(said.address, credentials) or text)}", file=sys.stderr)
        return EXIT_FAILED
    for line in lines_of(reply):
        print(line)
    return EXIT_FINISHED


class _NoAnswer(Exception):
    """What the last master said that was asked, instead of an answer."""

    def __init__(self, address: str, error: grpc.RpcError) -> None:
        super().__init__(f"{code_of(error).name}: {detail_of(error)}")
        self.address, self.error = address, error


def _answer(addresses: Sequence[str], credentials: Credentials, method: str, request: Any) -> Any:
    """The answer of the master that leads: of several the others name it. Raises _NoAnswer."""
    left, asked = list(addresses), set[str]()
    while True:
        address = left.pop(0)
        asked.add(address)
        with credentials.channel(address) as channel:
            try:
                call = getattr(control_pb2_grpc.ControlStub(channel), method)
                return call(request, timeout=_TIMEOUT_SECONDS, metadata=credentials.metadata)
            except grpc.RpcError as error:
                leader = leader_of(error)
                left = [one for one in ([leader] if leader else []) + left if one not in asked]
                if not left or code_of(error) not in RETRIED:
                    raise _NoAnswer(address, error) from error


def _without_master(runs: Path) -> tuple[str, bool]:
    """How the last run of a job stands that has no master just now, by its directory; and whether it is finished."""
    job, names = runs.name, runs_in_order(os.listdir(runs) if runs.is_dir() else ())
    if not names:
        return f"nobody runs job {job} just now, and it has no run: its dlrover-run command begins one", False
    run = CheckpointStore(runs / names[-1])
    newest = run.newest()
    kept = f"its newest checkpoint is {newest.name}" if newest is not None else "it has no checkpoint"
    if run.finished:
        text = f"job {job}, {names[-1]}: finished; {kept}; the same dlrover-run command with --new-run trains again"
        return text, True
    goes_on = f"step {newest.step}" if newest is not None else "step 0"
    text = f"nobody runs job {job} just now: {names[-1]} is not finished, {kept}; the dlrover-run command that began it"
    return f"{text} goes on from {goes_on}", False


def counted(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def scale_lines(reply: control_pb2.ScaleReply) -> list[str]:
    """What holds now, for a person."""
    if reply.nodes > reply.limit:
        return [
            f"at most {counted(reply.limit, 'node')} from now on; {reply.nodes} save at the next step boundary, and"
            " some stand by; without a session all workers restart, from the last checkpoint"
        ]
    return [f"at most {counted(reply.limit, 'node')} from now on; the world has {reply.nodes}"]


def _progress(reply: control_pb2.StatusReply) -> str:
    """How far the run is, as far as nodes have reported."""
    if reply.unheard:
        return f"resumed at step {reply.step}, no steps heard since" if reply.step else "no steps heard"
    return f"step {reply.step}" + (f", loss {reply.loss:.4f}" if math.isfinite(reply.loss) else "")


def _course(record: control_pb2.EpochRecord, reply: control_pb2.StatusReply) -> str:
    """The steps of an epoch, and what its beginning cost."""
    if record.unheard:
        return "no steps heard"
    # The newest epoch's record gets its last step only when the epoch is over.
    newest = record.epoch == reply.epoch
    last_step = max(record.last_step, reply.step) if newest else record.last_step
    until = "now" if newest and reply.phase in _TRAINS else str(last_step)
    lost = counted(record.lost_steps, "step")
    if record.lost_more:
        lost = f"at least {lost}" if record.lost_steps else "an unknown number of steps"
    return f"steps {record.first_step} to {until}, paused {record.paused:.1f} s, lost {lost}"


def status_lines(reply: control_pb2.StatusReply) -> list[str]:
    """A job as a person wants to see it."""
    phase = control_pb2.Phase.Name(reply.phase).removeprefix("PHASE_").lower()
    lines = [
        f"job {reply.job_id}, {reply.run_id or 'no run yet'}: {phase}, epoch {reply.epoch}, {_progress(reply)}"
        + (f" ({reply.reason})" if reply.reason else "")
    ]
    if reply.leader.address:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(reply.leader.since))
        lines.append(f"  master: {reply.leader.address} leads since {since}, generation {reply.generation}")
    for node in reply.nodes:
        rank = f" {node.group_rank}" if node.role == "member" else ""
        why = f": {node.reason}" if node.reason else ""
        lines.append(f"  {node.role}{rank}  {node.node} on {node.host}, {counted(node.nproc, 'worker')}{why}")
    if reply.head.ref.name:
        lines.append(f"  newest commit: {reply.head.ref.name}, {reply.head.bytes / 1e6:.1f} MB")
    lines += [
        f"  epoch {record.epoch}: {record.cause}, {counted(record.nodes, 'node')}, {_course(record, reply)}"
        for record in reply.history
    ]
    # Escape sequences in names must not move the cursor; the leading spaces are ours.
    return [line[: len(line) - len(line.lstrip())] + one_line(line.lstrip()) for line in lines]
