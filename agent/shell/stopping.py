"""Ends the workers of an epoch, on a thread of its own: asks them to save, takes what they saved, ends them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from dalsegno.protos.shortage import shortage

from ..decisions import events as ev
from ..dlrover.beside import DlroverSupport
from ..processes.signals import number_of
from ..processes.signs import Work
from ..storage.save_dir import Adoption
from ..workers.workers import WorkersContext

__all__ = ["Stopping"]

# What is kept of a notice for the end itself: at most so many seconds, and a part of it.
_END_SECONDS, _END_PART = 5.0, 0.25
# Seconds that a save of a script that has ended may take to come into sight.
_SIGHT_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Stopping:
    """One order to stop.

    Args:
        order: it.
        context: the workers; None: there are none.
        adoption: takes what they save.
        beside: takes what they leave in memory of Flash Checkpoint.
        join_timeout: the job's.
        save_timeout: see `AgentSettings`.
        say: tells people.
    """

    def __init__(
        self,
        order: ev.StopWorkers,
        context: WorkersContext | None,
        adoption: Adoption,
        beside: DlroverSupport,
        join_timeout: float,
        save_timeout: float,
        say: Callable[[str, bool], None],
    ) -> None:
        self._order, self._context, self._adoption, self._beside = order, context, adoption, beside
        self._join_timeout, self._save_timeout, self._say = join_timeout, save_timeout, say
        self._last = time.monotonic() + order.grace
        self._stopped = ev.WorkersStopped(order.epoch)

    def start(self, deliver: Callable[[ev.Event], None]) -> None:
        """Begins, and delivers `WorkersStopped` when all is over, whatever went wrong."""

        def stop() -> None:
            try:
                self._stop()
            finally:
                # The decisions wait for this event.
                deliver(replace(self._stopped, answered=self._adoption.met))

        # On a thread, because a process stuck in the kernel must not keep the agent from hearing its master.
        try:
            threading.Thread(target=stop, name="stop-workers", daemon=True).start()
        except RuntimeError as error:
            logger.warning("the workers are stopped here: %s", shortage(error) or error)
            stop()

    def _stop(self) -> None:
        order, context = self._order, self._context
        if order.ask and context is not None:
            with self._noted("asking the workers to save"):
                self._ask(context)
        if context is None or not context.over:
            with self._noted("telling who takes their saves"):
                self._adoption.interrupt()
        if order.grace > 0:
            with self._noted("telling who takes their saves of the notice"):
                self._adoption.notice()
        if order.save:
            with self._noted("keeping what is in memory"):
                self._beside.freeze()
        if context is not None:
            self._end(context)
        if order.save:
            with self._noted("saving what is in memory"):
                self._stopped = self._beside.stopped(order.epoch)
        if self._stopped.flash_step:
            with self._noted("taking what was in memory"):
                self._adoption.settle(self._beside.save_timeout)
        given = max(self._save_timeout, self._last - time.monotonic()) if order.save else 0.0
        with self._noted("taking what they saved"):
            self._adoption.stopped(self._join_timeout, given, noticed=order.save and order.grace > 0)

    @contextlib.contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        """An error in what is done beside the end of the workers keeps nobody from that, nor from what comes next."""
        try:
            yield
        except Exception:
            logger.exception("%s failed at the end of epoch %d", what, self._order.epoch)

    def _end(self, context: WorkersContext) -> None:
        """Ends the workers. They get no time where that meets an error: who is said to have stopped must not go on."""
        order = self._order
        with self._noted("ending the workers"):
            context.stop(self._grace(), order.still, [*self._adoption.signs, *([Work()] if order.work else [])])
            return
        with self._noted("killing the workers"):
            context.stop(0)

    def _grace(self) -> float:
        """Seconds between SIGTERM and SIGKILL."""
        if not self._order.ask:
            return self._order.grace
        left = max(0.0, self._last - time.monotonic())
        return min(left, _END_SECONDS) if self._adoption.met else left

    def _ask(self, context: WorkersContext) -> None:
        """Asks the workers to save, and waits until that is taken, they have ended, or hardly any time is left."""
        if not self._adoption.request():
            return
        if not context.ask(number_of(self._order.ask)):
            self._say(f"no process of the script listens to {self._order.ask}: it is told to end, unasked", True)
            return
        # The notice counts from its beginning, also where it took long to look at the volume, or at all processes.
        last = self._last - min(_END_SECONDS, _END_PART * self._order.grace)
        within = max(0.0, last - time.monotonic())
        if self._adoption.wait_met(within, lambda: context.over):
            return
        if context.over:
            # What it saved before it ended may come into sight late, where the volume is an object store.
            # Nothing is left to be ended, so what is kept for that is time for it, too.
            self._adoption.wait_met(max(0.0, min(_SIGHT_SECONDS, self._last - time.monotonic())), lambda: False)
        else:
            self._say(f"the script did not save within {within:.0f} s of {self._order.ask}: it is told to end", True)
