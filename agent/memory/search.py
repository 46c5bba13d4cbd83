"""Where one part of a memory checkpoint is looked for, without a call."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator

import grpc

from dalsegno.protos.peer_address import shown

from .calls import PeerError

__all__ = ["Search"]

# So often an agent is asked that was named by another one, and does not have the part yet.
MOST_EARLY = 10


class Search:
    """With those that are known to have it, and with those that these name.

    Args:
        addresses: of agents that have it, as the master says.
        own_address: is not asked.
    """

    def __init__(self, addresses: Iterable[str], own_address: str) -> None:
        self._own = own_address
        self._told = shuffled(address for address in addresses if address != own_address)
        # Those of the present round, and those that may be asked in the next one.
        self._now: list[str] = []
        self._later = list(self._told)
        self._early: Counter[str] = Counter()
        self._stalled: set[str] = set()
        self._reasons: dict[str, str] = {}
        self.unreachable = False
        self._ours = ""
        # In the present round somebody was asked to which it may come at any moment.
        self.comes_soon = False

    @property
    def waits(self) -> bool:
        """Somebody may still give it, but not now."""
        return bool(self._later) and not self._ours

    @property
    def knows_others(self) -> bool:
        """There are others to ask than the one that is being asked."""
        return bool(self._now or self._later)

    @property
    def reasons(self) -> list[str]:
        """Why nobody has given it."""
        return [self._ours] if self._ours else list(self._reasons.values())

    def begins_anew(self) -> bool:
        """Whether there is somebody to ask, again or for the first time."""
        if not self.waits:
            return False
        # First those that others have named: to these it has come by now, and nobody else may know of them.
        self._now, self._later = sorted(self._later, key=self._told.__contains__), []
        self.comes_soon = False
        return True

    def __iter__(self) -> Iterator[str]:
        """Whom to ask in this round. Those that are named meanwhile are asked in it, too."""
        while self._now:
            yield self._now.pop(0)

    def failed(self, address: str, error: PeerError) -> bool:
        """An agent has not given it. Returns whether nothing is wrong: it may do so later, or was only named."""
        if error.ours:
            self._ours = f"here: {error}"
            return False
        known = {*self._told, *self._now, *self._later, *self._reasons, self._own, address}
        # Who came last is asked first: it is the likeliest to be there still.
        self._now.extend(dict.fromkeys(other for other in reversed(error.others) if other not in known))
        # Who was named may not have put it in place yet.
        named = error.code is grpc.StatusCode.NOT_FOUND and address not in self._told
        early = named and self._early[address] < MOST_EARLY
        self._early[address] += early
        self.comes_soon = self.comes_soon or early
        # One that stood still for a moment is asked once more, behind all others.
        stalled = error.code is grpc.StatusCode.DEADLINE_EXCEEDED and self.knows_others and address not in self._stalled
        if stalled:
            self._stalled.add(address)
        if error.crowded or early or stalled:
            self._later.append(address)
            self._reasons.pop(address, None)
            return not stalled
        self._reasons[address] = f"{shown(address)}: {error}"
        self.unreachable = self.unreachable or error.unreachable
        return named


def shuffled(addresses: Iterable[str]) -> list[str]:
    """Each of many nodes that want a part begins with another one that has it."""
    found = list(addresses)
    random.shuffle(found)
    return found
