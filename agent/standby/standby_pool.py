"""The agent's standby workers: one nursery that forks them, or a process for each if forking is not possible."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from dalsegno.protos.shortage import starting

from ..processes.lifeline import Lifeline
from ..processes.proc import kill_group
from .ahead_workers import AHEAD_PATIENCE_SECONDS, AheadWorkers
from .nursery_client import Nursery, StandbyProcess
from .nursery_start import NurserySpec, StartedNursery, start_nursery
from .patience import waited
from .stayed_workers import StayedWorkers
from .worker_main import Assignment

__all__ = ["StandbyPool"]

# Seconds that imports may take, on a busy machine and from a slow file system; after that they count as stuck.
_IMPORT_PATIENCE_SECONDS = 120.0
# If so many nurseries of one agent are stuck, it starts no more.
_MOST_STUCK = 2

logger = logging.getLogger(__name__)


class StandbyPool:
    """Keeps what `count` workers need to start at once.

    Args:
        lifeline: every process is registered with it from its start.
        count: how many workers are wanted (nproc per node).
        modules: what is imported ahead.
        log: where a nursery writes; workers write where their assignment says.
        on_warm: called on any thread, once for each `fill`, when everything is imported and what runs ahead waits for
            its place.
        python: the interpreter.
        fork: one nursery that forks; False: a process per worker. It falls back to that by itself.
        ahead_patience_seconds: seconds that a script may run ahead before it is given up.
        patience_seconds: seconds that imports may take before a nursery is given up. Its workers then start cold.
        notices: signals that a nursery ignores, because they may be sent to all processes of the node.
        early: a nursery that was started before; it is used if it was started as this pool would have done it.
        first: the directory that the script has first on `sys.path`; "": none.
        say: prints one line for people, perhaps a warning; called on any thread.
    """

    def __init__(
        self,
        lifeline: Lifeline,
        count: int,
        modules: Sequence[str],
        log: Path,
        on_warm: Callable[[], None],
        python: str = sys.executable,
        fork: bool = True,
        notices: Sequence[int] = (),
        patience_seconds: float = _IMPORT_PATIENCE_SECONDS,
        ahead_patience_seconds: float = AHEAD_PATIENCE_SECONDS,
        early: StartedNursery | None = None,
        first: str = "",
        say: Callable[[str, bool], None] = lambda text, warning: None,
    ) -> None:
        self._lifeline = lifeline
        self._count = count
        self._modules = tuple(modules)
        self._log = log
        self._on_warm = on_warm
        self._python = python
        self._fork = fork
        self._notices = tuple(int(number) for number in notices)
        self._patience_seconds = patience_seconds
        self._early = early
        self._first = first
        self.say = say
        self._stuck = 0
        self._lock = threading.RLock()
        self._nurseries: list[Nursery] = []
        # These start nothing any more, but are the parents of living workers.
        self._retired: list[Nursery] = []
        self._closed = False
        self._ahead = AheadWorkers(self._advance, ahead_patience_seconds)
        self._stayed = StayedWorkers()
        # What is to run ahead, by local rank; and whether `on_warm` was called for this `fill`.
        self._wanted: tuple[Assignment, ...] = ()
        self._announced = True

    def fill(self, *, low_priority: bool, ahead: Sequence[Assignment] = ()) -> None:
        """Starts what is missing.

        Args:
            low_priority: its imports yield to the workers that train now.
            ahead: by local rank, what is to run as far as possible without a place in a world.
        """
        with self._lock:
            self._wanted, self._announced = tuple(ahead), False
        self._ahead.forget_ended()
        self._fill(low_priority)
        self._advance()

    def _fill(self, low_priority: bool) -> None:
        with self._lock:
            if self._closed or self._stuck >= _MOST_STUCK:
                return
            for dead in [nursery for nursery in self._nurseries if not nursery.usable]:
                logger.warning("a nursery ended by itself (status %s); see %s", dead.process.returncode, self._log)
                self._nurseries.remove(dead)
                dead.end()
            wanted = 1 if self._fork else self._count
            for _ in range(wanted - len(self._nurseries)):
                try:
                    self._nurseries.append(self._start(low_priority))
                except OSError as error:
                    # Nobody waits for what will not come: workers start cold.
                    logger.warning("%s", error)
                    self._announce()
                    return

    def _advance(self) -> None:
        """Once the imports are done, runs the script ahead; once that has got as far as possible, calls `on_warm`."""
        with self._lock:
            if self._closed or self._announced:
                return
            if self.warm() < self._count:
                if not any(nursery.usable for nursery in self._nurseries):
                    self._announce()  # it was killed while scripts ran ahead, so nothing more will come of it
                return
            wanted = self._wanted if self._fork else ()
            nursery = self._nurseries[0]
        self._ahead.run(nursery, wanted)
        if not wanted or self._ahead.settled:
            self._announce()

    def _announce(self) -> None:
        with self._lock:
            if self._announced or self._closed:
                return
            self._announced = True
        self._on_warm()

    def warm(self) -> int:
        """How many workers can start at once now."""
        with self._lock:
            ready = sum(nursery.ready.is_set() and nursery.usable for nursery in self._nurseries)
            return ready * self._count if self._fork else ready

    def start_worker(self, assignment: Assignment, local_rank: int | None = None) -> StandbyProcess | None:
        """Starts a worker from the warmest process there is; None if there is none.

        Args:
            local_rank: a worker that has stayed, or run ahead, under this number takes the place, if it fits.
        """
        if local_rank is not None:
            with self._lock:
                # The world starts now: what has not begun to run ahead of it would run beside it, for nothing.
                self._wanted = ()
            waiting = self._stayed.take(local_rank, assignment) or self._ahead.take(local_rank, assignment)
            if waiting is not None:
                return waiting
        while True:
            with self._lock:
                usable = sorted((one for one in self._nurseries if one.usable), key=lambda one: not one.ready.is_set())
                if not usable:
                    return None
                nursery = usable[0]
                if nursery.single:
                    self._nurseries.remove(nursery)
            try:
                return nursery.start_worker(assignment)
            except OSError as error:
                logger.warning("nursery %d could not start a worker: %s", nursery.process.pid, error)
                with self._lock:
                    if nursery in self._nurseries:
                        self._nurseries.remove(nursery)
                nursery.end()

    def start_helper(self, assignment: Assignment) -> StandbyProcess | None:
        """Starts a helper that is not a worker and takes no worker's place; None if nothing is forked."""
        with self._lock:
            forks = self._fork and self.warm() > 0
        return self.start_worker(assignment) if forks else None

    def keep(self, local_rank: int, before: Assignment, worker: StandbyProcess) -> None:
        """Keeps what a worker that has ended becomes, if its process stays for the next world.

        Args:
            before: what it was started or placed with.
        """
        if worker.successor is not None:
            self._stayed.add(local_rank, before, worker.successor)

    def dismiss(self) -> None:
        """Ends processes that have stayed, because this node has no place in the next world."""
        self._stayed.dismiss()

    def close(self) -> None:
        """Ends all nurseries, with the workers that were forked from them."""
        self._stayed.close()
        self._ahead.close()
        with self._lock:
            self._closed = True
            for nursery in (*self._nurseries, *self._retired):
                nursery.end()
            if self._early is not None:
                self._early.end(self._lifeline)
                self._early = None
            self._nurseries.clear()
            self._retired.clear()

    def _start(self, low_priority: bool) -> Nursery:
        spec = NurserySpec(
            self._modules,
            self._log,
            self._notices,
            {**os.environ, **self._lifeline.environment()},
            self._python,
            single=not self._fork,
            first=self._first,
        )
        started = self._take_early(spec) or start_nursery(spec, self._lifeline, low_priority=low_priority)
        try:
            with starting("a thread for a standby worker"):
                nursery = Nursery(
                    *(started.process, started.channel, self._lifeline, not self._fork, self._on_ready, self.say)
                )
                threading.Thread(
                    target=self._watch_imports, args=(nursery,), name="nursery-imports", daemon=True
                ).start()
        except OSError:
            kill_group(started.process.pid)
            started.process.wait()
            self._lifeline.drop_group(started.process.pid)
            raise
        return nursery

    def _take_early(self, spec: NurserySpec) -> StartedNursery | None:
        """The nursery that was started before this pool was made, if it is such a one; else it is ended."""
        early, self._early = self._early, None
        if early is None:
            return None
        if early.spec == spec:
            logger.info("nursery %d was started before the agent's own imports", early.process.pid)
            return early
        logger.info("nursery %d was started with other modules or variables than are known now", early.process.pid)
        early.end(self._lifeline)
        return None

    def _watch_imports(self, nursery: Nursery) -> None:
        """Gives up a nursery whose imports do not end in time: deadlocked, endless, or from a missing file system."""
        settled = waited(nursery.settled, self._patience_seconds)
        with self._lock:
            if self._closed or nursery.ready.is_set():
                return
            if settled or not nursery.usable:
                # It ended during its imports, so this node has nothing to wait for before it takes part.
                self._announce()
                return
            if nursery in self._nurseries:  # one that becomes its own worker has left the list already
                self._nurseries.remove(nursery)
            self._stuck += 1
        logger.warning(
            "nursery %d has not imported %s within %.0f s: given up, its workers start cold; see %s",
            *(nursery.process.pid, ", ".join(self._modules), self._patience_seconds, self._log),
        )
        nursery.give_up()
        # This node has nothing more to wait for before it takes part.
        self._announce()

    def _on_ready(self, nursery: Nursery, report: dict[str, object]) -> None:
        if report["failed"]:
            logger.warning("nursery %d could not import %s", nursery.process.pid, report["failed"])
        with self._lock:
            if self._closed:
                return
            if report.get("own"):
                # It serves earlier requests (with fresh interpreters), as others would.
                if self._stuck < _MOST_STUCK:
                    name = report["own"]
                    self.say(
                        f"ranks start cold: the script has a module {name} of its own, which only they may import", True
                    )
                self._stuck = _MOST_STUCK
                if nursery in self._nurseries:  # one that becomes its own worker has left the list already
                    self._nurseries.remove(nursery)
                    self._retired.append(nursery)
            elif self._fork and report["unforkable"]:
                # It serves earlier requests (with fresh interpreters); from now on each worker has a process of its
                # own.
                logger.warning("%s: workers are not forked, but wait one by one", report["unforkable"])
                self._fork = False
                self._nurseries.remove(nursery)
                self._retired.append(nursery)
                self._fill(low_priority=True)
        self._advance()
