"""The one task that owns the brain.

Every call, stream and timer becomes an event in a bounded queue. A *turn* takes everything that is queued, lets the
brain decide on it, saves the durable half of the state in one transaction if it changed (group commit: what arrives
meanwhile shares the next one), and only then lets the effects out: first the replies, then the directives.
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

from .events import Called, Event, HeldUp, Reply, StreamClosed, StreamOpened, Tick
from .store import Store, StoreStarved, StoreUnavailable

__all__ = ("HELD_UP_AFTER", "Brain", "BrainState", "Driver")

log = logging.getLogger(__name__)

# Events that may wait for their turn, and how many share one. A call beyond that is told to come again.
QUEUE_LIMIT = 4096
TURN_LIMIT = 512
# The loop is taken for held up when it could not run for longer than an agent's heartbeat interval; in seconds.
HELD_UP_AFTER = 1.0
# A store that cannot be written is tried again this long, with these pauses; in seconds.
SAVE_TIMEOUT = 30.0
SAVE_PAUSE = 0.1
SAVE_PAUSE_MAX = 2.0
# The shortest time between two timer turns, so that a wake-up that lies in the past does not burn a core; in seconds.
TICK_PAUSE = 0.01


class BrainState(Protocol):
    """What the shell sees of the brain's state."""

    @property
    def job(self) -> Any:
        """The durable half."""

    @property
    def wake(self) -> float | None:
        """When the brain wants a Tick, in the clock of `now`; None: not before the next event."""


S = TypeVar("S", bound=BrainState)


class Brain(Protocol[S]):
    """The pure functions of `master/brain.py`, bound to one job. Times are monotonic seconds."""

    def begin(self, saved: bytes | None, generation: int, now: float, /) -> S:
        """The state of a new job, or the one that `saved` holds. Raises StoreError."""

    def encode(self, state: S, /) -> bytes:
        """The durable half; the same content gives the same bytes."""

    def generation(self, state: S, /) -> int:
        """The generation that the state wants to speak with: higher than given where agents knew a higher one."""

    def handle(self, state: S, event: Event, now: float, /) -> tuple[S, list[Reply]]:
        """The next state, and one reply if the event is a `Called`. May change `state` in place."""

    def view(self, state: S, node: str, incarnation: str, /) -> control_pb2.Directive | None:
        """What that agent should be doing; None where the incarnation is unknown."""

    def status(self, state: S, now: float, /) -> control_pb2.StatusReply:
        """For people and tools."""


_REFUSED = Reply("UNAVAILABLE", "the master is stopping or starting: try again", None)


@dataclass
class _Entry:
    event: Event | None  # None: a question about the status
    answer: asyncio.Future[Reply]


