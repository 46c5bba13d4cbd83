"""A drain that cannot wait for the next exchange: all ranks agree on a boundary beside the steps.

Exchanges are k steps apart, and k comes from the pace so far. If steps of 2 ms become steps of 2 s, the next exchange
is a minute away, and a leaver has less time than that. So a rank that is told to drain calls the others over the store
of this world. Each rank has a thread that only waits for such a call. The thread answers at once with the step that its
rank is in, whatever the rank itself is waiting for. The rank then does not end that step before it knows all answers.
The boundary is the end of the latest of these steps: no rank has ended it yet, and all learn of it before they do. All
this costs nothing while nobody calls.

A rank that finishes the training calls, too: where another has gone on, or goes on later, both learn that. Else the
first would wait in a collective of the session's, and the second in one of the script's, or of a save's.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

from .agreement import Refusal

log = logging.getLogger(__name__)

# Seconds in which all must answer. Otherwise the call has no effect, and the next exchange carries the flag.
PATIENCE_SECONDS = 10.0
# Seconds of one wait for a call; after each the thread waits again.
_LONG_SECONDS = 86400.0
_CLOSE_SECONDS = 5.0
_MOMENT_SECONDS = 5.0
_NOTHING = -1
_APART = "apart"


class Channel(Protocol):
    """What is needed of torch's store."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def multi_get(self, keys: Sequence[str]) -> list[bytes]: ...
    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None: ...


class Ballot:
    """What one rank knows of the call. Pure; to share it between threads, lock it.

    Attributes:
        round: Number of calls that are over.
        answered: The rank has answered with that step, and must not end it before it knows the boundary.
        boundary: The step at whose end all act; None: not known.
        place: How far the rank has come: twice the step that it has begun last, and one more if it has ended that.
        finished: A rank that has finished the training, and its place.
        finishing: This round's call was that one's, so nobody drains at its boundary.
    """

    def __init__(self) -> None:
        self.round, self.place = 0, 0
        self.answered = self.finishing = False
        self.boundary: int | None = None
        self.finished: tuple[int, int] | None = None

    def begin(self, step: int) -> None:
        """The rank begins this step: the next one, or a step that it has left, once more or as if it were done.

        Where it has answered with a step that it left, it drains at the first one that it ends from there on: all ranks
        leave a loop in the same step.
        """
        self.place = 2 * step

    @property
    def step(self) -> int:
        """The step that the rank is in, or begins with."""
        return _step_at(self.place)

    def goes_apart(self, place: int) -> tuple[int, int] | None:
        """The rank that has finished the training before this place, to which this one comes; and its place."""
        return self.finished if self.finished is not None and place > self.finished[1] else None

    @property
    def waits(self) -> bool:
        """Whether the step must not end yet."""
        return self.answered and self.boundary is None

    def end(self) -> bool:
        """The rank ends its step. Returns whether all ranks act at this boundary."""
        assert not self.waits
        here = self.boundary is not None and self.step >= self.boundary
        drains = here and not self.finishing
        self.place = 2 * self.step + 1
        if here:
            self._close()
        return drains

    def answer(self) -> int:
        """A call was heard. Returns the rank's step, which does not end before all have answered."""
        self.answered = True
        return self.step

    def decide(self, boundary: int) -> None:
        """All have answered and the latest step is ``boundary``; below 0: some have not answered in time."""
        if boundary < 0:
            self._close()
        else:
            self.boundary = boundary

    def _close(self) -> None:
        self.round, self.answered, self.boundary, self.finishing = self.round + 1, False, None, False


