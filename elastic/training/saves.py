"""The saves of one session: where each one goes, and what the present step is saved as."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.protos.shortage import file_limit

from ..checkpoint import CheckpointStore, LocalLock, Manifest, Order, Position, Ref
from ..rank.collective import Collective
from ..rank.exchange import Boundary
from ..rank.identity import Identity
from ..rank.link import Link
from ..rank.remarks import remark
from ..saving.background_save import Background, in_background
from ..saving.content import Content
from ..saving.outcomes import SaveError
from ..saving.pruning import prune
from ..saving.saving import Saver

if TYPE_CHECKING:
    from ..saving.resuming import ResumePoint
    from .session import BareSession

log = logging.getLogger(__name__)

NO_DIRECTORY = "outside dlrover-run the script names the directory, session(checkpoint_dir=...)"

# What is compared of a stream as the training ends.
BEHIND_THE_LAST = "place behind the last step in the iterable data set"

# The last step is worth waiting for: somebody makes room on the disk, a mount comes back. Ten minutes all in all;
# counted, so that all ranks give up at the same time. Longer from try to try, and at most so long (seconds).
LAST_SAVE_TRIES = 27
LAST_SAVE_PAUSE_SECONDS, LAST_SAVE_LONGEST_SECONDS = 2.0, 30.0


def end_training(
    session: BareSession, save: Callable[[], bool] | None, order: Order | None, place: Callable[[], Position]
) -> None:
    """Makes the last save, and tells the agent that the training is over. Collective.

    Args:
        session: Is at the last step.
        save: As with `save_at_last`; None: nothing is saved.
        order: Of the data.
        place: Returns where they stand.

    Raises:
        SaveError: See `save_at_last`.
        Unlike: The ranks have not read the same of a stream. On all ranks.
    """
    session.examination.forget()
    save = save if session.step > 0 else None
    if save is not None:
        # First: what ends below ends also what is still being written.
        session.settle()
    if order is not None and not order.length and not session.meetings.over:
        # Where one rank's stream is shorter, it ends the loop for all, or this rank has begun anew. Saves compare it,
        # too, but not every run saves, and another start would end there again.
        session.compare({BEHIND_THE_LAST: asdict(place())})
    if save is not None:
        _await_best(session, BEST_WAIT_SECONDS)
        save_at_last(session, save)
    session.loop = None  # Nothing of it is left to be done.
    session.finish()


def _await_best(session: BareSession, seconds: float) -> None:
    """So that the last save can name it."""
    missing = session.saves.await_best(session.step, session.busy, seconds)
    if missing and session.rank == 0:
        remark(
            "%s would be the best checkpoint, and the agents have not written it to the disk within %g s: it does "
            "not count; see the agents' lines about the disk",
            missing,
            seconds,
        )


def save_at_last(session: BareSession, save: Callable[[], bool]) -> None:
    """Saves the last step, again and again if it fails.

    Args:
        session: Is at that step.
        save: Returns whether it is saved; alike on all ranks. What no other try would cure it raises.

    Raises:
        SaveError: It could not be saved.
    """
    for attempt in range(LAST_SAVE_TRIES):
        _pause(session, min(LAST_SAVE_PAUSE_SECONDS * attempt, LAST_SAVE_LONGEST_SECONDS))
        if save():
            return
        if attempt == 0 and session.rank == 0:
            # What the others have said of why it failed tells which it is.
            limit = f", or raise the limit: {limited}" if (limited := file_limit()) else ""
            remark(
                "the last step, %d, is not saved yet: it is tried again for ten minutes, so make room on the disk, or"
                " bring its mount back%s",
                session.step,
                limit,
            )
    raise SaveError(f"the last step, {session.step}, could not be saved in {LAST_SAVE_TRIES} tries")


def _pause(session: BareSession, seconds: float) -> None:
    """Waits, and is no stall."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        session.busy()
        # No event could end this wait.
        threading.Event().wait(min(left, 1.0))


# So long the end of training, or a drain where nobody stays, waits for the agents to bring the best checkpoint to the
# disk, seconds.
BEST_WAIT_SECONDS, DRAIN_BEST_WAIT_SECONDS = 60.0, 3.0
BEST_LOOK_SECONDS = 0.1


