"""Who is there, who is dead, and who would be in the next world."""

from __future__ import annotations

from collections import Counter

from .checkpoints import resume_point
from .state import Node, Part, Settings
from .turn import CLOSED_GRACE, DEAF_AFTER, DEAF_LEAST, HEARTBEAT, Turn

# A node lost this often within the window becomes a spare for a doubling time (seconds).
LOSS_LIMIT = 3
LOSS_WINDOW = 600.0
HOLD_BASE = 30.0
# How long agents may take to open their streams again after an outage of the master's (seconds).
RECONNECT = 5.0
HOLD_MAX = 3600.0


def drop(turn: Turn, node: Node) -> None:
    """Forget a node: whatever its incarnation still says is answered "fenced"."""
    turn.job.nodes.pop(node.name, None)
    for book in (turn.live.heard, turn.live.closed, turn.live.joined_at, turn.live.asked_at):
        book.pop(node.name, None)
    turn.live.unexpected.discard(node.name)
    turn.live.leave_by.pop(node.name, None)
    turn.live.presumed.discard(node.name)
    turn.live.unopened.discard(node.name)


def lose(turn: Turn, node: Node, how: str) -> None:
    """A node died. If its ranks were running this is an unplanned change: the phases see its part as LOST."""
    job = turn.job
    world = job.world
    member = world.member(node.incarnation) if world is not None else None
    # Of a script without a session nobody hears the first step.
    stepped = turn.live.first_step_at is not None or (world is not None and world.presented)
    drop(turn, node)
    if member is None or member.part is Part.LOST:
        if member is None and not node.leaving:
            turn.notice(f"{node.name} is gone ({how})")
        return
    if member.part in (Part.FINISHED, Part.DRAINED):
        return  # What its ranks had to do is done, and saved.
    if job.phase.has_workers and member.part is Part.RUNNING and others_finished(turn, member.node):
        member.part = Part.FINISHED
        return
    member.part = Part.LOST
    if world is not None and not any(job.node_by(one.incarnation) for one in world.members):
        # Everybody was gone at once, and some are back already: a start, at which the others come, too.
        job.quiet = True
    if stepped and not node.leaving:
        count_loss(turn, node.name)
    job.causes.append(f"{node.name} left" if node.leaving else f"{node.name} was lost ({how})")


def others_finished(turn: Turn, name: str) -> bool:
    """All other members ran to their end, and the last step's checkpoint is committed."""
    world = turn.job.world
    head = resume_point(turn.job)
    if world is None or head is None or len(world.members) < 2:
        return False
    return (
        all(member.part is Part.FINISHED for member in world.members if member.node != name)
        and head.epoch == world.epoch
        and head.step >= max(turn.live.steps.values(), default=1 << 62)
    )


def count_loss(turn: Turn, name: str) -> None:
    """A node was lost after its world had made a step; too often, and it is held."""
    live = turn.live
    times = [at for at in live.lost_at.get(name, []) if turn.now - at < LOSS_WINDOW] + [turn.now]
    live.lost_at[name] = times
    if len(times) >= LOSS_LIMIT:
        held = turn.job.losses.get(name, 0) + 1
        turn.job.losses[name] = held
        pause = min(HOLD_BASE * 2 ** (held - 1), HOLD_MAX)
        live.held_until[name] = turn.now + pause
        turn.job.holds[name] = pause
        turn.notice(f"{name} was lost {len(times)} times in {LOSS_WINDOW:.0f} s: a spare for {pause:.0f} s", True)


def hear(turn: Turn, node: Node) -> None:
    """A sign of life. The first one after hearing nobody gives every node a fresh node-timeout."""
    live = turn.live
    if live.deaf:
        live.deaf = False
        forgive(turn)
    live.heard[node.name] = turn.now
    live.presumed.discard(node.name)


def forgive(turn: Turn) -> None:
    """Nobody could be heard: silence proves nothing, and whatever waited for a word has its time anew."""
    job, live = turn.job, turn.live
    live.forgiven_at = turn.now
    for name in job.nodes:
        live.heard[name] = turn.now
        if name in live.closed:
            live.closed[name] = turn.now
    live.asked_at = dict.fromkeys(live.asked_at, turn.now)
    live.moved_at = live.conversion_moved = live.verify_moved = turn.now
    if live.drain_deadline is not None:
        live.drain_deadline = max(live.drain_deadline, turn.now + job.settings.drain_timeout)


