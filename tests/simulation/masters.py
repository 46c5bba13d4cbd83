"""The real brain in a simulated process: store, streams, timer, pauses, crashes at the worst moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dalsegno.master.brain import brain, liveness, replication
from dalsegno.master.brain.door import admit
from dalsegno.master.brain.events import Called, Event, Reply, StreamClosed, StreamOpened, Tick
from dalsegno.master.brain.live import State
from dalsegno.master.brain.state import Job, Phase
from dalsegno.master.brain.turn import Turn
from dalsegno.master.brain.views import Common, directive_of
from dalsegno.master.record.codec import JobCodec
from dalsegno.protos import control_pb2

from .clock import Timer
from .network import Stream

if TYPE_CHECKING:
    from .world import Simulation


def decoded(rows: dict[str, bytes]) -> Job:
    return JobCodec().decode(rows)


HELD_UP_AFTER_SECONDS = 1.0
# Seconds in which something of a memory checkpoint comes to buddies, where all is well and newer ones wait.
SENT_WITHIN = 12.0
TICK_PAUSE_SECONDS = 0.01
QUIET = (control_pb2.HeartbeatRequest, control_pb2.ProgressRequest)


class SimMaster:
    """One master at a time, over one store that may be lost."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.up = False
        self.state: State | None = None
        # The rows of the record, to which each change was applied by itself; None: there is no store yet.
        self.stored: dict[str, bytes] | None = None
        self._codec = JobCodec()
        # Whether the rows were compared with the job since it started.
        self._looked = False
        self.generation = 0
        self.started_at = 0.0
        self.streams: dict[tuple[str, str], Stream] = {}
        # "handled": dies between deciding and saving; "saved": between saving and answering.
        self.crash_at = ""
        self.crash_events = 0
        self.downtime = 1.0
        self._offset = 0.0
        self._paused_at: float | None = None
        self._backlog: list[Callable[[], None]] = []
        self._timer: Timer | None = None
        self._shape: tuple[object, ...] = ()
        self._common: Common | None = None
        # Since when what is sent to buddies stands at what.
        self._sending: tuple[float, tuple[object, ...] | None] = (0.0, None)

    @property
    def now(self) -> float:
        return self.sim.clock.now + self._offset

    @property
    def job(self) -> Job | None:
        """What is durable (saved before anything leaves)."""
        return self.state.job if self.state is not None else None

    # ---- the process ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.up:
            return
        self.started_at = self.sim.clock.now
        self._offset = self.sim.random.uniform(0.0, 5000.0)
        self.up = True
        if self.stored is None:
            self.stored, self.generation = {}, 0
        self.generation += 1
        self._codec, self._looked = JobCodec(), False
        if self.stored:
            self.state = brain.recover(self._codec.decode(self.stored), self.generation, self.now)
        else:
            self.state = brain.fresh("job", self.generation, embedded=self.sim.plan.embedded)
        self.generation = self.state.job.generation
        self.sim.trace("master", "starts, generation {}", self.generation)
        self.sim.ledger.master_moved(self.state.job)
        self._wake()

    def crash(self) -> None:
        """SIGKILL now; whoever supervises it starts it again after `downtime`."""
        if self.up and self.state is not None:
            self._die()

    def _save(self) -> None:
        """Stores what a turn has changed."""
        assert self.state is not None
        assert self.stored is not None
        for key, row in self._codec.changes(self.state.job).items():
            if row is None:
                self.stored.pop(key, None)
            else:
                self.stored[key] = row
        if not self._looked:
            # A master's first change knows least of what the store holds.
            self._looked = True
            whole = self.stored == JobCodec.everything(self.state.job)
            self.sim.ledger.require(whole, "the record is the job", "rows were left on it, or are missing")

    def _die(self) -> None:
        self.sim.trace("master", "dies (back in {:.1f} s)", self.downtime)
        self.up = False
        self.state = None
        self.crash_at = ""
        self._paused_at = None
        self._backlog.clear()
        self.streams.clear()
        if self._timer is not None:
            self._timer.cancel()
        self.sim.network.master_died()
        self.sim.clock.after(self.downtime, self.start)

    def lose_store(self) -> None:
        """Only while it is down."""
        self.stored = None
        self.sim.trace("master", "its store is lost")
        self.sim.ledger.store_lost()

    def pause(self) -> None:
        if self.up and self._paused_at is None:
            self.sim.trace("master", "is stopped")
            self._paused_at = self.sim.clock.now

    @property
    def is_paused(self) -> bool:
        return self.up and self._paused_at is not None

    def resume(self) -> None:
        if not self.up or self._paused_at is None:
            return
        held = self.sim.clock.now - self._paused_at
        self._paused_at = None
        self.sim.trace("master", "continues after {:.1f} s", held)
        self._sending = (self.sim.clock.now, None)
        if held > HELD_UP_AFTER_SECONDS:
            if self.state is not None:
                brain.held_up(self.state, held, self.now)
            self._decide(Tick(), None)
        backlog, self._backlog = self._backlog, []
        for work in backlog:
            if self.up:
                work()
        if self.up:
            self._wake()

    # ---- events -----------------------------------------------------------------------------------------------------

    def receive(self, event: Event, answer: Callable[[Reply], None] | None = None) -> None:
        if not self.up:
            return
        if isinstance(event, Called):
            admit(event.message)  # What an agent of ours says is never refused for its shape.
        if self._paused_at is not None:
            self._backlog.append(lambda: self._decide(event, answer))
        else:
            self._decide(event, answer)

    def stream_opened(self, stream: Stream) -> None:
        key = (stream.node, stream.incarnation)
        older = self.streams.get(key)
        if older is not None and older is not stream:
            self.sim.network.end(older)
        self.streams[key] = stream
        self.receive(StreamOpened(*key))

    def stream_closed(self, stream: Stream) -> None:
        key = (stream.node, stream.incarnation)
        if self.streams.get(key) is stream:
            del self.streams[key]
            self.receive(StreamClosed(*key))

    def _tick(self) -> None:
        self._timer = None
        if self.up and self._paused_at is None and self.state is not None:
            self._decide(Tick(), None)

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake = self.state.wake if self.state is not None else None
        if wake is not None:
            self._timer = self.sim.clock.after(max(TICK_PAUSE_SECONDS, wake - self.now), self._tick)

    def _decide(self, event: Event, answer: Callable[[Reply], None] | None) -> None:
        if self.state is None:
            return
        if self.crash_at and not (isinstance(event, Called) and isinstance(event.message, QUIET)):
            self.crash_events -= 1
            if self.crash_events <= 0:
                self._decide_and_die(event)
                return
        begun = self.state.job.epoch > 0
        self.state, replies = brain.handle(self.state, event, self.now)
        for fault in self.state.faults:
            self.sim.ledger.require(False, "no event is set aside", fault)
        self._save()
        self._look_at_all()
        self._look_at_sending()
        if not begun:
            self.sim.ledger.heard(self.state.job)
        if isinstance(event, Called) and len(replies) != 1:
            raise AssertionError(f"{len(replies)} replies to one call")
        job = self.state.job
        quiet = isinstance(event, Tick) or (isinstance(event, Called) and isinstance(event.message, QUIET))
        shape = self._looks(job)
        if not quiet or shape != self._shape:
            self._shape = shape
            self.generation = job.generation
            self.sim.ledger.master_moved(job)
            self._publish()
        if answer is not None and replies:
            answer(replies[0])
        self._wake()

    def _look_at_all(self) -> None:
        """The brain looks at those only who may be dead: it must come to the same as with all of them."""
        state = self.state
        if state is None or state.job.phase.is_terminal:
            return
        wake, state.wake = state.wake, None
        turn = Turn(state, self.now)
        for node in state.job.nodes.values():
            how = liveness.death_of(turn, node, state.job.settings.node_timeout)
            self.sim.ledger.require(not how, "the dead are noticed", f"{node.name} is still there: {how}")
        wanted, state.wake = state.wake, wake
        in_time = wanted is None or (wake is not None and wake <= wanted)
        self.sim.ledger.require(
            in_time, "the dead are noticed", f"wakes at {wake}, and somebody may be dead at {wanted}"
        )

    def _look_at_sending(self) -> None:
        """Where nothing fails, a memory checkpoint comes to buddies, and then the next one is sent."""
        now, state = self.sim.clock.now, self.state
        away = self.sim.plan.walled or bool(self.sim.network.cut)
        # A master that has just begun waits for one of them for as long as for any node.
        away = away or (state is not None and not self._members_live(state.job))
        if state is None or state.job.phase is not Phase.RUNNING or away:
            self._sending = (now, None)
            return
        replicas, turn = state.live.held.replicas, Turn(state, self.now)
        sending = replicas.sending
        if sending is None:
            waits, mark = replication.newest_unsent(turn, replicas) is not None, (self.generation, replicas.epoch)
        else:
            told = (len(sending.pending), len(sending.untold))
            waits, mark = bool(sending.later), (self.generation, replicas.epoch, sending.step.record.digest, *told)
        since, known = self._sending
        if not waits or mark != known:
            self._sending = since, known = now, mark
        since = max(since, self.sim.ledger.quiet_since, self.sim.network.healed_at)
        self.sim.ledger.require(
            now - since < SENT_WITHIN, "the next step is sent", f"nothing is since {since:.1f}: {mark}"
        )

    def _members_live(self, job: Job) -> bool:
        members = job.world.members if job.world is not None else ()
        agents = [self.sim.by_incarnation(member.incarnation) for member in members]
        return all(agent is not None and agent.alive for agent in agents)

    def _decide_and_die(self, event: Event) -> None:
        assert self.state is not None
        self.state, _ = brain.handle(self.state, event, self.now)
        if self.crash_at == "saved":
            self.sim.ledger.master_moved(self.state.job)
            self._save()
        self.sim.trace("master", "was just {} {}", self.crash_at, type(event).__name__)
        self._die()

    def _looks(self, job: Job) -> tuple[object, ...]:
        """What directives depend on, as far as a heartbeat, progress or timer can change it."""
        return (
            job.phase,
            job.epoch,
            job.noticed,
            len(job.checkpoints),
            [(r.retired, r.universal_digest) for r in job.checkpoints],
            (job.conversion.lease, job.conversion.owner, job.conversion.blocked) if job.conversion else None,
            (job.verification.number, job.verification.verifier) if job.verification else None,
            tuple(job.parts.items()),
            [(node.incarnation, node.leaving, node.unreadable, node.joined) for node in job.nodes.values()],
            (len(self.state.live.held_until), self.state.live.missing.text) if self.state is not None else 0,
            self._memory_looks(),
            job.checkpoints.head,
        )

    def _memory_looks(self) -> tuple[object, ...]:
        """The same of memory checkpoints: where their parts are, who stays for them, and who writes them."""
        if self.state is None:
            return ()
        common = Common(self.state)
        written = [(known, order, common.sources_to_write(order)) for known, order in common.durable.items()]
        return common.sources, common.needed, written

    def _publish(self) -> None:
        assert self.state is not None
        self._common = common = Common(self.state).after(self._common)
        # Nothing in it was built before. But what was told of parts is still told while it is true.
        anew = Common(self.state)
        anew.sources = common.sources
        for key, stream in list(self.streams.items()):
            node = self.state.job.nodes.get(stream.node)
            if node is not None and node.incarnation == stream.incarnation:
                directive = directive_of(anew, node)
            else:
                directive = control_pb2.Directive(generation=self.state.job.generation)
                directive.fenced.reason = "not known"
            content = directive.SerializeToString()
            stands_for = common.key(node) if node is not None else None
            known, stream.stands_for = stream.stands_for, stands_for
            if content == stream.offered:
                continue
            # The server builds no directive where these two are equal.
            told = known is None or stands_for is None or known != stands_for
            self.sim.ledger.require(told, "directives are told", f"{stream.node} is not told of a change")
            stream.offered = content
            self.sim.ledger.directive_sent(directive)
            self.sim.network.push(stream, directive)
            if directive.WhichOneof("order") == "fenced":
                del self.streams[key]
                self.sim.network.end(stream)
