"""A rank whose part of a save has failed, while the others may wait for it in a collective of the script's own.

Its error is caught, so that the save fails on all ranks and none has to end. It then waits for the others in the
session's group. Where there is a collective in what they save with (a barrier behind rank 0's write), they wait there
for this rank, and nobody would ever say that the disk is full. From here that looks like ranks that still write, except
that no file changes. So this rank says what it has, and ends after a while, which breaks their collective.

It sees what its own node sees: neither another one's memory nor, at once, what that writes to a volume. Where an agent
is there and the world has several nodes it leaves its end to the master, which hears what each of them writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from ..rank.collective import Collective, PeerLost, PeerSilent
from ..rank.exits import insist
from ..rank.identity import Identity
from ..rank.link import Link
from ..rank.remarks import remark
from .apart import PATIENCE_SHARE
from .content import Own
from .outcomes import SaveError
from .save_errors import describe
from .saving_reports import SavingReports, Written

# Seconds after which it is said, and between two looks at what the others write.
SAY_SECONDS, LOOK_SECONDS = 10.0, 2.0
# Seconds that it waits where there is no agent, and so no --stall-timeout.
ALONE_SECONDS = 450.0
ADVICE = "no barrier is needed in what saves, as the session waits for all ranks"


@contextmanager
def unless_stranded(
    collective: Collective, identity: Identity, link: Link | None, own: Own, said: Mapping[str, Any]
) -> Iterator[None]:
    """Around the collective in which this rank says how its part of a save went.

    Args:
        collective, identity, link: The session's.
        own: The save.
        said: What this rank says. Nothing is done unless that is a problem.

    Raises:
        SaveError: The others have not come, and have written nothing for too long. This process ends. `SavedByNobody`:
            One of them is gone.
        PeerLost: One of them is gone, and its notice was over.
    """
    if "text" not in said or identity.world_size == 1:
        yield
        return
    patience = ALONE_SECONDS if identity.alone else PATIENCE_SHARE * identity.stall_timeout
    if not identity.alone and identity.nodes > 1:
        patience = 0.0
    size = Written(own.path).read if own.name else (lambda: 0)
    stranded = Stranded(identity.rank, own, said["text"], patience, size, identity.stall_timeout)
    # The master's patience is that with a save for as long as this waits, not that with a step.
    try:
        told = link if own.name else None
        with SavingReports(told, own.name, size, problem=said["text"]), collective.unless(stranded.look):
            yield
    except PeerLost as lost:
        if link is not None and link.ending:
            raise
        stranded.is_left(lost)


class Unawaited:
    """One rank's copies for saves in memory, which no rank waits for.

    If one cannot be made this rank goes on to the next step all the same. Where the others wait for it in a barrier of
    what saves, nobody would ever hear of it.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity, self._said = identity, identity.world_size == 1

    def note(self, own: Own, error: BaseException | None) -> None:
        """Says why this rank has no copy for a save: once, until it has one again, as memory may stay full."""
        if error is None:
            self._said = self._identity.world_size == 1
        elif not self._said:
            self._said = True
            remark(
                "rank %d could not copy its part of step %d: %s. It goes on; if the other ranks wait for it in a"
                " barrier, the run stands still: %s",
                self._identity.rank,
                own.content.step,
                describe(error),
                ADVICE,
            )


class SavedByNobody(SaveError, PeerLost):
    """A rank could not write its part, and a peer is gone. Which of them was the cause of the other is not known."""


class Stranded:
    """One rank that waits with a problem.

    Args:
        rank: It.
        own: The save.
        text: The problem.
        patience_seconds: It waits so long without a byte; 0: for ever, as far as it is concerned.
        size: Measures what is written.
        masters_seconds: The master's patience with all nodes; 0: it has no limit, or there is no master.
    """

    def __init__(
        self,
        rank: int,
        own: Own,
        text: str,
        patience_seconds: float,
        size: Callable[[], int],
        masters_seconds: float = 0.0,
    ) -> None:
        self._rank, self._own, self._text, self._patience, self._size = rank, own, text, patience_seconds, size
        self._masters_seconds = masters_seconds
        self._say = min(SAY_SECONDS, (patience_seconds or masters_seconds or 2 * SAY_SECONDS) / 2)
        self._bytes, self._told = size(), False
        self._began = self._moved = self._looked = time.monotonic()

    def look(self) -> bool:
        """Called again and again while this rank waits. False: it waits on.

        Raises:
            SaveError: It has waited for too long.
        """
        now = time.monotonic()
        if not self._told and now - self._began >= self._say:
            self._tell()
        if now - self._looked >= LOOK_SECONDS:
            self._looked, size = now, self._size()
            if size != self._bytes:
                self._bytes, self._moved = size, now
            elif 0 < self._patience <= now - self._moved:
                self._end()
        return False

    def _tell(self) -> None:
        self._told = True
        ends = "it waits"
        if self._patience > 0:
            ends = f"in {self._patience:.0f} s without a byte from them it ends"
        elif self._masters_seconds > 0:
            ends = f"in {self._masters_seconds:.0f} s without a byte from any node the master ends this world"
        remark(
            "rank %d cannot save its part of %s, and the other ranks have not come yet: %s. If they wait for it in a"
            " barrier, %s; mend what it says, and %s",
            self._rank,
            self._own.name or f"step {self._own.content.step}",
            self._text,
            ends,
            ADVICE,
        )

    def _end(self) -> None:
        # The group's threads would delay the end of this process for as long as they wait.
        insist(1)
        raise SaveError(
            f"{self._line}; and the other ranks have written nothing for {self._patience:.0f} s, so they may wait for"
            f" this one in a barrier: {ADVICE}"
        )

    def is_left(self, lost: PeerLost) -> NoReturn:
        """The wait has failed.

        Raises:
            SaveError: The others have not come for as long as the group waits. This process ends.
            SavedByNobody: One of them is gone.
        """
        if isinstance(lost, PeerSilent):
            insist(1)
            raise SaveError(f"{self._line}; and the other ranks have not come: {lost}; {ADVICE}") from lost
        raise SavedByNobody(f"{self._line}; and a rank is gone: {lost}") from lost

    @property
    def _line(self) -> str:
        return f"saving step {self._own.content.step} failed: {self._text} (rank {self._rank})"