def check_liveness(turn: Turn) -> bool:
    """Declare dead who is; returns whether anything changed."""
    job, live = turn.job, turn.live
    nodes = list(job.nodes.values())
    if not nodes or job.phase.is_terminal:
        return False
    timeout = job.settings.node_timeout
    all_closed = all(node.name in live.closed for node in nodes)
    last_word = max(live.heard.get(node.name, turn.now) for node in nodes)
    deaf = turn.due(last_word + min(DEAF_AFTER, max(DEAF_LEAST, timeout / 2)))
    live.deaf = live.deaf or deaf
    for node in nodes:
        how = death_of(turn, node, timeout, all_closed)
        if how:
            lose(turn, node, how)
            return True
    return False


def death_of(turn: Turn, node: Node, timeout: float, all_closed: bool) -> str:
    """Why this node counts as dead now; "" while it does not."""
    live = turn.live
    if live.deaf:
        return ""
    # A step is a collective of all: advancing peers prove the silent node alive.
    proof = float("-inf")
    if turn.is_working(node):
        proof = max((at for name, at in live.advanced.items() if name != node.name), default=proof)
        if live.stopping:
            proof = max(proof, live.moved_at)  # A save is one, too.
    if node.name in live.closed and not spoke_since(turn, node):
        closed = live.closed[node.name]
        if all_closed:
            return ""  # The path to the master broke, or everybody is gone: the next one to register settles it.
        suspect = live.trouble and not has_answered(turn, node)
        grace = 0.0 if suspect else CLOSED_GRACE
        if not suspect and turn.is_working(node):
            # Steps that take longer than that do not stand still yet; a broken stream comes back meanwhile.
            grace = timeout if live.stopping else min(timeout, max(CLOSED_GRACE, 1.2 * live.longest))
        due = (closed if grace == 0.0 else max(closed, proof)) + grace
        # After an outage connections close late and come back one by one.
        if turn.due(max(due, live.forgiven_at + min(timeout, RECONNECT))):
            return "its connection closed"
        return ""
    heard = live.heard.get(node.name, turn.now)
    # Somebody must have been heard when this node's next word was overdue: else it may be the master that is cut off.
    witnessed = max(live.heard.values(), default=heard) >= heard + DEAF_LEAST
    if turn.due(max(heard, proof) + timeout) and witnessed:
        return f"silent for {timeout:.0f} s"
    return ""


def spoke_since(turn: Turn, node: Node) -> bool:
    """Heard after its stream had closed, and not by what was still under way: the stream broke, not the node."""
    live = turn.live
    return live.heard.get(node.name, 0.0) > live.closed[node.name] + HEARTBEAT / 2


def in_rank_order(turn: Turn, nodes: list[Node]) -> list[Node]:
    """Survivors in their old relative order, newcomers after them by arrival."""
    world = turn.job.world
    ranks = {member.incarnation: member.group_rank for member in world.members} if world is not None else {}
    return sorted(nodes, key=lambda node: (ranks.get(node.incarnation, 1 << 30), node.order))


def agree_on_directory(turn: Turn) -> None:
    """Until something was opened, the directory that most nodes share is the job's; at first the first agent's."""
    job = turn.job
    if job.epoch or job.checkpoints:
        return
    counts = Counter(node.probe for node in job.nodes.values() if node.probe and not node.leaving)
    probe, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if count > counts[job.probe]:
        job.probe = probe
        for node in job.nodes.values():
            node.sees_directory = node.probe == probe


def is_candidate(turn: Turn, node: Node) -> bool:
    """May be part of the next world as far as we know."""
    resume = resume_point(turn.job)
    return (
        node.sees_directory
        and not node.leaving
        and (resume is None or node.unreadable != resume.digest)
        and turn.is_fresh(node)
    )


