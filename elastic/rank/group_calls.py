"""What a script's ranks do in the default process group before they train: they make it, and meet at barriers there.

A process that stays begins its next world beside new processes, which run the script from its first line. It makes the
same calls, in the same order, so that nobody waits in vain. Only calls that need no data can be made again: the group's
own, and barriers, such as those of ``main_process_first``.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

__all__ = ["NONE", "Calls", "again", "so_far", "watch"]

# What the environment says of each world; scripts often hand it on.
_PLACE = {"rank": "RANK", "world_size": "WORLD_SIZE"}


@dataclass(frozen=True)
class Calls:
    """What was called so far.

    Attributes:
        group: Arguments with which the default group was made; None: it was not, or before anybody watched.
        barriers: Barriers in it.
        unknown: There is a group of whose making nothing is known.
        talk: Its ranks have talked in other ways, too.
    """

    group: Mapping[str, Any] | None = None
    barriers: int = 0
    unknown: bool = False
    talk: bool = False

    def problem(self, *, made_anew: bool) -> str:
        """Why not all of it can be called again, for people, behind "the ranks of this script"; "": it can.

        Args:
            made_anew: Somebody else makes the group in each world.
        """
        if self.talk:
            return "talk in more ways than barriers"
        given = self.group or {}
        if given.get("store") is not None or not str(given.get("init_method") or "env://").startswith("env://"):
            return "make the default process group with a store or an init_method of their own"
        if self.unknown and not made_anew:
            return "make the default process group before dalsegno.elastic is imported: import that first"
        return ""


NONE = Calls()
# The arguments of the last group, and the barriers of this process.
_made: list[Mapping[str, Any]] = []
_barriers = [0]
_watched: list[Any] = []


def watch() -> None:
    """From now on these calls are noted.

    It happens wherever our library is imported: a process may import it long before it knows that an agent started it.
    """
    if _watched:
        return
    make, meet = dist.init_process_group, dist.barrier
    signature = inspect.signature(make)

    @functools.wraps(make)
    def init_process_group(*arguments: Any, **options: Any) -> None:
        make(*arguments, **options)
        _made[:] = [signature.bind(*arguments, **options).arguments]

    @functools.wraps(meet)
    def barrier(*arguments: Any, **options: Any) -> Any:
        found = meet(*arguments, **options)
        group = arguments[0] if arguments else options.get("group")
        _barriers[0] += group is None or group is dist.group.WORLD
        return found

    for module in (dist, dist.distributed_c10d):
        module.init_process_group, module.barrier = init_process_group, barrier  # type: ignore[attr-defined]
    _watched[:] = [init_process_group, barrier]


def so_far() -> Calls:
    """What this process, in its first world, has called."""
    if not dist.is_initialized():
        return NONE
    made = _made[0] if _made else None
    return Calls(made, _barriers[0], unknown=made is None, talk=_collectives() != _barriers[0])


def again(calls: Calls, behind: Calls = NONE) -> None:
    """Makes these calls again, but not those that came before ``behind``. Collective."""
    if calls.group is not None and behind.group is None and not dist.is_initialized():
        place = {name: int(os.environ[variable]) for name, variable in _PLACE.items() if name in calls.group}
        dist.init_process_group(**{**calls.group, **place})
    for _ in range(calls.barriers - behind.barriers if dist.is_initialized() else 0):
        dist.barrier()


def _collectives() -> int:
    """Collectives of the default group so far."""
    try:
        group: Any = dist.distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # not every backend counts them
        return _barriers[0]
