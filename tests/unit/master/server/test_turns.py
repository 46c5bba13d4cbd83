"""Turns that take long leave time for calls, and events share the next one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dalsegno.master.brain.events import Event, Reply
from dalsegno.master.record.store import MemoryStore
from dalsegno.master.server import driver as driver_module
from dalsegno.master.server.driver import Driver
from dalsegno.protos import control_pb2 as pb
from tests.support.jobs.fake_brain import FakeBrain, FakeState

REST = 0.5


class Slow(FakeBrain):
    """Each turn takes 10 s of its own clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.turns: list[int] = []

    def handle_all(self, state: FakeState, events: list[Event], now: float) -> tuple[FakeState, list[Reply | None]]:
        self.now += 10.0
        self.turns.append(len(events))
        return super().handle_all(state, events, now)


def played(scene: Callable[[Driver, Slow], Awaitable[None]]) -> None:
    async def play() -> None:
        brain = Slow()
        driver = Driver(brain, MemoryStore(), lambda: None, clock=lambda: brain.now)
        running = asyncio.create_task(driver.run())
        await scene(driver, brain)
        driver.stop()
        await running

    asyncio.run(play())


def join(driver: Driver, request: int) -> asyncio.Future[Any]:
    caller = pb.Caller(job_id="job", node="a", incarnation="1", request=request)
    return asyncio.ensure_future(driver.call(pb.JoinRequest(caller=caller)))


@pytest.mark.slow
def test_what_comes_after_a_long_turn_shares_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "MOST_REST", REST)

    async def scene(driver: Driver, brain: Slow) -> None:
        await join(driver, 1)
        second = join(driver, 2)
        await asyncio.sleep(REST / 5)
        third = join(driver, 3)
        await asyncio.gather(second, third)
        assert brain.turns == [1, 2]

    played(scene)


def test_a_full_turn_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "MOST_REST", 30.0)
    monkeypatch.setattr(driver_module, "TURN_LIMIT", 2)

    async def scene(driver: Driver, brain: Slow) -> None:
        await join(driver, 1)
        await asyncio.wait_for(asyncio.gather(join(driver, 2), join(driver, 3)), 20)
        assert brain.turns == [1, 2]

    played(scene)


class Held(MemoryStore):
    """Cannot be written until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def save(self, *arguments: Any) -> None:
        assert self.free.wait(20)
        super().save(*arguments)


def test_who_is_heard_is_told_of_a_store_that_is_away() -> None:
    """After some seconds in which the master ran; what follows from a sign of life is not recorded either."""

    async def play() -> None:
        brain, store = Slow(), Held()
        driver = Driver(brain, store, lambda: None, clock=lambda: brain.now)
        running = asyncio.create_task(driver.run())

        async def hears(seconds: float) -> bool:
            """Whether an agent learns of it then."""
            brain.now += seconds
            reply = await driver.call(pb.HeartbeatRequest())
            return bool(reply.message.unrecorded)

        assert not await hears(0.0)
        joining = join(driver, 1)
        while not brain.turns:
            await asyncio.sleep(0)
        assert not await hears(0.0)
        assert not await hears(60.0), "it stood still"
        told = [await hears(0.5) for _ in range(8)]
        assert told == [False] * 6 + [True] * 2
        store.free.set()
        await joining
        assert not await hears(0.5)
        driver.stop()
        await running

    asyncio.run(play())
