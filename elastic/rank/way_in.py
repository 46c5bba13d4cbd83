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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dalsegno.protos import ahead
from dalsegno.protos.replacements import Replacements

from .address import put_back
from .exits import EXIT_DRAINED, Drained, insist
from .guide import Announcer, CannotFollow, Guide, repeatable
from .remarks import remark

__all__ = ["SESSION", "STATE", "TRAINS", "WayIn", "unwatch", "watch", "way_in"]

SESSION, STATE, TRAINS = "session", "state", "trains"
"""Where a leg of the way ends: the session opens, ``s.state(...)`` is called, the training begins."""

# What the environment says of each world; scripts often hand it on.
_PLACE = {"rank": "RANK", "world_size": "WORLD_SIZE"}
# A new process still has to import its libraries and to read its data, where this one is at once.
_PATIENCE = timedelta(minutes=10)


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
        # Whether ranks exchanged data in the present leg, as far as it was seen.
        self._talked = self._by_us = False
        self._alone = False
        self._announcer = Announcer()
        self._guide: Guide | None = None
        # The script's own for the group, which has a longer one until all train; None: it has the script's.
        self._timeout: timedelta | None = None

    # What is called, in a new process.

    def makes(self, given: Mapping[str, Any]) -> None:
        """The default group is about to be made so. If that fails, it is made twice, and then it has other names."""
        self._second = self._second or self._known
        self._known, self._collectives = True, 0
        if not self._by_us:
            self._made = given
            self._announcer.group(given)

    def talks(self) -> None:
        """Ranks exchange data, or make other groups: nobody can do that once more."""
        if not self._by_us:
            self._talked = True
            self._announcer.talk()

    @contextmanager
    def by_us(self) -> Iterator[None]:
        """What ranks exchange inside, and the group that they make, is ours: who stays does so, too."""
        before, self._by_us = self._by_us, True
        try:
            yield
        finally:
            self._by_us = before

    def meets(self) -> None:
        """Ranks meet at a barrier of the default group."""
        self._barriers += 1
        self._announcer.barrier()

    def at(self, stage: str) -> None:
        """A leg ends here, and the next one begins. What ranks do once they train is no part of the way."""
        if TRAINS in self._legs:
            return
        if stage == TRAINS and (running := ahead.running()) is not None:
            running.meet("its training begins")  # there the session opens, and that leg ends before this one
        there = dist.is_initialized()
        self._legs[stage] = Leg(self._made, self._barriers, self._problem(there=there), there and not self._known)
        self._alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        self.ours()
        self._announcer.stage(stage)
        if stage == TRAINS:
            self._announcer.end()
            unwatch()

    def _problem(self, *, there: bool) -> str:
        if self._made is not None and repeatable(self._made) is None:
            return "make the default process group with a store, an init_method or options of their own"
        if self._second or (self._known and not there):
            return "make the default process group more than once, or destroy it"
        known = self._collectives + self._barriers
        talks = self._talked or (there and _collectives(known) != known)
        return "exchange data, or make other process groups" if talks else ""

    def ours(self) -> None:
        """What was called up to here is called by us in each world."""
        self._made, self._barriers, self._talked = None, 0, False
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
                return (
                    "make the default process group before dalsegno.elastic is imported, or by another function than "
                    "init_process_group: import that first, and call this behind it"
                )
        return ""

    def again(self, stage: str) -> None:
        """Makes the calls of the leg that ends there. Collective.

        Raises:
            Drained: This process began alone, and what new ones do cannot be followed. Exit code 83.
        """
        if self._alone and int(os.environ["WORLD_SIZE"]) > 1:
            self._guide = self._guide or Guide()
        if self._guide is not None:
            group, barriers = self._followed(self._guide, stage)
            self._legs[stage] = Leg(group, barriers)
            if stage == TRAINS:
                self._guide, self._alone = None, False
            return
        leg = self._legs.get(stage, Leg())
        if leg.group is not None and not dist.is_initialized():
            self._make(leg.group)
        for _ in range(leg.barriers if dist.is_initialized() else 0):
            dist.barrier()
        if stage == TRAINS and self._timeout is not None and dist.is_initialized():
            dist.distributed_c10d._set_pg_timeout(self._timeout)
            self._timeout = None

    def _make(self, given: Mapping[str, Any]) -> None:
        """Makes the group. It waits for new processes, also if the script allows its ranks less."""
        options = {**given, **{name: int(os.environ[_PLACE[name]]) for name in _PLACE if name in given}}
        timeout = options.get("timeout")
        if isinstance(timeout, timedelta) and timeout < _PATIENCE:
            self._timeout, options["timeout"] = timeout, _PATIENCE
        dist.init_process_group(**options)

    def _followed(self, guide: Guide, stage: str) -> tuple[Mapping[str, Any] | None, int]:
        try:
            return guide.until(stage)
        except CannotFollow as error:
            remark("%s", error)
            insist(EXIT_DRAINED)
            raise Drained from None


