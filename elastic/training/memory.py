"""Memory checkpoints between the durable ones, in the loop of `steps`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..checkpoint import Ref
from ..saving.cadence import AUTO, Cadence
from .session import Session

log = logging.getLogger(__name__)


class MemorySaves:
    """Of one loop. Collective: all ranks make it and call its methods alike.

    Args:
        session: The process's.
        every: Steps between two, ``"auto"``, or 0: there are none.
        save: Saves the present step in memory: at once, or it begins to. None: that failed. On all ranks alike.
    """

    def __init__(self, session: Session, every: int | str, save: Callable[[], Ref | None]) -> None:
        self._session, self._save, self._auto = session, save, every == AUTO
        self._cadence: Cadence | None = None
        # The step that is being saved.
        self._saving: int | None = None
        self._mark = time.monotonic()
        if every and session.can_save_in_memory:
            self._cadence = Cadence(every)
        elif every:
            log.debug("memory_every=%s, and the nodes keep no memory checkpoints (--memory-replicas)", every)

    def at(self, step: int, *, saved: bool) -> None:
        """Behind each step; ``saved``: it has a save of another kind."""
        cadence, session = self._cadence, self._session
        if cadence is None:
            return
        cadence.measure(time.monotonic() - self._mark, saving=self._saving is not None)
        if self._saving is not None and not session.saves.under_way(in_memory=True):
            self._ended(cadence, step)
        # Nobody waits for a disk, and what a durable save under way has is hardly older.
        if not saved and cadence.due(step) and not session.saves.under_way(in_memory=False):
            began, self._saving = time.monotonic(), step
            begun = self._save()
            cadence.began(time.monotonic() - began)
            if begun is None or not session.saves.under_way(in_memory=True):
                self._ended(cadence, step)
        self._mark = time.monotonic()

    def _ended(self, cadence: Cadence, step: int) -> None:
        assert self._saving is not None
        failed = self._session.saves.of(self._saving, in_memory=True) is None
        apart = cadence.proposal()
        if self._auto:
            apart = self._session.saves.largest(apart)
        cadence.ended(self._saving, step, apart, failed=failed)
        self._saving = None
