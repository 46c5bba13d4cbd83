"""A job seen from the master's brain, driven by hand: time, agents and what they say, one line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from google.protobuf.message import Message

from dalsegno.master.brain import brain
from dalsegno.master.brain.events import Called, Reply, StreamClosed, StreamOpened, Tick
from dalsegno.master.brain.live import State
from dalsegno.master.brain.state import Job, Phase, Settings
from dalsegno.master.record.codec import JobCodec
from dalsegno.master.record.store import Rows
from dalsegno.protos import control_pb2
from dalsegno.protos.processes import Process
from dalsegno.protos.reads import Reads

PROBE = "the job's probe"


def stored(job: Job) -> Job:
    """As it comes back from a store."""
    return JobCodec().decode(JobCodec.everything(job))


def settings(**changes: Any) -> control_pb2.Settings:
    """Settings with short times: 1 to 4 nodes, node-timeout 6 s, everything else as the tests want it."""
    values: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 4,
        "node_unit": 1,
        "node_timeout": 6.0,
        "drain_timeout": 10.0,
        "join_timeout": 5.0,
        "stall_timeout": 40.0,
        "grow_interval": 0.0,
        "grow_wait": 20.0,
        "wait_for_nodes": -1.0,
        "quiet_time": 1.0,
        "max_restarts": 3,
        "universal_checkpoint": True,
        "universal_gate": False,
        "keep_checkpoints": 3,
    }
    return control_pb2.Settings(**{**values, **changes})


@dataclass
class Node:
    """One agent's mouth. `number` is its last request number."""

    job: Driven
    incarnation: str
    name: str = ""
    number: int = 0
    probe: str = PROBE
    # What only this agent and the master know; an agent keeps it when it registers anew.
    secret: bytes = b""
    # Epoch and number of the last step that its ranks have made, as it has counted; None: it has not.
    made: tuple[int, int] | None = (0, 0)

    def __post_init__(self) -> None:
        self.secret = self.secret or f"the secret of {self.incarnation}".encode()

    def caller(self, epoch: int | None = None, number: int | None = None) -> control_pb2.Caller:
        if number is None:
            self.number += 1
            number = self.number
        epoch = self.job.epoch if epoch is None else epoch
        return control_pb2.Caller(
            job_id="job",
            node=self.name,
            incarnation=self.incarnation,
            secret=self.secret,
            epoch=epoch,
            request=number,
        )

    @property
    def directive(self) -> control_pb2.Directive:
        """What its agent is told now. Of why it waits, people are told the same."""
        found = brain.view(self.job.state, self.name)
        (shown,) = (node for node in brain.status(self.job.state, self.job.now).nodes if node.node == self.name)
        assert shown.reason == found.wait.reason
        return found

    @property
    def order(self) -> str:
        return str(self.directive.WhichOneof("order"))

    @property
    def is_known(self) -> bool:
        return self.job.job.node_by(self.incarnation) is not None

    def register(self, **fields: Any) -> Reply:
        request = control_pb2.RegisterRequest(
            job_id="job",
            incarnation=self.incarnation,
            secret=self.secret,
            protocol=1,
            host="host",
            nproc=1,
            probe=self.probe,
        )
        request.settings.CopyFrom(fields.pop("settings", self.job.settings))
        for name, value in fields.items():
            if isinstance(value, list):
                getattr(request, name).extend(value)
            elif isinstance(value, Message):
                getattr(request, name).CopyFrom(value)
            else:
                setattr(request, name, value)
        reply = self.job.call(request)
        if reply.code == "OK":
            assert isinstance(reply.message, control_pb2.RegisterReply)
            self.name = reply.message.node
            self.job.event(StreamOpened(self.name, self.incarnation))
        return reply

    def join(
        self,
        sees: list[control_pb2.Checkpoint] | None = None,
        epoch: int | None = None,
        unusable: Sequence[str] = (),
        flash_saved: int = 0,
    ) -> Reply:
        """Answers the present Gather or Wait, with the checkpoints it sees (by default all of the job's).

        `unusable`: names of directories that it sees with another manifest than the recorded one. `flash_saved`: what
        DLRover's saver has brought to the disk.
        """
        request = self.joining(sees, epoch, unusable)
        request.flash_saved = flash_saved
        return self.job.call(request)

    def joining(
        self,
        sees: list[control_pb2.Checkpoint] | None = None,
        epoch: int | None = None,
        unusable: Sequence[str] = (),
    ) -> control_pb2.JoinRequest:
        """What `join` sends."""
        directive = self.directive
        gather = directive.gather if directive.WhichOneof("order") == "gather" else None
        round_ = gather.round if gather is not None else directive.wait.round
        wanted = gather.resume if gather is not None else directive.wait.look_for
        request = control_pb2.JoinRequest(
            caller=self.caller(epoch), round=round_, store_host="host", store_port=1, probe=self.probe
        )
        request.resume.digest = wanted.digest
        if gather is not None and gather.partly:
            request.parts.extend(part.group_rank for part in gather.parts)
        world = self.job.job.world
        if self.made is not None and world is not None and world.member(self.incarnation) is not None:
            request.last_step = self.made[1] if self.made[0] == world.epoch else world.resumed_step
        request.inventory.extend(self.job.sealed if sees is None else sees)
        request.unusable.extend(control_pb2.UnusableCheckpoint(name=name, reason="checksum") for name in unusable)
        return request

    def holds(self, checkpoint: control_pb2.Checkpoint, *parts: int, wanted: bool = False) -> Reply:
        """Says which parts of a memory checkpoint it has, all of them. `wanted`: its ranks want it on the disk."""
        request = control_pb2.HeldRequest(caller=self.caller(), checkpoint=checkpoint, parts=parts, make_durable=wanted)
        return self.job.call(request)

    def has_told_all(self) -> Reply:
        """Says that it has told this master of all that it holds."""
        return self.job.call(control_pb2.HeldRequest(caller=self.caller(), all=True))

    def gathers(self, digest: str) -> Reply:
        """Says that it still brings the resume point here."""
        return self.job.call(control_pb2.HeldRequest(caller=self.caller(), gathering=digest))

    def wrote(self, checkpoint: control_pb2.Checkpoint, *parts: int) -> Reply:
        """Says that it has written parts of a memory checkpoint to the disk, which nobody has asked for."""
        return self.job.call(control_pb2.DurableRequest(caller=self.caller(), ref=checkpoint.ref, parts=parts))

    def durable(self, failure: str = "", absent: bool = False) -> Reply:
        """Does what `make_durable` asks for, or says why not. `absent`: nothing is there of what it was to look for."""
        wanted, caller = self.directive.make_durable, self.caller()
        assert wanted.ref.digest
        request = control_pb2.DurableRequest(caller=caller, ref=wanted.ref, parts=wanted.write, absent=absent)
        request.failure = failure or ("it is not on the disk" if absent else "")
        return self.job.call(request)

    def sights(self) -> Reply:
        """Does what a `sight` asks for."""
        return self.job.call(control_pb2.SightedRequest(caller=self.caller(), ref=self.directive.sight))

    def beat(self) -> Reply:
        return self.job.note(control_pb2.HeartbeatRequest(caller=self.caller(number=0)))

    def warm(self) -> Reply:
        return self.job.call(control_pb2.WarmRequest(caller=self.caller()))

    def leave(self, notice: float = 10.0) -> Reply:
        return self.job.call(control_pb2.LeaveRequest(caller=self.caller(), notice=notice))

    def goodbye(self) -> Reply:
        """The agent ends."""
        return self.job.call(control_pb2.LeaveRequest(caller=self.caller(), gone=True))

    def step(self, step: int, epoch: int | None = None, **said: int | str) -> Reply:
        """`said`: of the report's other fields."""
        report = control_pb2.ProgressRequest(caller=self.caller(epoch, 0), step=step, has_session=True, longest=0.5)
        report.MergeFrom(control_pb2.ProgressRequest(**said))  # type: ignore[arg-type]
        self.made = max(self.made or (0, 0), (report.caller.epoch, step))
        return self.job.note(report)

    def drained(self, step: int, epoch: int | None = None, digest: str = "") -> Reply:
        saved = control_pb2.CheckpointRef(digest=digest)
        return self.job.call(control_pb2.DrainedRequest(caller=self.caller(epoch), step=step, checkpoint=saved))

    def finished(self, step: int, epoch: int | None = None) -> Reply:
        return self.job.call(control_pb2.FinishedRequest(caller=self.caller(epoch), step=step))

    def failed(self, message: str = "exit 1", step: int = 0, epoch: int | None = None) -> Reply:
        return self.job.call(
            control_pb2.FailureRequest(
                caller=self.caller(epoch),
                kind=control_pb2.FAILURE_KIND_WORKER,
                exit_code=1,
                message=message,
                step=step,
            )
        )

    def save_failed(self, step: int = 0, *, regular: bool = False) -> Reply:
        failed = {"reason": "disk full", "step": step, "regular": regular}
        return self.job.call(control_pb2.SaveFailedRequest(caller=self.caller(), **failed))

    def commit(self, checkpoint: control_pb2.Checkpoint) -> Reply:
        return self.job.call(control_pb2.CommitRequest(caller=self.caller(checkpoint.epoch), checkpoint=checkpoint))

    def save(self, step: int, epoch: int | None = None, **sizes: int) -> control_pb2.Checkpoint:
        """Seals and commits one; `sizes` as for `Driven.seal`."""
        made = self.job.seal(step, epoch, **sizes)
        assert self.commit(made).code == "OK"
        return made

    def converts(
        self, state: control_pb2.ConversionState.ValueType, message: str = "", files: int = 0, moved: int = 0
    ) -> Reply:
        report = control_pb2.ConversionReport(
            caller=self.caller(), lease=self.lease, state=state, message=message, files_done=files, bytes_done=moved
        )
        return self.job.call(report)

    def convert(self) -> control_pb2.Checkpoint:
        """Does what the lease asks for: claims, commits the form, says ready."""
        order = self.directive.convert
        assert order.lease
        assert self.job.call(control_pb2.ClaimRequest(caller=self.caller(), lease=order.lease)).code == "OK"
        form = control_pb2.Checkpoint()
        form.CopyFrom(order.source)
        form.ref.name = f"{order.source.ref.name}.universal.{order.lease}"
        form.ref.digest = f"digest of {form.ref.name}"
        form.form = control_pb2.FORM_UNIVERSAL
        form.source.CopyFrom(order.source.ref)
        self.job.sealed.append(form)
        assert self.commit(form).code == "OK"
        return form

    @property
    def lease(self) -> int:
        return int(self.directive.convert.lease)

    def bad(self, ref: control_pb2.CheckpointRef, form: control_pb2.Form.ValueType = control_pb2.FORM_SHARDED) -> Reply:
        return self.job.call(
            control_pb2.BadCheckpointRequest(
                caller=self.caller(), ref=ref, form=form, file="part-0.pt", message="checksum"
            )
        )

    def verifies(self, moved: int) -> Reply:
        """No verdict yet."""
        number = self.directive.verify.number
        assert number
        report = control_pb2.VerificationReport(
            caller=self.caller(), number=number, working=True, inconclusive=True, bytes_done=moved
        )
        return self.job.call(report)

    def verified(self, intact: bool) -> Reply:
        number = self.directive.verify.number
        assert number
        return self.job.call(
            control_pb2.VerificationReport(caller=self.caller(), number=number, intact=intact, message="part-0.pt")
        )

    def hang_up(self) -> None:
        """Its process is gone: the peer closed the stream."""
        self.job.event(StreamClosed(self.name, self.incarnation))
        self.job.silent.add(self.incarnation)


