"""Signals as events: the handler does nothing, a thread reads their numbers from the wake-up descriptor.

A Python signal handler runs between two instructions of the main thread, wherever that is, and must not take a lock;
`signal.set_wakeup_fd` moves the work out of it and also reaches a main thread that waits inside C code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

from dalsegno.protos.processes import stat_fields

__all__ = ["SignalWatch", "can_be_continued", "held_back", "number_of", "signals_of"]

# If these are ignored when we start (by nohup, or a shell for a background job), they are meant to stay so. The other
# signals are sent to somebody on purpose.
_MAY_STAY_IGNORED = frozenset({signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP})
_NOBODY_CAN_HANDLE = frozenset({signal.SIGKILL, signal.SIGSTOP})
# The most seconds for which Ctrl-Z waits until nothing is done that others would wait for.
_UNDISTURBED_SECONDS = 10.0
# Between two looks at signals that come while that is waited for.
_LOOK_SECONDS = 0.05


def signals_of(text: str) -> tuple[signal.Signals, ...]:
    """The signals in a list like "SIGTERM,SIGINT", as in torchrun's --signals-to-handle.

    Raises:
        ValueError: one of them does not exist or cannot be handled.
    """
    found = []
    for name in text.split(","):
        number = signal.Signals.__members__.get(name.strip())
        if number is None:
            raise ValueError(f"{name.strip()!r} is no signal's name, as SIGTERM is")
        if number in _NOBODY_CAN_HANDLE:
            raise ValueError(f"{number.name} cannot be handled by anybody")
        found.append(number)
    return tuple(found)


def number_of(name: str) -> int:
    """The number of a signal by its name, SIGRTMIN+N among them.

    Raises:
        ValueError: it does not exist or cannot be handled.
    """
    base, _, more = name.partition("+")
    (number,) = signals_of(base)
    if not more:
        return int(number)
    if number is not signal.SIGRTMIN or not more.isdecimal() or number + int(more) > signal.SIGRTMAX:
        raise ValueError(f"{name!r} is no signal's name, as SIGRTMIN+1 is")
    return int(number) + int(more)


@contextlib.contextmanager
def held_back(signals: Iterable[int]) -> Iterator[None]:
    """Processes that are started inside begin with these signals blocked, so that none arrives before they are ready.

    They unblock the signals themselves. A signal to this process goes to another of its threads.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def can_be_continued() -> bool:
    """Whether a shell can continue this process after a Ctrl-Z.

    Otherwise the kernel ignores it: no ancestor is in the same session and in another group, as with `ssh -t` and in a
    container.
    """
    group, session, pid = str(os.getpgrp()), str(os.getsid(0)), os.getppid()
    with contextlib.suppress(OSError):
        while pid and (fields := stat_fields(pid)):
            if fields[2] != group:
                return fields[3] == session
            pid = int(fields[1])
    return False


def _nothing(signum: int, frame: FrameType | None) -> None:
    """Does nothing: the number goes through the wake-up descriptor."""


class SignalWatch:
    """While open, passes each of `signals` to `first`, and later to the function given to `to`. Main thread only.

    Args:
        signals: the signals to watch for.
        first: called with the number on the watch's own thread until the first `to`; it may end the process.
        stopping: called on that thread before Ctrl-Z stops this process, if SIGTSTP is none of `signals`; with whether
            workers run.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals],
        first: Callable[[int], None],
        *,
        stopping: Callable[[bool], None] | None = None,
    ) -> None:
        self.signals = tuple(signals)
        self._stopping = None if signal.SIGTSTP in signals else stopping
        self._wanted = frozenset(int(number) for number in signals)
        self._deliver = first
        self._has_workers: Callable[[], bool] = lambda: False
        # How many things are under way that Ctrl-Z waits for.
        self._undisturbed, self._changed = 0, threading.Condition()
        self._lock = threading.Lock()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)

    def __enter__(self) -> SignalWatch:
        self._thread.start()
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in sorted(self._wanted | ({signal.SIGTSTP} if self._stopping is not None else set())):
            if number in _MAY_STAY_IGNORED and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, _nothing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writer.close()
        self._thread.join(5.0)
        self._reader.close()

    @contextlib.contextmanager
    def to(self, deliver: Callable[[int], None], has_workers: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Passes signals to `deliver` inside. Afterwards nobody gets them, because this process is about to end.

        Args:
            deliver: called on the watch's thread with the number.
            has_workers: tells whether workers run, for whoever presses Ctrl-Z.
        """
        with self._lock:
            self._deliver, self._has_workers = deliver, has_workers
        try:
            yield
        finally:
            with self._lock:
                self._deliver = lambda number: None

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Ctrl-Z stops this process before or behind what is done inside, unless that takes more than 10 seconds.

        For what holds a lock: other processes would wait for it until `fg`.
        """
        with self._changed:
            self._undisturbed += 1
        try:
            yield
        finally:
            with self._changed:
                self._undisturbed -= 1
                self._changed.notify_all()

    def _read(self) -> None:
        while data := self._reader.recv(64):
            self._pass_on(data)
            if self._stopping is not None and signal.SIGTSTP in data and can_be_continued():
                self._stopping(self._has_workers())
                self._stop()

    def _stop(self) -> None:
        """Stops this process, at the latest after `_UNDISTURBED_SECONDS`. Other signals are heard meanwhile."""
        last = time.monotonic() + _UNDISTURBED_SECONDS
        while True:
            # Who pressed Ctrl-Z more than once meanwhile has stopped it once.
            with contextlib.suppress(BlockingIOError):
                self._pass_on(self._reader.recv(64, socket.MSG_DONTWAIT))
            with self._changed:
                if not self._undisturbed or time.monotonic() >= last:
                    # Not its default action again: only the main thread may set that, and it may be busy.
                    os.kill(os.getpid(), signal.SIGSTOP)
                    return
                self._changed.wait(_LOOK_SECONDS)

    def _pass_on(self, data: bytes) -> None:
        for number in data:
            if number in self._wanted:
                with self._lock:
                    self._deliver(number)
