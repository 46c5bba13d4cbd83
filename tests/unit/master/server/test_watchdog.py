"""What the master's watchdog counts: looks of a process that runs, not the time of any clock."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from dalsegno.master.server import watchdog
from dalsegno.master.server.watchdog import Watchdog


class Looks:
    """Stands in for the event between two looks: no time passes; the loop turns before those that are named."""

    def __init__(self, dog: Watchdog, most: int, turns: set[int]) -> None:
        self.dog, self.most, self.turns, self.count = dog, most, turns, 0

    def wait(self, seconds: float) -> bool:
        self.count += 1
        if self.count in self.turns:
            self.dog._beats += 1
        return self.count > self.most


class Ended(Exception):
    """In place of the process's end."""


def ends(turns: set[int], most: int = 100) -> int | None:
    """At which look it ends the process, of which ten in a row may find the loop where it was; None: it does not."""
    dog = Watchdog(10.0, None)
    looks = Looks(dog, most, turns)
    dog._over = looks  # type: ignore[assignment]

    def end(seconds: float) -> None:
        raise Ended(seconds)

    dog._end = end  # type: ignore[method-assign]
    try:
        dog._watch()
    except Ended:
        return looks.count
    return None


def test_only_looks_without_a_turn_count() -> None:
    """A stopped process looks once when it goes on, however long that took; one turn in between starts anew."""
    assert ends(set()) == 11
    assert ends({5}) == 15
    assert ends(set(range(0, 101, 10))) is None


@pytest.mark.parametrize("seconds", [0.1, 1.0])
def test_one_look_is_never_enough(seconds: float) -> None:
    """The loop may just be at work, however short the time that was asked for."""
    assert Watchdog(seconds, None)._looks >= 2


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_with_0_nobody_looks(seconds: float) -> None:
    """As with other flags. It meant the least, 2 s, in which a busy disk or machine ends a master."""

    async def looked() -> bool:
        running = asyncio.create_task(Watchdog(seconds, None).run())
        await asyncio.sleep(0)
        looks = any(thread.name == "dalsegno-watchdog" for thread in threading.enumerate())
        running.cancel()
        return looks

    assert asyncio.run(looked()) == (seconds > 0)
    for thread in threading.enumerate():
        if thread.name == "dalsegno-watchdog":
            thread.join(5)


def test_the_stacks_are_shown_by_a_python_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are built without it."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert b"test_the_stacks_are_shown" in watchdog._stacks()
