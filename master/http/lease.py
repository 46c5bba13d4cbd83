"""Leases for workers that are not ours: stands for such a worker in the master as its agent would.

To acquire is to register and to join, to renew is a heartbeat, and what is reported are progress and the ends that an
agent reports. So who holds the run is decided where it always is, in the brain, and stands on its record.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import Message

from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.commander_api import RunState
from dalsegno.protos.contract import CONTROL_PROTOCOL, JobSettings
from dalsegno.protos.phases import ENDED_PHASES
from dalsegno.protos.run_file import RunFile
from dalsegno.protos.text import one_line

from ..brain.door import ShapeError, admit
from ..brain.events import Reply
from . import leases
from .api import STATUS_OF
from .leases import Token
from .looking import Master

__all__ = ("Answer", "Lessor", "RelayedRun", "Report", "Served", "say")

# What workers with a lease have read of the job's directory: each has a volume of its own. Who has read nothing, as an
# agent says with an empty text, has no place in a world.
NO_DIRECTORY = "of no directory"
# Seconds that a world has to open for a worker that has acquired the lease.
OPEN_WITHIN_SECONDS = 10.0
# The pause between two looks for it: most often it is open at once.
LOOK_EVERY_SECONDS = 0.1
# What a worker may be answered beside what orders are: 409 is the last word on what it asks for, 503 is not.
_STATUS_OF = {**STATUS_OF, "ALREADY_EXISTS": 409, "PERMISSION_DENIED": 409, "ABORTED": 503}
HELD, FENCED, RELEASED, EXPIRED = "held", "fenced", "released", "expired"
# Whoever was heard so many seconds ago is alive; for a short lease, within half of it.
ALIVE_SECONDS = 5.0


class Served(Master, Protocol):
    """A master with the address of its agents' port."""

    @property
    def address(self) -> str:
        """HOST:PORT."""


@dataclass(frozen=True)
class RelayedRun:
    """One run of a Commander: what its file says, and the master that has it."""

    file: RunFile
    master: Served


@dataclass(frozen=True)
class Answer:
    """What is answered over HTTP."""

    code: int
    body: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """What a worker says of its work.

    Attributes:
        status: how it goes on: RUNNING, or that it ends.
        step: the last optimizer step.
        repo: where its last milestone is, with `revision`; empty: it has none.
        message: one line for people.
        said: all of it, as it came.
    """

    status: RunState
    step: int
    repo: str
    revision: str
    message: str
    said: dict[str, Any]


