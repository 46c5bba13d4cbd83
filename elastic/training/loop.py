"""The training loop around a session's primitives: agree, hand out a batch, count it, save, drain, finish."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..checkpoint import Cut, Order, Position, Ref
from ..data.batch import Batch, batch_in
from ..data.sampler import check_order
from ..rank import rng
from ..rank.agreement import PART, Trouble
from ..rank.exchange import MAX_STEPS_APART, Boundary
from ..rank.meetings import is_mistake
from ..saving.background_save import Background
from ..saving.cadence import checked
from ..saving.declared import strategy_of
from ..saving.resuming import check_strategy
from . import saves
from .bounds import check_data_epochs, check_steps
from .examination import learn_loop
from .left_loops import Due, LeftLoop, place_behind, say_what_was_left
from .left_schedules import ScheduleWatch
from .memory import MemorySaves
from .rehearsal import rehearse, what_is_saved
from .saves import NO_DIRECTORY
from .session import BareSession
from .sources import (
    BatchSource,
    StatefulLoader,
    Unknown,
    alike_of,
    begin,
    check_goes_on,
    check_place,
    kind,
    knows,
    saved_with,
    say_what_cannot_resume,
    source_of,
)
from .survival import Survival
from .whole_steps import WholeSteps, optimizers_in

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Cadences:
    """Steps between saves, see `steps`."""

    save_every: int
    memory_every: int | str


def steps(
    session: BareSession,
    data: Iterable[T],
    *,
    max_steps: int | None = None,
    save: Callable[[Path], None] | Background | None = None,
    save_every: int = 0,
    memory_every: int | str = 0,
    strategy: str = "ddp",
    any_world_size: bool | None = None,
    create_directory: bool | None = None,
    order: Order | None = None,
    cut: Cut | None = None,
    position: Callable[[], Position] | None = None,
    advanced: bool = False,
    metric: Callable[[], float | None] | None = None,
    seed: int | None = None,
) -> Iterator[T]:
    """One batch per optimizer step; the body of the ``for`` is the step. All ranks leave the loop at the same step.

    The call is collective: it compares what must be alike on all ranks, and they begin together or not at all. The loop
    ends when ``max_steps`` are done or some rank has no more data. It then saves if the last step is not saved, and the
    agent learns that the training finished. If the world is about to change, the ranks save at one boundary and the
    process ends with ``Drained`` (exit code 83). After a ``break`` the script decides: call ``session.finish()`` if the
    training is done. What was to be saved at the step of the ``break`` that does, or the next loop as it begins.

    Args:
        session: The process's.
        data: ``Batches``, or any iterable of batches, of which one is fetched ahead. What a loader's ``state_dict``
            says is saved, and loads where as many ranks resume. Others would begin anew: refused, see ``sources``.
        max_steps: Steps of the whole run, those before the resume point included.
        save: Writes this rank's part of a checkpoint, see ``BareSession.save``, or ``background(state)``: while the
            training goes on. None: nothing is saved, and a drain goes back to the last commit. The same where there
            is no directory (``BareSession.can_save``); one line says so.
        save_every: Steps between saves; 0: only for drains and at the end. Without an effect where nothing is saved.
        memory_every: The same to the nodes' memory (``docs/memory.md``); ``"auto"``: it slows the loop by 2 % at most.
        strategy, any_world_size, create_directory: See ``BareSession.save``.
        order, cut: Default: those of ``Batches``.
        position: Returns the data's position after the present step; default: the batch's ``position_after``.
        advanced: The script itself has moved ``data`` to where the run resumes, ``session.step`` steps from their
            beginning, and makes the same global batches in every world. Implied by ``position``.
        metric: Returns the run's tracked metric; called at each save. What it draws at random moves no other draw.
        seed: The seed of the random generators, see ``BareSession.restore_rng``.

    Raises:
        ValueError: The ranks were not started alike; a number is below 0, or below what the run has made; saves are
            wanted without ``save``; ``save`` calls a DeepSpeed engine that is not of ``strategy``; the resume point is
            another strategy's, or of another order, or the data do not begin where it ended.
        RuntimeError: A step ended before all micro-batches of its ``Batch`` were computed.
        SaveError: The script's ``save`` has a mistake (found before the first step if ``rehearsal`` can see it, else at
            the first save), or the final save failed again and again.
        Drained: See above.
    """
    advanced, strategy = advanced or position is not None, strategy_of(save, strategy)
    first = begin(data, advanced=advanced)
    told = data if first is None else first.batches or data  # other iterables may pass on the batches of `Batches`
    options: dict[str, Any] = {"strategy": strategy, "create_directory": create_directory}
    options |= {"order": order or getattr(told, "order", None), "cut": cut or getattr(told, "cut", None)}
    options["any_world_size"], cadence = any_world_size, Cadences(save_every, memory_every)
    with session.meetings.telling():
        _compare(session, told, first, options, max_steps, save, cadence, advanced=advanced)
        _same_data(session, data, options, max_steps)
        given, save = save, _saving(session, save, cadence, strategy)
        source = _source(session, data, first, options, advanced=advanced)
        if save is not None:
            save = _saved_too(session, data, source, save, options, advanced=advanced)
    learn_loop(session, given if save is None else save, save_every, options, knows(told, advanced=advanced))
    run = _Run(session, given, told, save, cadence, position, metric, options)
    return _loop(session, source, run, max_steps, seed)


def _compare(
    session: BareSession,
    data: Any,
    first: Unknown[Any] | None,
    options: Mapping[str, Any],
    max_steps: int | None,
    save: Callable[[Path], None] | Background | None,
    cadence: Cadences,
    *,
    advanced: bool,
) -> None:
    """Checks that all ranks were given the same, and something possible; otherwise none begins. Collective."""
    order = options["order"]
    alike = {
        "max_steps": max_steps,
        "save_every": cadence.save_every if session.can_save else 0,
        "memory_every": cadence.memory_every if session.can_save else 0,
        "what is saved": what_is_saved(save) if session.can_save else "nothing",
        "strategy": options["strategy"],
        "any_world_size": options["any_world_size"],
        "what is known of where the data stand": knows(data, advanced=advanced),
        "order": None if order is None or hasattr(data, "alike") else asdict(order),
        **alike_of(data),
    }
    failure = None if first is None else first.failure
    final = failure is None or is_mistake(failure)
    problem = "" if failure is None else f"the first batch could not be made: {type(failure).__name__}: {failure}"
    try:
        session.compare({} if problem else alike, problem=problem, final=final)
    except (ValueError, Trouble):
        if failure is not None:
            raise failure from None
        raise
    # From here on what is refused is refused on all ranks, as they have the same in their hands.
    if cadence.save_every < 0 or (max_steps is not None and max_steps < 0):
        raise ValueError(f"max_steps and save_every cannot be negative: {max_steps}, {cadence.save_every}")
    checked(cadence.memory_every)
    check_steps(session, max_steps)


def _same_data(session: BareSession, data: Any, options: dict[str, Any], max_steps: int | None) -> None:
    """Checks that all ranks have the data that the run began with. Collective; updates ``cut``, which says so."""
    # If only some ranks have Batches, and others a progress bar around them, those with Batches would wait here alone.
    if all(session.gather(hasattr(data, "check_samples"))):
        check_data_epochs(session, data)
        data.check_samples(session, max_steps)
        if options["cut"] is not None:
            options["cut"] = replace(options["cut"], samples=data.cut.samples)


def _source(
    session: BareSession, data: Iterable[T], first: Unknown[T] | None, options: Mapping[str, Any], *, advanced: bool
) -> BatchSource[T]:
    """The data, positioned where the run resumes."""
    resume, order = session.resume, options["order"]
    begins = session.step == (0 if resume is None else resume.step)
    if not begins and not advanced:
        check_goes_on(first)
    say_what_was_left(session, first)
    if resume is None or not begins:
        return source_of(data, first, None, session.rank, session.world_size, advanced=advanced)
    if order is not None and resume.manifest.order is not None:
        check_order(resume.manifest.order, order)
    place = getattr(data, "position", None)
    if not advanced and isinstance(place, Position):
        check_place(place, resume)
    source = source_of(data, first, resume, session.rank, session.world_size, advanced=advanced)
    if isinstance(source, StatefulLoader):
        problem = source.go_on()
        session.compare({}, problem=problem, final=source.failure is None or is_mistake(source.failure))
    return source


def _saved_too(
    session: BareSession,
    data: Any,
    source: BatchSource[Any],
    save: Callable[[Path], None] | Background,
    options: dict[str, Any],
    *,
    advanced: bool,
) -> Callable[[Path], None] | Background:
    """``save`` that also saves the data's position, and a remark on what that means. Changes ``any_world_size``."""
    if not source.any_world_size:
        if options["any_world_size"]:
            raise ValueError(
                f"any_world_size=True, and the state of {kind(data)} is each rank's own, which loads with as many "
                "ranks only: leave it out, or give Batches"
            )
        options["any_world_size"] = False
    if session.resume is None and not advanced and session.rank == 0:
        say_what_cannot_resume(source, data, session.world_size)
    return saved_with(save, source, session.rank)


