"""Agents that keep to the protocol: what they are told and how long they wait is what the fuzzer of calls looks at."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from dalsegno.protos import control_pb2 as pb
from dalsegno.protos import control_pb2_grpc

__all__ = ["BOUND", "KEEP", "Broken", "GoodAgent", "settings"]

# Seconds that a good agent may wait for an answer. Generous: other tests share the cores.
BOUND = 5.0
KEEP = 3
# Seconds. What the master may ask for, with as many nodes as callers can register here.
LONGEST_PACE = 15.0
PROBE = "the probe of the job"


class Broken(AssertionError):
    """Something happened that no caller may bring about."""


def settings() -> pb.Settings:
    """Of a job of exactly two nodes, whose deadlines no test reaches."""
    return pb.Settings(
        min_nodes=2,
        max_nodes=2,
        node_unit=1,
        node_timeout=60.0,
        drain_timeout=60.0,
        join_timeout=60.0,
        stall_timeout=600.0,
        grow_interval=0.0,
        grow_wait=600.0,
        wait_for_nodes=-1.0,
        quiet_time=0.1,
        max_restarts=100,
        keep_checkpoints=KEEP,
    )


class GoodAgent:
    """One node with one worker that trains on and on. `watch` reads its directives on a thread of its own."""

    def __init__(self, address: str, name: str, metadata: tuple[tuple[str, str], ...]) -> None:
        # The same in every job, so that a call found in one can be made in another.
        self.name, self.incarnation = name, hashlib.sha256(name.encode()).hexdigest()[:32]
        self.secret = hashlib.sha256(f"the secret of {name}".encode()).digest()
        self.run_id = ""
        self.slowest = 0.0
        self._metadata = metadata
        self._requests = 0
        self._changed = threading.Condition()
        self._directive: pb.Directive | None = None
        self._watched: Any = None
        self._problems: list[str] = []
        self._pruned: set[str] = set()
        self._sighted: pb.CheckpointRef | None = None
        self._verified = 0
        self.connect(address)

    def connect(self, address: str) -> None:
        """Goes to a (new) master."""
        self.channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub: Any = control_pb2_grpc.ControlStub(self.channel)

    def close(self) -> None:
        """Ends stream and channel."""
        if self._watched is not None:
            self._watched.cancel()
        self.channel.close()

    # ---- calls ------------------------------------------------------------------------------------------------------

    def caller(self, epoch: int = 0, *, numbered: bool = True) -> pb.Caller:
        """Says who this is, as every call must."""
        self._requests += numbered
        return pb.Caller(
            job_id="job",
            node=self.name,
            incarnation=self.incarnation,
            epoch=epoch,
            request=self._requests if numbered else 0,
            protocol=1,
            secret=self.secret,
        )

    def call(self, method: str, request: Message) -> Any:
        """One call. Raises Broken where it is not answered well, and within the bound."""
        began = time.monotonic()
        try:
            return getattr(self._stub, method)(request, timeout=4 * BOUND, metadata=self._metadata)
        except grpc.RpcError as error:
            raise Broken(f"{self.name}: {method} was answered {error.code().name}: {error.details()}") from None
        finally:
            self.slowest = max(self.slowest, took := time.monotonic() - began)
            if took > BOUND:
                self._problems.append(f"waited {took:.1f} s for {method}")

    def register(self) -> None:
        """Opens the door."""
        reply = self.call(
            "Register",
            pb.RegisterRequest(
                job_id="job",
                node=self.name,
                incarnation=self.incarnation,
                protocol=1,
                host=self.name,
                nproc=1,
                settings=settings(),
                probe=PROBE,
                secret=self.secret,
            ),
        )
        self.run_id = reply.run_id

    def join(self, round_: int, inventory: list[pb.Checkpoint]) -> None:
        """Answers a Gather order; everything committed is in sight."""
        request = pb.JoinRequest(
            caller=self.caller(), round=round_, store_host="127.0.0.1", store_port=29400, probe=PROBE
        )
        request.inventory.extend(inventory)
        if inventory:
            request.resume.CopyFrom(inventory[-1].ref)
        self.call("Join", request)

    def live(self, epoch: int, step: int) -> None:
        """A heartbeat and a step; and a look for what another has committed, where that is asked for."""
        self._check_pace(self.call("Heartbeat", pb.HeartbeatRequest(caller=self.caller(epoch, numbered=False))).pace)
        progress = pb.ProgressRequest(
            caller=self.caller(epoch, numbered=False), step=step, loss=1.0 / step, has_session=True, longest=0.1
        )
        self.call("ReportProgress", progress)
        directive = self._directive
        if directive is not None and directive.HasField("sight") and directive.sight != self._sighted:
            self._sighted = directive.sight
            self.call("ReportSighted", pb.SightedRequest(caller=self.caller(epoch), ref=directive.sight))

    def _check_pace(self, pace: pb.Pace) -> None:
        """A few nodes are to speak every second or two, whoever else registers."""
        if not (0 < pace.heartbeat_seconds <= LONGEST_PACE and 0 < pace.progress_seconds <= LONGEST_PACE):
            raise Broken(f"{self.name}: was told to speak every {pace.heartbeat_seconds} and {pace.progress_seconds} s")

    def commit(self, epoch: int, step: int, generation: int) -> pb.Checkpoint:
        """Records a checkpoint as a worker of rank 0 would have sealed it."""
        name = f"step-{step}.e{epoch}.1"
        checkpoint = pb.Checkpoint(
            ref=pb.CheckpointRef(name=name, digest=hashlib.sha256(name.encode()).hexdigest()),
            run_id=self.run_id,
            step=step,
            epoch=epoch,
            form=pb.FORM_SHARDED,
            shape=pb.Shape(world_size=2, strategy="ddp", any_world_size=True),
            position=pb.Position(samples=step),
            bytes=1000,
            largest_file=500,
            min_nodes=2,
            max_nodes=2,
            generation=generation,
        )
        self.call("CommitCheckpoint", pb.CommitRequest(caller=self.caller(epoch), checkpoint=checkpoint))
        return checkpoint

    def fail(self, epoch: int, step: int) -> None:
        """A worker broke: the world forms anew."""
        request = pb.FailureRequest(
            caller=self.caller(epoch), kind=pb.FAILURE_KIND_WORKER, exit_code=1, message="of its own", step=step
        )
        self.call("ReportFailure", request)

    def status(self) -> pb.StatusReply:
        """The job as people see it."""
        reply: pb.StatusReply = self.call("GetStatus", pb.StatusRequest(job_id="job", protocol=1))
        return reply

    # ---- directives -------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Reads directives from now on."""
        request = pb.WatchRequest(caller=self.caller(numbered=False))
        self._directive = None
        self._watched = self._stub.Watch(request, metadata=self._metadata, timeout=3600)
        threading.Thread(target=self._read, args=(self._watched,), daemon=True).start()

    def _read(self, stream: Any) -> None:
        try:
            for directive in stream:
                with self._changed:
                    self._directive = directive
                    self._pruned |= {ref.name for ref in directive.prune}
                    if directive.WhichOneof("order") == "fenced":
                        self._problems.append(f"was fenced: {directive.fenced.reason}")
                    self._changed.notify_all()
        except grpc.RpcError as error:
            if stream is self._watched and error.code() is not grpc.StatusCode.CANCELLED:
                with self._changed:
                    self._problems.append(f"its stream ended: {error.code().name}: {error.details()}")
                    self._changed.notify_all()

    def wait_for(self, what: str, wanted: Callable[[pb.Directive], bool], seconds: float = 30.0) -> pb.Directive:
        """The first directive of this kind. Raises Broken where none comes."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._problems or (self._directive is not None and wanted(self._directive)), seconds
            )
            self.check(())
            if not came or self._directive is None:
                raise Broken(f"{self.name}: was not told of {what} within {seconds:g} s, but {self._directive}")
            return self._directive

    def wait_for_world(self) -> int:
        """The epoch of the next world. Until then it verifies what others cannot read, as a node does: it is intact."""
        while True:
            told = self.wait_for("a world", lambda told: told.WhichOneof("order") == "run" or self._is_to_verify(told))
            if told.WhichOneof("order") == "run":
                return int(told.run.epoch)
            self._verified = told.verify.number
            report = pb.VerificationReport(caller=self.caller(), number=self._verified, intact=True)
            self.call("ReportVerification", report)

    def _is_to_verify(self, told: pb.Directive) -> bool:
        return told.HasField("verify") and told.verify.number > self._verified

    def check(self, kept: tuple[str, ...]) -> None:
        """Raises Broken where something happened to this agent, or a checkpoint that must stay was retired."""
        if self._problems:
            raise Broken(f"{self.name}: {self._problems[0]}")
        if gone := self._pruned.intersection(kept):
            raise Broken(f"{self.name}: was told to delete {sorted(gone)}")

    def expect_undisturbed(self, epoch: int) -> None:
        """The last directive still says: run this world, nothing else."""
        directive = self._directive
        order = "" if directive is None else directive.WhichOneof("order")
        if directive is None or order != "run" or directive.run.epoch != epoch:
            raise Broken(f"{self.name}: is told {order} although nothing happened to its world of epoch {epoch}")
        if directive.HasField("convert") or directive.HasField("verify"):
            raise Broken(f"{self.name}: was given work by a stranger: {directive.convert}{directive.verify}")