def has_answered(turn: Turn, node: Node) -> bool:
    """Has joined the present round and said whether it sees the resume point, and is not merely presumed alive."""
    resume = resume_point(turn.job)
    return (
        node.joined is not None
        and node.name not in turn.live.presumed
        and node.joined.round == turn.job.round
        and (resume is None or resume.digest == node.joined.resume or resume.digest in node.joined.seen)
    )


def sees_resume(turn: Turn, node: Node) -> bool:
    resume = resume_point(turn.job)
    return resume is None or (node.joined is not None and resume.digest in node.joined.seen)


def expected(turn: Turn) -> list[Node]:
    """The agents that gathering waits for, answered or not: fresh, not leaving, not held, not overdue."""
    job, live = turn.job, turn.live
    found = []
    for node in job.nodes.values():
        if not is_candidate(turn, node) or turn.is_held(node):
            continue
        if not has_answered(turn, node):
            if node.name in live.unexpected:
                continue
            asked = live.asked_at.setdefault(node.name, turn.now)
            if turn.due(asked + job.settings.join_timeout):
                live.unexpected.add(node.name)
                turn.notice(f"{node.name} has not joined within {job.settings.join_timeout:.0f} s: going on without it")
                continue
        found.append(node)
    return in_rank_order(turn, found)


def eligible(turn: Turn) -> list[Node]:
    """Those that have joined and can take part; held ones only where fewer than `min` would remain."""
    nodes = [n for n in turn.job.nodes.values() if is_candidate(turn, n) and has_answered(turn, n)]
    nodes = [n for n in nodes if sees_resume(turn, n)]
    free = [n for n in nodes if not turn.is_held(n)]
    if len(free) < turn.job.settings.min_nodes:
        held = in_rank_order(turn, [n for n in nodes if turn.is_held(n)])
        free += held[: turn.job.settings.min_nodes - len(free)]
    return in_rank_order(turn, free)


def select(turn: Turn, nodes: list[Node]) -> list[Node]:
    """The members of a world of these nodes: at most `max`, a multiple of the unit, never less than `min`."""
    settings = turn.job.settings
    count = min(len(nodes), turn.job.most_nodes)
    count -= count % max(1, settings.node_unit)
    return nodes[:count] if count >= settings.min_nodes else []


def of_size(nodes: list[Node], world_size: int, settings: Settings, most: int) -> list[Node]:
    """As many of these nodes, at most `most`, as may form a world of exactly `world_size` workers, in their order.

    Of nodes with the same number of workers the first are taken, so only how many of each kind there are is searched.
    """
    kinds: dict[int, list[Node]] = {}
    for node in nodes:
        kinds.setdefault(node.nproc, []).append(node)
    # Nodes and workers so far, and how many of each kind that took.
    found: dict[tuple[int, int], tuple[int, ...]] = {(0, 0): ()}
    for nproc, alike in kinds.items():
        wider: dict[tuple[int, int], tuple[int, ...]] = {}
        for (count, workers), taken in found.items():
            for more in range(len(alike), -1, -1):
                key = (count + more, workers + more * nproc)
                if key[0] <= most and key[1] <= world_size:
                    wider.setdefault(key, (*taken, more))
        found = wider
    unit = max(1, settings.node_unit)
    counts = [c for c, workers in found if workers == world_size and c >= settings.min_nodes and c % unit == 0]
    if not counts:
        return []
    taken = found[max(counts), world_size]
    chosen = [node for more, alike in zip(taken, kinds.values(), strict=True) for node in alike[:more]]
    return [node for node in nodes if node in chosen]


def newcomers(turn: Turn, presumed: bool = False) -> list[Node]:
    """Live nodes outside the open world that wait for a place and have announced themselves.

    `presumed`: also those that a restarted master has not heard yet. A drain that began for them goes on; none begins.
    """
    world = turn.job.world
    members = {member.incarnation for member in world.members} if world is not None else set()
    return [
        node
        for node in turn.job.nodes.values()
        if node.incarnation not in members
        and node.joined is not None
        and (world is None or not world.resume or world.resume in node.joined.seen)
        and (presumed or node.name not in turn.live.presumed)
        and is_candidate(turn, node)
        and not turn.is_held(node)
    ]
