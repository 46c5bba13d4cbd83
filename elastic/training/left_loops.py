"""A loop of `steps` that its script leaves: by a ``break``, behind which another loop may follow, or by ``finish()``.

A ``break`` ends a generator, which can do nothing then that all ranks do together: its errors would reach nobody, and
it cannot tell a ``break`` from an error of this rank's. So what was due is made up by whatever comes next.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..checkpoint import Position
from ..data.batch import batch_in
from ..rank import rng
from ..rank.hooks import until_gone, weakly
from ..rank.remarks import remark

if TYPE_CHECKING:
    from .session import BareSession
    from .sources import BatchSource

__all__ = ["Due", "LeftLoop", "place_behind", "say_what_was_left"]


@dataclass(frozen=True)
class Due:
    """What happens behind a step: all ranks save and leave, or save to the disk, or to memory."""

    drain: bool = False
    to_disk: bool = False
    to_memory: bool = False

    @property
    def any(self) -> bool:
        return self.drain or self.to_disk or self.to_memory


class LoopRun(Protocol):
    """What happens at the boundaries of such a loop."""

    def passes(self, place: Position | None) -> None:
        """The data stand here; None: nobody knows."""

    def took(self, batch: Any) -> None:
        """The batch was trained."""

    @property
    def saves(self) -> bool:
        """It has what to save with, and a directory. On all ranks alike."""

    def make_up(self, *, behind: bool, later: bool) -> Due:
        """Makes the saves that were due, also at the present step if that is ``behind``. Collective.

        Args:
            behind: The present step was trained, and no boundary was behind it.
            later: The next loop can save what is put off.

        Returns:
            What has to come behind a later step.
        """

    def owes(self, late: Due) -> None:
        """This was due in the loop before."""

    def finish(self) -> None:
        """Makes the last save, and ends the training. Collective."""


class LeftLoop:
    """A loop that goes on, or was left. Main thread only.

    Args:
        session: The process's.
        run: Of this loop.
        source: Of its batches.
    """

    def __init__(self, session: BareSession, run: LoopRun, source: BatchSource[Any]) -> None:
        self._session, self._run = session, run
        # Behind a `break` the workers of its loader go. Whoever saves the state of one holds it: the run.
        self._source = weakref.ref(source)
        self._batch: Any = None
        # The data's position behind the batch in which it was left.
        self._place: Position | None = None
        # Its body runs; the step in which it was left was trained: as its batch knows, or as far as it shows.
        self._within = self._trained = self._seems_trained = False
        # Its body has ended the training.
        self._closed = False
        # The generators as it was left in a step that does not count.
        self._generators: bytes | None = None
        # An optimizer has begun a step in this body.
        self._stepped = False
        until_gone(self, register_optimizer_step_pre_hook(weakly(self._steps)))

    def begins(self, batch: Any) -> None:
        """The body has this batch now."""
        self._batch, self._within, self._stepped = batch, True, False

    def ends(self) -> bool:
        """The body has come to its end. Returns whether it has ended the training."""
        self._batch, self._within = None, False
        return self._closed

    def leave(self) -> None:
        """The body was left: a step whose micro-batches were all computed counts. Not collective."""
        if self._closed:
            return
        self._look()
        self._tell(trained=self._trained)
        # Of the batch no more is kept: it may hold what the script trains, which may have to go with the world.
        self._place, self._batch = place_behind(self._batch), None
        if self._trained:
            self._run.passes(self._place)
        self._session.abandon_step(trained=self._trained)
        if not self._trained:
            self._generators = rng.capture()

    def restore_rng(self) -> bool:
        """Lets the next loop draw on where this one was left. Returns False if it was left behind a trained step.

        Else the boundary before it was this loop's, and so was what is saved there: a run that resumes from that draws
        on, too. What a script draws between its loops counts in neither.
        """
        if self._generators is None:
            return False
        rng.restore(self._generators)
        return True

    def close_step(self) -> None:
        """The script ends the training in the body, or behind a loop that was left: counts what it has trained.

        Of data that are not `Batches` nobody knew that. Here the script says that its work is done, so the step counts
        if an optimizer has stepped. Collective in the body.
        """
        if self._within:
            self._closed = True
            self._look()
            self._tell(trained=self._seems_trained)
            if self._seems_trained:
                self._run.took(self._batch)
                self._session.end_step()
            else:
                self._session.abandon_step()
        elif self._seems_trained and not self._trained:
            self._tell(trained=True)
            self._run.passes(self._place)
            self._session.count_left_step()
        self._seems_trained = False

    def make_up(self, *, later: bool) -> Due:
        """Another loop begins: makes the saves that were due where this one was left. Collective. See `LoopRun`."""
        return self._run.make_up(behind=self._trained, later=later)

    def finish(self) -> None:
        """See `LoopRun`."""
        self._run.finish()

    def _tell(self, *, trained: bool) -> None:
        """See `BatchSource.last`."""
        if (source := self._source()) is not None:
            source.last(trained=trained)

    def _look(self) -> None:
        found, self._within = batch_in(self._batch), False
        self._trained = found is not None and found.trained
        # A training without any optimizer that is known steps in a way that nobody sees.
        stepped = self._stepped or not self._session.unstepped.known
        self._seems_trained = stepped if found is None else self._trained

    def _steps(self, *_: Any) -> None:
        self._stepped = True


def place_behind(batch: Any) -> Position | None:
    """The data's position behind a batch, if that says so."""
    found = getattr(batch_in(batch) or batch, "position_after", None)
    return found if isinstance(found, Position) else None


def say_what_was_left(session: BareSession, first: Any) -> None:
    """Says that nobody knows whether a step was trained before a ``break``; only `Batches` know it.

    Args:
        session: The process's.
        first: What fetches the next loop's batches; None: `Batches` themselves do.
    """
    if session.left_in_a_step and first is not None and first.batches is None and session.rank == 0:
        remark(
            "the previous loop was left in step %d, which does not count, because nobody knows whether it was trained: "
            "if it was, this run makes one step more than it counts; leave the loop by max_steps=, or give Batches",
            session.step + 1,
        )
