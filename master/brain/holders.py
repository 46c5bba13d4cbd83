"""Which nodes have which parts of a memory checkpoint, as far as they live and have said so.

These questions are asked in each turn, of as many parts as the world had nodes. So none of them looks at all holders of
a part where the first few will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from .live import HeldStep
from .state import Job, Node

__all__ = (
    "Source",
    "able",
    "copies",
    "has_holder",
    "holders",
    "is_copied",
    "is_there",
    "is_whole",
    "missing",
    "sole_keepers",
    "sources",
    "steady",
    "suffices",
    "unaccounted",
    "who_looks",
)

# A step that is not whole in memory any more is given up when it could not be written or sealed so often.
MOST_FAILURES = 3


class Source(NamedTuple):
    """Where one part can be fetched; perhaps nowhere, yet. `leaves`: only nodes that leave have it."""

    addresses: tuple[str, ...] = ()
    leaves: bool = False


def living(job: Job, step: HeldStep, part: int) -> Iterator[Node]:
    """The living nodes that hold a part, in the order in which they said so."""
    for incarnation in step.holders.get(part, ()):
        node = job.node_by(incarnation)
        if node is not None:
            yield node


def holders(job: Job, step: HeldStep, part: int) -> list[Node]:
    """All of them."""
    return list(living(job, step, part))


def has_holder(job: Job, step: HeldStep, part: int) -> bool:
    return next(living(job, step, part), None) is not None


def is_whole(job: Job, step: HeldStep) -> bool:
    """Each part has a living holder."""
    return all(has_holder(job, step, part) for part in range(step.record.parts))


def is_there(job: Job, step: HeldStep) -> bool:
    """Each part has a living holder; or what is not on the disk has one that can write it there, and seal it."""
    if is_whole(job, step):
        return True
    parts = range(step.record.parts)
    return bool(step.written) and suffices(step, [can_be_written(job, step, part) for part in parts])


def can_be_written(job: Job, step: HeldStep, part: int) -> bool:
    """Somebody has it who can.

    Who could not is asked again, but not for ever where parts are gone from the memories.
    """
    again = step.failures < MOST_FAILURES
    return any(can_write(step, node, again=again) for node in living(job, step, part))


def unaccounted(job: Job, step: HeldStep) -> list[int]:
    """The parts that nobody has who can write them, and of which nobody has said that they are on the disk."""
    parts = (part for part in range(step.record.parts) if part not in step.written)
    return [part for part in parts if not can_be_written(job, step, part)]


def who_looks(job: Job, step: HeldStep) -> list[Node]:
    """Who can look whether the unaccounted parts are on the disk, and has not tried; nobody where that is known.

    That takes a part of it: what lies there is known by its manifest.
    """
    lost = unaccounted(job, step)
    if not lost or not step.absent.isdisjoint(lost):
        return []
    others = (name for name, parts in step.by_node.items() if name not in step.looked and parts.isdisjoint(lost))
    there = (node for name in others if (node := job.node_by(name)) is not None)
    return able(step, there, again=True)


def able(step: HeldStep, nodes: Iterable[Node], *, again: bool = False) -> list[Node]:
    """Those that can write to the disk, as far as is known. `again`: also who could not just now."""
    return [node for node in nodes if can_write(step, node, again=again)]


def can_write(step: HeldStep, node: Node, *, again: bool = False) -> bool:
    return node.sees_directory and bool(node.peer_address) and (again or node.incarnation not in step.unable)


def suffices(step: HeldStep, by_part: list[bool]) -> bool:
    """Whether the step can be brought to the disk by these: of each part, whether somebody has it."""
    return any(by_part) and all(here or part in step.written for part, here in enumerate(by_part))


def missing(job: Job, step: HeldStep) -> list[int]:
    """The parts that nobody has."""
    return [part for part in range(step.record.parts) if not has_holder(job, step, part)]


def copies(job: Job, step: HeldStep) -> int:
    """How many nodes have each part, at least."""
    return min(len(holders(job, step, part)) for part in range(step.record.parts))


def is_copied(job: Job, step: HeldStep, part: int) -> bool:
    """Whether a part is on as many nodes as the job wants, or on all."""
    wanted = min(1 + job.settings.memory_replicas, step.record.parts)
    return len(list(islice(living(job, step, part), wanted))) >= wanted


def sole_keepers(job: Job, step: HeldStep) -> set[str]:
    """The incarnations of leavers that have a part which nobody has who stays."""
    found: set[str] = set()
    for part in step.holders:
        leavers: list[str] = []
        for node in living(job, step, part):
            if not node.leaving:
                break
            leavers.append(node.incarnation)
        else:
            found.update(leavers)
    return found


def sources(job: Job, step: HeldStep, most: int = 0) -> tuple[Source, ...]:
    """Where each part can be fetched, by its number: from those that were heard first, because that changes seldom.

    As many addresses are told as a step begins with. Who gathers soon has all parts, and to tell that to all others of
    a thousand nodes, of each part, takes longer than to gather them.

    Args:
        most: addresses of each; 0: so many.
    """
    return tuple(source(job, step, part, most or 1 + job.settings.memory_replicas) for part in range(step.record.parts))


def source(job: Job, step: HeldStep, part: int, most: int) -> Source:
    """Where one part can be fetched: who stays comes first."""
    staying: list[str] = []
    leaving: list[str] = []
    for node in living(job, step, part):
        if node.peer_address:
            (leaving if node.leaving else staying).append(node.peer_address)
        if len(staying) == most:
            break
    return Source((*staying, *leaving)[:most], leaves=bool(leaving) and not staying)


def steady(job: Job, step: HeldStep, told: tuple[Source, ...], now: tuple[Source, ...]) -> tuple[Source, ...]:
    """`now`, but of each part what was told before, as long as all who were named hold it.

    While a thousand nodes gather, each that has a part is one more to fetch it from. To tell all others of that again
    takes longer than to gather, and a holder names others itself. Who could reach nobody is told of more.
    """
    if len(told) != len(now):
        return now
    return tuple(
        before if before == found or holds_still(job, step, part, before, found) else found
        for part, (before, found) in enumerate(zip(told, now, strict=True))
    )


def holds_still(job: Job, step: HeldStep, part: int, told: Source, now: Source) -> bool:
    """Whether all who were named have this part, and stay if anybody does who has it."""
    if not told.addresses or told.leaves != now.leaves:
        return False
    named = set(told.addresses)
    for node in living(job, step, part):
        if told.leaves or not node.leaving:
            named.discard(node.peer_address)
        if not named:
            return True
    return False
