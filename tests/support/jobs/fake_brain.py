"""A small brain for tests of the master's shell: it counts, and what it counts is durable."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from google.protobuf.message import Message

from dalsegno.master.brain.events import Called, Event, Reply, StreamClosed, StreamOpened, Tick
from dalsegno.master.record.store import Rows
from dalsegno.protos import control_pb2

# No node's.
ORDERS = (
    control_pb2.DrainNodeRequest,
    control_pb2.StopRequest,
    control_pb2.StartRequest,
    control_pb2.SaveNowRequest,
)
SOMEBODY_ELSES = b"somebody else's secret"


@dataclass
class FakeState:
    """`job` and `incarnations` are durable, `live` is not."""

    job: dict[str, int] = field(default_factory=dict)
    incarnations: dict[str, str] = field(default_factory=dict)
    live: list[str] = field(default_factory=list)
    wake: float | None = None
    generation: int = 0
    faults: list[str] = field(default_factory=list)


class FakeBrain:
    """Any call is counted once per request number under its node's name.

    `Leave` asks for a Tick after `notice` seconds; `ReportFailure` is set aside; `ReportPruned` is refused;
    `ReportFinished` ends the job.
    """

    def __init__(self) -> None:
        self._stored = b""

    def begin(self, rows: dict[str, bytes], generation: int, now: float) -> FakeState:
        job, incarnations = json.loads(rows["all"]) if rows else ({}, {})
        return FakeState(job, incarnations=incarnations, generation=generation)

    def changes(self, state: FakeState) -> Rows:
        before, self._stored = self._stored, json.dumps([state.job, state.incarnations], sort_keys=True).encode()
        return {} if self._stored == before else {"all": self._stored}

    def generation(self, state: FakeState) -> int:
        return state.generation

    def handle_all(self, state: FakeState, events: list[Event], now: float) -> tuple[FakeState, list[Reply | None]]:
        return state, [self._handle(state, event, now) for event in events]

    def _handle(self, state: FakeState, event: Event, now: float) -> Reply | None:
        if isinstance(event, Called):
            return self._called(state, event.message, now)
        if isinstance(event, StreamOpened | StreamClosed):
            state.live.append(f"{type(event).__name__} {event.node}/{event.incarnation}")
        elif isinstance(event, Tick) and state.wake is not None and now >= state.wake:
            state.wake = None
            state.live.append("Tick")
            state.job["ticks"] = state.job.get("ticks", 0) + 1
        return None

    def note(self, state: FakeState, message: Message, now: float) -> tuple[Reply, bool]:
        """Heartbeats change nothing; progress is counted like any call, and wants a turn."""
        if isinstance(message, control_pb2.HeartbeatRequest):
            return Reply("OK", "", control_pb2.Ack(generation=state.generation)), False
        return self._called(state, message, now), True

    def held_up(self, state: FakeState, seconds: float, now: float) -> None:
        state.live.append("HeldUp")

    def admits(self, state: FakeState, incarnation: str, secret: bytes) -> bool:
        return secret != SOMEBODY_ELSES

    def look(self, state: FakeState) -> FakeState:
        return state

    def key(self, common: FakeState, node: str, incarnation: str) -> object:
        return (common.generation, common.job.get(node, 0)) if common.incarnations.get(node) == incarnation else None

    def directive(self, common: FakeState, node: str) -> control_pb2.Directive:
        return control_pb2.Directive(generation=common.generation, epoch=common.job.get(node, 0))

    def events(self, state: FakeState) -> tuple[object, ...]:
        return ()

    def earlier(self, state: FakeState) -> int:
        return 0

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
        if isinstance(message, ORDERS):
            return Reply("OK", "", control_pb2.OrderReply(generation=state.generation, text="done"))
        caller: control_pb2.Caller = message.caller  # type: ignore[attr-defined]
        if isinstance(message, control_pb2.FailureRequest):
            state.faults.append("RuntimeError: a bug")
            return Reply("INTERNAL", "the master failed on this call: RuntimeError('a bug')", None)
        if isinstance(message, control_pb2.PrunedRequest):
            return Reply("NOT_FOUND", "fenced for a test", None)
        if isinstance(message, control_pb2.LeaveRequest):
            state.wake = now + message.notice
        if isinstance(message, control_pb2.FinishedRequest):
            state.job["finished"] = 1
        last = f"last {caller.node}"
        if caller.request > state.job.get(last, 0):
            state.job[last] = caller.request
            state.job[caller.node] = state.job.get(caller.node, 0) + 1
        return Reply("OK", "", control_pb2.Ack(generation=state.generation))