class Driver:
    """Runs the brain until it is stopped or superseded. Everything but `Store` happens in one event loop."""

    def __init__(
        self,
        brain: Brain[S],
        store: Store,
        on_turn: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        held_up_after: float = HELD_UP_AFTER,
    ) -> None:
        """Takes the store over: no earlier master can write any more, and nothing was read before that.

        `on_turn` is called after each turn, when directives may have changed. Raises StoreError.
        """
        self._brain: Brain[Any] = brain
        self._store = store
        self._on_turn = on_turn
        self._clock = clock
        self._held_up_after = held_up_after
        self.generation = store.raise_generation()
        self._saved = store.load()
        self._state: Any = brain.begin(self._saved, self.generation, clock())
        self._streams: set[tuple[str, str]] = set()
        self._queue: deque[_Entry] = deque()
        self._arrived = asyncio.Event()
        self._stopping = False
        self._held_up = False
        self._alive_at = clock()
        # One thread: two writes of one store never overlap.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dalsegno-store")
        # When an agent was last heard, for the embedded master's end.
        self.heard_at = clock()

    async def call(self, message: Message) -> Reply:
        """The brain's reply to a request, once what it decided is durable."""
        self.heard_at = self._clock()
        return await self._ask(Called(message))

    async def status(self) -> Reply:
        """A `StatusReply` of the job as the last durable state has it."""
        return await self._ask(None)

    def tell(self, event: StreamOpened | StreamClosed) -> asyncio.Future[Reply]:
        """Queues what happened to a stream. Never refused: the server limits how many streams there are.

        The future is done (with an empty reply) once the event was handled.
        """
        return self._put(event)

    def view(self, node: str, incarnation: str) -> control_pb2.Directive | None:
        """Only within `on_turn`: between two turns the state is durable, during one it may not be."""
        return self._brain.view(self._state, node, incarnation)

    def stop(self) -> None:
        """Ends `run` after the present turn."""
        self._stopping = True
        self._arrived.set()

    async def run(self) -> None:
        """Takes turns until `stop`. Raises Superseded, StoreError; whatever ends it, nobody is left waiting."""
        self._alive_at = self._clock()
        pulse = asyncio.create_task(self._pulse())
        try:
            while not self._stopping:
                await self._wait()
                await self._turn()
        finally:
            pulse.cancel()
            self._writer.shutdown()
            self._refuse(self._queue)
            self._queue.clear()
            self._stopping = True

    async def _ask(self, event: Called | None) -> Reply:
        if len(self._queue) >= QUEUE_LIMIT:
            return Reply("RESOURCE_EXHAUSTED", "the master has too many calls waiting: try again", None)
        return await self._put(event)

    def _put(self, event: Event | None) -> asyncio.Future[Reply]:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        entry = _Entry(event, answer)
        if self._stopping:
            self._refuse([entry])
        else:
            self._queue.append(entry)
            self._arrived.set()
        return answer

    async def _wait(self) -> None:
        """Returns when there is an event, a due timer, or a reason to stop."""
        if self._queue or self._stopping:
            return
        self._arrived.clear()
        wake = self._state.wake
        timeout = None if wake is None else max(TICK_PAUSE, wake - self._clock())
        # Timing out is what this wait is for: the timer is due.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), timeout)

    async def _turn(self) -> None:
        now = self._beat()
        entries = [self._queue.popleft() for _ in range(min(len(self._queue), TURN_LIMIT))]
        try:
            answers = self._decide_all(entries, now)
            await self._persist()
        except BaseException:
            self._refuse(entries)
            raise
        for entry, reply in zip(entries, answers, strict=True):
            # A caller that hung up has cancelled its future.
            if not entry.answer.done():
                entry.answer.set_result(reply)
        self._on_turn()

    def _decide_all(self, entries: list[_Entry], now: float) -> list[Reply]:
        if self._held_up:
            # Before anything that would be judged by the time: nobody could be heard meanwhile.
            self._held_up = False
            self._decide(HeldUp(), now)
        answers: list[Reply] = []
        for entry in entries:
            try:
                answers.append(self._answer(entry, now))
            except Exception as error:
                if not isinstance(entry.event, Called):
                    raise
                # A bug in one decision: one caller's trouble, not the job's. What this turn had decided before is
                # in a state that cannot be trusted any more, so those callers come again.
                log.exception("the master failed on %s", type(entry.event.message).__name__)
                self._begin_again(now)
                answers = [_REFUSED] * len(answers)
                answers.append(Reply("INTERNAL", f"the master failed on this call: {error!r}", None))
        # After what was queued: a heartbeat that has arrived counts before a deadline does. A backlog goes first.
        if not self._queue and self._state.wake is not None and self._state.wake <= now:
            self._decide(Tick(), now)
        return answers

    def _answer(self, entry: _Entry, now: float) -> Reply:
        if entry.event is None:
            return self._status(now)
        if isinstance(entry.event, StreamOpened):
            self._streams.add((entry.event.node, entry.event.incarnation))
        if isinstance(entry.event, StreamClosed):
            self._streams.discard((entry.event.node, entry.event.incarnation))
        replies = self._decide(entry.event, now)
        if isinstance(entry.event, Called):
            if len(replies) != 1:
                raise AssertionError(f"{len(replies)} replies to one {type(entry.event.message).__name__}")
            return replies[0]
        return Reply("OK", "", None)

    def _status(self, now: float) -> Reply:
        try:
            return Reply("OK", "", self._brain.status(self._state, now))
        except Exception as error:
            # It only reads: what cannot be shown is no reason to stop the job.
            log.exception("the master cannot say how the job stands")
            return Reply("INTERNAL", f"the master cannot say how the job stands: {error!r}", None)

    def _decide(self, event: Event, now: float) -> list[Reply]:
        self._state, replies = self._brain.handle(self._state, event, now)
        return replies

    def _begin_again(self, now: float) -> None:
        """Goes back to the stored state, as a restarted master would; the streams are still there."""
        self._state = self._brain.begin(self._saved, self.generation, now)
        for node, incarnation in sorted(self._streams):
            self._decide(StreamOpened(node, incarnation), now)

    async def _persist(self) -> None:
        data = self._brain.encode(self._state)
        if data == self._saved:
            return
        loop = asyncio.get_running_loop()
        give_up = self._clock() + SAVE_TIMEOUT
        pause = SAVE_PAUSE
        said = ""
        while True:
            try:
                await loop.run_in_executor(self._writer, self._save, data, self._brain.generation(self._state))
            except StoreUnavailable as error:
                # No effect may leave before its state is kept. Agents repeat their calls, training goes on.
                # A store that is well is never given up: a restarted master would have no more descriptors.
                starved = isinstance(error, StoreStarved)
                if self._stopping or (not starved and self._clock() + pause > give_up):
                    raise
                if str(error) != said:
                    said = str(error)
                    log.warning("%s; trying again", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, SAVE_PAUSE_MAX)
            else:
                self._saved = data
                return

    def _save(self, data: bytes, generation: int) -> None:
        """In the writer's thread."""
        if generation > self.generation:
            self.generation = self._store.raise_generation(above=generation - 1, owner=self.generation)
        self._store.save(data, self.generation)

    def _refuse(self, entries: list[_Entry] | deque[_Entry]) -> None:
        for entry in entries:
            if not entry.answer.done():
                entry.answer.set_result(_REFUSED)

    async def _pulse(self) -> None:
        """Moves `_alive_at` while the loop runs, also while a turn waits for a slow disk."""
        while True:
            await asyncio.sleep(self._held_up_after / 4)
            self._beat()

    def _beat(self) -> float:
        now = self._clock()
        if now - self._alive_at > self._held_up_after:
            log.warning("the master was held up for %.1f s", now - self._alive_at)
            self._held_up = True
            self._arrived.set()
        self._alive_at = now
        return now
