"""Memory checkpoints in the loop of `steps`: between the durable ones, and for those that the agents make durable."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..checkpoint import Ref
from ..saving.cadence import AUTO, Cadence
from .session import BareSession

# So long the ranks look whether a step is on the disk that the agents were to bring there, where the disk is slow.
LOOK_SECONDS = 1.0

log = logging.getLogger(__name__)


class MemorySaves:
    """The memory checkpoints of one loop. Collective: all ranks make it and call its methods alike.

    Args:
        session: The process's.
        every: Steps between two, ``"auto"``, or 0: there are none.
        save: Saves the present step in memory: at once, or it begins to. None: that failed. On all ranks alike. It is
            told whether the agents are to write the step to the disk.
    """

    def __init__(self, session: BareSession, every: int | str, save: Callable[[bool], Ref | None]) -> None:
        self._session, self._save, self._auto = session, save, every == AUTO
        self._cadence: Cadence | None = None
        # The step that is being saved, and whether the agents are to write it to the disk.
        self._saving: int | None = None
        self._to_disk = False
        # The name of the last one that the agents are to write to the disk; empty: it is no question any more.
        self._coming = ""
        self._mark = time.monotonic()
        if every and session.can_save_in_memory:
            self._cadence = Cadence(every)
            session.examination.learn(memory_every=every)
        elif every:
            log.debug("memory_every=%s, and the nodes keep no memory checkpoints (--memory-replicas)", every)

    @property
    def on(self) -> bool:
        """Whether there are memory checkpoints. On all ranks alike."""
        return self._cadence is not None

    @property
    def leads_to_disk(self) -> bool:
        """Whether the agents bring to the disk what is saved in memory for it. On all ranks alike."""
        return self.on and not self._session.saves.unheard

    def owes(self) -> bool:
        """Whether the present step goes to the disk in place of one that the agents have not brought there. Collective.

        They wait for the master's word, and it is not heard any more. Once for each time that this begins.
        """
        session, name = self._session, self._coming
        if not name or not session.saves.unheard:
            return False
        self._coming = ""
        return not session.saves.await_on_disk(name, session.busy, LOOK_SECONDS)

    def is_due(self, step: int) -> bool:
        """Whether the cadence wants a save behind this step, if nothing else saves it. On all ranks alike."""
        return self._cadence is not None and self._cadence.due(step)

    def acts(self, step: int) -> bool:
        """Whether `at` has something for the ranks to do together behind this step. On all ranks alike."""
        ended = self._saving is not None and not self._session.saves.under_way(in_memory=True)
        return self.on and (ended or self.is_due(step))

    def at(self, step: int, *, saved: bool, here: bool = True, late: bool = False, to_disk: bool = False) -> bool:
        """Behind each step.

        Args:
            saved: It has a save of another kind, or of this one (``to_disk``).
            here: One may begin; else it comes at a later step.
            late: One was due at an earlier step, where none might begin.
            to_disk: It is to be saved here, and the agents are to write it to the disk. Only where this is `on`.

        Returns:
            Whether the ranks save the present step to the disk themselves: memory had no room for what was to go there.
        """
        cadence, session = self._cadence, self._session
        if cadence is None:
            return False
        cadence.measure(time.monotonic() - self._mark, saving=self._saving is not None)
        lacks = False
        if self._saving is not None and not session.saves.under_way(in_memory=True):
            lacks = self._ended(cadence, step) and not saved
        # Nobody waits for a disk, and what a durable save under way has is hardly older.
        due = here and not saved and (late or cadence.due(step)) and not session.saves.under_way(in_memory=False)
        if to_disk or due:
            lacks = self._begin(cadence, step, to_disk) or lacks
        self._mark = time.monotonic()
        return lacks

    def _begin(self, cadence: Cadence, step: int, to_disk: bool) -> bool:
        """Returns whether a save that was to come to the disk has failed: this one, or the one before."""
        session, lacks = self._session, False
        if self._saving is not None:
            session.settle()
            lacks = self._ended(cadence, step) and not to_disk
        began, self._saving, self._to_disk = time.monotonic(), step, to_disk
        begun = self._save(to_disk)
        if to_disk and begun is not None:
            self._coming = begun.name
        cadence.began(time.monotonic() - began)
        if begun is None or not session.saves.under_way(in_memory=True):
            lacks = self._ended(cadence, step) or lacks
        return lacks

    def _ended(self, cadence: Cadence, step: int) -> bool:
        """Returns whether the save has failed, and was to come to the disk."""
        assert self._saving is not None
        # What the step was saved as before, for the case of a crash alone, nobody brings to the disk.
        failed = self._session.saves.of(self._saving, in_memory=True, for_disk=self._to_disk) is None
        apart = cadence.proposal(failed=failed)
        if self._auto:
            apart = self._session.saves.largest(apart)
        cadence.ended(self._saving, step, apart, failed=failed)
        self._saving = None
        if failed and self._to_disk:
            self._coming = ""  # The ranks save to the disk in its place.
        return failed and self._to_disk
