"""Schedules that set an optimizer's learning rate and that nobody saves: each start would begin them anew."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ..data.batch import batch_in
from ..rank.remarks import remark
from ..saving.background_save import Background
from ..saving.declared import is_engine
from ..saving.schedules import has_moved, left_out, place_of, rates_of
from .examination import Examination
from .parts import kind
from .rehearsal import knows_itself
from .session import BareSession

__all__ = ["LeftSchedules", "ScheduleWatch", "optimizers_of"]

T = TypeVar("T")

log = logging.getLogger(__name__)


class LeftSchedules:
    """Those of a training whose parts are all known. They are said at the start, and again where a run resumes.

    Args:
        examination: Of the session.
        lacks: Where they are not, for people: "is not in TrainingState".
        cure: Where they belong.
        say: Says it where a run resumes; None: the run is refused there.
    """

    def __init__(self, examination: Examination, lacks: str, cure: str, say: Callable[..., None] | None = None) -> None:
        self._examination, self._lacks, self._cure, self._say = examination, lacks, cure, say
        # For each optimizer: such schedules, the saved places of those there were, and its saved rates.
        self._found: dict[str, list[weakref.ref[Any]]] = {}
        self._stood: dict[str, list[Any]] = {}
        self._rates: dict[str, list[float]] = {}

    def resumes(self, name: str, optimizer: Any, places: list[Any] | None) -> None:
        """Notes an optimizer that has just been loaded.

        Args:
            name: For people, and for `look`.
            optimizer: Its groups have the saved rates.
            places: What `places` gave as it was saved; None: an earlier version did not ask.
        """
        if places is not None:
            self._stood[name] = places
        self._rates[name] = rates_of(group["lr"] for group in optimizer.param_groups)

    def look(self, name: str, optimizers: Iterable[Any], known: Iterable[Any]) -> None:
        """Looks for schedules that act on an optimizer and are in nothing that is ``known``.

        Args:
            name: The optimizer's.
            optimizers: What a schedule may have in its hands: it, and what is around it.
            known: What is saved.

        Raises:
            ValueError: The run resumes, such a schedule stands at its beginning, and this refuses.
        """
        known = list(known)
        found = [schedule for optimizer in optimizers for schedule in left_out(optimizer, known)]
        self._found[name] = [weakref.ref(schedule) for schedule in found]
        for schedule in found:
            what = kind(schedule)
            self._examination.learn_left_out(what, self._lacks, self._cure, refused=self._say is None)
            if name not in self._rates or self._stands(name, schedule):
                continue
            if self._say is None:
                raise ValueError(
                    f"{what} sets the learning rate of {name} and {self._lacks}, so it begins anew: {self._cure}, or "
                    "move it to session.step before the first step"
                )
            self._say(
                "%s sets the learning rate of %s and %s, so it begins anew, unless the script sets it by s.step: %s",
                what,
                name,
                self._lacks,
                self._cure,
            )
            del self._rates[name]

    def _stands(self, name: str, schedule: Any) -> bool:
        """Whether it may be where the run goes on. One that is never stepped stands where it stood, too."""
        moved = has_moved(schedule, self._rates[name])
        if name not in self._stood:
            return moved
        fits = place_of(schedule) in self._stood[name]
        return fits and (moved or self._say is not None)

    def places(self) -> dict[str, list[Any]]:
        """Where those that were found stand, by the optimizer's name, for checkpoints."""
        return {
            name: [place_of(one) for ref in found if (one := ref()) is not None] for name, found in self._found.items()
        }


class ScheduleWatch:
    """Remarks once where a run goes on with schedules at their beginning, in a loop with a ``save=`` of the script's.

    What such a function writes nobody knows, so nothing is refused, and nothing is said at a run's start.

    Args:
        session: This process's session.
        save: What the loop saves with. One that knows its parts looks by itself, see `LeftSchedules`.
        say: For tests.
    """

    def __init__(
        self,
        session: BareSession,
        save: Callable[[Path], None] | Background | None,
        say: Callable[..., None] = remark,
    ) -> None:
        self._say = say
        resume = session.resume
        goes_on = resume is not None and session.step == resume.step
        self._asks = goes_on and session.rank == 0 and save is not None and not knows_itself(save)

    def begins(self, batch: T) -> T:
        """Before the step of a batch: has the `Accumulation` that goes through the first one tell its optimizers."""
        found = batch_in(batch) if self._asks else None
        if found is not None:
            self._asks, found.begun = False, self._look
        return batch

    def _look(self, model: Any, optimizers: Iterable[Any]) -> None:
        try:
            for optimizer in [*optimizers, *optimizers_of(model)]:
                schedules = left_out(optimizer, [getattr(model, "lr_scheduler", None)])
                rates = rates_of(group["lr"] for group in optimizer.param_groups)
                if schedules and not any(has_moved(one, rates) or place_of(one)[1] for one in schedules):
                    self._say(
                        "%s sets the learning rate of %s, which was loaded, and stands at its own beginning: save its "
                        "state_dict() and load it where the run goes on, or the learning rate leaves its curve (unless "
                        "the script sets it by s.step)",
                        kind(schedules[0]),
                        type(optimizer).__name__,
                    )
                    return
        # Objects of the script's own are looked at, whatever they answer. It is advice, and ends no training.
        except Exception:
            log.debug("schedules were not looked at", exc_info=True)


def optimizers_of(model: Any) -> Iterator[Any]:
    """The optimizers of a DeepSpeed engine that a schedule may have in its hands; of any other model none."""
    if not is_engine(model):
        return
    known: list[Any] = []
    one = getattr(model, "optimizer", None)
    while one is not None and all(one is not other for other in known):
        known.append(one)
        one = getattr(one, "optimizer", None)
    basic = getattr(model, "basic_optimizer", None)
    yield from known
    if basic is not None and all(basic is not other for other in known):
        yield basic