class LeaseRefused(Exception):
    """The brain refuses what is asked for; its answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.body["detail"])
        self.answer = answer


class Lessor:
    """The lease of one run: at most one, whatever is asked at the same time."""

    def __init__(self, run: RelayedRun) -> None:
        self._run, self._file, self._master = run, run.file, run.master
        # One at a time, so that a renewal and the end of its lease do not overtake each other.
        self._lock = asyncio.Lock()
        # What the holder has said last, for people; lost with this process.
        self.report: dict[str, Any] | None = None

    async def status(self) -> pb.StatusReply:
        """How the run stands. Raises LeaseRefused if this master cannot tell."""
        reply = await self._master.status()
        if not isinstance(reply.message, pb.StatusReply):
            raise LeaseRefused(say(503, reply.detail))
        return reply.message

    async def call(self, message: Message) -> Any:
        """The brain's answer. Raises LeaseRefused."""
        reply = await self._ask(message)
        if reply.code != "OK":
            raise LeaseRefused(say(_status_of(reply), reply.detail))
        return reply.message

    async def acquire(self, worker: str, devices: int, *, force: bool) -> Answer:
        """Gives the lease to a worker if nobody holds it; `force`: fences who does. Raises LeaseRefused."""
        async with self._lock:
            status = await self.status()
            if leases.state_of(status) is RunState.COMPLETED:
                return say(409, f"{self._file.run_id} is completed: {status.reason}", status="completed")
            holder = leases.holder_of(status)
            if holder is not None:
                left = leases.seconds_left(holder, self._file.lease_seconds)
                if left > 0 and not force:
                    return self._held(holder)
                why = f"its lease was taken by force, for {worker}"
                await self._fence(holder, why if left > 0 else f"silent for {holder.silent_seconds:.0f} s")
            for node in leases.leftovers(status):
                await self._fence(node, "its lease is over", left=True)
            return await self._take(worker, devices)

    async def renew(self, token: Token, worker: str) -> Answer:
        """Prolongs a lease. Raises LeaseRefused."""
        async with self._lock:
            status = await self._heard(token, worker, pb.HeartbeatRequest(caller=self._caller(token, worker)))
            ended = self._ended(status)
            if ended is not None:
                return ended
            holder = leases.holder_of(status)
            goes = holder is not None and (holder.incarnation, holder.role) == (token.incarnation, "leaving")
            if not goes and await self._place(token, worker) is not None:
                return say(409, f"{worker} has no place in {self._file.run_id} any more", status=FENCED)
            order = "leave" if goes else "continue"
            left = leases.in_seconds(self._file.lease_seconds)
            return Answer(200, {"status": "renewed", "lease_expires_in_sec": left, "order": order})

    async def take_report(self, token: Token, report: Report) -> Answer:
        """Takes what a worker says; the end of its work releases the lease. Raises LeaseRefused."""
        async with self._lock:
            status = await self.status()
            node = leases.known_as(status, token.incarnation)
            worker = "" if node is None else node.node
            caller = self._caller(token, worker, status.epoch)
            status = await self._heard(token, worker, pb.ProgressRequest(caller=caller, step=report.step))
            if (ended := self._ended(status)) is not None:
                same = leases.state_of(status) is report.status
                return Answer(200, {"status": RELEASED, "state": report.status.value}) if same else ended
            self.report = {"worker_id": worker, "at": round(time.time(), 3), **report.said}
            if report.repo and report.revision:
                made = pb.Milestone(repo=report.repo, revision=report.revision, step=report.step)
                await self.call(pb.MilestoneRequest(job_id=token.run_id, milestone=made, holder=caller))
            if report.status is RunState.RUNNING:
                left = leases.in_seconds(self._file.lease_seconds)
                return Answer(200, {"status": "ok", "lease_expires_in_sec": left})
            await self._end(caller, report)
            return Answer(200, {"status": RELEASED, "state": report.status.value})

    async def release(self) -> Answer:
        """Fences whoever holds the run. Raises LeaseRefused."""
        async with self._lock:
            holder = leases.holder_of(await self.status())
            if holder is None:
                return say(409, f"nobody holds {self._file.run_id}")
            await self._fence(holder, "released by the admin", for_good=True)
            return Answer(200, {"status": RELEASED, "holder": holder.node})

    async def expire(self) -> Answer:
        """Ends the lease of a holder that somebody knows to be gone. Raises LeaseRefused."""
        async with self._lock:
            holder = leases.holder_of(await self.status())
            if holder is None:
                return say(409, f"nobody holds {self._file.run_id}")
            if holder.silent_seconds < min(ALIVE_SECONDS, self._file.lease_seconds / 2):
                ago = leases.in_seconds(holder.silent_seconds)
                line = f"{holder.node} lives: it was heard {ago:g} s ago; a release takes {self._file.run_id} from it"
                return say(409, line, status=HELD, by=holder.node)
            await self._fence(holder, "gone, says the admin")
            return Answer(200, {"status": EXPIRED, "holder": holder.node})

    async def milestone(self, made: pb.Milestone) -> Answer:
        """Notes a milestone of a committed checkpoint. Raises LeaseRefused."""
        await self.call(pb.MilestoneRequest(job_id=self._file.run_id, milestone=made))
        return Answer(200, {"status": "ok"})

    async def shown(self) -> dict[str, Any]:
        """All that is told of the run. Raises LeaseRefused."""
        port = int(self._master.address.rpartition(":")[2])
        return leases.shown(self._file, await self.status(), port, self.report)

    # ---- what an agent does -----------------------------------------------------------------------------------------

    async def _take(self, worker: str, devices: int) -> Answer:
        """Registers the worker, and waits for its world."""
        token = Token.drawn(self._file.run_id, secrets.token_bytes(leases.RANDOM_BYTES))
        settings = leases.settings_of(self._file)
        request = pb.RegisterRequest(
            job_id=self._file.run_id,
            incarnation=token.incarnation,
            protocol=CONTROL_PROTOCOL,
            host=worker,
            node=worker,
            nproc=devices,
            settings=pb.Settings(**{name: getattr(settings, name) for name in JobSettings.names()}),
            probe=(await self.status()).probe or NO_DIRECTORY,
            secret=token.secret,
        )
        await self.call(request)
        try:
            refused = await self._place(token, worker)
        except BaseException:
            # Nobody learns of this token.
            await self._give_up(token, worker)
            raise
        if refused is not None:
            await self._give_up(token, worker)
            return refused
        self.report = None
        left = leases.in_seconds(self._file.lease_seconds)
        granted = {"status": "granted", "lease_token": token.text, "lease_expires_in_sec": left}
        return Answer(200, granted | leases.lease_config(self._file, await self.status()))

    async def _place(self, token: Token, worker: str) -> Answer | None:
        """Joins until the worker has a place in the open world. None: it has; else why not."""
        until = time.monotonic() + OPEN_WITHIN_SECONDS
        asked = 0
        while True:
            status = await self.status()
            holder = leases.holder_of(status)
            if status.phase in (pb.PHASE_RUNNING, pb.PHASE_DRAINING) and holder is not None:
                return None if holder.incarnation == token.incarnation else self._held(holder)
            if leases.known_as(status, token.incarnation) is None:
                return say(409, f"{worker} was fenced meanwhile", status=FENCED)
            if (ended := self._ended(status)) is not None:
                return ended
            if asked != status.epoch + 1:
                asked = status.epoch + 1
                await self.call(self._join(token, worker, status))
                continue
            if time.monotonic() > until:
                why = status.reason or "its last world is not over yet"
                return say(503, f"{self._file.run_id} cannot go on yet: {why}")
            await asyncio.sleep(LOOK_EVERY_SECONDS)

    def _join(self, token: Token, worker: str, status: pb.StatusReply) -> pb.JoinRequest:
        """As an agent joins that sees what the run goes on from: the worker looks for that on its volume itself."""
        request = pb.JoinRequest(
            caller=self._caller(token, worker, status.epoch),
            round=status.epoch + 1,
            store_host="127.0.0.1",
            probe=status.probe or NO_DIRECTORY,
        )
        if status.HasField("head"):
            request.resume.CopyFrom(status.head.ref)
            request.inventory.append(status.head)
        return request

    async def _heard(self, token: Token, worker: str, message: Message) -> pb.StatusReply:
        """The run's state, once the holder of the token was heard. Raises LeaseRefused if it is fenced."""
        known = leases.known_as(await self.status(), token.incarnation)
        gone = "the lease is over: somebody else may hold the run, and nothing of this worker counts any more"
        if known is None:
            raise LeaseRefused(say(409, gone, status=FENCED))
        if known.node != worker:
            raise LeaseRefused(say(409, f"this is the lease of {known.node!r}, not of {worker!r}", status=FENCED))
        reply = await self._ask(message)
        if reply.code in ("NOT_FOUND", "PERMISSION_DENIED"):
            raise LeaseRefused(say(409, gone, status=FENCED))
        if reply.code != "OK":
            raise LeaseRefused(say(_status_of(reply), reply.detail))
        return await self.status()

    async def _end(self, caller: pb.Caller, report: Report) -> None:
        """Reports an end of the work, as an agent does."""
        if report.status is RunState.COMPLETED:
            await self.call(pb.FinishedRequest(caller=caller, step=report.step))
        elif report.status is RunState.FAILED:
            why = f"{caller.node} has failed" + (f": {report.message}" if report.message else "")
            kind = pb.FAILURE_KIND_REFUSED
            await self.call(pb.FailureRequest(caller=caller, kind=kind, exit_code=1, message=why, step=report.step))
        else:
            node = pb.NodeStatus(node=caller.node, incarnation=caller.incarnation)
            await self._fence(node, report.message or "pre-empted", left=True)

    async def _fence(self, node: pb.NodeStatus, why: str, *, left: bool = False, for_good: bool = False) -> None:
        """Ends a node's place at once; one that is gone already is fine."""
        request = pb.FenceNodeRequest(job_id=self._file.run_id, node=node.node, incarnation=node.incarnation)
        request.reason, request.left, request.for_good = why, left, for_good
        reply = await self._ask(request)
        if reply.code not in ("OK", "NOT_FOUND"):
            raise LeaseRefused(say(_status_of(reply), reply.detail))

    async def _give_up(self, token: Token, worker: str) -> None:
        node = pb.NodeStatus(node=worker, incarnation=token.incarnation)
        await self._fence(node, "it did not get the lease", left=True)

    async def _ask(self, message: Message) -> Reply:
        try:
            admit(message)
        except ShapeError as error:
            return Reply("INVALID_ARGUMENT", str(error))
        return await self._master.call(message)

    def _caller(self, token: Token, worker: str, epoch: int = 0) -> pb.Caller:
        return token.caller(worker, epoch, CONTROL_PROTOCOL)

    def _held(self, holder: pb.NodeStatus) -> Answer:
        left = leases.in_seconds(leases.seconds_left(holder, self._file.lease_seconds))
        detail = f"{holder.node} holds {self._file.run_id}: try again in {left:g} s"
        return say(409, detail, status=HELD, by=holder.node, expires_in_sec=left)

    def _ended(self, status: pb.StatusReply) -> Answer | None:
        """The answer to a worker whose run has ended; None: it has not."""
        if status.phase not in ENDED_PHASES:
            return None
        state = leases.state_of(status).value
        return say(409, f"{self._file.run_id} has ended: {status.reason}", status=RELEASED, state=state)


def say(code: int, detail: str, **more: Any) -> Answer:
    """An answer with one line for a person."""
    return Answer(code, {"detail": one_line(detail), **more})


def _status_of(reply: Reply) -> int:
    """The status code of a refusal of the brain. One that nobody foresaw is the master's failure, and no last word."""
    return _STATUS_OF.get(reply.code, 500)
