"""Starting, watching and ending the workers of one epoch on this node.

Extends torch's subprocess context, whose log files, tee and error files stay. A worker may be an adopted standby
process, every exit is an event instead of something to poll for, and every process group is registered with the keeper.
We end workers ourselves, because torch checks that a process lives and signals it later, when we may have reaped it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler, get_subprocess_handler

from dalsegno.protos.room import ended_for_memory, oom_kills
from dalsegno.protos.shortage import shortage, starting

from ..processes.lifeline import Lifeline
from ..processes.proc import descendants, kill_group, listeners, start_time
from ..processes.signs import DiskWrites, Sign
from ..script import Script
from ..standby import hooks
from ..standby.nursery import CANNOT_START
from ..standby.nursery_client import BROKEN, StandbyProcess
from ..standby.standby_pool import StandbyPool
from ..standby.worker_main import Assignment
from .last_words import error_message, last_words
from .torch_versions import filtered_of, known, tails_of
from .worker_link import WorkerLink
from .working_directory import WorkingDirectory

__all__ = ["WorkersContext"]

# Seconds that a worker's last messages may take to us after its exit; its end of the socket is then closed.
_LAST_WORDS_SECONDS = 5.0
# Seconds to wait for a process after SIGKILL before it is given up as stuck in the kernel.
_KILL_TIMEOUT_SECONDS = 10.0
# Seconds that the last lines of a worker's files may take to the console.
_OUTPUT_TIMEOUT_SECONDS = 2.0
# Seconds between two looks whether workers that were told to end still do something.
_LOOK_SECONDS = 1.0

logger = logging.getLogger(__name__)

OnExit = Callable[[int, int, str, bool], None]


class _ColdProcess:
    """A worker that is our own child, with `StandbyProcess`'s interface for signals.

    Only `follow` reaps it, so the number of its group is still its own whenever it is signalled.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process
        self._lock = threading.Lock()
        self._reaped = False

    def signal_group(self, signum: int) -> None:
        """Signals its whole process group while it has not been reaped."""
        with self._lock:
            if not self._reaped:
                kill_group(self.pid, signum)

    def follow(self) -> int:
        """Waits for its end, kills what is left of its group, and returns its exit status."""
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            orphans = True
        except ChildProcessError:
            # Another part of this process has reaped it. A new leader under that number would be a stranger's.
            orphans = start_time(self.pid) is None
        with self._lock:
            if orphans:
                kill_group(self.pid)
            code = self._process.wait()
            self._reaped = True
        return code


class _StandbyHandler(SubprocessHandler):
    """A worker from a nursery, in the form in which torch keeps its workers."""

    def __init__(self, process: StandbyProcess, local_rank: int) -> None:
        # Not torch's __init__: that starts a process.
        self._stdout = None
        self._stderr = None
        self.local_rank_id = local_rank
        self.proc = process  # type: ignore[assignment]


@dataclass(frozen=True)
class _Running:
    """One worker, until its watcher has reported its exit."""

    process: _ColdProcess | StandbyProcess
    # Set once nothing of its process group is left.
    ended: threading.Event
    watcher: threading.Thread


