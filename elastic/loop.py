"""The training loop around a session's primitives: agree, hand out a batch, count it, save, drain, finish."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from .background_save import Background
from .batches import Batch, Batches
from .checkpoint import Order, Position, Ref
from .exchange import MAX_STEPS_APART, Boundary
from .rehearsal import rehearse
from .resuming import check_strategy
from .sampler import check_order
from .saving import SaveError
from .worker_session import NO_DIRECTORY, Session

log = logging.getLogger(__name__)

T = TypeVar("T")

FINAL_SAVE_TRIES = 3
FINAL_SAVE_PAUSE_SECONDS = 2.0


def steps(
    session: Session,
    data: Iterable[T],
    *,
    max_steps: int | None = None,
    save: Callable[[Path], None] | Background | None = None,
    save_every: int = 0,
    strategy: str = "ddp",
    any_world_size: bool | None = None,
    create_directory: bool | None = None,
    order: Order | None = None,
    position: Callable[[], Position] | None = None,
    metric: Callable[[], float | None] | None = None,
    seed: int | None = None,
) -> Iterator[T]:
    """One batch per optimizer step; the body of the ``for`` is the step. All ranks leave the loop at the same step.

    Ends when ``max_steps`` are done or some rank has no more data: a last save if the last step is not saved, then the
    agent is told that the training finished. If the world is about to change, the ranks save at one boundary and the
    process ends with ``Drained`` (exit code 83). A ``break`` is the script's own affair; call ``session.finish()``
    after it if the training is done.

    Args:
        session: The process's.
        data: ``Batches``, or any iterable of batches. Of other iterables one batch is fetched ahead, and where to
            begin after a resume is theirs to know.
        max_steps: Of the whole run, steps before the resume point included.
        save: Writes this rank's part of a checkpoint, see ``Session.save``, or ``background(state)``: while the
            training goes on. None: nothing is saved, and a drain goes back to the last commit. The same where there
            is no directory (``Session.can_save``); one line says so.
        save_every: Steps between saves; 0: only for drains and at the end. Without an effect where nothing is saved.
        strategy, any_world_size, create_directory: See ``Session.save``.
        order: Default: that of ``Batches``.
        position: Where the data stands after the present step; default: the batch's ``position_after``.
        metric: The run's tracked metric, asked for at each save.
        seed: Of the random generators, see ``Session.restore_rng``.

    Raises:
        ValueError: ``max_steps`` below 0 or ``save_every`` below 0; there is a directory, and ``save_every`` without
            ``save``; the resume point is another strategy's, or of another order of samples, or the data do not begin
            where it ended.
        RuntimeError: A step ended before all micro-batches of its ``Batch`` were computed.
        SaveError: The script's ``save`` has a mistake (before the first step, where ``rehearsal`` sees it, else at the
            first save), or the final save failed again and again.
        Drained: See above.
    """
    if save_every < 0 or (max_steps is not None and max_steps < 0):
        raise ValueError(f"max_steps and save_every cannot be negative: {max_steps}, {save_every}")
    save = _saving(session, save, save_every)
    if save is not None:
        check_strategy(session.resume, strategy)
    order = order or getattr(data, "order", None)
    _check_data(session, data, order, moves=position is None)
    source = _source(data)
    run = _Run(
        session,
        partial(rehearse, session, save),
        save=save,
        save_every=save_every,
        position=position,
        metric=metric,
        options={
            "order": order,
            "strategy": strategy,
            "any_world_size": any_world_size,
            "create_directory": create_directory,
        },
    )
    return _loop(session, source, run, max_steps, seed)


def _saving(
    session: Session, save: Callable[[Path], None] | Background | None, save_every: int
) -> Callable[[Path], None] | Background | None:
    """What the loop saves with; None: it saves nothing, which one line says where the script wanted it."""
    if session.can_save:
        if save_every and save is None:
            raise ValueError(f"save_every={save_every}, and nothing to save with: give save=, or leave save_every out")
        return save
    if save is not None and session.rank == 0:
        log.warning("nothing will be saved: %s", NO_DIRECTORY)
    return None


def _check_data(session: Session, data: Any, order: Order | None, *, moves: bool) -> None:
    """Do the data go on where the resume point ended? Nobody would notice samples that come twice, or never."""
    resume = session.resume
    if resume is None or session.step != resume.step:
        return
    if order is not None and resume.manifest.order is not None:
        check_order(resume.manifest.order, order)
    if moves and isinstance(data, Batches) and data.position != resume.position:
        raise ValueError(
            f"the data begin at {_place(data.position)}, and {resume.ref.name} ended at {_place(resume.position)}: "
            "give Batches(..., resume=session.resume)"
        )


def _place(position: Position) -> str:
    return f"sample {position.samples} of data epoch {position.data_epoch}"


def _loop(
    session: Session, source: _Source[T], run: _Run, max_steps: int | None, seed: int | None
) -> Generator[T, None, None]:
    def ahead() -> int:
        limit = MAX_STEPS_APART if max_steps is None else max(0, min(MAX_STEPS_APART, max_steps - session.step))
        return source.ahead(limit)

    run.rehearse()
    ready = session.meet(ahead()) > 0
    session.restore_rng(seed)
    while ready:
        batch = source.take()
        # The step that begins now is one of those that are left.
        limit = MAX_STEPS_APART if max_steps is None else min(MAX_STEPS_APART, max_steps - session.step - 1)
        session.begin_step(source.ahead(limit))
        ended = False
        try:
            yield batch
            ended = True
        finally:
            if not ended:
                session.abandon_step()
        run.took(batch)
        ready = run.at(session.end_step())
    run.finish()


class _Run:
    """What happens at boundaries."""

    def __init__(
        self,
        session: Session,
        rehearsal: Callable[[], None],
        *,
        save: Callable[[Path], None] | Background | None,
        save_every: int,
        position: Callable[[], Position] | None,
        metric: Callable[[], float | None] | None,
        options: dict[str, Any],
    ) -> None:
        self._session, self._write, self._every = session, save, save_every
        self._position_of, self._metric, self._options = position, metric, options
        self._position = Position() if session.resume is None else session.resume.position
        # Could what is to be saved be loaded again? Collective.
        self.rehearse, self._new = rehearsal, session.resume is None

    def took(self, batch: Any) -> None:
        """The batch was trained: the run's position is the one after it.

        Raises:
            RuntimeError: Micro-batches of it are missing: nothing of this step may be saved.
        """
        if isinstance(batch, Batch):
            batch.check_complete()
        self._position = getattr(batch, "position_after", self._position)

    def at(self, boundary: Boundary) -> bool:
        """Saves and drains as due; says whether the loop goes on."""
        if self._new:
            # An optimizer makes its state in its first step.
            self._new = False
            self.rehearse()
        if boundary.end:
            return False
        if boundary.drain:
            if self._write is None or self._save(drain=True) is not None:
                self._session.leave_drained()
            self._session.drain_failed()
        elif self._due(boundary.step):
            self._save(wait=False)
        return True

    def _due(self, step: int) -> bool:
        """This step is to be saved; never without something to save with, and somewhere to save to."""
        if self._write is None:
            return False
        return self._session.worth_saving or (self._every > 0 and step % self._every == 0)

    def finish(self) -> None:
        """The last save, and the word that the training is over."""
        for attempt in range(1, FINAL_SAVE_TRIES + 1):
            if self._write is None or self._session.step == 0 or self._save() is not None:
                self._session.finish()
                return
            # Nothing could end this wait early: the disk may have room again, or not.
            threading.Event().wait(FINAL_SAVE_PAUSE_SECONDS * attempt)
        raise SaveError(f"the last step, {self._session.step}, could not be saved in {FINAL_SAVE_TRIES} tries")

    def _save(self, *, drain: bool = False, wait: bool = True) -> Ref | None:
        assert self._write is not None
        return self._session.save(
            self._write,
            position=self._position if self._position_of is None else self._position_of(),
            metric=None if self._metric is None else self._metric(),
            drain=drain,
            wait=wait,
            **self._options,
        )


class _Source(ABC, Generic[T]):
    """Batches one after the other, and how many are certain to follow."""

    @abstractmethod
    def take(self) -> T:
        """The next batch, which ``ahead`` has promised."""

    @abstractmethod
    def ahead(self, limit: int) -> int:
        """Batches not taken yet, at most ``limit``; never more than there are."""


class _Counted(_Source[T]):
    """Knows its length: ``Batches``."""

    def __init__(self, data: Any) -> None:
        self._data, self._iterator = data, iter(data)

    def take(self) -> T:
        batch: T = next(self._iterator)
        return batch

    def ahead(self, limit: int) -> int:
        left: int | None = self._data.left
        return limit if left is None else min(limit, left)


class _Unknown(_Source[T]):
    """Any iterable: the only way to know whether there is one more is to fetch it."""

    def __init__(self, data: Iterable[T]) -> None:
        self._iterator = iter(data)
        self._next: list[T] = []

    def take(self) -> T:
        self.ahead(1)
        return self._next.pop()

    def ahead(self, limit: int) -> int:
        if limit and not self._next:
            for batch in self._iterator:
                self._next.append(batch)
                break
        return min(limit, len(self._next))


def _source(data: Iterable[T]) -> _Source[T]:
    return _Counted(data) if hasattr(data, "left") else _Unknown(data)
