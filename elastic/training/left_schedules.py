"""Schedules that set an optimizer's learning rate and that nobody saves: each start would begin them anew."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ..data.batch import batch_in
from ..rank.remarks import remark
from ..saving.background_save import Background
from ..saving.reaching import reaches
from ..saving.schedules import has_moved, left_out, place_of, rates_of
from .examination import Examination
from .parts import kind
from .rehearsal import knows_itself
from .session import BareSession

__all__ = ["LeftSchedules", "ScheduleWatch", "optimizers_of"]

T = TypeVar("T")


class LeftSchedules:
    """Those of a training whose parts are all known. They are said at the start, and refused where a run resumes.

    Args:
        examination: Of the session.
        lacks: Where they are not, for people: "is not in TrainingState".
        cure: Where they belong.
    """

    def __init__(self, examination: Examination, lacks: str, cure: str) -> None:
        self._examination, self._lacks, self._cure = examination, lacks, cure
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
            ValueError: The run resumes, and such a schedule stands at its beginning.
        """
        known = list(known)
        found = [schedule for optimizer in optimizers for schedule in left_out(optimizer, known)]
        self._found[name] = [weakref.ref(schedule) for schedule in found]
        for schedule in found:
            what = kind(schedule)
            self._examination.learn_left_out(what, self._lacks, self._cure)
            stood = name not in self._stood or place_of(schedule) in self._stood[name]
            if name in self._rates and not (stood and has_moved(schedule, self._rates[name])):
                raise ValueError(
                    f"{what} sets the learning rate of {name} and {self._lacks}, so it begins anew: {self._cure}, or "
                    "move it to session.step before the first step"
                )

    def places(self) -> dict[str, list[Any]]:
        """Where those that were found stand, by the optimizer's name, for checkpoints."""
        return {
            name: [place_of(one) for ref in found if (one := ref()) is not None] for name, found in self._found.items()
        }


class ScheduleWatch:
    """Remarks once on a schedule of a loop with a ``save=`` of the script's own, before the first optimizer step.

    What such a function writes nobody knows. So nothing is refused: a line says of which schedule nothing is seen in
    what ``save`` calls, or which was not loaded.

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
        self._session, self._say = session, say
        asks = session.rank == 0 and session.can_save and save is not None and not knows_itself(save)
        self._save = save if asks else None

    def begins(self, batch: T) -> T:
        """Before the step of a batch: has the `Accumulation` that goes through the first one tell its optimizers."""
        found = None if self._save is None else batch_in(batch)
        if found is not None:
            found.begun = self._look
        return batch

    def _look(self, model: Any, optimizers: Iterable[Any]) -> None:
        save, self._save = self._save, None
        if save is None:
            return
        resume = self._session.resume
        for optimizer in [*optimizers, *optimizers_of(model)]:
            for schedule in left_out(optimizer, [getattr(model, "lr_scheduler", None)]):
                seen = reaches(save, schedule)
                if resume is None or self._session.step != resume.step:
                    stands = seen
                else:
                    stands = has_moved(schedule, rates_of(group["lr"] for group in optimizer.param_groups))
                    stands = stands and (seen or place_of(schedule)[1] != 0)
                if not stands:
                    self._tell(kind(schedule), type(optimizer).__name__, seen=seen)
                    return

    def _tell(self, schedule: str, optimizer: str, *, seen: bool) -> None:
        if seen:
            self._say(
                "%s, which sets the learning rate of %s, stands elsewhere than the optimizer that was loaded: load its "
                "state_dict() where the run goes on, or the learning rate leaves its curve",
                schedule,
                optimizer,
            )
            return
        self._say(
            "%s sets the learning rate of %s and is not known to be saved: nothing of it is seen in what save= calls. "
            "Have that write its state_dict(), and load it where the run goes on, or it begins anew at each start",
            schedule,
            optimizer,
        )


def optimizers_of(model: Any) -> Iterator[Any]:
    """The optimizers of a DeepSpeed engine that a schedule may have in its hands; of any other model none."""
    if not hasattr(model, "zero_optimization_stage"):
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
