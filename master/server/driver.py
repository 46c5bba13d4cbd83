"""The one task that owns the brain.

Every call, stream and timer becomes an event in a bounded queue. A *turn* takes everything that is queued, lets the
brain decide on it, saves what changed of the durable half of the state in one transaction (group commit: what arrives
meanwhile shares the next one), and only then lets the effects out: first the replies, then the directives.

Heartbeats and progress, which every node sends all the time, wait for no turn: the brain notes them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from dalsegno.protos import control_pb2

from ..brain.events import Called, Event, Reply, StreamClosed, StreamOpened, Tick
from ..record.store import Rows, Store, StoreAway, StoreStarved, StoreUnavailable, is_news

__all__ = ("HELD_UP_AFTER_SECONDS", "Brain", "BrainState", "Driver", "OrderLate", "Views")

log = logging.getLogger(__name__)

# The most events that may wait for a turn, and the most that share one. Calls beyond that are told to come again.
QUEUE_LIMIT = 4096
TURN_LIMIT = 512
# Seconds that the loop must have stood still, longer than an agent's heartbeat interval, to count as held up.
HELD_UP_AFTER_SECONDS = 1.0
# Seconds for which a store that cannot be written is tried again, and the pauses between the tries.
SAVE_TIMEOUT_SECONDS = 30.0
SAVE_PAUSE_SECONDS = 0.1
MAX_SAVE_PAUSE_SECONDS = 2.0
# Seconds that a request for the status waits for what is being stored; less than an agent waits for an answer.
STATUS_PATIENCE_SECONDS = 1.0
# A turn that is not stored after so many seconds is told to the agents, which then save as if they heard nobody: they
# take so long to find that, too.
UNRECORDED_AFTER_SECONDS = 3.0
# Seconds that an order of people and tools waits for its turn to be stored; less than they wait for an answer.
ORDER_PATIENCE_SECONDS = 4.0
# Least seconds between two timer turns, so that a wake-up time in the past does not burn a core.
TICK_PAUSE_SECONDS = 0.01
# After a turn the loop serves calls for at least so many times the turn's duration, up to so many seconds: events that
# come meanwhile share the next turn. Each turn looks at all nodes, so with thousands of them turns would take all time.
REST, MOST_REST = 2.0, 0.1
# The most faults that are logged.
MOST_FAULTS = 100


class BrainState(Protocol):
    """What the shell sees of the brain's state."""

    @property
    def job(self) -> Any:
        """The durable half."""

    @property
    def wake(self) -> float | None:
        """When the brain wants a Tick, in the clock of `now`; None: not before the next event."""

    @property
    def faults(self) -> list[str]:
        """Tracebacks of events that were set aside; the shell takes them out."""


S = TypeVar("S", bound=BrainState)


class Brain(Protocol[S]):
    """The pure functions of `master/brain/brain.py`, bound to one job. Times are monotonic seconds."""

    def begin(self, rows: dict[str, bytes], generation: int, now: float, /) -> S:
        """The state of a new job, or the one that `rows` hold. Raises StoreError."""

    def changes(self, state: S, /) -> Rows:
        """The rows of the durable half that changed since the last call."""

    def generation(self, state: S, /) -> int:
        """The state's generation: higher than the given one if agents knew a higher one."""

    def handle_all(self, state: S, events: list[Event], now: float, /) -> tuple[S, list[Reply | None]]:
        """The next state, and one reply for each `Called` (None for others). May change `state` in place."""

    def note(self, state: S, message: Any, now: float, /) -> tuple[Reply, bool]:
        """Notes a heartbeat or progress: its reply, and whether the state wants a turn. Changes `state` in place."""

    def admits(self, state: S, incarnation: str, secret: bytes, /) -> bool:
        """Whether the secret is that of the agent which registered the incarnation, as far as it is known."""

    def held_up(self, state: S, seconds: float, now: float, /) -> None:
        """Notes that the loop stood still for `seconds` until now."""

    def look(self, state: S, /) -> Any:
        """What all directives of this moment have in common."""

    def key(self, common: Any, node: str, incarnation: str, /) -> object:
        """A value that is equal if a node's directive is equal; None if the incarnation is unknown."""

    def directive(self, common: Any, node: str, /) -> control_pb2.Directive:
        """What that agent should be doing."""

    def events(self, state: S, /) -> Any:
        """What happened, oldest first; the same object while nothing has been added."""

    def earlier(self, state: S, /) -> int:
        """Number of the last event on the record when it was taken over; 0: there was none."""

    def status(self, state: S, now: float, /) -> control_pb2.StatusReply:
        """The job's status, for people and tools."""


