"""Ranks as threads of one process: a group whose collectives are real, for tests of what several nodes do together."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from dalsegno.elastic.rank.board import LocalStore
from dalsegno.elastic.rank.collective import Done, Pending, PendingGather

T = TypeVar("T")

SECONDS = 30.0


class Gone(RuntimeError):
    """A rank has ended in the middle, and no collective works any more."""


class Meeting:
    """Where ranks meet. Unlike with `threading.Barrier`, who was met is met, even if some end right behind it."""

    def __init__(self, world: int) -> None:
        self.messages: list[Any] = [None] * world
        self.left = False
        self.stores: dict[str, LocalStore] = {}
        self._changed, self._here, self._times = threading.Condition(), 0, 0

    def meet(self) -> None:
        with self._changed:
            self._here, time = self._here + 1, self._times
            if self._here == len(self.messages):
                self._here, self._times = 0, self._times + 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._times > time or self.left, SECONDS)
            if self._times == time:
                raise Gone("a rank is gone")

    def leave(self) -> None:
        with self._changed:
            self.left = True
            self._changed.notify_all()


class Threads:
    """The group of one rank.

    Args:
        rank: of it.
        meeting: of all of them.
    """

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world_size, self._meeting = rank, len(meeting.messages), meeting

    def gather(self, message: Any, *, patience_seconds: float | None = None) -> list[Any]:
        # As on the wire: nobody else has the same object.
        self._meeting.messages[self.rank] = json.dumps(message)
        self._meeting.meet()
        found = [json.loads(one) for one in self._meeting.messages]
        self._meeting.meet()
        return found

    def start_gather(self, message: Any) -> PendingGather:
        return Done(self.gather(message))

    def channel(self, use: str) -> Any:
        if use not in ("board", "verification"):
            raise NotImplementedError(use)
        return self._meeting.stores.setdefault(use, LocalStore())

    def broadcast(self, message: Any) -> Any:
        return self.gather(message)[0]

    def max(self, values: Sequence[int]) -> list[int]:
        return [max(column) for column in zip(*self.gather(list(values)), strict=True)]

    def start_max(self, values: Sequence[int]) -> Pending:
        return Done(self.max(values))

    def start_sum(self, values: Sequence[int]) -> Pending:
        return Done([sum(column) for column in zip(*self.gather(list(values)), strict=True)])

    def sum(self, value: float) -> float:
        return float(sum(self.gather(value)))

    def barrier(self) -> None:
        self._meeting.meet()

    @contextmanager
    def unless(self, gone: Callable[[], bool]) -> Iterator[None]:
        yield

    def has_lost_a_peer(self) -> bool:
        return self._meeting.left

    def close(self) -> None:
        return None


def together(world: int, work: Callable[[Threads], T]) -> list[T | BaseException]:
    """What `work` returned on each rank, or what ended it there."""
    meeting = Meeting(world)

    def one(rank: int) -> T | BaseException:
        try:
            return work(Threads(rank, meeting))
        except BaseException as error:
            meeting.leave()
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))
