"""An asyncio event loop on the simulator's clock, whose callbacks cost time as their work does."""

from __future__ import annotations

import _lsprof
import asyncio
import contextlib
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from random import Random
from typing import Any

from .clock import Clock, Timer

# What one call or return of a function costs, seconds; measured over the brain's own, with what lies between them.
SECONDS_PER_EVENT = 0.15e-6
# How often what is left of a dead loop's coroutines is asked to end.
MOST_ROUNDS = 10


class Meter:
    """Counts calls and returns of all functions, in C and in Python: work that is the same on every machine.

    It is the profiler of the standard library with a clock that counts its own readings.
    """

    def __init__(self) -> None:
        self._count = itertools.count()
        self._profiler = _lsprof.Profiler(self._count.__next__, 1.0)

    def measure(self, call: Callable[[], None]) -> int:
        """Runs `call`; how many events it took."""
        before = next(self._count)
        self._profiler.enable()
        try:
            call()
        finally:
            self._profiler.disable()
            self._profiler.clear()
        return next(self._count) - before

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What the simulation does meanwhile is nobody's work. Only within `measure`."""
        self._profiler.disable()
        try:
            yield
        finally:
            self._profiler.enable()


class VirtualLoop(asyncio.AbstractEventLoop):
    """What the master's shell runs on. Executors do their work after a time that `disk` says."""

    def __init__(self, clock: Clock, random: Random, slowness: float, disk: Callable[[], float]) -> None:
        """`slowness`: how many times slower than the reference its processor is."""
        self.clock = clock
        self.offset = random.uniform(0.0, 5000.0)
        self.frozen = self.dead = False
        # Until then the processor is at work, in the clock's seconds.
        self.busy_until = 0.0
        self.longest_turn = 0.0
        self.errors: list[dict[str, Any]] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self._disk = disk
        self._slowness = slowness
        self.meter = Meter()
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._next: Timer | None = None
        self._next_at = 0.0
        self._executing: dict[int, float] = {}

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def charge(self, seconds: float) -> None:
        """Work that is not seen here (serialization, sockets)."""
        self.hold_up(seconds * self._slowness)

    def hold_up(self, seconds: float) -> None:
        """Something else has the processor."""
        self.busy_until = max(self.busy_until, self.clock.now) + seconds

    def thaw(self) -> None:
        self.frozen = False
        self._schedule()

    def kill(self) -> None:
        """Nothing of it runs any further; its coroutines end here, and not whenever the collector finds them."""
        self.dead = True
        if self._next is not None:
            self._next.cancel()
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            for task in self.tasks:
                task.cancel()
            # What they still say and do, nobody hears and nothing keeps: see `dead`.
            for _ in range(MOST_ROUNDS):
                for handle in [self._ready.popleft() for _ in range(len(self._ready))]:
                    handle._run()
        finally:
            asyncio._set_running_loop(outer)
        for task in self.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._ready.clear()
        self._timers.clear()
        self.tasks.clear()

    def _schedule(self) -> None:
        if self.dead or self.frozen:
            return
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if self._ready:
            at = self.clock.now
        elif self._timers:
            at = self._timers[0][0] - self.offset
        else:
            return
        at = max(at, self.busy_until, self.clock.now)
        if self._next is not None:
            if self._next_at <= at:
                return
            self._next.cancel()
        self._next_at = at
        self._next = self.clock.after(at - self.clock.now, self._turn)

    def _turn(self) -> None:
        self._next = None
        if self.dead or self.frozen:
            return
        if self.clock.now < self.busy_until - 1e-9:
            self._schedule()
            return
        asyncio._set_running_loop(self)
        try:
            work = self.meter.measure(self._run_ready)
        finally:
            asyncio._set_running_loop(None)
        self.charge(work * SECONDS_PER_EVENT)
        self.longest_turn = max(self.longest_turn, self.busy_until - self.clock.now)
        self._schedule()

    def _run_ready(self) -> None:
        while self._timers and self._timers[0][0] <= self.time() + 1e-9:
            _, _, timer = heapq.heappop(self._timers)
            self._ready.append(timer)
        for _ in range(len(self._ready)):
            if self.dead:
                return
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()

    # ---- what asyncio asks of a loop ---------------------------------------------------------------------------------

    def time(self) -> float:
        return self.clock.now + self.offset

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        self._schedule()
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not self.dead:
            heapq.heappush(self._timers, (when, next(self._numbers), handle))
            self._schedule()
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, **options)
        if len(self.tasks) > 1000:
            self.tasks = [task for task in self.tasks if not task.done()]
        self.tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """One piece of work of an executor after another, each taking as long as the disk does."""
        future = self.create_future()
        key = id(executor)
        begin = max(self.clock.now, self._executing.get(key, 0.0))
        self._executing[key] = end = begin + self._disk()
        self.clock.after(end - self.clock.now, self._executed, future, func, args)
        return future

    def _executed(self, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self.dead:
            return
        if self.frozen:
            self.clock.after(0.1, self._executed, future, func, args)
            return
        try:
            result = func(*args)
        except Exception as error:
            if not self.dead and not future.done():
                future.set_exception(error)
        else:
            if not self.dead and not future.done():
                future.set_result(result)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self.errors.append(context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self.dead

    def is_closed(self) -> bool:
        return self.dead
