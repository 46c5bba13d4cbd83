"""Threads of simulated processes: real threads of which one runs at a time, handed over at every wait.

The product's modules get `threading` and `time` of this module in place of their own (`shims`), so that every lock,
condition, event, timer and sleep of theirs waits on the simulator's clock. Who runs next, and how late, is a matter of
the seed alone.
"""

from __future__ import annotations

import _thread
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from .clock import Clock

# A thread that may run does so within that time, in seconds: enough for threads to change places.
LATENCY = 50e-6


class Killed(BaseException):
    """Unwinds a thread of a process that is gone."""


class Process:
    """What one simulated process shares: its host, its clock, whether it lives, and how slow its threads may be."""

    def __init__(self, kernel: Kernel, label: str, host: str, offset: float) -> None:
        self.kernel = kernel
        self.label = label
        self.host = host
        self.offset = offset
        self.alive = True
        self.frozen = False
        # Whoever writes to its terminal waits.
        self.console_blocked = False
        # How likely a thread is held back whenever it may run or lets go of a lock, and for how long at most (seconds).
        self.hold_chance = 0.0
        self.hold_longest = 0.0
        self.threads: dict[Thread, None] = {}
        # Whom it stands for.
        self.owner: Any = None
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def spawn(self, target: Callable[..., None], name: str, *args: Any) -> Thread:
        thread = Thread(target=target, name=name, args=args, process=self)
        thread.start()
        return thread

    def run(self, call: Callable[..., None], *args: Any) -> None:
        """Runs a callback of the simulation as a part of this process: never when it is gone, later when stopped."""
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append((call, args))
        else:
            call(*args)

    def thaw(self) -> None:
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for call, args in backlog:
            self.run(call, *args)

    def kill(self) -> None:
        """No thread of it runs any further. Not from one of its own threads."""
        self.alive = False
        for thread in list(self.threads):
            self.kernel.kill(thread)
        self.threads.clear()


class Kernel:
    """Hands control to one thread at a time; the simulation's own callbacks run while none has it."""

    def __init__(self, clock: Clock, random: Random) -> None:
        self.clock = clock
        self.random = random
        self.current: Thread | None = None
        # An error that no code under test may swallow.
        self.failure: BaseException | None = None
        self.switches = 0
        # The worker processes of all agents; see `processes`.
        self.processes: Any = None
        self._baton = _thread.allocate_lock()
        self._baton.acquire()

    def here(self) -> Process:
        """The process whose thread runs now."""
        assert self.current is not None, "no simulated thread is running"
        return self.current.process

    def run(self, thread: Thread) -> None:
        """Lets it run until it waits or ends. For the simulation's own thread."""
        self.switches += 1
        self.current = thread
        thread.baton.release()
        self._baton.acquire()
        self.current = None
        if self.failure is not None:
            raise self.failure

    def begin(self, thread: Thread) -> None:
        if thread.killed:
            thread.done = True
        elif thread.process.frozen:
            thread.process.run(self.begin, thread)
        else:
            self.switches += 1
            self.current = thread
            _thread.start_new_thread(self._carry, (thread,))
            self._baton.acquire()
            self.current = None
            if self.failure is not None:
                raise self.failure

    def _carry(self, thread: Thread) -> None:
        try:
            thread.run()
        except Killed:
            pass
        except Exception as error:
            # Nobody would hear of it: no thread of the product ends so.
            self.failure = self.failure or error
        thread.done = True
        thread.process.threads.pop(thread, None)
        for waiter in list(thread.joiners):
            self.wake(waiter)
        self._baton.release()

    def park(self, timeout: float | None = None) -> bool:
        """The running thread waits. True: it was woken; False: `timeout` seconds are over."""
        thread = self.current
        assert thread is not None, "the simulation itself must not wait"
        if thread.killed:
            raise Killed
        thread.turn += 1
        thread.parked, thread.woken = True, False
        timer = None if timeout is None else self.clock.after(timeout, self._resume, thread, thread.turn)
        self._baton.release()
        thread.baton.acquire()
        if timer is not None:
            timer.cancel()
        if thread.killed:
            raise Killed
        return thread.woken

    def wake(self, thread: Thread) -> None:
        if thread.parked and not thread.woken:
            thread.woken = True
            self.clock.after(self._latency(thread), self._resume, thread, thread.turn)

    def sleep(self, seconds: float) -> None:
        self.park(max(0.0, seconds))

    def hold(self) -> None:
        """Where a thread may lose its core: now and then it does, for long."""
        thread = self.current
        if thread is not None and not thread.killed and (seconds := self._held(thread)):
            self.park(seconds)

    def kill(self, thread: Thread) -> None:
        if thread.done or thread.killed:
            return
        thread.killed = True
        if thread.parked:
            thread.parked = False
            self.run(thread)

    def _latency(self, thread: Thread) -> float:
        return self.random.random() * LATENCY + self._held(thread)

    def _held(self, thread: Thread) -> float:
        process = thread.process
        if not process.hold_chance or self.random.random() >= process.hold_chance:
            return 0.0
        seconds = self.random.uniform(0.0, process.hold_longest)
        thread.held += seconds
        return seconds

    def _resume(self, thread: Thread, turn: int) -> None:
        if thread.done or not thread.parked or thread.turn != turn:
            return
        if thread.process.frozen:
            thread.process.run(self._resume, thread, turn)
            return
        thread.parked = False
        self.run(thread)


class _Running:
    """The kernel of the schedule that runs now; there is one at a time in a process of the host."""

    kernel: Kernel | None = None


def install(kernel: Kernel | None) -> None:
    _Running.kernel = kernel


def running() -> Kernel:
    assert _Running.kernel is not None, "no schedule is running"
    return _Running.kernel


