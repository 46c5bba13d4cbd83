"""What a candidate tells people while etcd refuses: once, the truth, and what they can do."""

from __future__ import annotations

import asyncio
import logging

import pytest

from dalsegno.master.leadership.candidate import Candidate
from dalsegno.master.leadership.standing import KeyOrder, Leader, Saw, Unanswered

FULL = "h1:2379: etcdserver: mvcc: database space exceeded"


class FullEtcd:
    """Everything can be read, and nothing written until there is room. Nobody leads."""

    def __init__(self) -> None:
        self.has_room, self.campaigns = False, 0
        self._written: Leader | None = None

    def carry_out(self, order: KeyOrder, mine: Leader, /) -> Saw | Unanswered:
        if order in (KeyOrder.CAMPAIGN, KeyOrder.ANNOUNCE):
            self.campaigns += 1
            if not self.has_room:
                return Unanswered(FULL)
            self._written = mine
        return Saw(self._written)

    def close(self) -> None: ...


class FallingEtcd:
    """Has no leader for a moment, then ever fewer members."""

    SAID = (
        Unanswered("h1:2379: no answer in time"),
        Unanswered("h2:2379: no answer in time"),
        Unanswered("h1:2379: connection refused (start it)", "start it"),
        Unanswered("h1:2379: no answer in time"),
        Unanswered("h2:2379: connection refused (start it)", "start it"),
        Unanswered("h2:2379: database space exceeded (make room)", "make room"),
        Unanswered("h1:2379: connection refused (start it)", "start it"),
        Saw(Leader("another", "h:2", 3)),
        Unanswered("h1:2379: connection refused (start it)", "start it"),
    )

    def __init__(self) -> None:
        self.asked = 0

    def carry_out(self, order: KeyOrder, mine: Leader, /) -> Saw | Unanswered:
        self.asked += 1
        return self.SAID[min(self.asked, len(self.SAID)) - 1]

    def close(self) -> None: ...


class Nobody:
    """Serves nobody."""

    def __init__(self) -> None:
        self.away: list[bool] = []
        self._over = asyncio.Event()

    async def lead(self) -> int:
        return 1

    async def run(self) -> None:
        await self._over.wait()

    def stop(self) -> None:
        self._over.set()

    def stand_by(self, leader: str | None, etcd_is_away: bool = False) -> None:
        self.away.append(etcd_is_away)


def test_an_etcd_that_can_be_read_and_not_written_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Each look answers and each campaign fails: that is not "away" and "back" again and again."""

    async def scene() -> None:
        key, server, led = FullEtcd(), Nobody(), asyncio.Event()
        candidate = Candidate(key, server, "h:1", said=lambda generation: led.set())
        running = asyncio.create_task(candidate.run())
        try:
            while key.campaigns < 5:
                await asyncio.sleep(0.01)  # why: its thread tells nobody
            assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
                f"cannot take the lead in etcd: {FULL}; trying again"
            ]
            assert server.away[-1]
            key.has_room = True
            await asyncio.wait_for(led.wait(), 10)
            assert [record.message for record in caplog.records if record.levelno == logging.WARNING][1:] == [
                "etcd says again who leads"
            ]
        finally:
            candidate.stop()
            await asyncio.wait_for(running, 10)

    with caplog.at_level(logging.INFO, logger="dalsegno"):
        asyncio.run(scene())


def test_what_a_person_can_do_is_said_once_when_it_is_known(caplog: pytest.LogCaptureFixture) -> None:
    """An outage that begins as an election is not known from its first answer. No reason comes twice."""

    async def scene() -> None:
        key = FallingEtcd()
        candidate = Candidate(key, Nobody(), "h:1")
        running = asyncio.create_task(candidate.run())
        try:
            while key.asked <= len(key.SAID):
                await asyncio.sleep(0.01)  # why: its thread tells nobody
        finally:
            candidate.stop()
            await asyncio.wait_for(running, 10)

    with caplog.at_level(logging.INFO, logger="dalsegno"):
        asyncio.run(scene())
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "cannot see in etcd who leads: h1:2379: no answer in time; trying again",
        "cannot see in etcd who leads: h1:2379: connection refused (start it); trying again",
        "cannot see in etcd who leads: h2:2379: database space exceeded (make room); trying again",
        "etcd says again who leads",
        "cannot see in etcd who leads: h1:2379: connection refused (start it); trying again",
    ]
