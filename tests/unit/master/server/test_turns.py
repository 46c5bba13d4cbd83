"""Turns that take long leave time for calls, and events share the next one."""

from __future__ import annotations

import asyncio
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