def _collectives(otherwise: int) -> int:
    """Collectives of the default group so far."""
    try:
        group: Any = dist.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # not every backend counts them
        return otherwise


way_in = WayIn()
"""That of this process."""
# What we have put in place of functions of `torch.distributed`; empty: nobody watches.
_watching: list[Replacements] = []
# Those in which ranks exchange data, or whose collectives are in other groups.
_TALK = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier"),
    *("new_group", "new_subgroups", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    *("scatter_object_list", "send", "split_group"),
)


def watch() -> None:
    """From now on the group's making, its barriers and other collectives are noted, until the training begins.

    It happens wherever our library is imported: a process may import it long before it knows that an agent started it.
    """
    if _watching:
        return
    replaced = Replacements()
    for name, around in {**dict.fromkeys(_TALK, _noted_talk), **_NOTED}.items():
        made: dict[Any, Any] = {}  # The same function has one in its place in both modules.
        for module in (dist, dist.distributed_c10d):
            theirs = getattr(module, name, None)
            if theirs is not None:
                replaced.put(module, name, made.setdefault(theirs, around(theirs)))
    _watching.append(replaced)


def unwatch() -> None:
    """Puts back what was there, but where somebody else has put something since."""
    while _watching:
        _watching.pop().put_back()


def _noted_making(make: Any) -> Any:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def init_process_group(*arguments: Any, **options: Any) -> None:
        running = ahead.running()
        if running is not None:
            running.meet("its group")
        try:
            given = signature.bind(*arguments, **options).arguments
        except TypeError:
            given = {}
        if _is_the_worlds(given):
            put_back()
        way_in.makes(given)
        make(*arguments, **options)

    return init_process_group


def _is_the_worlds(given: Mapping[str, Any]) -> bool:
    """Not a group that a script makes of processes that it has started itself, which have its variables."""
    places = (("rank", "RANK"), ("world_size", "WORLD_SIZE"))
    own = all(given.get(name) in (None, -1) or str(given[name]) == os.environ.get(place) for name, place in places)
    return own and given.get("store") is None and given.get("init_method") in (None, "env://")


def _noted_barrier(meet: Any) -> Any:
    @functools.wraps(meet)
    def barrier(*arguments: Any, **options: Any) -> Any:
        group = arguments[0] if arguments else options.get("group")
        if dist.is_initialized():
            if group is None or group is dist.group.WORLD:
                way_in.meets()
            else:
                way_in.talks()
        return meet(*arguments, **options)

    return barrier


def _noted_talk(talk: Any) -> Any:
    @functools.wraps(talk)
    def exchange(*arguments: Any, **options: Any) -> Any:
        way_in.talks()
        return talk(*arguments, **options)

    return exchange


_NOTED = {"init_process_group": _noted_making, "barrier": _noted_barrier}