class Views:
    """What agents should be doing at one moment. Valid only until the next turn."""

    def __init__(self, brain: Brain[Any], common: Any) -> None:
        self._brain, self._common = brain, common

    def key(self, node: str, incarnation: str) -> object:
        """A value that is equal if this agent's directive is equal; None if the agent is unknown."""
        return self._brain.key(self._common, node, incarnation)

    def directive(self, node: str) -> control_pb2.Directive:
        """The directive of a node that has a key."""
        return self._brain.directive(self._common, node)


# Messages that are noted at once.
NOTED = (control_pb2.HeartbeatRequest, control_pb2.ProgressRequest)

_HEARD = Reply("OK", "", None)
_REFUSED = Reply("UNAVAILABLE", "the master is stopping or starting: try again", None)
_FULL = Reply("RESOURCE_EXHAUSTED", "the master has too many calls waiting: try again", None)


class OrderLate(Exception):
    """An order is not on the record in time; one line for a person, which says whether it may get there yet."""


@dataclass(eq=False)
class _Entry:
    event: Event
    answer: asyncio.Future[Reply]
    # A turn has taken it: what follows from it may be stored at any moment.
    is_decided: bool = False


class Driver:
    """Runs the brain until it is stopped or superseded. Everything but `Store` happens in one event loop."""

    def __init__(
        self,
        brain: Brain[S],
        store: Store,
        on_turn: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        held_up_after: float = HELD_UP_AFTER_SECONDS,
    ) -> None:
        """Takes the store over: from then on no earlier master can write. Nothing is read before that.

        `on_turn` is called after each turn, when directives may have changed. Raises StoreError.
        """
        self._brain: Brain[Any] = brain
        self._store = store
        self._on_turn = on_turn
        self._clock = clock
        self._held_up_after = held_up_after
        self.generation = store.raise_generation()
        self._state: Any = brain.begin(store.load(), self.generation, clock())
        self._queue: deque[_Entry] = deque()
        self._arrived = asyncio.Event()
        self._stopping = False
        # How many turns have ended.
        self.turns = 0
        # A note wants a turn.
        self._news = False
        # Since when a turn has changed the state but not stored it; requests for the status are answered at its end.
        self._storing_since: float | None = None
        self._asked: asyncio.Future[Reply] | None = None
        self._alive_at = clock()
        # No turn begins before this time, unless the queue is full.
        self._rest_until = clock()
        # Tracebacks that are in the log.
        self._said: set[str] = set()
        # One thread, so that two writes of one store never overlap.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dalsegno-store")
        # Why the present turn cannot be stored, for people; empty: it can.
        self.store_trouble = ""
        # When an agent was last heard, for the embedded master's end.
        self.heard_at = clock()

    async def call(self, message: Message) -> Reply:
        """The brain's reply to a request, once what it decided is durable.

        Of heartbeats and progress nothing is stored, so they are answered at once.
        """
        now = self._beat()
        self.heard_at = now
        if isinstance(message, NOTED):
            return self._note(message, now)
        if len(self._queue) >= QUEUE_LIMIT:
            return _FULL
        return await self._put(Called(message)).answer

    async def order(self, message: Message) -> Reply:
        """As `call`, for an order of people and tools, which does not wait for a store that is away.

        What no turn has taken by then is withdrawn: nobody wants it carried out when the store is back, perhaps hours
        later. Raises OrderLate.
        """
        self.heard_at = self._beat()
        if len(self._queue) >= QUEUE_LIMIT:
            return _FULL
        entry = self._put(Called(message))
        try:
            await asyncio.wait([entry.answer], timeout=ORDER_PATIENCE_SECONDS)
        finally:
            # Also of a caller that hangs up.
            with contextlib.suppress(ValueError):
                self._queue.remove(entry)
        if entry.answer.done():
            # Also that this master ends: the next one may be asked, as orders may be repeated.
            return entry.answer.result()
        why = f"the master cannot record it: {self._why_late()}"
        if not entry.is_decided:
            raise OrderLate(f"the order was not taken, as {why}; give it again once dalsegno status shows no trouble")
        raise OrderLate(
            f"the order may not have been taken, as {why}; once dalsegno status shows no trouble, look with dalsegno"
            " events whether it was, and give it again if not"
        )

    def _why_late(self) -> str:
        return self.store_trouble or (
            "it has too much to do" if self._storing_since is None else "its store does not answer"
        )

    def events(self) -> Any:
        """What happened, as of the last turn, oldest first; the same object while nothing has been added."""
        return self._brain.events(self._state)

    @property
    def earlier(self) -> int:
        """Number of the last event on the record when it was taken over; 0: there was none."""
        return self._brain.earlier(self._state)

    async def status(self) -> Reply:
        """A `StatusReply` of the job as it is stored, so that a crash takes back nothing of it.

        It does not wait for a slow store: after `STATUS_PATIENCE_SECONDS` it is what the present turn has decided.
        """
        if self._storing_since is not None and not self._stopping:
            asked = self._asked = self._asked or asyncio.get_running_loop().create_future()
            # Shielded, so that one caller's timeout or hanging up does not cancel it for the others.
            await asyncio.wait([asked], timeout=STATUS_PATIENCE_SECONDS)
            if asked.done():
                return asked.result()
        return self._status()

    def _end_storing(self, *, stored: bool) -> None:
        """Answers those who asked during the turn, before the next one changes anything."""
        self._storing_since = None
        self.turns += 1
        if self._asked is not None:
            self._asked.set_result(self._status() if stored else _REFUSED)
            self._asked = None

    def _status(self) -> Reply:
        """The status of the state in memory."""
        if self._stopping:
            return _REFUSED
        try:
            return Reply("OK", "", self._brain.status(self._state, self._clock()))
        except Exception as error:
            # This only reads, so a failure is no reason to stop the job.
            log.exception("the master cannot say how the job stands")
            return Reply("INTERNAL", f"the master cannot say how the job stands: {error!r}", None)

    def admits(self, incarnation: str, secret: bytes) -> bool:
        """Whether a caller with this secret may watch for the incarnation; for an unknown one it learns just that."""
        return self._brain.admits(self._state, incarnation, secret)

    def _note(self, message: Message, now: float) -> Reply:
        if self._stopping:
            return _REFUSED
        try:
            reply, news = self._brain.note(self._state, message, now)
        except Exception as error:
            log.exception("the master failed on %s", type(message).__name__)
            return Reply("INTERNAL", f"the master failed on this call: {error!r}", None)
        if news:
            self._news = True
            self._arrived.set()
        waits_since = self._storing_since
        if isinstance(reply.message, control_pb2.Ack) and waits_since is not None:
            # No order leaves before the turn is stored: who waits for one would wait as long as the store is away.
            reply.message.unrecorded = now - waits_since > UNRECORDED_AFTER_SECONDS
        return reply

    def tell(self, event: StreamOpened | StreamClosed) -> asyncio.Future[Reply]:
        """Queues what happened to a stream. Never refused: the server limits the number of streams.

        The future is done (with an empty reply) once the event was handled.
        """
        return self._put(event).answer

    def views(self) -> Views:
        """The present views. Only within `on_turn`: between turns the state is durable, during one it may not be."""
        return Views(self._brain, self._brain.look(self._state))

    @property
    def stopping(self) -> bool:
        """Whether no call is taken any more."""
        return self._stopping

    def stop(self) -> None:
        """Ends `run` after the present turn."""
        self._stopping = True
        self._arrived.set()

    async def run(self) -> None:
        """Takes turns until `stop`. Raises Superseded, StoreError; however it ends, nobody is left waiting."""
        self._alive_at = self._clock()
        pulse = asyncio.create_task(self._pulse())
        try:
            while not self._stopping:
                await self._wait()
                await self._rest()
                await self._turn()
        finally:
            pulse.cancel()
            self._writer.shutdown()
            self._refuse(self._queue)
            self._queue.clear()
            self._stopping = True

    def _put(self, event: Event) -> _Entry:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        entry = _Entry(event, answer)
        if self._stopping:
            self._refuse([entry])
        else:
            self._queue.append(entry)
            self._arrived.set()
        return entry

    async def _wait(self) -> None:
        """Returns when there is an event, a due timer, or a reason to stop."""
        if self._queue or self._news or self._stopping:
            return
        self._arrived.clear()
        wake = self._state.wake
        timeout_seconds = None if wake is None else max(TICK_PAUSE_SECONDS, wake - self._clock())
        # A timeout is what this wait is for: the timer is due.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), timeout_seconds)

    async def _rest(self) -> None:
        """Lets events gather; the longer turns take, the longer this lasts."""
        rest = self._rest_until - self._clock()
        if rest > 0 and len(self._queue) < TURN_LIMIT and not self._stopping:
            await asyncio.sleep(min(rest, MOST_REST))

    async def _turn(self) -> None:
        now = self._beat()
        self._news = False
        entries = [self._queue.popleft() for _ in range(min(len(self._queue), TURN_LIMIT))]
        for entry in entries:
            entry.is_decided = True
        events = [entry.event for entry in entries] or [Tick()]
        self._storing_since = now
        try:
            self._state, replies = self._brain.handle_all(self._state, events, now)
            self._say_faults()
            took = self._clock() - now
            await self._persist()
        except BaseException:
            self._end_storing(stored=False)
            self._refuse(entries)
            raise
        self._end_storing(stored=True)
        for entry, reply in zip(entries, replies, strict=False):
            # A caller that hung up has cancelled its future.
            if not entry.answer.done():
                entry.answer.set_result(reply or _HEARD)
        decided = self._clock()
        self._on_turn()
        ended = self._clock()
        self._rest_until = ended + min(MOST_REST, REST * (took + ended - decided))
        # Lets others have the loop, even after a turn that had nothing to store.
        await asyncio.sleep(0)

    def _say_faults(self) -> None:
        """Logs each kind of fault once, because the same one may come again with every turn."""
        faults, self._state.faults[:] = list(self._state.faults), []
        for fault in faults:
            if fault not in self._said and len(self._said) < MOST_FAULTS:
                self._said.add(fault)
                log.error("an event was set aside, the job goes on without it\n%s", fault)

    async def _persist(self) -> None:
        rows = self._brain.changes(self._state)
        generation = self._brain.generation(self._state)
        if not rows and generation <= self.generation:
            return
        loop = asyncio.get_running_loop()
        began = self._clock()
        pause = SAVE_PAUSE_SECONDS
        said = set[str]()
        while True:
            try:
                await loop.run_in_executor(self._writer, self._save, rows, generation)
                self.store_trouble = ""
                if said:
                    log.warning("the store takes writes again, after %.0f s", self._clock() - began)
                return
            except StoreUnavailable as error:
                # No effect may leave before its state is kept. Agents repeat their calls, and training goes on. A store
                # that is fine, or a service of its own, is never given up: a restarted master would not help.
                lasts = isinstance(error, StoreStarved | StoreAway)
                if self._stopping or (not lasts and self._clock() + pause > began + SAVE_TIMEOUT_SECONDS):
                    raise
                self.store_trouble = str(error)
                if is_news(error, said):
                    log.warning("%s; trying again", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_SAVE_PAUSE_SECONDS)

    def _save(self, rows: Rows, generation: int) -> None:
        """Saves on the writer's thread."""
        if generation > self.generation:
            self.generation = self._store.raise_generation(above=generation - 1, owner=self.generation)
        self._store.save(rows, self.generation)

    def _refuse(self, entries: list[_Entry] | deque[_Entry]) -> None:
        for entry in entries:
            if not entry.answer.done():
                entry.answer.set_result(_REFUSED)

    async def _pulse(self) -> None:
        """Updates `_alive_at` while the loop runs, also while a turn waits for a slow disk."""
        while True:
            await asyncio.sleep(self._held_up_after / 4)
            self._beat()

    def _beat(self) -> float:
        """Notes that the loop runs; called before any message is noted, because deaf time does not count."""
        now = self._clock()
        gap = now - self._alive_at
        self._alive_at = now
        if gap > self._held_up_after:
            log.warning("the master was held up for %.1f s", gap)
            if self._storing_since is not None:
                # The store may be there: nobody has looked meanwhile.
                self._storing_since += gap
            self._brain.held_up(self._state, gap - self._held_up_after / 4, now)
            self._news = True
            self._arrived.set()
        return now
