"""Where the first node of a world without a session is gone: who takes what its script saved last.

The first node takes what the script saves, and what it had not taken yet when it was lost is whole all the same, but
recorded nowhere. Once the next world is open nobody may take it any more. So another node looks before.
"""

from __future__ import annotations

from . import waits
from .checkpoints import has_gone_back
from .membership import in_rank_order, is_candidate
from .state import Node
from .turn import Turn

__all__ = ("awaits", "took")


def awaits(turn: Turn, waited_for: list[Node]) -> bool:
    """Whether a node still looks for what the last world's script saved last; no world opens meanwhile.

    Args:
        turn: the turn.
        waited_for: who has not joined yet.
    """
    job, gathering = turn.job, turn.live.gathering
    before, gathering.taker = gathering.taker, ""
    if job.world is None or job.has_session or gathering.took or has_gone_back(job):
        return False
    first = job.node_by(job.world.members[0].incarnation)
    if first is not None:
        # It looks before it joins. (A leaver looks while others wait for it: `awaits_last_save`.)
        return first.adopts and any(node.name == first.name for node in waited_for)
    node = taker(turn)
    if node is None:
        return False
    if node.name != before:
        gathering.take_by = turn.heard + job.settings.join_timeout
    if turn.overdue(gathering.take_by):
        gathering.took = True
        limit = job.settings.join_timeout
        turn.notice(f"{node.name} has not taken what the script saved last within {limit:.0f} s: going on", True)
        return False
    gathering.taker = node.name
    text = f"waiting for {node.name}, which takes what the script saved last: the node that did so is gone"
    waits.say(turn, "taking", text, gathering.take_by - turn.heard, "--join-timeout")
    return True


def taker(turn: Turn) -> Node | None:
    """The first of the last world's nodes that is there, or of those that have come since."""
    job = turn.job
    able = [node for node in job.nodes.values() if node.adopts and is_candidate(turn, node)]
    present = [node for node in able if node.name not in turn.live.gathering.overdue]
    return next(iter(in_rank_order(job, present)), None)


def took(turn: Turn, node: Node, epoch: int) -> bool:
    """Whether a node has looked, as it was asked to: its Join names what it found."""
    gathering = turn.live.gathering
    if not epoch or epoch != turn.job.epoch or node.name != gathering.taker:
        return False
    gathering.took, gathering.taker = True, ""
    return True