def _saving(
    session: BareSession, save: Callable[[Path], None] | Background | None, cadence: Cadences, strategy: str
) -> Callable[[Path], None] | Background | None:
    """What the loop saves with; None: it saves nothing, and one line says so if the script wanted to."""
    if session.can_save:
        for name, every in asdict(cadence).items():
            if every and save is None:
                raise ValueError(f"{name}={every}, and nothing to save with: give save=, or leave {name} out")
        if save is not None:
            check_strategy(session.resume, strategy)
        return save
    if save is not None and session.rank == 0:
        log.warning("nothing will be saved: %s", NO_DIRECTORY)
    return None


def _loop(
    session: BareSession, source: BatchSource[T], run: _Run, max_steps: int | None, seed: int | None
) -> Generator[T, None, None]:
    def ahead() -> int:
        limit = MAX_STEPS_APART if max_steps is None else max(0, min(MAX_STEPS_APART, max_steps - session.step))
        return source.ahead(limit)

    run.rehearse()
    ready = session.meet(ahead()) > 0
    before, session.loop = session.loop, (loop := LeftLoop(session, run, source))
    if before is None or seed is None or not before.restore_rng():
        session.restore_rng(seed)
    if before is not None:
        # With the generators as they are now: who resumes from there begins with this loop.
        run.owes(before.make_up(later=run.saves))
        before = None  # It goes now, with its hooks.
    while ready:
        batch = run.begins(source.take())
        # The step that begins now counts as one of those that are left.
        limit = MAX_STEPS_APART if max_steps is None else min(MAX_STEPS_APART, max_steps - session.step - 1)
        session.begin_step(source.ahead(limit))
        loop.begins(batch)
        ended = False
        try:
            yield batch
            ended = True
        finally:
            if not ended:
                loop.leave()
        if loop.ends():
            return
        run.took(batch)
        ready = run.at(session.end_step())
        if ready:
            run.look()
    run.finish()


