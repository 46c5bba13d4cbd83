"""After a crash, a rank that is left saves the last boundary alone, if it still holds exactly that: no step is lost.

With DDP each rank has all of the state, and a step changes none of it before the optimizer's step. So what a rank holds
when the collective of a backward pass breaks is the last boundary, unless something else has changed since. That must
be known (`unchanged`), not hoped: what is noted at each boundary is compared with this moment, and so are some of the
values (`samples`); and that changes are seen at all in this training was tried before. All else that a checkpoint
needs, position and random generators, was noted at the boundary.

A rank saves when it ends because a peer is lost, or when its agent says that the world has broken. A peer that only
falls silent closes no connection, as a host without power: who waits for it in a collective never returns from there.
Then another thread saves. The main one can change nothing meanwhile: as soon as it returns it waits for that thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from ..checkpoint import Position
from ..checkpoint.errors import is_full
from ..rank import rng
from ..rank.exits import Stays, end_at_once
from ..rank.interrupt import Interrupt
from ..rank.remarks import remark
from ..saving.content import Content
from .cards import Cards
from .held_state import HeldState, held_by
from .pace import Pace
from .samples import Sample
from .session import BareSession
from .staying import holding
from .unchanged import BoundaryNote, Now, SeenState, UnclearError, is_due, why_not

log = logging.getLogger(__name__)

# Watching that takes more than this part of a step, and more than so many seconds, is given up.
MOST_SHARE, MOST_SECONDS = 0.02, 0.001
UNSEEN = "the state changes before the optimizer's step, unseen"
# Steps that this is judged by.
JUDGED_STEPS = 32


class _Mark(NamedTuple):
    """A boundary, and what changes after it without being part of what is watched."""

    boundary: BoundaryNote
    sample: Sample
    position: Position
    generators: rng.Taken
    beside: Any
    # Behind all that was asked of the cards until then.
    asked: list[Any]


class Survival:
    """What the ranks of one loop may save by themselves. Collective: all ranks make it alike. Main thread only.

    Args:
        session: The process's.
        save: What the loop saves with.
        options: What it says of each checkpoint, see ``BareSession.save``.
        wanted: The loop makes memory checkpoints.
        files: What a checkpoint of a step has, with what was given to `mark`. Default: what is watched.

    Attributes:
        wanted: Something may be saved. Alike on all ranks.
    """

    def __init__(
        self,
        session: BareSession,
        save: Any,
        options: Mapping[str, Any],
        *,
        wanted: bool,
        files: Callable[[int, Any], Mapping[str, Any]] | None = None,
    ) -> None:
        self._session, self._options, self._files = session, options, files
        self._held: HeldState | None = None
        # The state when it was last looked at, and those of its tensors of which a rank may have its own.
        self._known: SeenState | None = None
        self._lone: dict[int, int] = {}
        self._mark: _Mark | None = None
        self._stepping, self._witnessed = False, False
        self._boundaries = self._watched = 0
        # The checksum of the last look, until it is compared; changes are seen, as that has shown; all ranks hold it.
        self._probe, self._proved, self._alike = "", False, False
        self._called = self._saving = False
        # People know that it has no room.
        self._refused = False
        # Where the state lies, if not in the host's memory; and whether the last step began behind its gradients.
        self._cards: Cards | None = None
        self._pace = Pace()
        # The step that this rank has saved by itself, and what it holds then.
        self._kept: tuple[int, Mapping[str, str]] | None = None
        # Of the thread that looks whether it can save, and saves. The main thread may be called while it does.
        self._turn = threading.RLock()
        self._watched_seconds, self._began = 0.0, time.monotonic()
        state = held_by(save)
        plain = options["strategy"] == "ddp" and options["any_world_size"] in (None, True)
        wanted = wanted and plain and state is not None and session.world_size > 1
        self.wanted = wanted and session.can_save_in_memory
        if self.wanted and state is not None:
            self._held = HeldState(state, self._steps, self._stepped)
            self._interrupt = Interrupt(self._told, self._unheard)
            session.survivor.when_broken(self.peer_lost, self._interrupt.begin)

    # At each step.

    def mark(self, step: int, position: Position, beside: Any = None) -> None:
        """The step's work is all done, which makes this boundary ``step``; also once more behind what follows it.

        Args:
            beside: For ``files``.
        """
        held = self._held
        if held is None:
            return
        began = time.thread_time()
        again = self._mark is not None and self._mark.boundary.step == step
        self._witnessed = self._stepping or (again and self._witnessed)
        mark = None
        if self._known is not None:
            mark = self._noted(held, step, position, beside)
        self._pace.boundary(again=again)
        # In this order: a call in between finds that an optimizer has stepped.
        self._mark = mark
        self._stepping = False
        # Not compared: a step without an optimizer's (a loss scale that was too large) has changed what it may.
        self._probe = ""
        self._judge(time.thread_time() - began)
        if self._called:
            self._told(self._session.survivor.loop_stays)

    def _noted(self, held: HeldState, step: int, position: Position, beside: Any) -> _Mark | None:
        try:
            boundary = BoundaryNote(step, held.versions(), held.plain(), self._witnessed)
            sample = held.samples.take()
            asked = [] if self._cards is None else self._cards.asked()
        except Exception as error:
            self._cannot(error)
            return None
        return _Mark(boundary, sample, position, rng.taken(), beside, asked)

    def _judge(self, seconds: float) -> None:
        self._watched_seconds += seconds
        self._watched += 1
        if self._watched % JUDGED_STEPS:
            return
        now = time.monotonic()
        mean, step = self._watched_seconds / JUDGED_STEPS, (now - self._began) / JUDGED_STEPS
        self._watched_seconds, self._began = 0.0, now
        if mean > max(MOST_SECONDS, MOST_SHARE * step):
            self._give_up(f"watching the state takes {1000 * mean:.1f} ms of {1000 * step:.0f} in each step")

    @property
    def looks_next(self) -> bool:
        """Whether the next call of `look` looks. Alike on all ranks."""
        return self.wanted and is_due(self._boundaries + 1)

    def look(self, position: Position, beside: Any = None, *, marked: bool = True) -> None:
        """Behind a boundary's saves, at some boundaries: looks at the state, and compares it with rank 0's. Collective.

        What was noted of the boundary is noted anew.

        Args:
            beside: As with `mark`.
            marked: This boundary was; else the one that was marked last stays, as nothing has changed since.
        """
        looks = self.looks_next
        self._boundaries += 1
        if not looks:
            return
        said, held = "", self._held
        if held is not None:
            try:
                self._known = held.look()
                self._cards = held.cards(self._cards)
                self._probe, self._lone = held.content(), held.lone()
                said = held.same_everywhere(self._known, self._probe)
                if marked:
                    self._mark = self._noted(held, self._session.step, position, beside)
            except Exception as error:
                self._cannot(error)
        first = self._session.gather(said)[0]
        self._alike = said != "" and said == first
        self._may_keep()

    def _steps(self) -> None:
        """An optimizer begins its step.

        Raises:
            torch.distributed.DistBackendError: A peer is lost: its gradients never came.
        """
        self._pace.begins()
        # Each one: it may step behind a backward pass of its own.
        if self._cards is not None and self._pace.may_wait and self._cards.can_wait:
            self._cards.wait()
            self._pace.waited()
        if not self._stepping:
            try:
                self._try_out()
            # It is the script's step, which goes on.
            except Exception as error:
                self._cannot(error)
        self._stepping = True

    def _stepped(self) -> None:
        self._pace.stepped()

    def _try_out(self) -> None:
        """Whether what is not seen to have changed since the look has not changed."""
        probe, self._probe = self._probe, ""
        held, mark = self._held, self._mark
        if held is None or mark is None:
            return
        if held.versions() == mark.boundary.versions and not held.samples.are_as(mark.sample):
            self._give_up(UNSEEN)
            return
        if not probe or self._why_not():
            return
        if held.content() != probe:
            self._give_up(UNSEEN)
            return
        self._proved = True
        self._may_keep()

    def _may_keep(self) -> None:
        held = self._held
        may = held is not None and self._proved and self._alike
        self._session.survivor.may_keep(may and (self._session.rank == 0 or held is None or held.stepped_alike))

    def _cannot(self, error: Exception) -> None:
        """The training goes on without this, whatever the error is."""
        if not isinstance(error, UnclearError) and not isinstance(error.__cause__, UnclearError):
            log.warning("the state of this training cannot be watched", exc_info=error)
        self._give_up(f"the state cannot be watched: {error}")

    def _give_up(self, why: str) -> None:
        log.debug("after a crash this rank saves nothing: %s", why)
        self._held, self._known, self._mark = None, None, None
        self._session.survivor.may_keep(False)

    # When the world has broken.

    def peer_lost(self, stays: bool) -> Mapping[str, str] | None:
        """This rank ends because a peer is lost. Returns what it holds, if that is saved, by this rank."""
        if stays and self._cards is not None:
            return None  # NCCL's watchdog would end it: it saves as it ends.
        return self._kept[1] if self._save(stays=stays) and self._kept is not None else None

    def _told(self, stays: bool | None = None) -> None:
        """The agent says so. Between any two instructions of the main thread; it is called again and again.

        Args:
            stays: Whether the loop takes a `Stays` here; None: as the loop says.
        """
        self._called = True
        survivor = self._session.survivor
        stays = (survivor.anywhere if stays is None else stays) and survivor.may_stay and self._cards is None
        with self._turn:
            if self._saving or survivor.is_busy or not self._save(stays=stays):
                return
        if stays and self._kept is not None:
            raise Stays(self._kept[1], broken=True)
        _end()

    def _unheard(self) -> None:
        """The main thread does not hear that: it waits in a library, and hears it first when it returns."""
        if not self._turn.acquire(blocking=False):
            return  # It has heard it.
        try:
            if not self._session.survivor.is_busy and self._save(stays=False):
                _end()
        finally:
            self._turn.release()

    def _why_not(self) -> str:
        held, known, mark = self._held, self._known, self._mark
        if held is None or known is None or mark is None:
            return "the state is not watched"
        if self._session.rank and not held.stepped_alike:
            return "rank 0 may have more than this rank"
        # First: past what hangs there the state may be read once the card is done with the boundary.
        if why := self._why_not_on_cards(mark):
            return why
        lone = self._lone if self._session.rank else {}
        now = Now(held.seen(held.files()), held.versions(), held.plain(), self._stepping, lone)
        if why := why_not(known, mark.boundary, now):
            return why
        return "" if held.samples.are_as(mark.sample) else UNSEEN

    def _why_not_on_cards(self, mark: _Mark) -> str:
        if self._cards is None:
            return ""
        if not self._pace.came:
            return "the boundary's step began before its gradients had come, or it is not known that they had"
        return "" if self._cards.have_done(mark.asked) else "the card is not done with the boundary's step"

    def _save(self, *, stays: bool) -> bool:
        """Saves the boundary. Returns whether that is done, by this rank or another one of this node."""
        with self._turn:
            return self._save_in_turn(stays)

    def _save_in_turn(self, stays: bool) -> bool:
        self._saving = True
        try:
            # Parts may ask a card for values when their state is wanted, as a loss scale does.
            with contextlib.nullcontext() if self._cards is None else self._cards.aside():
                why = self._why_not() if self._proved and self._alike else "that changes are seen was not shown"
                if not why:
                    self._write(stays)
                    self._interrupt.close()
                    return True
        # Whatever it is, this process is about to end, and its own error says more.
        except Exception as error:
            why = str(error) or type(error).__name__
            if is_full(error):
                self._say_no_room(error)
        finally:
            self._saving = False
        log.debug("the last boundary is not saved by this rank: %s", why)
        return False

    def _say_no_room(self, error: OSError) -> None:
        """Once, although it is tried again until this process ends. What is lost for that would have no other line."""
        if self._mark is None or self._refused:
            return
        # Where this comes in the middle of a print there can be no other one, and it is called again.
        with contextlib.suppress(RuntimeError):
            remark(
                "a peer is lost, and rank %d has no room to save step %d by itself: %s. If no other rank saves it, the"
                " steps since the last checkpoint are made again. Give each node room for one whole state more, in"
                " --memory-budget, /dev/shm and the machine's or container's memory",
                self._session.rank,
                self._mark.boundary.step,
                error.strerror or error,
            )
            self._refused = True

    def _write(self, stays: bool) -> None:
        held, mark, session = self._held, self._mark, self._session
        assert held is not None
        assert mark is not None
        step, saver = mark.boundary.step, session.saves.saver
        saved = session.saves.of(step)
        if self._kept is not None and self._kept[0] == step:
            return
        if saved is not None:  # It is on the disk.
            self._kept = (step, holding(saved.name, saved.digest)) if saved.digest else None
            return
        best, candidate = (None, None) if saver is None else (saver.bests.best, saver.bests.strongest())
        options = {"cut": self._options["cut"], "best": best, "candidate": candidate}
        content = Content(step, mark.position, self._options["order"], **options)
        files = held.files() if self._files is None else self._files(step, mark.beside)
        fetch = None if self._cards is None else self._cards.fetch
        manifest = session.survivor.save(content, files, rng.encoded(mark.generators), stays=stays, fetch=fetch)
        # If another rank of this node writes it, that has the same state, which need not be saved twice.
        digest = "" if manifest is None else manifest.digest
        self._kept = step, holding(session.survivor.name_of(step), digest)


def _end() -> NoReturn:
    """Nothing else is of use: the agent waits for this end, and handlers may wait for peers."""
    end_at_once(1)
