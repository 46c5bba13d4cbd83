"""What the master knows of one round, from the end of a world to the opening of the next: not stored.

Times are as in `live`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dalsegno.protos import control_pb2

from .state import Checkpoint, Node

__all__ = ("Gathering", "Needs")

# Losses of one name within so many seconds count as a crash loop.
CRASH_LOOP_SECONDS = 60.0
# The part of a step in which lies what is alike on all ranks.
FIRST = frozenset({0})


@dataclass(frozen=True)
class Needs:
    """Which parts of the resume point nodes need for their places in the next world, see `places`."""

    digest: str
    # By incarnation.
    needed: Mapping[str, frozenset[int]]

    def of(self, node: Node) -> frozenset[int]:
        """Spares have at least what each of them would need."""
        return self.needed.get(node.incarnation, FIRST)


@dataclass
class Gathering:
    """One round: from the end of a world to the opening of the next."""

    # When each node was first asked, and which nodes have not answered in time.
    asked: dict[str, float] = field(default_factory=dict)
    overdue: set[str] = field(default_factory=set)
    # What the last epoch sealed without a master, by digest, and who has told: nodes that had no part in it.
    told_by_strangers: dict[str, tuple[control_pb2.Checkpoint, dict[str, None]]] = field(default_factory=dict)
    # Since when a node says that it gathers the resume point.
    gathers: dict[str, float] = field(default_factory=dict)
    # When it was counted whether most have yet to join.
    most_at_it: tuple[float, bool] = (float("-inf"), False)
    # When each name was lost in this round: a node that comes back again and again holds nobody up.
    lost: dict[str, tuple[float, ...]] = field(default_factory=dict)
    # Since when only the quiet time delays the opening.
    complete_at: float | None = None
    # At the last look for what is in memory fewer nodes were here than a world needs.
    too_few: bool = False
    # Since when nobody has seen the resume point.
    unseen: float | None = None
    # Until when agents that remember a lost store are heard out.
    listen_until: float | None = None
    # When the job ends, because nobody will be able to convert its resume point.
    vain_until: float | None = None
    # The last steps of the previous world are known: counted on some node after their end, or drained at a boundary.
    counted: bool = False
    # A world has ended in which nobody was heard: it may have made steps all the same.
    unheard: bool = False
    # When workers that failed without progress again start.
    restart_at: float | None = None
    # Who looks for what a script without a session saved last, until when, and whether that is done. See `taking`.
    taker: str = ""
    take_by: float = 0.0
    took: bool = False
    # Which parts of the resume point each node needs; None: all. How often that has changed.
    plan: Needs | None = None
    plans: int = 0

    def needs(self, node: Node, digest: str) -> frozenset[int] | None:
        """Which parts of the resume point a node is told to fetch; None: all of them."""
        return None if self.plan is None or self.plan.digest != digest else self.plan.of(node)

    def lacks(self, node: Node, resume: Checkpoint | None) -> bool:
        """Whether a node that has joined with some parts of the resume point needs others, which are in memory."""
        joined = node.joined
        if resume is None or not resume.parts or joined is None or joined.parts is None:
            return False
        if resume.digest not in joined.seen:
            return False
        needed = self.needs(node, resume.digest)
        return needed is None or not needed <= joined.parts

    def is_crash_looping(self, name: str, now: float) -> bool:
        """Whether the name was lost in this very round, lately, and more than once."""
        return sum(now - at < CRASH_LOOP_SECONDS for at in self.lost.get(name, ())) > 1

    def note_loss(self, name: str, now: float) -> None:
        """Notes a loss, and forgets those that count no more: a round may last for weeks."""
        self.lost[name] = (*self.lost.pop(name, ()), now)[-2:]
        # By the time of the last loss, because each one puts its name at the end.
        while now - next(iter(self.lost.values()))[-1] >= CRASH_LOOP_SECONDS:
            del self.lost[next(iter(self.lost))]
