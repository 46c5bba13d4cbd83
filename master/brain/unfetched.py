"""Nodes that could not fetch a resume point from memory, for whose sake drains go to the disk for a while."""

from __future__ import annotations

from .state import Node
from .turn import Turn

__all__ = ("DISK_FOR_SECONDS", "could_not_fetch", "tend")

# Seconds in which drains go to the disk for the sake of a node that could not fetch a step (no room, a firewall). Into
# memory each growth that is to take it in would end without it, and the next one would begin at once.
DISK_FOR_SECONDS = 600.0


def could_not_fetch(turn: Turn, nodes: list[Node]) -> list[str]:
    """These nodes could not fetch the resume point from memory. Names of those of whom that was not known."""
    tend(turn)
    known = turn.live.held.unfetched
    new = [node.name for node in nodes if node.incarnation not in known]
    if nodes:
        turn.live.held.unfetched = known | {node.incarnation: turn.now + DISK_FOR_SECONDS for node in nodes}
    return new


def tend(turn: Turn) -> None:
    """Forgets them when their time is over: they may have room by then, or a way."""
    held = turn.live.held
    known = {node: until for node, until in held.unfetched.items() if not turn.due(until)}
    if known != held.unfetched:
        held.unfetched = known
