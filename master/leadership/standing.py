"""Whether this master leads, decided from what it has learnt: pure.

The key with a lease in etcd only says who should take the record over. It never decides about a write: that does the
record's generation, which the next leader raises. So a master that loses the key goes on until another one has it, and
nothing here relies on a clock that others have.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

__all__ = [
    "KEEP_SECONDS",
    "LEASE_SECONDS",
    "LOOK_SECONDS",
    "Event",
    "KeyOrder",
    "Leader",
    "LeadershipState",
    "Replaced",
    "Saw",
    "Standing",
    "Stop",
    "TookOver",
    "Unanswered",
    "after",
    "leads",
    "order_at",
]

# Seconds that the leader's key outlives its last word: etcd itself may give more, never less.
LEASE_SECONDS = 3
# Seconds between two looks at the key: of the leader, which keeps its lease with each, and of the others.
KEEP_SECONDS, LOOK_SECONDS = 1.0, 0.25
# Seconds after which an etcd that did not answer is asked again.
RETRY_SECONDS = 0.25
# How many looks in a row must find another master that leads at this one's own address, before that is an error: one
# that was killed and started again finds its former self for the time of a lease, or longer where etcd's own leader has
# changed. Looks, not seconds: this process may have stood still between two.
CLASH_LOOKS = int(5 * LEASE_SECONDS / LOOK_SECONDS)


class Standing(enum.Enum):
    """What a master is at a moment."""

    FOLLOWER = "another one leads, or who leads is not known: it looks at the key"
    CAMPAIGNING = "nobody leads: it tries to write the key"
    LEADER = "the key was its own: it has the record, or takes it over"
    RESIGNING = "it was told to stop: its last turn ends, then it deletes the key"


class KeyOrder(enum.Enum):
    """What is to be done in etcd next."""

    LOOK = "read the key"
    KEEP = "keep the lease, and read the key"
    CAMPAIGN = "write the key, with a new lease, if it is not there"
    ANNOUNCE = "write the generation into the key, if it is our own"
    RESIGN = "delete the key, if it is our own"


@dataclass(frozen=True)
class Leader:
    """What the key says.

    Attributes:
        master: random name of the process that wrote it.
        address: HOST:PORT at which agents find it.
        generation: of the record under it; 0: it has not taken the record over yet.
    """

    master: str
    address: str
    generation: int = 0


@dataclass(frozen=True)
class Saw:
    """The key was read, or found out by a write that failed; None: it is not there."""

    leader: Leader | None


@dataclass(frozen=True)
class Unanswered:
    """Nobody knows whether the order was carried out; the reason is for a person, as is what they can do about it."""

    why: str = ""
    cure: str = ""


@dataclass(frozen=True)
class TookOver:
    """The record has this generation, and is ours."""

    generation: int


@dataclass(frozen=True)
class Replaced:
    """Another master has raised the record's generation."""


@dataclass(frozen=True)
class Stop:
    """This process was told to end."""


Event = Saw | Unanswered | TookOver | Replaced | Stop


@dataclass(frozen=True)
class LeadershipState:
    """What a master knows of who leads. Times are seconds of its own monotonic clock.

    Attributes:
        me: random name of this process.
        address: at which agents find it.
        leader: what the key said last.
        due: when the next order is.
        answered_at: when etcd said last what the key is.
        generation: of the record, while it is ours; 0: it is not.
        rests_until: it does not campaign before.
        clashes: how many looks in a row have found another master at our address.
    """

    me: str
    address: str
    standing: Standing = Standing.FOLLOWER
    leader: Leader | None = None
    due: float = 0.0
    answered_at: float = 0.0
    generation: int = 0
    rests_until: float = 0.0
    clashes: int = 0

    @property
    def named(self) -> str:
        """Address of the other master that leads; empty: none is known that has the record."""
        leader = self.leader
        return leader.address if leader is not None and leader.master != self.me and leader.generation else ""

    @property
    def clashing(self) -> bool:
        """Whether another master advertises our address for longer than one that has ended could seem to."""
        return self.clashes >= CLASH_LOOKS


def leads(state: LeadershipState) -> bool:
    """Whether this master is to hold the record, or to take it over."""
    return state.standing is Standing.LEADER


def order_at(state: LeadershipState) -> tuple[KeyOrder, float]:
    """The next order, and when it is due."""
    return _order(state), state.due


def _order(state: LeadershipState) -> KeyOrder:
    if state.standing is Standing.FOLLOWER:
        return KeyOrder.LOOK
    if state.standing is Standing.RESIGNING:
        return KeyOrder.RESIGN
    if state.standing is Standing.CAMPAIGNING or state.leader is None:
        return KeyOrder.CAMPAIGN
    return KeyOrder.ANNOUNCE if state.generation > state.leader.generation else KeyOrder.KEEP


def after(state: LeadershipState, event: Event, now: float) -> LeadershipState:
    """The state after an event. Raises nothing, whatever comes in whichever order."""
    if isinstance(event, Stop):
        return replace(state, standing=Standing.RESIGNING, due=now)
    if state.standing is Standing.RESIGNING:
        # Whatever is learnt now, this master ends.
        return state
    if isinstance(event, Unanswered):
        return _unanswered(state, now)
    if isinstance(event, TookOver):
        return replace(state, generation=event.generation, due=now) if leads(state) else state
    if isinstance(event, Replaced):
        # The other one has no key yet, or has lost it: it gets the time to write it.
        rests_until = now + LEASE_SECONDS
        return replace(state, standing=Standing.FOLLOWER, generation=0, due=now, rests_until=rests_until)
    return _saw(state, event.leader, now)


def _unanswered(state: LeadershipState, now: float) -> LeadershipState:
    state = replace(state, due=now + RETRY_SECONDS)
    if leads(state) and now - state.answered_at <= LEASE_SECONDS:
        return state
    # What a campaign without an answer has done, a look tells. A leader that cannot see the key for as long as it lasts
    # may be cut off alone: if it kept its agents, the next leader would take them for dead. If etcd is away for all,
    # they wait as for any master that is away.
    return replace(state, standing=Standing.FOLLOWER, generation=0)


def _saw(state: LeadershipState, leader: Leader | None, now: float) -> LeadershipState:
    state = replace(state, leader=leader, answered_at=now)
    if leader is None:
        return _nobody(state, now)
    if leader.master == state.me:
        # Also what a lost answer has hidden. A master that was replaced lets its key end.
        standing = state.standing if now < state.rests_until else Standing.LEADER
        return replace(state, standing=standing, clashes=0, due=now + _pause(standing, state, leader))
    clashes = state.clashes + 1 if leader.address == state.address else 0
    return replace(state, standing=Standing.FOLLOWER, generation=0, clashes=clashes, due=now + LOOK_SECONDS)


def _nobody(state: LeadershipState, now: float) -> LeadershipState:
    state = replace(state, clashes=0)
    if leads(state):
        # The lease has ended, nobody else has come: the key is written anew, the record stays ours meanwhile.
        return replace(state, due=now)
    if now < state.rests_until:
        return replace(state, standing=Standing.FOLLOWER, due=now + LOOK_SECONDS)
    return replace(state, standing=Standing.CAMPAIGNING, due=now)


def _pause(standing: Standing, state: LeadershipState, leader: Leader) -> float:
    """Seconds until the next order of a master whose own key this is."""
    if standing is not Standing.LEADER:
        return LOOK_SECONDS
    return 0.0 if state.generation > leader.generation else KEEP_SECONDS