class Thread:
    """`threading.Thread`."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
        process: Process | None = None,
    ) -> None:
        self.process = process if process is not None else running().here()
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.started = self.done = self.killed = self.parked = self.woken = False
        self.turn = 0
        # How long it was held back so far, in seconds.
        self.held = 0.0
        self.joiners: list[Thread] = []

    @property
    def ident(self) -> int | None:
        return id(self) if self.started else None

    native_id = ident

    def start(self) -> None:
        kernel = self.process.kernel
        if self.started:
            raise RuntimeError("threads can only be started once")
        self.started = True
        if self.process.alive:
            self.process.threads[self] = None
            kernel.clock.after(kernel._latency(self), kernel.begin, self)
        else:
            self.done = True

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        return self.started and not self.done

    def join(self, timeout: float | None = None) -> None:
        kernel = self.process.kernel
        if kernel.current is self:
            raise RuntimeError("cannot join current thread")
        end = None if timeout is None else kernel.clock.now + timeout
        while not self.done:
            left = None if end is None else end - kernel.clock.now
            if left is not None and left <= 0:
                return
            me = kernel.current
            assert me is not None, "the simulation itself must not wait"
            self.joiners.append(me)
            try:
                kernel.park(left)
            finally:
                self.joiners.remove(me)


class Timer(Thread):
    """`threading.Timer`."""

    def __init__(self, interval: float, function: Callable[..., object], args: Any = None, kwargs: Any = None) -> None:
        super().__init__(name="timer")
        self.interval, self.function = interval, function
        self.finished = Event()
        self._call = (args or (), kwargs or {})

    def cancel(self) -> None:
        self.finished.set()

    def run(self) -> None:
        if not self.finished.wait(self.interval):
            self.function(*self._call[0], **self._call[1])
        self.finished.set()


class Lock:
    """`threading.Lock`, and with `reentrant` an RLock. Handed over in the order of asking."""

    reentrant = False

    def __init__(self) -> None:
        self.owner: Thread | None = None
        self.depth = 0
        self._waiting: deque[Thread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = running()
        me = kernel.current
        assert me is not None, "a lock of a simulated process is taken outside of it"
        if me.killed:
            raise Killed
        if self.owner is None or (self.reentrant and self.owner is me):
            self.owner = me
            self.depth += 1
            return True
        if not blocking:
            return False
        self._waiting.append(me)
        try:
            kernel.park(None if timeout < 0 else timeout)
        finally:
            if self.owner is not me and me in self._waiting:
                self._waiting.remove(me)
        return self.owner is me

    def release(self) -> None:
        kernel = running()
        me = kernel.current
        if self.owner is not me:
            if me is not None and me.killed:
                return
            raise RuntimeError("release of a lock that is not held")
        self.depth -= 1
        if not self.depth:
            self._pass_on(kernel)
            if me is not None and not me.killed:
                kernel.hold()

    def _pass_on(self, kernel: Kernel) -> None:
        while self._waiting:
            heir = self._waiting.popleft()
            if not heir.killed and not heir.done:
                self.owner, self.depth = heir, 1
                kernel.wake(heir)
                return
        self.owner, self.depth = None, 0

    def locked(self) -> bool:
        return self.owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    reentrant = True


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock if lock is not None else RLock()
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiting: deque[Thread] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        kernel = running()
        me = kernel.current
        if me is None or self._lock.owner is not me:
            raise RuntimeError("cannot wait on un-acquired lock")
        depth, self._lock.depth = self._lock.depth, 0
        self._waiting.append(me)
        self._lock._pass_on(kernel)
        try:
            woken = kernel.park(None if timeout is None else max(0.0, timeout))
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
        self._lock.acquire()
        self._lock.depth = depth
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        clock = running().clock
        end = None if timeout is None else clock.now + timeout
        while not (result := predicate()):
            left = None if end is None else end - clock.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        kernel = running()
        if self._lock.owner is not kernel.current:
            if kernel.current is not None and kernel.current.killed:
                return
            raise RuntimeError("cannot notify on un-acquired lock")
        while self._waiting and n > 0:
            kernel.wake(self._waiting.popleft())
            n -= 1

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """`threading.Event`. The simulation itself may set one, too."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        kernel = running()
        if self._set or (kernel.current is not None and kernel.current.killed):
            return
        self._set = True
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            kernel.wake(thread)
        kernel.hold()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        kernel = running()
        me = kernel.current
        assert me is not None, "the simulation itself must not wait"
        if self._set:
            return True
        self._waiting.append(me)
        try:
            kernel.park(None if timeout is None else max(0.0, timeout))
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
        return self._set


class Semaphore:
    """`threading.Semaphore`."""

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._changed = Condition(Lock())

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: self._value > 0, timeout if blocking else 0.0):
                return False
            self._value -= 1
            return True

    def release(self, n: int = 1) -> None:
        with self._changed:
            self._value += n
            self._changed.notify(n)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Hands:
    """A thread of a process that does what the simulation gives it, in order: a reader of sockets, a pool's worker."""

    def __init__(self, process: Process, name: str) -> None:
        self._process = process
        self._jobs: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        # Woken only from its own wait: its work may wait for something else.
        self._idle = False
        self._thread = process.spawn(self._work, name)

    def give(self, call: Callable[..., object], *args: Any) -> None:
        """From the simulation, or from another thread of the process."""
        if self._process.alive:
            self._jobs.append((call, args))
            if self._idle:
                self._idle = False
                self._process.kernel.wake(self._thread)

    def _work(self) -> None:
        while True:
            while self._jobs:
                call, args = self._jobs.popleft()
                call(*args)
            self._idle = True
            self._process.kernel.park()
