"""The agent's side of one nursery, and of the workers that it forks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

from dalsegno.protos.contract import WORKER_DRAINED
from dalsegno.protos.ready import readable

from ..processes.lifeline import Lifeline
from ..processes.proc import is_stopped, kill_group, start_time
from .nursery import receive
from .nursery_start import reap
from .request_writer import RequestWriter
from .worker_main import Assignment

__all__ = ["BROKEN", "Nursery", "StandbyProcess"]

# While a nursery says nothing: seconds between two looks whether it was stopped; so much longer, and we stood still.
LOOK_SECONDS, STOOD_STILL_SECONDS = 5.0, 1.0
# The exit code of a worker that has left a broken world: that of an error, as if its process had ended.
BROKEN = 1

logger = logging.getLogger(__name__)


class StandbyProcess:
    """A worker from a nursery, with the part of `subprocess.Popen`'s interface that torch uses.

    It is the nursery's child, so its exit status comes over the channel, after its whole group was killed. It may not
    exist yet: a nursery that still imports starts it afterwards.

    Args:
        cancel: asks its nursery not to start it. Returns whether the nursery will answer: with its end, or with its
            start if that came first.
        ahead: it has no place in a world, and counts as a worker only once it has taken one.

    Attributes:
        parked: for one that runs ahead: why it wants its place; "" while it runs.
        taken: it has its place, and is a worker like any other.
        stale: what it had looked at and has changed since, because of which it ended.
        failed: why its script ended ahead.
        plainly: another one may come further that leaves TrainingArguments as they are.
        late: why it could not take its place in time; its script was not to blame.
        holds: for one that has stayed: the checkpoint that it holds, by the names of a world's variables.
        successor: this worker has drained, and its process stays: what it is from now on.
    """

    def __init__(self, cancel: Callable[[], bool], *, ahead: bool = False) -> None:
        self._cancel = cancel
        # It runs, and has no place.
        self._ahead = ahead
        self.parked = self.stale = self.failed = self.late = ""
        self.taken = self.plainly = False
        self.holds: Mapping[str, str] = {}
        self.successor: tuple[Nursery, StandbyProcess] | None = None
        self._on_news: Callable[[], None] | None = None
        # It was told to end before it was known to exist.
        self._unwanted = False
        # 0 until it exists.
        self.pid = 0
        # Its nursery is stuck or gone, or it ended ahead: it never was a worker, and never will be.
        self.abandoned = False
        # Why its nursery could not start it, for people.
        self.failure = ""
        self.returncode: int | None = None
        self._imported = False
        self._on_import: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def poll(self) -> int | None:
        """The exit status; None while it lives."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end, and returns the exit status.

        Raises:
            subprocess.TimeoutExpired: it still lives after `timeout` seconds.
        """
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def signal_group(self, signum: int) -> None:
        """Signals its whole process group; a worker that does not exist yet is never started.

        It may exist before we know. So it has ended only once its nursery says so; if the nursery still imports, at
        once.
        """
        with self._lock:
            if self.returncode is not None or self._unwanted:
                return
            if self.pid:
                kill_group(self.pid, signum)
                return
            self._unwanted = True
        if not self._cancel():
            self.ended(-signum)

    def forgo(self) -> None:
        """Nobody wants it, and its nursery cannot be told now: it is killed once it exists."""
        with self._lock:
            self._unwanted = True

    def discard(self) -> None:
        """Kills a worker that runs ahead; nobody waits for it."""
        with self._lock:
            self._ahead = False
        self.signal_group(signal.SIGKILL)

    def started(self, pid: int) -> bool:
        """Notes that it exists now. False: nobody wants it any more."""
        with self._lock:
            self.pid = pid
            return self.returncode is None and not self._unwanted

    def when_imported(self, call: Callable[[], None]) -> None:
        """Calls, on any thread, when the script imports `dalsegno.elastic`; never if its nursery has imported that."""
        with self._lock:
            self._on_import = call
            known = self._imported
        if known:
            call()

    def when_settled(self, call: Callable[[], None]) -> None:
        """Calls, on any thread, when a worker that runs ahead waits for its place or has ended."""
        with self._lock:
            self._on_news = call
            known = bool(self.parked) or self.taken or self.returncode is not None
        if known:
            call()

    def said(self, message: dict[str, object]) -> None:
        """Handles a message of the worker itself to its nursery."""
        with self._lock:
            if "taken" in message:
                self._ahead, self.taken = False, True
            imported = "imports" in message
            self._imported = self._imported or imported
            self.parked = str(message.get("parked", self.parked))
            self.stale = str(message.get("stale", self.stale))
            self.failed = str(message.get("failed", self.failed))
            self.plainly = bool(message.get("plainly", self.plainly))
            self.late = str(message.get("late", self.late))
            news = "parked" in message or "taken" in message
            calls = (self._on_import if imported else None, self._on_news if news else None)
        for call in calls:
            if call is not None:
                call()

    def stays(self, nursery: Nursery, successor: StandbyProcess, code: int) -> None:
        """Notes that it has ended, and that its process waits for a place as another worker."""
        with self._lock:
            successor.pid, unwanted = self.pid, self._unwanted
        self.successor = (nursery, successor)
        self.ended(code)
        if unwanted:
            successor.discard()

    def abandon(self) -> None:
        """Its nursery is given up or gone: its owner starts it in another way, unless it was told to end."""
        with self._lock:
            self.abandoned = self.returncode is None and not self.pid and not self._unwanted
        self.ended(-signal.SIGKILL)

    def ended(self, code: int) -> None:
        """Notes that it is gone."""
        with self._lock:
            if self.returncode is None:
                self.returncode = code
                # It has done nothing that anybody saw.
                self.abandoned = self.abandoned or (self._ahead and not self._unwanted)
            call = None if self.taken else self._on_news
        try:
            # Set first, because the code that waits for its end may look at it.
            if call is not None:
                call()
        finally:
            self._ended.set()


class Nursery:
    """One nursery process; with `single` it becomes its first and only worker itself.

    Args:
        process: as started by `StandbyPool`.
        channel: our end of the channel.
        lifeline: every worker is registered with it.
        on_ready: called with (nursery, report) when the imports are done.
        say: prints one line for people, perhaps a warning; called on any thread.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channel: socket.socket,
        lifeline: Lifeline,
        single: bool,
        on_ready: Callable[[Nursery, dict[str, object]], None],
        say: Callable[[str, bool], None],
    ) -> None:
        self.process = process
        self.ready = threading.Event()
        # It is ready, or ended before it was.
        self.settled = threading.Event()
        self.single = single
        self._channel = channel
        self._requests = RequestWriter(channel)
        self._lifeline = lifeline
        self._on_ready = on_ready
        self._say = say
        # At how many looks in a row it was stopped.
        self._stopped = 0
        self._lock = threading.Lock()
        self._number = 0
        self._workers: dict[int, StandbyProcess] = {}
        self._gone = False
        threading.Thread(target=self._listen, name="nursery", daemon=True).start()

    @property
    def usable(self) -> bool:
        """Whether it lives; it may still be importing."""
        return not self._gone and self.process.poll() is None

    def start_worker(self, assignment: Assignment, *, ahead: bool = False, plainly: bool = False) -> StandbyProcess:
        """Asks for a worker, `ahead` of its world (`plainly`: see `RunAhead`) or with its place; returns at once.

        Raises:
            OSError: the nursery is gone, or did not take the request within a few seconds.
        """
        with self._lock:
            if self._gone:
                raise BrokenPipeError("the nursery is gone")
            self._number += 1
            number = self._number
            worker = self._workers[number] = StandbyProcess(lambda: self._cancel(number), ahead=ahead)
            request: dict[str, object] = {
                "start": number,
                "ahead": ahead,
                "plainly": plainly,
                **dataclasses.asdict(assignment),
            }
            try:
                self._requests.send(request)
            except OSError:
                if self._requests.cut:
                    worker.forgo()  # it is started, and ended, once the nursery has the rest
                else:
                    del self._workers[number]
                raise
        return worker

    def place(self, worker: StandbyProcess, place: dict[str, object]) -> bool:
        """Gives a worker that runs ahead its place. False: it has ended meanwhile."""
        with self._lock:
            numbers = [number for number, known in self._workers.items() if known is worker]
            if self._gone or not numbers:
                return False
            try:
                self._requests.send({"place": numbers[0], **place})
            except OSError as error:
                logger.warning("nursery %d cannot be told a place: %s", self.process.pid, error)
                return False
        return True

    def _cancel(self, number: int) -> bool:
        """Cancels a start. Returns whether the worker's end will be reported; not while it only waits for imports."""
        with self._lock:
            if not self.single and number in self._workers:
                try:
                    self._requests.send({"cancel": number})
                except OSError as error:
                    logger.warning("nursery %d cannot be told to start nothing: %s", self.process.pid, error)
            return self.ready.is_set() and number in self._workers

    def give_up(self) -> None:
        """Ends it because its imports do not end; the workers that it was to start are `abandoned`."""
        with self._lock:
            self._gone = True
            workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            worker.abandon()
        self._kill()
        reap(self.process, self._lifeline)

    def end(self) -> None:
        """Kills it, with its workers."""
        self._kill()
        if not self.single:
            reap(self.process, self._lifeline)

    def _kill(self) -> None:
        """Kills its group. Once it is reaped a leader with that number is another's; without one, the group is ours."""
        pid = self.process.pid
        with contextlib.suppress(OSError):  # a look that fails is none
            if self.process.returncode is None or start_time(pid) is None:
                kill_group(pid)

    def _listen(self) -> None:
        """Reads its messages until it is gone, on a thread of its own."""
        with self._channel:
            while (message := self._receive()) is not None:
                try:
                    self._heard(message)
                except Exception:  # whatever it is: only the end of the channel is the end of its workers
                    logger.exception("what nursery %d says cannot be handled", self.process.pid)
            with self._lock:
                self._gone = True
                workers, self._workers = list(self._workers.values()), {}
        self.settled.set()
        if self.single and self.ready.is_set() and workers:
            # It has become its only worker, which is the agent's own child.
            self._follow(workers[0])
            return
        if workers:
            logger.warning("nursery %d is gone; the workers that it started end with it", self.process.pid)
        for worker in workers:
            if not worker.pid and not self.ready.is_set():
                worker.abandon()
                continue
            # A worker that is not known yet may have begun, and dies with its parent: it is not started again.
            if worker.pid:
                worker.signal_group(signal.SIGKILL)
            worker.ended(-signal.SIGKILL)

    def _receive(self) -> dict[str, object] | None:
        try:
            while not self._says_something():
                self._wake()
            return receive(self._channel)
        except OSError as error:
            logger.info("nursery %d: %s", self.process.pid, error)
            return None

    def _says_something(self) -> bool:
        """Waits for a message, until the next look is due."""
        began = time.monotonic()
        says = readable(self._channel.fileno(), LOOK_SECONDS)
        if says or time.monotonic() - began >= LOOK_SECONDS + STOOD_STILL_SECONDS:
            # With this process all others of the job may have been suspended, and they go on one after another.
            self._stopped = 0
        return says

    def _wake(self) -> None:
        """Has it go on if a signal has stopped it: nobody would start, place or reap a worker."""
        pid = self.process.pid
        try:
            self._stopped = self._stopped + 1 if is_stopped(pid) else 0
            if self._stopped == 2:
                os.kill(pid, signal.SIGCONT)
        except OSError as error:
            # Whatever keeps us from a look is not the end of its workers.
            logger.warning("whether nursery %d is stopped cannot be seen, or changed: %s", pid, error)
            return
        what = "is to become a worker of this node" if self.single else "this node's workers are forked from"
        who, ends = f"the process that {what} (process {pid})", "" if self.single else ", which ends its workers, too"
        if self._stopped == 2:
            self._say(f"{who} was stopped (SIGSTOP): it is told to go on", True)
        elif self._stopped == 3:
            self._say(f"{who} is stopped again: `kill -CONT {pid}`, or `kill -9 {pid}`{ends}", True)

    def _heard(self, message: dict[str, object]) -> None:
        if "ready" in message:
            self.ready.set()
            self.settled.set()
            report = message["ready"]
            assert isinstance(report, dict)
            self._on_ready(self, report)
            return
        number = int(str(message.get("started", message.get("of", message.get("exited")))))
        with self._lock:
            worker = self._workers.pop(number, None) if "exited" in message else self._workers.get(number)
        if worker is None:
            return  # it was given up, and is being killed
        if "stays" in message:
            self._stays(number, worker, message)
            return
        if "of" in message:
            worker.said(message)
            return
        if "started" in message:
            pid = int(str(message["pid"]))
            # First, whatever becomes of the rest: nobody could end a worker whose number is not known.
            if not worker.started(pid):
                kill_group(pid)
            self._lifeline.add_group(pid)
            return
        try:
            self._lifeline.drop_group(worker.pid)
        finally:
            worker.failure = str(message.get("failure", ""))
            worker.ended(int(str(message["code"])))

    def _stays(self, number: int, worker: StandbyProcess, message: dict[str, object]) -> None:
        holds = message["stays"]
        successor = StandbyProcess(lambda: self._cancel(number), ahead=True)
        successor.parked = "it has left its world"
        successor.holds = {str(name): str(value) for name, value in holds.items()} if isinstance(holds, dict) else {}
        with self._lock:
            self._workers[number] = successor
        worker.stays(self, successor, BROKEN if message.get("broken") is True else WORKER_DRAINED)

    def _follow(self, worker: StandbyProcess) -> None:
        pid = self.process.pid
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        # Not reaped yet, so the number of its group stays its own while the rest of the group is killed.
        kill_group(pid)
        code = self.process.wait()
        try:
            self._lifeline.drop_group(pid)
        finally:
            worker.ended(code)
