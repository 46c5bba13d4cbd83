"""Between agents and master: delay, loss, duplicates that come late, cuts; one channel per agent process.

As gRPC behaves: a call ends with an answer, with UNAVAILABLE (soon) or by its timeout; a stream keeps its order and
breaks. A cut is "closed" (both ends notice) or "silent" (nobody does until its own timeout).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from dalsegno.master.brain.events import Called, Reply
from dalsegno.protos import control_pb2

from .clock import Clock, Timer

if TYPE_CHECKING:
    from .client import Client
    from .masters import SimMaster

Done = Callable[[str, str, Message | None], None]


class Attempt:
    """One try of one unary call: resolved once."""

    def __init__(self, client: Client, done: Done, network: Network) -> None:
        self.client = client
        self.done: Done | None = done
        self.timer: Timer | None = None
        self._network = network

    def resolve(self, code: str, detail: str = "", message: Message | None = None) -> None:
        if self.done is None:
            return
        done, self.done = self.done, None
        if self.timer is not None:
            self.timer.cancel()
        self._network.open.pop(self, None)
        self.client.agent.run(done, code, detail, message)


class Stream:
    """One `Watch`: at the client's end, at the master's end, or only on one of them."""

    def __init__(self, client: Client, node: str, incarnation: str) -> None:
        self.client = client
        self.node = node
        self.incarnation = incarnation
        self.client_open = True
        self.master_open = False
        self.last_at = 0.0
        self.offered = b""
        # By what the server would know whether that has changed.
        self.stands_for: object = None
        self.held: list[control_pb2.Directive] = []
        self.request: Message | None = None
        # What the client is told when it ends.
        self.code = "UNAVAILABLE"


class Network:
    """Carries calls and streams. `cut`: host -> "closed" or "silent"."""

    def __init__(self, clock: Clock, random: Random) -> None:
        self.clock = clock
        self.random = random
        self.master: SimMaster | None = None
        self.loss = 0.0
        self.duplication = 0.0
        self.slow = 0.0
        self.cut: dict[str, str] = {}
        # When the last of them was cut off no more.
        self.healed_at = 0.0
        # Ordered: on a crash of the master they fail in the order in which they began.
        self.open: dict[Attempt, None] = {}
        self.streams: dict[Stream, None] = {}

    def delay(self) -> float:
        random = self.random.random
        if self.slow and random() < self.slow:
            return 0.05 + random()
        return 0.001 + 0.01 * random()

    # ---- calls ------------------------------------------------------------------------------------------------------

    def send(self, client: Client, message: Message, timeout: float, done: Done) -> Attempt:
        """One attempt; `done(code, detail, reply)` runs in the agent."""
        attempt = Attempt(client, done, self)
        self.open[attempt] = None
        attempt.timer = self.clock.after(timeout, attempt.resolve, "DEADLINE_EXCEEDED")
        how = self.cut.get(client.agent.host)
        if how == "closed":
            self.clock.after(0.005, attempt.resolve, "UNAVAILABLE")
        elif how is None:
            lost = self.random.random() < self.loss
            if lost and self.random.random() < 0.5:
                self.clock.after(self.random.uniform(0.05, 1.5), attempt.resolve, "UNAVAILABLE")
            else:
                self.clock.after(self.delay(), self._arrive, attempt, message, lost)
            if self.random.random() < self.duplication:
                self.clock.after(self.random.uniform(0.05, 12.0), self._stray, client.agent.host, message)
        return attempt

    def _arrive(self, attempt: Attempt, message: Message, answer_lost: bool) -> None:
        host = attempt.client.agent.host
        if host in self.cut:
            return
        if self.master is None or not self.master.up:
            self.clock.after(self.delay(), attempt.resolve, "UNAVAILABLE")
            return
        self.master.receive(Called(message), lambda reply: self._answered(attempt, reply, answer_lost))

    def _stray(self, host: str, message: Message) -> None:
        """An old copy that was under way for long: the answer goes nowhere."""
        if host not in self.cut and self.master is not None and self.master.up:
            self.master.receive(Called(message), lambda reply: None)

    def _answered(self, attempt: Attempt, reply: Reply, lost: bool) -> None:
        if lost:
            self.clock.after(self.random.uniform(0.05, 1.5), attempt.resolve, "UNAVAILABLE")
        else:
            self.clock.after(self.delay(), self._return, attempt, reply)

    def _return(self, attempt: Attempt, reply: Reply) -> None:
        if attempt.client.agent.host not in self.cut:
            attempt.resolve(reply.code, reply.detail, reply.message)

    # ---- streams ----------------------------------------------------------------------------------------------------

    def watch(self, client: Client, node: str, incarnation: str) -> Stream:
        stream = Stream(client, node, incarnation)
        self.streams[stream] = None
        how = self.cut.get(client.agent.host)
        if how == "closed":
            self.clock.after(0.005, self._broken, stream)
        elif how == "silent":
            self.clock.after(11.0, self._broken, stream)  # the channel's keepalive
        else:
            self.clock.after(self.delay(), self._open_at_master, stream)
        return stream

    def _open_at_master(self, stream: Stream) -> None:
        if stream.client.agent.host in self.cut:
            self.clock.after(11.0, self._broken, stream)
        elif self.master is None or not self.master.up:
            self.clock.after(self.delay(), self._broken, stream)
        else:
            # Also when the client has hung up meanwhile: its hanging up follows.
            stream.master_open = True
            self.master.stream_opened(stream)
            if not stream.client_open:
                self.clock.after(self.delay(), self._close_at_master, stream)

    def push(self, stream: Stream, directive: control_pb2.Directive) -> None:
        """From the master; keeps the order."""
        stream.last_at = max(stream.last_at + 1e-6, self.clock.now + self.delay())
        self.clock.after(stream.last_at - self.clock.now, self._deliver, stream, directive)

    def _deliver(self, stream: Stream, directive: control_pb2.Directive) -> None:
        if not stream.client_open:
            return
        if stream.client.agent.host in self.cut or stream.held:
            stream.held.append(directive)
        else:
            stream.client.agent.run(stream.client.directed, stream, directive)

    def hang_up(self, stream: Stream) -> None:
        """The client's process closes it."""
        if stream.client_open:
            stream.client_open = False
            if stream.client.agent.host not in self.cut:
                self.clock.after(self.delay(), self._close_at_master, stream)

    def end(self, stream: Stream) -> None:
        """The master closes it, after what it has sent."""
        stream.master_open = False
        self.clock.after(max(0.0, stream.last_at - self.clock.now) + 0.001, self._broken, stream)

    def _close_at_master(self, stream: Stream) -> None:
        if stream.master_open:
            stream.master_open = False
            if self.master is not None and self.master.up:
                self.master.stream_closed(stream)
        self.streams.pop(stream, None)

    def _broken(self, stream: Stream) -> None:
        if stream.client_open:
            stream.client_open = False
            stream.client.agent.run(stream.client.stream_broken, stream)
        if not stream.master_open:
            self.streams.pop(stream, None)

    # ---- what happens to it -----------------------------------------------------------------------------------------

    def cut_off(self, host: str, how: str) -> None:
        self.cut[host] = how
        for stream in [s for s in self.streams if s.client.agent.host == host]:
            if how == "closed":
                self.clock.after(0.01, self._broken, stream)
                self.clock.after(0.01, self._close_at_master, stream)

    def heal(self, host: str) -> None:
        """What a silent cut held back goes through, unless its end has given up meanwhile."""
        if self.cut.pop(host, None) is not None:
            self.healed_at = self.clock.now
        for stream in [s for s in self.streams if s.client.agent.host == host]:
            held, stream.held = stream.held, []
            if not stream.client_open:
                self.clock.after(self.delay(), self._close_at_master, stream)
            elif not stream.master_open:
                # The other end went while it was cut off: the next packet finds out.
                self.clock.after(self.delay(), self._broken, stream)
            for directive in held:
                self.push(stream, directive)

    def master_died(self) -> None:
        for attempt in list(self.open):
            if attempt.client.agent.host not in self.cut:
                self.clock.after(self.delay(), attempt.resolve, "UNAVAILABLE")
        for stream in list(self.streams):
            stream.master_open = False
            if stream.client.agent.host not in self.cut:
                self.clock.after(self.delay(), self._broken, stream)
