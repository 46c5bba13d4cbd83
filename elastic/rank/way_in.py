"""How a script's ranks come to train: they make the default process group, meet at barriers, and open their session.

A process that stays begins its next world beside new processes, which run the script from its first line. It makes the
same calls, at the same places, so that nobody waits in vain. Only calls that need no data can be made again: the
group's own, and barriers, such as those of ``main_process_first``. A process that began alone cannot know them, and
follows a new one (``guide``).
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from dalsegno.protos import ahead

from .guide import Announcer, Guide, repeatable

__all__ = ["SESSION", "STATE", "TRAINS", "WayIn", "watch", "way_in"]

SESSION, STATE, TRAINS = "session", "state", "trains"
"""Where a leg of the way ends: the session opens, ``s.state(...)`` is called, the training begins."""

# What the environment says of each world; scripts often hand it on.
_PLACE = {"rank": "RANK", "world_size": "WORLD_SIZE"}


@dataclass(frozen=True)
class Leg:
    """What was called there.

    Attributes:
        group: Arguments with which the default group was made; None: it was not.
        barriers: Barriers in it.
        problem: Why not all of it can be called again, for people, behind "the ranks of this script"; "": it can.
        unknown: There is a group, and nobody saw how it was made.
    """

    group: Mapping[str, Any] | None = None
    barriers: int = 0
    problem: str = ""
    unknown: bool = False


class WayIn:
    """The way of this process's first world. Main thread only."""

    def __init__(self) -> None:
        self._legs: dict[str, Leg] = {}
        # Of the present leg: how the group was made, and its barriers.
        self._made: Mapping[str, Any] | None = None
        self._barriers = 0
        # Collectives of the group before it, whether it is known how that was made, and whether there was another one.
        self._collectives, self._known, self._second = 0, False, False
        self._alone = False
        self._announcer = Announcer()
        self._guide: Guide | None = None

    # What is called, in a new process.

    def makes(self, given: Mapping[str, Any]) -> None:
        """The default group is made so."""
        self._second = self._second or self._known
        self._made, self._known, self._collectives = given, True, 0
        self._announcer.group(given)

    def meets(self) -> None:
        """Ranks meet at a barrier of the default group."""
        self._barriers += 1
        self._announcer.barrier()

    def at(self, stage: str) -> None:
        """A leg ends here, and the next one begins. What ranks do once they train is no part of the way."""
        if TRAINS in self._legs:
            return
        there = dist.is_initialized()
        self._legs[stage] = Leg(self._made, self._barriers, self._problem(there=there), there and not self._known)
        self._alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        self.ours()
        self._announcer.stage(stage)
        if stage == TRAINS:
            self._announcer.end()

    def _problem(self, *, there: bool) -> str:
        if self._made is not None and repeatable(self._made) is None:
            return "make the default process group with a store, an init_method or options of their own"
        if self._second or (self._known and not there):
            return "destroy the default process group"
        known = self._collectives + self._barriers
        return "exchange data" if there and _collectives(known) != known else ""

    def ours(self) -> None:
        """What was called up to here is called by us in each world."""
        self._made, self._barriers = None, 0
        self._known = dist.is_initialized()
        self._collectives = _collectives(0) if self._known else 0

    # The same once more, in a process that stays.

    def problem(self, *, made_anew: bool = False) -> str:
        """Why not all of it can be called again, for people, behind "the ranks of this script"; "": it can.

        Args:
            made_anew: Somebody else makes the group in each world.
        """
        for leg in self._legs.values():
            if leg.problem:
                return leg.problem
            if leg.unknown and not made_anew:
                return "make the default process group before dalsegno.elastic is imported: import that first"
        return ""

    def again(self, stage: str) -> None:
        """Makes the calls of the leg that ends there. Collective.

        Raises:
            RuntimeError: This process began alone, and what new ones do cannot be followed.
        """
        if self._alone and int(os.environ["WORLD_SIZE"]) > 1:
            self._guide = self._guide or Guide()
        if self._guide is not None:
            group, barriers = self._guide.until(stage)
            self._legs[stage] = Leg(group, barriers)
            if stage == TRAINS:
                self._guide, self._alone = None, False
            return
        leg = self._legs.get(stage, Leg())
        if leg.group is not None and not dist.is_initialized():
            place = {name: int(os.environ[variable]) for name, variable in _PLACE.items() if name in leg.group}
            dist.init_process_group(**{**leg.group, **place})
        for _ in range(leg.barriers if dist.is_initialized() else 0):
            dist.barrier()


def _collectives(otherwise: int) -> int:
    """Collectives of the default group so far."""
    try:
        group: Any = dist.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # not every backend counts them
        return otherwise


way_in = WayIn()
"""That of this process."""
_watched: list[Any] = []


def watch() -> None:
    """From now on the group's making and its barriers are noted.

    It happens wherever our library is imported: a process may import it long before it knows that an agent started it.
    """
    if _watched:
        return
    make, meet = dist.init_process_group, dist.barrier
    signature = inspect.signature(make)

    @functools.wraps(make)
    def init_process_group(*arguments: Any, **options: Any) -> None:
        running = ahead.running()
        if running is not None:
            running.meet("its group")
        way_in.makes(signature.bind(*arguments, **options).arguments)
        make(*arguments, **options)

    @functools.wraps(meet)
    def barrier(*arguments: Any, **options: Any) -> Any:
        group = arguments[0] if arguments else options.get("group")
        if dist.is_initialized() and (group is None or group is dist.group.WORLD):
            way_in.meets()
        return meet(*arguments, **options)

    for module in (dist, dist.distributed_c10d):
        module.init_process_group, module.barrier = init_process_group, barrier  # type: ignore[attr-defined]
    _watched[:] = [init_process_group, barrier]
