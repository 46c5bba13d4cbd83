"""Ranks as threads of one process: a group whose collectives are real, for tests of what several nodes do together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from dalsegno.elastic.rank.board import LocalStore
from dalsegno.elastic.rank.collective import ByMessages, Done, Pending, PendingGather
from dalsegno.elastic.rank.envelopes import Statement, packed, unpacked

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


class Gathered:
    """A gather under way: its envelopes are opened when somebody waits for it."""

    def __init__(self, envelopes: list[bytes]) -> None:
        self._envelopes = envelopes

    def wait(self) -> list[Any]:
        return unpacked(self._envelopes)


class Threads(ByMessages):
    """The group of one rank.

    Args:
        rank: of it.
        meeting: of all of them.
    """

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world_size, self._meeting = rank, len(meeting.messages), meeting

    def gather(self, message: Any) -> list[Any]:
        return self.start_gather(message).wait()

    def meet(self, said: Statement, *, patience_seconds: float | None = None) -> None:
        self.gather(said)

    def start_gather(self, message: Any) -> PendingGather:
        return Gathered(self._exchange("messages", packed(message)))

    def _exchange(self, kind: str, own: Any) -> list[Any]:
        # As on the wire: nobody else has the same object.
        self._meeting.messages[self.rank] = kind, own
        self._meeting.meet()
        found = list(self._meeting.messages)
        self._meeting.meet()
        if any(other != kind for other, _ in found):
            raise Gone(f"gloo may abort ranks that are in unlike collectives: {[other for other, _ in found]}")
        return [one for _, one in found]

    def channel(self, use: str) -> Any:
        if use not in ("board", "verification"):
            raise NotImplementedError(use)
        return self._meeting.stores.setdefault(use, LocalStore())

    def start_max(self, values: Sequence[int]) -> Pending:
        return Done([max(column) for column in zip(*self._exchange("max", list(values)), strict=True)])

    def start_sum(self, values: Sequence[int]) -> Pending:
        return Done([sum(column) for column in zip(*self._exchange("sum", list(values)), strict=True)])

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