class _Run:
    """What happens at boundaries."""

    def __init__(
        self,
        session: BareSession,
        given: Callable[[Path], None] | Background | None,
        data: Any,
        save: Callable[[Path], None] | Background | None,
        cadence: Cadences,
        position: Callable[[], Position] | None,
        metric: Callable[[], float | None] | None,
        options: dict[str, Any],
    ) -> None:
        self._session, self._write, self._every = session, save, cadence.save_every
        self._memory = MemorySaves(session, 0 if save is None else cadence.memory_every, self._save_in_memory)
        self._position_of, self._metric, self._options = position, metric, options
        session.reports.saves_nothing = save is None
        # Where nothing is saved, nothing is lost by that alone.
        self._whole = None if save is None else WholeSteps(session, save)
        # Also where nothing is saved steps are counted.
        session.unstepped.known |= bool(optimizers_in(given))
        self._late, self._within = Due(), False
        self._survival = Survival(session, save, options, wanted=save is not None and bool(cadence.memory_every))
        # The position that the data give, or else the resume point's.
        says, resume = getattr(data, "position", None), session.resume
        self._position = resume.position if resume is not None else Position()
        if isinstance(says, Position):
            self._position = says
        # Checks that what is to be saved could be loaded again. Collective.
        self.rehearse = partial(rehearse, session, given if session.can_save else None)
        self._new = session.resume is None
        self.begins = ScheduleWatch(session, given).begins
        # The metric of the step that is being saved.
        self._value: float | None = None

    def took(self, batch: Any) -> None:
        """Counts the batch as trained: the run's position is the one after it.

        Raises:
            RuntimeError: Micro-batches of it are missing, so nothing of this step may be saved.
        """
        found = batch_in(batch)
        if found is not None:
            found.check_complete()
            self._learn(found)
        self.passes(place_behind(batch))
        step = self._session.step + 1
        # Until an optimizer steps a rank holds the boundary before, which is whole.
        self._within = self._whole is not None and self._whole.boundary(step)
        if self._within:
            return
        # The step's work is done. What follows are agreements and saves, which change nothing of the training.
        self._survival.mark(step, self._place())

    def passes(self, place: Position | None) -> None:
        """See `LoopRun`."""
        self._position = place or self._position

    def look(self) -> None:
        """Behind a boundary at which the loop goes on. Collective."""
        self._survival.look(self._place(), marked=not self._within)

    def _place(self) -> Position:
        return self._position if self._position_of is None else self._position_of()

    def _learn(self, batch: Batch[Any]) -> None:
        """Notes what the training calls, if each rank has its own part of the global batch."""
        by, made_by = batch.trained_by, batch.made_by
        if not self._session.copies.asked:
            return
        if by is not None and made_by is not None and made_by.alike[PART][1] == self._session.world_size:
            self._session.copies.know(by.model, *by.optimizers)

    def at(self, boundary: Boundary) -> bool:
        """Saves and drains as due. Returns whether the loop goes on."""
        if self._new:
            # An optimizer creates its state in its first step.
            self._new = False
            self.rehearse()
        if boundary.end:
            return False
        due, step = self._due_at(boundary), boundary.step
        # What the script calls worth saving is what it has just measured.
        whole = self._whole if due.any and not self._session.worth_saving else None
        if whole is not None and whole.put_off(boundary.carries, drain=due.drain):
            lacks = self._memory.at(step, saved=False, here=False)
            self._late = replace(due, to_disk=due.to_disk or lacks)
            return True
        self._late = Due()
        if due.drain:
            self._drain(step)
        self._save_between(step, due)
        return True

    @property
    def saves(self) -> bool:
        """See `LoopRun`."""
        return self._write is not None

    def make_up(self, *, behind: bool, later: bool) -> Due:
        """See `LoopRun`."""
        step, whole = self._session.step, self._whole
        lacks = self._settled(step)
        due = self._due_at(Boundary(step)) if behind else self._late
        due = replace(due, drain=False, to_disk=due.to_disk or lacks)
        if behind and whole is not None:
            whole.boundary(step)
        whole = whole if due.any and not self._session.worth_saving else None
        if whole is not None and whole.put_off(True, drain=False, later=later):
            return due
        if behind or due.any:
            self._save_between(step, due)
        if self._settled(step):
            self._save(self._value)
        return Due()

    def _settled(self, step: int) -> bool:
        """The next loop knows nothing of a save to memory that this one has begun: see `MemorySaves.at`. Collective."""
        if not self._memory.on:
            return False
        self._session.settle()
        return self._memory.at(step, saved=False, here=False)

    def owes(self, late: Due) -> None:
        """See `LoopRun`."""
        self._late = late

    def _drain(self, step: int) -> None:
        """Saves and ends this process, if the save has not failed."""
        if self._write is None or self._save(self._measure(), drain=True) is not None:
            if self._session.saves.of(step) is not None:
                # Nobody stays who could write what is in memory.
                self._session.saves.await_best(step, self._session.busy, saves.DRAIN_BEST_WAIT_SECONDS)
            self._session.leave_drained(stays=self._session.may_stay)
        else:
            self._session.drain_failed()

    def _save_between(self, step: int, due: Due) -> None:
        """What is due between two changes, on the disk or in memory. With a drain the step is saved already."""
        to_disk = due.to_disk and not due.drain
        metric = self._measure() if to_disk else None
        # What goes to memory first the agents bring to the disk, as long as they hear a master.
        through_memory = to_disk and self._memory.leads_to_disk
        if to_disk and not through_memory:
            self._save(metric, wait=False)
        self._value = metric
        late = due.to_memory and not due.drain
        if self._memory.at(step, saved=due.drain or to_disk, late=late, to_disk=through_memory):
            self._save(metric, wait=False)

    def _due_at(self, boundary: Boundary) -> Due:
        """What is due here, or was at an earlier boundary. On all ranks alike."""
        late, step, owed = self._late, boundary.step, self._memory.owes()
        return Due(
            boundary.drain or late.drain,
            late.to_disk or owed or self._due(step) or (boundary.save and self._write is not None),
            late.to_memory or self._memory.is_due(step),
        )

    def _due(self, step: int) -> bool:
        """Whether this step is to be saved; never if there is nothing to save with, or no directory."""
        if self._write is None:
            return False
        return self._session.worth_saving or (self._every > 0 and step % self._every == 0)

    def finish(self) -> None:
        """Makes the last save, and tells the agent that the training is over.

        Raises:
            Unlike: The ranks have not read the same of a stream. On all ranks.
        """
        save = None if self._write is None else lambda: self._save(self._measure()) is not None
        saves.end_training(self._session, save, self._options["order"], self._place)

    def _measure(self) -> float | None:
        if self._metric is None:
            return None
        # Some of these saves come of a drain or an order, and the training's draws must not depend on that.
        before = rng.capture()
        try:
            return self._metric()
        finally:
            rng.restore(before)

    def _save_in_memory(self, to_disk: bool) -> Ref | None:
        # A metric may take an evaluation, and what is only in memory is no candidate for the best checkpoint.
        return self._save(self._value if to_disk else None, wait=False, in_memory=True, make_durable=to_disk)

    def _save(
        self,
        metric: float | None,
        *,
        drain: bool = False,
        wait: bool = True,
        in_memory: bool = False,
        make_durable: bool = False,
    ) -> Ref | None:
        assert self._write is not None
        return self._session.save(
            self._write,
            position=self._place(),
            metric=metric,
            drain=drain,
            wait=wait,
            in_memory=in_memory,
            make_durable=make_durable,
            **self._options,
        )