class Hurry:
    """One rank's end of the channel. For the main thread, except the methods that its own thread runs.

    Args:
        rank, world_size: The session's.
        mine: The main thread's connection to the store.
        waiting: The thread's own connection to the same store.
    """

    def __init__(self, rank: int, world_size: int, mine: Channel, waiting: Channel) -> None:
        self._rank, self._world_size, self._mine, self._waiting = rank, world_size, mine, waiting
        self._ballot, self._changed = Ballot(), threading.Condition()
        self._called = -1
        self._closing, self._failed = False, ""
        self._thread = threading.Thread(target=self._run, name="dalsegno-hurry", daemon=True)
        self._thread.start()
        # A thread that needs the interpreter while Python ends would abort the process.
        atexit.register(self.close)

    def begin(self, step: int, *, call: bool) -> None:
        """The main thread begins a step.

        Args:
            step: Its number.
            call: This rank was told to drain, and no exchange in this step says so.

        Raises:
            Refusal: Another rank has finished the training, and will not make this step.
        """
        with self._changed:
            finished = self._ballot.goes_apart(2 * step)
            if finished is None:
                self._ballot.begin(step)
        if finished is not None:
            self._refuse(_apart(*finished, self._rank, 2 * step))
        if call:
            self._call("")

    def finish(self) -> None:
        """This rank finishes the training: no other one may have come further, or do so from now on.

        Raises:
            Refusal: Another rank has.
        """
        with self._changed:
            place, number = self._ballot.place, self._ballot.round
        self._call(f"{self._rank} {place}")
        try:
            self._look_for_others(place, number)
        except RuntimeError as error:
            log.debug("what the other ranks do is not known: %s", error)

    def apart(self) -> str:
        """Why no rank may go on, if one has finished the training and another trains on; else nothing."""
        with self._changed:
            if self._ballot.finished is None:
                return ""  # without a question to the store, which may be gone
        try:
            return self._mine.get(_APART).decode() if self._mine.check([_APART]) else ""
        except RuntimeError:
            return ""

    def _refuse(self, line: str) -> NoReturn:
        """Raises Refusal, also on ranks that lose this one by it."""
        with contextlib.suppress(RuntimeError):
            self._mine.set(_APART, line)
        raise Refusal(line)

    def _look_for_others(self, place: int, number: int) -> None:
        """Looks once how far the others have come."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ballot.boundary is not None or self._ballot.round != number or bool(self._failed),
                3 * PATIENCE_SECONDS,
            )
            if self._ballot.boundary is None or self._ballot.round != number:
                return  # Not all have answered: what a rank that stands still does is not known.
        for rank, other in enumerate(map(int, self._places(self._mine, number))):
            if other > place:
                self._refuse(_apart(self._rank, place, rank, other))

    def _places(self, store: Channel, number: int) -> list[bytes]:
        """How far each rank had come as it answered; all have."""
        return store.multi_get([_place(number, rank) for rank in range(self._world_size)])

    def _call(self, finishes: str) -> None:
        """Has all threads answer, unless they do already. ``finishes``: why, if that is no drain."""
        with self._changed:
            number = self._ballot.round
            called = self._ballot.answered or self._called == number
        if called:
            return
        self._called = number
        try:
            if self._mine.add(f"{number}/called", 1) == 1:
                ears = [_ear(number, rank) for rank in range(self._world_size)]
                self._mine.multi_set(ears, [finishes] * len(ears))
        except RuntimeError as error:
            log.warning("the other ranks cannot be told to hurry: %s", error)

    def end(self) -> bool:
        """The main thread ends the step. Returns whether all ranks drain at this boundary.

        Raises:
            RuntimeError: The store is gone, so what the others have agreed on cannot be known.
            Refusal: Another rank has finished the training in the middle of this step.
        """
        with self._changed:
            if not self._changed.wait_for(self._is_decided, 3 * PATIENCE_SECONDS):
                # This process may have stood still itself: its other thread knows more in a moment.
                self._changed.wait_for(self._is_decided, _MOMENT_SECONDS)
            if self._ballot.waits:
                raise RuntimeError(
                    f"the ranks were about to agree on a boundary, and the store is gone: {self._failed or 'no answer'}"
                )
            place = 2 * self._ballot.step + 1
            finished = self._ballot.goes_apart(place)
            drains = finished is None and self._ballot.end()
        if finished is not None:
            self._refuse(_apart(*finished, self._rank, place))
        return drains

    def _is_decided(self) -> bool:
        return not self._ballot.waits or bool(self._failed)

    def close(self) -> None:
        """Ends the thread."""
        if self._closing:
            return
        self._closing = True
        atexit.unregister(self.close)
        with self._changed:
            number = self._ballot.round
            self._changed.notify_all()
        try:
            self._mine.set(_ear(number, self._rank), "")
        except RuntimeError as error:
            log.debug("the store is gone: %s", error)
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._hear(self._ballot.round)
        except Exception as error:
            with self._changed:
                self._failed = str(error) or type(error).__name__
                self._changed.notify_all()
            log.debug("nobody hurries this rank any more", exc_info=error)

    def _hear(self, number: int) -> None:
        """Waits for one call, and handles it to its end."""
        store, since = self._waiting, time.monotonic()
        try:
            store.wait([_ear(number, self._rank)], timedelta(seconds=_LONG_SECONDS))
        except RuntimeError:
            if time.monotonic() - since < 0.9 * _LONG_SECONDS:
                raise
            return  # nobody has called for that long
        if self._closing:
            return
        finishes = store.get(_ear(number, self._rank)).decode().split()
        with self._changed:
            if finishes:
                self._ballot.finished, self._ballot.finishing = (int(finishes[0]), int(finishes[1])), True
            self._ballot.answer()
            place = self._ballot.place
        store.set(_place(number, self._rank), str(place))
        if store.add(f"{number}/answers", 1) == self._world_size:
            boundary = _step_at(max(map(int, self._places(store, number))))
            store.compare_set(f"{number}/boundary", "", str(boundary))
        boundary = self._boundary(number)
        with self._changed:
            self._ballot.decide(boundary)
            self._changed.notify_all()
            # The next call belongs to the next round.
            self._changed.wait_for(lambda: self._ballot.round > number or self._closing)

    def _boundary(self, number: int) -> int:
        key = f"{number}/boundary"
        try:
            self._waiting.wait([key], timedelta(seconds=PATIENCE_SECONDS))
        except RuntimeError:
            # Some rank has not answered. The first rank to get here decides for all, and a late answer may itself be
            # first.
            return int(self._waiting.compare_set(key, "", str(_NOTHING)))
        return int(self._waiting.get(key))


def _ear(number: int, rank: int) -> str:
    return f"{number}/ear/{rank}"


def _step_at(place: int) -> int:
    return (place + 1) // 2


def _place(number: int, rank: int) -> str:
    return f"{number}/place/{rank}"


def _apart(first: int, place: int, other: int, further: int) -> str:
    where = f"behind step {place // 2}" if place % 2 else f"in the middle of step {place // 2}"
    there = f"is behind step {further // 2}" if further % 2 else f"goes on with step {further // 2}"
    return (
        f"rank {first} has finished the training {where}, and rank {other} {there}: all ranks"
        " have to leave the loop in the same step. Let that depend on something that they have alike, such as s.sum(…)"
        " of what one of them has found"
    )


def open_hurry(collective: Any) -> Hurry | None:
    """A channel beside a collective that has a store; None if it has none."""
    channel = getattr(collective, "channel", None)
    if channel is None:
        return None
    try:
        return Hurry(collective.rank, collective.world_size, channel("hurry"), channel("hurry"))
    except (RuntimeError, NotImplementedError) as error:
        log.debug("no channel beside the exchange: %s", error)
        return None