class WorkersContext(SubprocessContext):
    """The workers of one epoch on this node.

    Args:
        script: what they run.
        arguments: for each local rank, the arguments of the interpreter (or program).
        environments: for each local rank, what is added to the agent's environment.
        logs_specs: torch's choice of files for output and errors.
        prefixes: for each local rank, the prefix of each line that is shown from a file.
        home: where they start.
        pool: standby workers to adopt; None: all are started cold.
        lifeline: every process group is registered with it.
        link: delivers a worker's last messages before its exit is reported.
        on_exit: called on a thread of its own with (local rank, exit status, message, whether the process has stayed
            from the world before); the status is negative for a signal. The worker's whole process group is dead by
            then.
        on_import: called on any thread, once for each worker, if a script imports `dalsegno.elastic` and nothing had
            shown that before.
        extras: `numa_options` and the output filters, as in torch.
    """

    def __init__(
        self,
        name: str,
        script: Script,
        arguments: Mapping[int, Sequence[str]],
        environments: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        prefixes: dict[int, str] | None,
        home: WorkingDirectory,
        pool: StandbyPool | None,
        lifeline: Lifeline,
        link: WorkerLink,
        on_exit: OnExit,
        on_import: Callable[[], None],
        numa_options: Any = None,
        stdout_filters: list[str] | None = None,
        stderr_filters: list[str] | None = None,
    ) -> None:
        super().__init__(
            name=name,
            entrypoint=script.entrypoint,
            args={rank: tuple(own) for rank, own in arguments.items()},
            envs=environments,
            logs_specs=logs_specs,
            log_line_prefixes=prefixes,
            **known(
                SubprocessContext.__init__,
                numa_options=numa_options,
                duplicate_stdout_filters=stdout_filters,
                duplicate_stderr_filters=stderr_filters,
            ),
        )
        self._numa_options = numa_options
        self._script = script
        self._home = home
        # NUMA binding happens in the command line, which an adopted process has already left behind.
        self._pool = pool if numa_options is None else None
        self._lifeline = lifeline
        self._link = link
        self._on_exit = on_exit
        self._on_import = on_import
        self._running: list[_Running] = []
        self._lock = threading.Lock()
        self._stopping = False
        self._output: threading.Thread | None = None
        self._assignments: dict[int, Assignment] = {}
        self.adopted = 0
        self._oom_kills = oom_kills()

    def start(self) -> None:
        """Starts all workers. Unlike torch's, it leaves the signal handlers alone: they are the agent's.

        Raises:
            OSError: a process could not be started; those that were are ended.
        """
        try:
            self._start()
        except OSError:
            self.stop(0)
            raise
        for tail in tails_of(self):
            tail.start()

    def ask(self, signum: int) -> int:
        """Sends a signal to those processes of each worker that handle it. Returns to how many. From any thread.

        A worker that its nursery has not started yet has no processes, and nothing to save.
        """
        asked = 0
        for pid in listeners([one.process.pid for one in self._running if not one.ended.is_set()], signum):
            # One may be another user's: a launcher like `sudo` makes it that.
            with contextlib.suppress(PermissionError):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
                asked += 1
        return asked

    @property
    def over(self) -> bool:
        """Whether all workers have ended."""
        return all(one.ended.is_set() for one in self._running)

    def stop(self, grace: float, still: float = math.inf, signs: Sequence[Sign] = ()) -> None:
        """Ends all workers and waits for them; SIGKILL after `grace` seconds, at once for 0. Any thread, repeatedly.

        SIGKILL comes earlier when there was no sign for `still` seconds: they have written hardly anything to a disk,
        and none of `signs` says anything else.

        When this returns, every exit has been reported through `on_exit`, except of processes that SIGKILL did not end
        in time: those are named in the log and given up. Takes at most 17 s more than `grace`.
        """
        with self._lock:
            self._stopping = True
        if grace > 0:
            self._signal(signal.SIGTERM)
            self._wait_while_signs(grace, still, (DiskWrites(), *signs))
        self._signal(signal.SIGKILL)
        if stuck := self._wait(_KILL_TIMEOUT_SECONDS):
            logger.error("processes %s did not end within %.0f s of SIGKILL: given up", stuck, _KILL_TIMEOUT_SECONDS)
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        for one in self._running:
            if one.ended.is_set():
                one.watcher.join(max(0.0, deadline - time.monotonic()))
        self._end_output()

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """Replaces torch's method, which torch's agent calls."""
        self.stop(0 if death_sig == signal.SIGKILL else timeout)

    def _signal(self, signum: signal.Signals) -> None:
        for one in self._running:
            if not one.ended.is_set():
                try:
                    one.process.signal_group(signum)
                except OSError as error:
                    logger.warning("process %d cannot be sent %s: %s", one.process.pid, signum.name, error)

    def _wait(self, seconds: float) -> list[int]:
        """Waits for all workers together; returns the processes that are left."""
        deadline = time.monotonic() + seconds
        return [one.process.pid for one in self._running if not one.ended.wait(max(0.0, deadline - time.monotonic()))]

    def _wait_while_signs(self, grace: float, still: float, signs: Sequence[Sign]) -> None:
        """Waits for all workers, at most `grace` seconds, and only `still` seconds from the last sign on."""
        last = time.monotonic()
        deadline = last + grace
        if still >= grace:
            self._wait(grace)
            return
        pids = [one.process.pid for one in self._running]
        while pids and (left := deadline - time.monotonic()) > 0:
            # A worker that its nursery has not started yet has the number 0, and nothing to write.
            roots = [root for root in pids if root > 0]
            every = [*roots, *descendants(*roots)]
            seen = [sign(every) for sign in signs]
            if any(seen):
                last = time.monotonic()
            elif time.monotonic() - last >= still:
                return
            pids = self._wait(min(left, _LOOK_SECONDS))

    def _end_output(self) -> None:
        """Ends the threads that copy files to the console. A thread whose write does not end is left alone."""

        def end() -> None:
            for tail in tails_of(self):
                tail.stop()
            for filtered in filtered_of(self):
                filtered.close()

        with self._lock:
            if self._output is None:
                output = threading.Thread(target=end, name="end-output", daemon=True)
                try:
                    output.start()
                except RuntimeError as error:
                    # Here it could take for ever, and all that is lost are last lines on the console.
                    logger.warning("what copies files to the console is left as it is: %s", shortage(error) or error)
                    return
                self._output = output
        self._output.join(_OUTPUT_TIMEOUT_SECONDS)

    def _start(self) -> None:
        directory = self._home.enter()
        # Behind it: the script may be looked for in that directory.
        if self._pool is not None and not self._script.adoptable:
            self._pool = None
        for rank in range(self.nprocs):
            process = self._adopt(rank, directory) or self._start_cold(rank)
            ended = threading.Event()
            watcher = threading.Thread(
                target=self._watch, args=(rank, process, ended), name=f"worker-{rank}", daemon=True
            )
            self._running.append(_Running(process, ended, watcher))
            self._link.started(rank, partial(self._pid, rank))
            with starting(f"the thread that watches worker {rank}"):
                watcher.start()

    def _pid(self, rank: int) -> int:
        return self._running[rank].process.pid

    def _adopt(self, rank: int, directory: str) -> StandbyProcess | None:
        if self._pool is None:
            return None
        assignment = Assignment(
            arguments=[str(own) for own in self.args[rank][2 if self._script.module else 1 :]],
            module=self._script.module,
            environment={**os.environ, **self.envs[rank]},
            cwd=directory,
            stdout=self.stdouts[rank] or None,
            stderr=self.stderrs[rank] or None,
        )
        process = self._pool.start_worker(assignment, rank)
        if process is None:
            return None
        self._assignments[rank] = assignment
        self.adopted += 1
        process.when_imported(self._on_import)
        self.subprocess_handlers[rank] = _StandbyHandler(process, rank)
        return process

    def _start_cold(self, rank: int) -> _ColdProcess:
        arguments = self.args[rank]
        if hooks.wanted(self.envs[rank]):
            arguments = hooks.arguments_for(arguments)
        with starting(f"worker {rank}"):
            handler = get_subprocess_handler(
                entrypoint=self._script.entrypoint,
                args=arguments,
                env=self.envs[rank],
                stdout=self.stdouts[rank],
                stderr=self.stderrs[rank],
                local_rank_id=rank,
                **known(get_subprocess_handler, numa_options=self._numa_options),
            )
        self._lifeline.add_group(handler.proc.pid)
        for ours in (handler._stdout, handler._stderr):
            if ours is not None:
                ours.close()  # the worker has its own
        self.subprocess_handlers[rank] = handler
        return _ColdProcess(handler.proc)

    def _watch(self, rank: int, process: _ColdProcess | StandbyProcess, ended: threading.Event) -> None:
        """Waits for one worker's end on a thread of its own, and reports it whatever fails beside that."""
        code, reason, instead = CANNOT_START, "its end cannot be followed", None
        with self._going_on(rank):
            code = process.wait() if isinstance(process, StandbyProcess) else process.follow()
            reason = ""
            if isinstance(process, StandbyProcess) and process.abandoned:
                instead = self._start_instead(rank, process)
        if instead is not None:
            self._watch(rank, instead, ended)
            return
        with self._going_on(rank):
            self._clear_up(rank, process)
        ended.set()
        with self._going_on(rank):
            code, reason = self._how_ended(rank, process, code, reason)
        with self._going_on(rank):
            self._on_exit(rank, code, reason, isinstance(process, StandbyProcess) and bool(process.holds))

    @contextlib.contextmanager
    def _going_on(self, rank: int) -> Iterator[None]:
        try:
            yield
        except Exception:  # whatever it is: without its exit the node would wait for this worker for ever
            logger.exception("worker %d has ended, and something went wrong behind that", rank)

    def _clear_up(self, rank: int, process: _ColdProcess | StandbyProcess) -> None:
        """Lets go of what was a worker's alone, or keeps it for its next world."""
        if not isinstance(process, StandbyProcess):
            self._lifeline.drop_group(process.pid)
        elif self._pool is not None:
            self._pool.keep(rank, self._assignments[rank], process)
        stays = isinstance(process, StandbyProcess) and process.successor is not None
        if process.pid > 0 and not stays:
            self._link.clean(process.pid)

    def _how_ended(self, rank: int, process: _ColdProcess | StandbyProcess, code: int, reason: str) -> tuple[int, str]:
        """The exit status to report, and why, once a worker's last messages have come."""
        if not self._link.flush(process.pid, _LAST_WORDS_SECONDS):
            logger.warning("the last messages of worker %d (process %d) did not come through", rank, process.pid)
        if isinstance(process, StandbyProcess):
            if process.failure:
                return CANNOT_START, process.failure
            if process.successor is not None:
                return code, "it lost a peer, and waits for the next world" if code == BROKEN else ""
        return code, reason or (self._reason(rank, code) if code else "")

    def _start_instead(self, rank: int, abandoned: StandbyProcess) -> _ColdProcess | StandbyProcess | None:
        """Starts a worker that its nursery could not start, or that ended before it had its place.

        Returns:
            None if all workers are to end anyway, or it cannot be started.
        """
        with self._lock:
            if self._stopping:
                return None
            try:
                instead = self._adopt(rank, self._home.enter()) or self._start_cold(rank)
            except OSError as error:
                logger.exception("worker %d cannot be started", rank)
                abandoned.failure = str(error)
                return None
            running = self._running[rank]
            self._running[rank] = _Running(instead, running.ended, running.watcher)
            return instead

    def _reason(self, rank: int, code: int) -> str:
        """Why a worker ended, in one line: what torch's `@record` wrote, or the last line of its errors."""
        words = error_message(self.error_files[rank]) or last_words(self.stderrs[rank], code)
        why = ended_for_memory(self._oom_kills) if code == -signal.SIGKILL else ""
        return "; ".join(filter(None, (why, words)))
