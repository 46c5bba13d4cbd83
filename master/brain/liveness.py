"""Who is dead: whose word is overdue, and whose stream has closed, while others can be heard."""

from __future__ import annotations

from . import membership, saves
from .listening import HEARTBEAT_SECONDS
from .presences import Presence
from .state import Node
from .turn import CLOSED_GRACE_SECONDS, Turn, heartbeat_of

__all__ = ("check_liveness", "death_of", "have_closed", "look_at_streams", "spoke_since")

# Seconds of silence before the end of a stream from which on its peer did not close it: the connection was found dead.
PINGED_SECONDS = 3.5


def look_at_streams(turn: Turn) -> None:
    """Tells the clock whether anybody can be heard over an open stream."""
    clock, nodes = turn.live.clock, turn.job.nodes
    # A leaver whose ranks are done need not speak any more.
    done = {node.name for node in nodes.leavers if not turn.is_working(node)}
    if len(nodes) == len(done) or turn.job.phase.is_terminal:
        if clock.expects or clock.shut_at is not None:
            clock.nobody(turn.now)
    elif len(done.union(turn.live.nodes.broken)) == len(nodes):
        clock.shut(turn.now)
    elif clock.shut_at is not None:
        clock.reopened(turn.now)
    turn.heard = clock.at(turn.now)


def check_liveness(turn: Turn) -> bool:
    """Declares dead all nodes that are. Returns whether anything changed."""
    if turn.job.phase.is_terminal:
        return False
    nodes, timeout_seconds = turn.job.nodes, turn.job.settings.node_timeout
    dead = []
    for name in turn.live.nodes.suspects(turn.heard, timeout_seconds):
        how = death_of(turn, nodes[name], timeout_seconds)
        if how:
            dead.append((nodes[name], how))
    look = turn.live.nodes.next_look(timeout_seconds)
    if look is not None:
        turn.overdue(look)
    membership.lose(turn, sorted(dead, key=lambda one: one[0].order))
    if dead:
        membership.forget_losses(turn)
    return bool(dead)


def death_of(turn: Turn, node: Node, timeout_seconds: float) -> str:
    """Why this node counts as dead now; "" while it does not.

    If all streams are closed, the listening clock stands still: the path to the master broke, or everybody is gone, and
    the next node to register settles it.
    """
    presence, epoch = turn.presence(node), turn.open
    # A step is a collective of all, so peers that advance prove the silent node alive.
    proof = float("-inf")
    if turn.is_working(node):
        proof = epoch.proof(node.name)
        if epoch.stopping:
            proof = max(proof, epoch.moved)  # so does a save
    if presence.closed is not None and not spoke_since(presence):
        suspect = epoch.trouble and not membership.has_answered(turn, node)
        grace = 0.0 if suspect else CLOSED_GRACE_SECONDS
        if not suspect and turn.is_working(node):
            # Steps that take longer than that have not stopped; a broken stream comes back meanwhile. Nor have saves.
            # Behind them ranks have little to do, and what a dead node holds counts as saved until its death is known.
            saving = epoch.stopping and not saves.is_committed(turn)
            usual = min(timeout_seconds, max(CLOSED_GRACE_SECONDS, 1.2 * epoch.longest_seconds))
            grace = timeout_seconds if saving else usual
        if suspect or not was_silent_before(turn, presence):
            due = presence.closed if suspect else max(presence.closed, proof) + grace
            return "its connection closed" if turn.overdue(due) else ""
    if not turn.overdue(max(presence.heard, proof) + timeout_seconds):
        return ""
    # Somebody must have been heard after this node's next word was due; otherwise the master may be the one cut off.
    beat = heartbeat_of(turn.job)
    if turn.live.clock.word_shown < presence.heard + 1.5 * beat:
        turn.due(turn.now + beat)
        return ""
    return f"silent for {timeout_seconds:.0f} s"


def was_silent_before(turn: Turn, presence: Presence) -> bool:
    """Whether nothing had come for so long when its stream closed that it was not the peer that closed it.

    The node may be frozen, or cut off for a while, so it has its whole node-timeout. A process that ends was heard
    before.
    """
    silence = (presence.closed or 0.0) - presence.heard
    return presence.closed is not None and silence >= max(PINGED_SECONDS, 1.5 * heartbeat_of(turn.job))


def have_closed(turn: Turn) -> bool:
    """Whether everybody who was here has closed its stream, as a process's end does.

    Where one node is a world, nobody then is on the way back from an outage of the master's. So the usual grace is all
    that there is to wait for.
    """
    presences, shut_at = turn.live.nodes, turn.live.clock.shut_at
    if shut_at is None:
        return False
    # The clock stands still soon after a lone node falls silent, so this is asked of real time.
    latest = shut_at - turn.live.stood_seconds - max(PINGED_SECONDS, 1.5 * heartbeat_of(turn.job))
    return all(presence.closed is not None and presence.at > latest for presence in presences.values())


def spoke_since(presence: Presence) -> bool:
    """Whether it was heard after its stream had closed, by a new message: the stream broke, not the node."""
    return presence.closed is not None and presence.heard > presence.closed + HEARTBEAT_SECONDS / 2