class Saves:
    """On the disk and in memory.

    Args:
        identity, collective, link: The session's.
        resume: The resume point.
        keep: How many checkpoints stay, where no master says it; 0: all.
        lock: Of the directory, on rank 0 of a run without a master.

    Attributes:
        saver: None: there is no directory.
        store: Of the run's directory.
        carries: This rank's gradients are carried over boundaries.
        keep: See above; a save may change it.
        by_script: The script says what is saved when, and not a framework's arguments.
        unheard: No agent of the world hears the master, as of the last exchange: the same on all ranks.
    """

    def __init__(
        self,
        identity: Identity,
        collective: Collective,
        link: Link | None,
        resume: ResumePoint | None,
        keep: int,
        lock: LocalLock | None = None,
    ) -> None:
        self._identity, self._collective, self._link, self._resume = identity, collective, link, resume
        self.keep, self.carries, self.unheard, self.by_script = keep, False, False, True
        self.store = None if identity.run_dir is None else CheckpointStore(identity.run_dir, lock)
        self.saver: Saver | None = None
        self._memory: bool | None = None
        if self.store is not None:
            if resume is None:
                self.saver = Saver(identity, collective, self.store, link, None)
            else:
                in_memory, manifest = identity.in_memory(resume.saved_at), resume.manifest
                bests = manifest.best, manifest.candidate, in_memory
                self.saver = Saver(identity, collective, self.store, link, resume.ref, *bests)
                # At the resume point this step number is saved as the resume point itself.
                self.saver.saved.note(resume.step, resume.ref, in_memory=in_memory)

    def tells(self) -> tuple[bool, bool, bool]:
        """What this rank tells the others in each exchange: see `Saver`, and ``carries``."""
        failed, saving = (False, False) if self.saver is None else self.saver.tells()
        return failed, saving, self.carries

    def hear(self, boundary: Boundary) -> None:
        """Notes what the ranks have told each other at a boundary."""
        if boundary.exchanged:
            self.unheard = self._link is not None and not boundary.master_seen

    def check(self, *, in_step: bool, in_memory: bool) -> None:
        """Raises RuntimeError where nothing can be saved now. Collective the first time with ``in_memory``."""
        if in_step:
            raise RuntimeError(
                "save() in the middle of a step would save it as the one before, without its place in the data. In"
                " `for batch in s.steps(…)` give steps() save= and save_every=; in a loop with begin_step() and"
                " end_step() call it behind end_step()"
            )
        if self.saver is None:
            raise RuntimeError(f"nowhere to save: {NO_DIRECTORY}")
        self.verified()
        if in_memory and not self.has_memory():
            raise RuntimeError("nowhere to save: the nodes keep no memory checkpoints (--memory-replicas)")

    def verified(self) -> None:
        """Waits until what this world starts from is verified; raises what ends this process if it is damaged."""
        if self._resume is not None:
            self._resume.wait()

    def drain_by(self, since: float, most: float) -> float:
        """Until when a drain may wait for a better boundary, in monotonic seconds: half of the notice is for the save.

        Args:
            since: When it was first seen to be due.
            most: So many seconds at most.
        """
        told = None if self._link is None else self._link.drain_since
        return (since if told is None else told) + min(most, self._identity.drain_timeout / 2)

    @property
    def busy(self) -> bool:
        """See `Saver`."""
        return self.saver is not None and self.saver.busy

    def under_way(self, *, in_memory: bool) -> bool:
        """A save in the background is not settled yet, on all ranks alike."""
        tier = None if self.saver is None else self.saver.under_way
        return tier is not None and tier.in_memory == in_memory

    @property
    def apart(self) -> bool:
        """See `Saver`."""
        return self.saver is not None and self.saver.apart

    def of(self, step: int, *, in_memory: bool = False, for_disk: bool = False) -> Ref | None:
        """The checkpoint of this step, if it is the last one there; see `LastSaves`."""
        return None if self.saver is None else self.saver.saved.of(step, in_memory=in_memory, for_disk=for_disk)

    def left_as(self, step: int) -> tuple[Ref, bool]:
        """What a drained step is saved as, with no name if it is not, and whether that is in memory."""
        durable, held = self.of(step), self.of(step, in_memory=True)
        return (durable or held or Ref("", "")), durable is None and held is not None

    def has_memory(self) -> bool:
        """Whether all ranks have where memory checkpoints go. Collective the first time."""
        if self._memory is None:
            # A rank without an agent knows that the others have none either.
            lacks = self._identity.alone or bool(self._collective.max([int(self._identity.memory_dir is None)])[0])
            self._memory = not lacks
        return self._memory

    def largest(self, value: int) -> int:
        """The largest value of all ranks. Collective."""
        return self._collective.max([value])[0]

    def await_best(self, step: int, busy: Callable[[], None], seconds: float) -> str:
        """Waits until the best checkpoint is on the disk, where the agents bring it. Collective.

        Args:
            step: What is saved last: it is no question what that is.
            busy: Called now and then.
            seconds: No longer than this.

        Returns:
            "", or the name of what is not there: what was the best before stays it.
        """
        name = "" if self.saver is None else self.saver.bests.awaited(step)
        return "" if not name or self.await_on_disk(name, busy, seconds) else name

    def await_on_disk(self, name: str, busy: Callable[[], None], seconds: float) -> bool:
        """Whether a checkpoint of this session is on the disk, sealed, within so long. Collective.

        Args:
            name: Its name.
            busy, seconds: See `await_best`.
        """
        assert self.saver is not None
        bests, deadline = self.saver.bests, time.monotonic() + seconds
        while True:
            bests.look(name)
            over = time.monotonic() >= deadline
            found, over = self._collective.broadcast([bests.is_on_disk(name), over])
            if found or over:
                return bool(found)
            busy()
            # No event tells when the agents have sealed it.
            threading.Event().wait(BEST_LOOK_SECONDS)

    def drains_to_memory(self) -> bool:
        """Whether the save of a drain goes there: some agent has said so, and none otherwise. Collective."""
        if self._identity.alone or not self.has_memory():
            return False
        link = self._link
        told, to_memory = (False, False) if link is None else (link.drain, link.to_memory)
        otherwise, so = self._collective.max([int(told and not to_memory), int(told and to_memory)])
        return bool(so) and not otherwise

    def save(
        self,
        content: Content,
        write: Callable[[Path], None] | Background,
        *,
        create_directory: bool,
        wait: bool,
        drain: bool,
        in_memory: bool,
    ) -> Ref | None:
        """See ``Session.save``. Collective.

        What can be written in the background is, if it goes to memory. A drain's that fails in memory is tried on the
        disk at once; if that fails, too, it goes with what memory has of its step. What the agents were to bring to the
        disk goes there itself while no master is heard.
        """
        assert self.saver is not None
        if content.make_durable and self.unheard:
            # Who writes which part, and who seals, the master says.
            content, in_memory = replace(content, make_durable=False), False
        in_memory = self.drains_to_memory() if drain else in_memory
        # What was saved for the case of a crash alone comes to no disk, and is not the best: then it is saved anew.
        for_disk = content.make_durable or (drain and content.metric is not None)
        there = self.of(content.step, in_memory=True, for_disk=for_disk) if in_memory else None
        saved = self.of(content.step) or there
        for place in [True, False] if in_memory and drain else [in_memory]:
            if saved is not None:
                break
            beside = in_background(write) if place else write
            if isinstance(beside, Background):
                name = self.saver.begin(content, beside, self.prune, drain=drain, in_memory=place, waits=wait)
                saved = Ref(name, "") if name is not None and not wait else self.settle()
            else:
                options = {"create_directory": create_directory, "drain": drain, "in_memory": place}
                saved = self._sealed(self.saver.save(content, beside, **options))
        if saved is None and drain and in_memory:
            saved = self.of(content.step, in_memory=True)
        return saved

    def _sealed(self, manifest: Manifest | None) -> Ref | None:
        if manifest is None:
            return None
        self.prune()
        return manifest.ref

    def settle(self, *, over: bool = False) -> Ref | None:
        """See ``Session.settle``, and `Saver`. Collective."""
        ended = None if self.saver is None else self.saver.settle(over=over)
        return None if ended is None else ended[1]

    def prune(self) -> None:
        """Alone: deletes what need not stay."""
        if self._identity.alone and self._identity.rank == 0 and self.store is not None:
            prune(self.store, self._identity, self._resume, self.keep)

    def say_unsaved(self, step: int) -> None:
        """Says at the end of a training that its last step is in no checkpoint, where an earlier one is."""
        before = None if self.saver is None else self.saver.saved.last
        if self._identity.rank or not self.by_script or before is None or before >= step:
            return
        remark(
            "the training is finished at step %d, and its last checkpoint is of step %d: what was trained since is in "
            "none, unless the script has saved it by itself; give session.steps(...) save=, or call session.save(...) "
            "before session.finish()",
            step,
            before,
        )

    def note_the_end(self, step: int) -> None:
        """Alone: notes in the directory that the training is finished."""
        if self.store is None or self.saver is None:
            return
        try:
            self.saver.disk.prepare()
            self.store.mark_finished(step, self.store.newest())
        except OSError as error:
            log.warning("the training is finished, but the note of it could not be written: %s", error)

    def close(self) -> None:
        """Ends saves, and leaves nothing that only later ones would have used."""
        if self._resume is not None:
            self._resume.end()
        if self.saver is not None:
            self.saver.close()
        if self._identity.alone and self._identity.rank == 0 and self.store is not None:
            self.store.clear_spares()
