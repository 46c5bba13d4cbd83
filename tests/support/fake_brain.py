"""A small brain for tests of the master's shell: it counts, and what it counts is durable."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from google.protobuf.message import Message

from dalsegno.master.events import Called, Event, HeldUp, Reply, StreamClosed, StreamOpened, Tick
from dalsegno.protos import control_pb2


@dataclass
class FakeState:
    """`job` and `incarnations` are durable, `live` is not."""

    job: dict[str, int] = field(default_factory=dict)
    incarnations: dict[str, str] = field(default_factory=dict)
    live: list[str] = field(default_factory=list)
    wake: float | None = None
    generation: int = 0


class FakeBrain:
    """Any call is counted once per request number under its node's name.

    `Leave` asks for a Tick after `notice` seconds; `ReportFailure` runs into a bug; `ReportPruned` is refused;
    `ReportFinished` ends the job.
    """

    def begin(self, saved: bytes | None, generation: int, now: float) -> FakeState:
        job, incarnations = ({}, {}) if saved is None else json.loads(saved)
        return FakeState(job, incarnations=incarnations, generation=generation)

    def encode(self, state: FakeState) -> bytes:
        return json.dumps([state.job, state.incarnations], sort_keys=True).encode()

    def generation(self, state: FakeState) -> int:
        return state.generation

    def handle(self, state: FakeState, event: Event, now: float) -> tuple[FakeState, list[Reply]]:
        if isinstance(event, Called):
            return state, [self._called(state, event.message, now)]
        if isinstance(event, StreamOpened | StreamClosed):
            state.live.append(f"{type(event).__name__} {event.node}/{event.incarnation}")
        elif isinstance(event, Tick):
            state.wake = None
            state.live.append("Tick")
            state.job["ticks"] = state.job.get("ticks", 0) + 1
        elif isinstance(event, HeldUp):
            state.live.append("HeldUp")
        return state, []

    def view(self, state: FakeState, node: str, incarnation: str) -> control_pb2.Directive | None:
        if state.incarnations.get(node) != incarnation:
            return None
        return control_pb2.Directive(generation=state.generation, epoch=state.job.get(node, 0))

    def status(self, state: FakeState, now: float) -> control_pb2.StatusReply:
        phase = control_pb2.PHASE_SUCCEEDED if "finished" in state.job else control_pb2.PHASE_RUNNING
        nodes = [control_pb2.NodeStatus(node=name, group_rank=count) for name, count in state.job.items()]
        return control_pb2.StatusReply(
            generation=state.generation, phase=phase, nodes=nodes, reason="; ".join(state.live), job_id="job"
        )

    def _called(self, state: FakeState, message: Message, now: float) -> Reply:
        if isinstance(message, control_pb2.RegisterRequest):
            state.incarnations[message.node] = message.incarnation
            # As an agent that has seen a later master than the store has.
            state.generation = max(state.generation, message.generation + 1)
            return Reply("OK", "", control_pb2.RegisterReply(generation=state.generation, node=message.node))
        if isinstance(message, control_pb2.ScaleRequest):
            return Reply("OK", "", control_pb2.ScaleReply(generation=state.generation, limit=message.nodes))
        caller: control_pb2.Caller = message.caller  # type: ignore[attr-defined]
        if isinstance(message, control_pb2.FailureRequest):
            state.job["half"] = 1
            raise RuntimeError("a bug")
        if isinstance(message, control_pb2.PrunedRequest):
            return Reply("FAILED_PRECONDITION", "fenced: for a test", None)
        if isinstance(message, control_pb2.LeaveRequest):
            state.wake = now + message.notice
        if isinstance(message, control_pb2.FinishedRequest):
            state.job["finished"] = 1
        if isinstance(message, control_pb2.HeartbeatRequest):
            return Reply("OK", "", control_pb2.Ack(generation=state.generation))
        last = f"last {caller.node}"
        if caller.request > state.job.get(last, 0):
            state.job[last] = caller.request
            state.job[caller.node] = state.job.get(caller.node, 0) + 1
        return Reply("OK", "", control_pb2.Ack(generation=state.generation))
