"""One master among several: looks at the key, leads when it has it, and stands by otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from ..record.store import StoreAway, StoreError, StoreUnavailable, Superseded, is_news
from .standing import (
    Event,
    KeyOrder,
    Leader,
    LeadershipState,
    Replaced,
    Saw,
    Standing,
    Stop,
    TookOver,
    Unanswered,
    after,
    leads,
    order_at,
)

__all__ = ["Candidate", "Key", "SameAddress", "Serving"]

log = logging.getLogger(__name__)

# Seconds between two tries to take the record over from a store that is away.
AGAIN_SECONDS = 0.5
# Seconds that a master which was told to stop gives etcd for the deletion of its key: it would end by itself.
RESIGN_SECONDS = 1.5


class SameAddress(StoreError):
    """Another master advertises our address; one line for a person."""


class Serving(Protocol):
    """What serves agents while this master leads."""

    async def lead(self) -> int:
        """Takes the record over and serves; returns its generation. Raises StoreError."""

    async def run(self) -> None:
        """Serves until `stop`. Raises Superseded, StoreError."""

    def stop(self) -> None:
        """Ends `run` after the present turn."""

    def stand_by(self, leader: str | None, etcd_is_away: bool = False) -> None:
        """Sends agents to this address from now on; empty: nobody is known to; None: this one ends.

        `etcd_is_away`: why nobody is known to, or that one may do so no longer.
        """


class Key(Protocol):
    """See `leader_key.LeaderKey`."""

    def carry_out(self, order: KeyOrder, mine: Leader, /) -> Saw | Unanswered: ...

    def close(self) -> None: ...


class Candidate:
    """Use `run`, which ends after `stop`, or with an error.

    Args:
        key: the leader's, its own from here on.
        server: serves while this master leads.
        address: at which agents find it.
        said: called with each generation under which it leads.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        key: Key,
        server: Serving,
        address: str,
        *,
        said: Callable[[int], None] = lambda generation: None,
        clock: Callable[[], float] = time.monotonic,
        me: str = "",
    ) -> None:
        self._key, self._server, self._said = key, server, said
        self._clock = clock
        self._state = LeadershipState(me or secrets.token_hex(8), address)
        # The other leader as it was said last; what was said of an etcd that does not answer, since somebody led:
        # whether it was a campaign, and what a person can do.
        self._named, self._troubles = "", set[tuple[bool, str]]()
        self._term: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        # One thread: the key's calls wait for etcd, and the loop answers agents meanwhile.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dalsegno-leader")

    def stop(self) -> None:
        """Has `run` end: after the last turn the key is deleted, so that another master leads at once."""
        self._learn(Stop())

    async def run(self) -> None:
        """Runs until `stop`. Raises SameAddress, StoreError."""
        try:
            while self._state.standing is not Standing.RESIGNING:
                await self._next()
            await self._end_term()
        except StoreError:
            self._learn(Stop())
            raise
        finally:
            if self._term is not None:
                self._term.cancel()
            if self._state.standing is Standing.RESIGNING:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._obey(KeyOrder.RESIGN), RESIGN_SECONDS)
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _next(self) -> None:
        """Carries out the next order when it is due, or draws the consequences of what was learnt meanwhile."""
        self._changed.clear()
        order, due = order_at(self._state)
        pause = due - self._clock()
        if pause > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause)
        else:
            await self._obey(order)
        if self._state.clashing:
            raise SameAddress(
                f"another master of this job advertises {self._state.address}, too: give each its own --advertise"
            )
        await self._settle()

    async def _obey(self, order: KeyOrder) -> None:
        mine = Leader(self._state.me, self._state.address, self._state.generation)
        answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._key.carry_out, order, mine)
        self._say(order, answer)
        self._learn(answer)

    def _learn(self, event: Event) -> None:
        self._state = after(self._state, event, self._clock())
        self._changed.set()

    def _say(self, order: KeyOrder, answer: Saw | Unanswered) -> None:
        """Logs what is news for a person."""
        if isinstance(answer, Unanswered):
            campaigned = order is KeyOrder.CAMPAIGN
            known = {cure for was_campaign, cure in self._troubles if was_campaign is campaigned}
            # An outage may begin with "no answer in time", as each loss of etcd's leader does, and be another one soon.
            if not known or (answer.cure and answer.cure not in known):
                if campaigned:
                    log.warning("cannot take the lead in etcd: %s; trying again", answer.why)
                else:
                    log.warning("cannot see in etcd who leads: %s; trying again", answer.why)
            self._troubles.add((campaigned, answer.cure))
        elif self._troubles and answer.leader is not None:
            # That nobody leads is no news of an etcd that is full: it can be read, and not written.
            log.warning("etcd says again who leads")
            self._troubles.clear()

    async def _settle(self) -> None:
        """Begins to lead, or ends it, as the state says."""
        if self._term is not None and self._term.done():
            await self._end_term()
        if not leads(self._state):
            await self._end_term()
            if self._named != self._state.named:
                self._named = self._state.named
                log.info("standing by: %s", f"{self._named} leads" if self._named else "nobody is known to lead")
            self._server.stand_by(self._elsewhere, bool(self._troubles))
        elif self._term is None:
            self._named = ""
            self._term = asyncio.create_task(self._lead())
            self._term.add_done_callback(lambda _: self._changed.set())

    async def _end_term(self) -> None:
        """Ends this master's lead after its present turn. Raises what has ended it before."""
        term, self._term = self._term, None
        if term is not None:
            self._server.stop()
            # Agents go at once: the last turn may wait for etcd.
            self._server.stand_by(self._elsewhere, bool(self._troubles))
            await term

    @property
    def _elsewhere(self) -> str | None:
        """Where agents go while this master does not lead: one that ends must not have them wait here."""
        return self._state.named or (None if self._state.standing is Standing.RESIGNING else "")

    async def _lead(self) -> None:
        """Takes the record over and serves, as long as this master leads. Raises StoreError."""
        try:
            generation = await self._taken_over()
            if generation is None:
                return
            log.info("leading, generation %d", generation)
            self._learn(TookOver(generation))
            self._said(generation)
            await self._server.run()
        except Superseded as error:
            log.warning("%s: standing by", error)
            self._learn(Replaced())
        except StoreAway:
            # Of one that is to end; the next leader hears from the agents what was not stored.
            if leads(self._state):
                raise

    async def _taken_over(self) -> int | None:
        """The record's generation; None: another master leads meanwhile. Etcd may be away for any time."""
        said = set[str]()
        while leads(self._state):
            try:
                generation = await self._server.lead()
                return generation if leads(self._state) else None
            except StoreUnavailable as error:
                if is_news(error, said):
                    log.warning("%s; trying again", error)
            await asyncio.sleep(AGAIN_SECONDS)
        return None