@dataclass
class Driven:
    """A job of one master; agents that are not silent send a heartbeat every second while time passes."""

    settings: control_pb2.Settings = field(default_factory=settings)
    embedded: bool = False
    now: float = 1000.0
    # Events that are set aside are what the test is about.
    expects_faults: bool = False

    def __post_init__(self) -> None:
        self._begin(brain.fresh("job", 1, embedded=self.embedded))
        self.nodes: list[Node] = []
        self.silent: set[str] = set()
        self.sealed: list[control_pb2.Checkpoint] = []

    def _begin(self, state: State) -> None:
        """A new master over an empty store."""
        self.state = state
        self._codec = JobCodec()
        # What the store holds: each change was applied to it by itself.
        self.rows: dict[str, bytes] = {}
        # What was stored last.
        self.changes: Rows = {}

    def keep(self) -> None:
        """Stores what changed, as the master does after each turn."""
        self.changes = self._codec.changes(self.job)
        for key, row in self.changes.items():
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = row

    @property
    def job(self) -> Job:
        return self.state.job

    @property
    def phase(self) -> Phase:
        return self.job.phase

    @property
    def epoch(self) -> int:
        return self.job.epoch

    @property
    def has_failed(self) -> bool:
        """It is over, perhaps but for what it has in memory alone."""
        return self.phase is Phase.FAILED or self.job.ending is not None

    @property
    def members(self) -> list[str]:
        return [member.node for member in self.job.world.members] if self.job.world is not None else []

    @property
    def notices(self) -> str:
        return "\n".join(notice.text for notice in self.job.notices)

    def event(self, event: Any) -> list[Reply]:
        self.state, replies = brain.handle(self.state, event, self.now)
        assert self.expects_faults or not self.state.faults, self.state.faults[0]
        self.keep()
        return replies

    def call(self, message: Message) -> Reply:
        (reply,) = self.event(Called(message))
        return reply

    def note(self, message: control_pb2.HeartbeatRequest | control_pb2.ProgressRequest) -> Reply:
        """As the master's shell does it: what follows from it is decided in a turn of its own."""
        reply, news = brain.note(self.state, message, self.now)
        if news:
            self.event(Tick())
        return reply

    def node(self, **fields: Any) -> Node:
        """A new agent registers."""
        probe = fields.pop("probe", PROBE)
        new = Node(self, f"incarnation-{len(self.nodes)}", probe=probe)
        self.nodes.append(new)
        assert new.register(**fields).code == "OK"
        if self.job.settings.memory_replicas > 0:
            new.has_told_all()
        return new

    def start(self, count: int, **fields: Any) -> list[Node]:
        """`count` agents register and join, and the first world opens."""
        nodes = [self.node(**fields) for _ in range(count)]
        # All at once: a large world settles once.
        joins = [Called(node.joining()) for node in nodes]
        self.state, replies = brain.handle_all(self.state, joins, self.now)
        self.keep()
        assert all(reply is not None and reply.code == "OK" for reply in replies)
        self.wait(self.settings.quiet_time + 0.1)
        assert self.phase is Phase.RUNNING
        assert len(self.members) == count
        return nodes

    def seal(
        self,
        step: int,
        epoch: int | None = None,
        any_size: bool = False,
        reshards: bool = False,
        by_place: bool = False,
        reads: Reads | None = None,
        size: int = 0,
        largest_file: int = 0,
    ) -> control_pb2.Checkpoint:
        """A checkpoint on the disk, of the open world; sizes in bytes."""
        epoch = self.epoch if epoch is None else epoch
        world = self.job.world
        assert world is not None
        made = control_pb2.Checkpoint(
            ref=control_pb2.CheckpointRef(name=f"step-{step}.e{epoch}.1", digest=f"digest of step-{step}.e{epoch}.1"),
            run_id=self.job.run_id,
            step=step,
            epoch=epoch,
            form=control_pb2.FORM_SHARDED,
            shape=control_pb2.Shape(
                world_size=world.size,
                any_world_size=any_size,
                reshards=reshards,
                by_place=by_place,
                reads=None if reads is None else control_pb2.Reads(**asdict(reads)),
            ),
            resumed_from=control_pb2.CheckpointRef(digest=world.resume),
            bytes=size,
            largest_file=largest_file,
            min_nodes=self.job.settings.min_nodes,
            max_nodes=self.job.settings.max_nodes,
        )
        self.sealed.append(made)
        return made

    def wait(self, seconds: float) -> None:
        """Time passes: heartbeats of who is not silent, and the ticks that the brain asks for."""
        end = self.now + seconds
        beat = self.now + 1.0
        while self.now < end:
            wake = self.state.wake
            self.now = min([end, beat] + ([max(wake, self.now + 0.001)] if wake is not None else []))
            if self.now >= beat:
                beat += 1.0
                for node in self.nodes:
                    if node.incarnation not in self.silent and node.is_known:
                        node.beat()
            self.event(Tick())

    def held_up(self, seconds: float) -> None:
        """The master's own loop stands still."""
        self.now += seconds
        brain.held_up(self.state, seconds, self.now)
        self.event(Tick())

    def scale(self, nodes: int) -> Reply:
        """A person asks for so many nodes."""
        return self.call(control_pb2.ScaleRequest(job_id="job", nodes=nodes))

    def restart(
        self,
        keep_store: bool = True,
        is_gone: Callable[[Process], bool] = lambda process: False,
        left: Mapping[str, bytes] | None = None,
    ) -> None:
        """A new master process: over the stored job, or over an empty store.

        Args:
            is_gone: as it sees an agent's process.
            left: rows that are in the store besides, by the fault of an earlier version.
        """
        self.now += 100.0
        if keep_store:
            self.keep()
            assert self.rows == JobCodec.everything(self.job)
            self.rows.update(left or {})
            self._codec = JobCodec()
            self.state = brain.recover(self._codec.decode(self.rows), self.job.generation + 1, self.now, is_gone)
        else:
            self._begin(brain.fresh("job", 1, embedded=self.embedded))

    def fixed(self, minimum: int, maximum: int) -> None:
        """The master was told --nnodes."""
        self._begin(brain.fresh("job", 1, Settings(minimum, maximum), self.embedded))


def all_join(nodes: list[Node]) -> None:
    """Everybody who is asked to joins."""
    for node in nodes:
        if node.is_known and node.order in ("gather", "wait"):
            node.join()
