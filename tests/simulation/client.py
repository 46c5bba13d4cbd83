"""The agent's `control/master_client.py` without its threads: outbox, pulse and watch over the simulated network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import Message

from dalsegno.agent.control import connection
from dalsegno.agent.control.client_threads import Outbox, WaitingCall
from dalsegno.agent.decisions import events as ev
from dalsegno.protos import control_pb2

from .clock import Timer
from .network import Attempt, Stream

if TYPE_CHECKING:
    from .agents import SimAgent

CALL_TIMEOUT_SECONDS = 10.0
BEAT_TIMEOUT = 3.0
BEAT_INTERVAL = 1.0
PROGRESS_INTERVAL_SECONDS = 0.1
AWAY_AFTER = 3.0
RETRIED = frozenset(code.name for code in connection.RETRIED)


class Client:
    """One agent process's connection to the master."""

    def __init__(self, agent: SimAgent) -> None:
        self.agent = agent
        self.network = agent.sim.network
        self.clock = agent.sim.clock
        self.secret = agent.label.encode().rjust(16)
        self.queue = Outbox()
        self.progress: control_pb2.ProgressRequest | None = None
        self.incarnation = ""
        self.node = ""
        self.registered = False
        self.generation = 0
        self.request = 0
        self.epoch = 0
        self.up = True
        self.heard_at: float | None = None
        self.stream: Stream | None = None
        self._sending: Attempt | None = None
        self._beating: Attempt | None = None
        self._backoff = 0.05
        self._pump_timer: Timer | None = None
        self._progress_at = 0.0
        self._beat_timer: Timer | None = None

    # ---- for the agent ----------------------------------------------------------------------------------------------

    def register(self, request: control_pb2.RegisterRequest) -> None:
        self.registered = False
        if request.incarnation != self.incarnation:
            self.queue.forget()
        self.incarnation = request.incarnation
        self.request = 0
        self.progress = None
        self.queue.clear()
        self.queue.put("Register", request, 0)
        self._drop_attempts()
        if self.stream is not None:
            self.network.hang_up(self.stream)
            self.stream = None
        self.pump()

    def call(self, method: str, request: Message) -> None:
        caller: control_pb2.Caller = request.caller  # type: ignore[attr-defined]
        self.epoch = max(self.epoch, caller.epoch)
        if isinstance(request, control_pb2.ProgressRequest):
            self.progress = request
            self._schedule_beat(max(0.0, self._progress_at - self.clock.now))
            return
        if self.queue.renew(request):
            self._fill(caller, caller.request)
            return
        self.request += 1
        self._fill(caller, self.request)
        self.queue.put(method, request, 0)
        self.pump()

    def close(self) -> None:
        """The process is gone."""
        self._drop_attempts()
        self.queue.clear()
        for timer in (self._pump_timer, self._beat_timer):
            if timer is not None:
                timer.cancel()
        if self.stream is not None:
            self.network.hang_up(self.stream)
            self.stream = None

    def _drop_attempts(self) -> None:
        for attempt in (self._sending, self._beating):
            if attempt is not None:
                attempt.done = None
                self.network.open.pop(attempt, None)
        self._sending = self._beating = None

    def _fill(self, caller: control_pb2.Caller, number: int) -> None:
        caller.job_id, caller.node, caller.incarnation = "job", self.node, self.incarnation
        caller.request, caller.protocol, caller.secret = number, 1, self.secret

    # ---- the outbox -------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        if self._pump_timer is not None:
            self._pump_timer.cancel()
            self._pump_timer = None
        if self._sending is None and self.queue:
            entry = self.queue[0]
            entry.tried = True
            self._sending = self.network.send(
                self,
                entry.request,
                CALL_TIMEOUT_SECONDS,
                lambda code, detail, reply: self._settled(entry, code, detail, reply),
            )

    def _again(self) -> None:
        if self._pump_timer is None:
            self._pump_timer = self.clock.after(
                self._backoff * self.network.random.uniform(0.7, 1.3), self.agent.run, self.pump
            )
            self._backoff = min(1.0, 2 * self._backoff)

    def _settled(self, entry: WaitingCall, code: str, detail: str, reply: Message | None) -> None:
        self._sending = None
        if code == "ABORTED" and entry.method == "Register":
            self.agent.deliver(ev.Postponed(detail))
            self._again()
            return
        if code in RETRIED:
            self._unheard()
            self._again()
            return
        if code == "OK" and not self._heard(reply.generation):  # type: ignore[union-attr]
            self._fail_channel()
            self._again()
            return
        self._backoff = 0.05
        if self.queue and self.queue[0] is entry:
            self.queue.popleft()
        if isinstance(reply, control_pb2.RegisterReply):
            self.node = reply.node
            self.registered = True
            self._schedule_beat(BEAT_INTERVAL)
            self._watch()
            self.agent.deliver(ev.Registered(self.incarnation, reply))
        elif code != "OK":
            if entry.method == "Register":
                self.agent.deliver(ev.Refused(code, detail))
            else:
                self.agent.deliver(ev.CallFailed(entry.method, code, detail))
        elif isinstance(entry.request, control_pb2.HeldRequest) and isinstance(reply, control_pb2.Ack):
            self.agent.deliver(ev.Replication(entry.request.checkpoint.ref.digest, reply.generation, reply.replication))
        self.pump()

    # ---- the pulse --------------------------------------------------------------------------------------------------

    def _schedule_beat(self, delay: float) -> None:
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        self._beat_timer = self.clock.after(delay, self.agent.run, self._beat)

    def _beat(self) -> None:
        self._beat_timer = None
        if not self.registered or self._beating is not None:
            return
        request: Message
        if self.progress is not None:
            request, self.progress = self.progress, None
            self._progress_at = self.clock.now + PROGRESS_INTERVAL_SECONDS
        else:
            request = control_pb2.HeartbeatRequest(caller=control_pb2.Caller(epoch=self.epoch))
        self._fill(request.caller, 0)
        self._beating = self.network.send(
            self, request, BEAT_TIMEOUT, lambda code, detail, reply: self._beaten(request, code, detail, reply)
        )

    def _beaten(self, request: Message, code: str, detail: str, reply: Message | None) -> None:
        self._beating = None
        is_progress = isinstance(request, control_pb2.ProgressRequest)
        if code in RETRIED:
            if is_progress and self.progress is None:
                self.progress = request  # type: ignore[assignment]
            self._schedule_beat(BEAT_INTERVAL)
            self._unheard()
            return
        self._schedule_beat(max(0.0, self._progress_at - self.clock.now) if self.progress else BEAT_INTERVAL)
        if code != "OK":
            self.agent.deliver(ev.CallFailed("ReportProgress" if is_progress else "Heartbeat", code, detail))
        elif not self._heard(reply.generation):  # type: ignore[union-attr]
            self._fail_channel()
        elif isinstance(reply, control_pb2.Ack) and reply.HasField("replication"):
            self.agent.deliver(ev.Replication("", reply.generation, reply.replication))

    # ---- the watch --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self.registered and self.stream is None:
            self.stream = self.network.watch(self, self.node, self.incarnation)
            caller = control_pb2.Caller(epoch=self.epoch)
            self._fill(caller, 0)
            self.stream.request = control_pb2.WatchRequest(caller=caller)

    def directed(self, stream: Stream, directive: control_pb2.Directive) -> None:
        if stream is not self.stream:
            return
        if not self._heard(directive.generation):
            self._fail_channel()
            return
        self.agent.directed(directive)

    def stream_broken(self, stream: Stream) -> None:
        if stream is self.stream:
            self.stream = None
            self._unheard()
            self.clock.after(self.network.random.uniform(0.05, 0.5), self.agent.run, self._watch)

    # ---- who is heard -----------------------------------------------------------------------------------------------

    def _heard(self, generation: int) -> bool:
        if generation < self.generation:
            return False
        self.generation = generation
        self.heard_at = self.clock.now
        if not self.up:
            self.up = True
            self.agent.deliver(ev.LinkChanged(True))
        return True

    def _unheard(self) -> None:
        self._fail_channel()
        if self.up and self.heard_at is not None and self.clock.now - self.heard_at > AWAY_AFTER:
            self.up = False
            self.agent.deliver(ev.LinkChanged(False))

    def _fail_channel(self) -> None:
        """One finding fails all that goes over the channel."""
        for attempt in (self._sending, self._beating):
            if attempt is not None:
                self.clock.after(0.001, attempt.resolve, "CANCELLED")
        if self.stream is not None:
            stream, self.stream = self.stream, None
            self.network.hang_up(stream)
            self.clock.after(self.network.random.uniform(0.05, 0.5), self.agent.run, self._watch)
