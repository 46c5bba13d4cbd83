"""Who is there, what becomes of who is not, and who would be in the next world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from . import shapes
from .checkpoints import resume_point
from .chronicle import Kind
from .fitting import how_many
from .live import VerificationLife
from .state import Job, Member, MemberState, Node, Settings
from .turn import Turn, about, heartbeat_of, names

__all__ = (
    "agree_on_directory",
    "answers",
    "are_enough",
    "counts",
    "drop",
    "eligible",
    "expected",
    "forget_losses",
    "give_notice",
    "has_answered",
    "hear",
    "in_rank_order",
    "is_candidate",
    "lose",
    "may_call_session",
    "members_of",
    "newcomers",
    "of_size",
    "sees_resume",
    "select",
)

# A node that is lost this often within the window becomes a spare for a doubling time. Seconds.
LOSS_LIMIT = 3
LOSS_WINDOW_SECONDS = 600.0
HOLD_BASE_SECONDS = 30.0
MAX_HOLD_SECONDS = 3600.0
# For each period of this length without a loss, a name that was held is trusted a little more again.
FORGIVEN_AFTER_SECONDS = 6 * LOSS_WINDOW_SECONDS


def drop(turn: Turn, node: Node) -> None:
    """Forgets a node: whatever its incarnation still says is answered NOT_FOUND."""
    turn.job.nodes.drop(node.name)
    turn.live.nodes.drop(node.name)
    gathering = turn.live.gathering
    gathering.asked.pop(node.name, None)
    gathering.gathers.pop(node.name, None)
    gathering.overdue.discard(node.name)
    turn.live.held.complaints.pop(node.name, None)
    for step in turn.live.held.steps.values():
        step.forget(node.incarnation)
    void_orders(turn, node.name)


def void_orders(turn: Turn, name: str) -> None:
    """Takes back what a node was to do beside its ranks: whoever comes back under its name knows nothing of it."""
    held, verification = turn.job.conversion, turn.job.verification
    if held is not None and held.lease and held.owner == name:
        turn.notice(f"{name} can no longer convert: another node takes over")
        turn.update_next(conversion=replace(held, lease=0, owner=""))
    if verification is not None and verification.number and verification.verifier == name:
        # Somebody is asked at once: this is no verification without a verdict.
        turn.update_next(verification=replace(verification, number=0))
        turn.live.verification = VerificationLife(turn.heard, retry_at=turn.now)


def give_notice(turn: Turn, node: Node, seconds: float) -> None:
    """The node goes within so many seconds, by its own word or by order: a drain that must end does so before."""
    node = turn.update(node, leaving=True)
    gone = turn.heard + seconds
    turn.presence(node).leaves = gone
    if turn.job.drain is not None and not turn.job.drain.optional and turn.is_working(node):
        turn.drain_life.deadline = min(gone, turn.drain_life.deadline)


def lose(turn: Turn, dead: Sequence[tuple[Node, str]]) -> None:
    """Handles the death of nodes, and how they died. If ranks were running, the phases see their parts as LOST."""
    job, live = turn.job, turn.live
    world = job.world
    counts = costs_the_run(turn)
    gone: dict[str, list[str]] = {}
    broken: dict[str, list[str]] = {}
    spares: dict[tuple[int, float], list[str]] = {}
    for node, how in dead:
        drop(turn, node)
        if not node.leaving:
            live.gathering.note_loss(node.name, turn.now)
        member = world.member(node.incarnation) if world is not None else None
        if member is None or job.part(member) in (MemberState.LOST, MemberState.LEFT):
            if member is None and not node.leaving:
                gone.setdefault(how, []).append(node.name)
            continue
        if not breaks_world(turn, member):
            if node.leaving and job.phase.has_workers and job.part(member) is MemberState.DRAINED:
                # The end of this world finds it no more, and would not name it.
                turn.cause(f"{node.name} left")
            continue
        saves_on = node.leaving and turn.is_working(node) and job.drain is not None and job.drain.agreed
        turn.set_part(member, MemberState.LEFT if saves_on else MemberState.LOST)
        if counts and not node.leaving and (held := count_loss(turn, node.name)) is not None:
            spares.setdefault(held, []).append(node.name)
        broken.setdefault("left" if node.leaving else how, []).append(node.name)
    say_spares(turn, spares)
    for how, who in gone.items():
        text = f"{names(who)} {'is' if len(who) == 1 else 'are'} gone ({how})"
        turn.notice(text, kind=Kind.LOST, nodes=about(who))
    for how, who in broken.items():
        text = f"{names(who)} left" if how == "left" else f"{names(who)} {was(who)} lost ({how})"
        turn.cause(text)
        if how != "left":
            turn.note(Kind.LOST, text, warning=True, nodes=about(who))
    if left := [node.name for node, _ in dead if node.leaving]:
        turn.note(Kind.LEFT, f"{names(left)} left", nodes=about(left))
    if world is not None and any(how != "left" for how in broken):
        note_stillborn(turn, world.epoch)
    if broken and world is not None and not any(job.node_by(member.incarnation) for member in world.members):
        # Everybody was gone at once, and some are back already: that is a start, to which the others will come, too.
        turn.update_next(quiet=True)


def member_of(turn: Turn, node: Node, epoch: int) -> Member | None:
    """The node's place in the world of `epoch`, if that is the last opened one."""
    world = turn.job.world
    if world is None or world.epoch != epoch:
        return None
    return world.member(node.incarnation)


def costs_the_run(turn: Turn) -> bool:
    """Whether the loss costs the others steps: some of this world, or all that two worlds could have made.

    A newcomer that dies before its world's first step costs nobody a step. But if world after world dies, none is made.
    """
    world, live = turn.job.world, turn.live
    if world is None:
        return False
    # Nobody hears the first step of a script without a session.
    stepped = turn.open.first_step_at is not None or turn.job.told.start
    first, last = live.run.stillborn
    return stepped or (first < world.epoch and last >= world.epoch - 1)


def note_stillborn(turn: Turn, epoch: int) -> None:
    """Notes that a world lost members before a step. Of such worlds in a row the first and the last are remembered."""
    first, last = turn.live.run.stillborn
    if turn.open.first_step_at is not None:
        turn.live.run.stillborn = (0, -1)
    else:
        turn.live.run.stillborn = (first if last >= epoch - 1 else epoch, epoch)


def was(who: list[str]) -> str:
    return "was" if len(who) == 1 else "were"


def breaks_world(turn: Turn, member: Member) -> bool:
    """Whether a dead member's ranks are missed. Marks it finished if all others are, and nothing is lost."""
    part = turn.job.part(member)
    if part in (MemberState.FINISHED, MemberState.DRAINED):
        return False  # its ranks have done their work, and it is saved
    if turn.job.phase.has_workers and part is MemberState.RUNNING and others_finished(turn, member.incarnation):
        turn.set_part(member, MemberState.FINISHED)
        return False
    return True


def others_finished(turn: Turn, incarnation: str) -> bool:
    """Whether all other members ran to their end, and the last step's checkpoint is committed."""
    world = turn.job.world
    head = resume_point(turn.job)
    if world is None or head is None or len(world.members) < 2:
        return False
    return (
        head.epoch == world.epoch
        and bool(turn.open.steps)
        and head.step >= turn.open.top_step
        and all(part is MemberState.FINISHED for other, part in turn.job.parts.items() if other != incarnation)
    )


def count_loss(turn: Turn, name: str) -> tuple[int, float] | None:
    """Counts a member's loss that cost others; after too many it is held. Returns how many, and for how long then."""
    live, job = turn.live, turn.job
    before = live.lost_at.get(name, [])
    if before and turn.now - before[-1] > FORGIVEN_AFTER_SECONDS and name in job.losses:
        job.losses[name] = max(0, job.losses[name] - int((turn.now - before[-1]) / FORGIVEN_AFTER_SECONDS))
    times = [at for at in before if turn.now - at < LOSS_WINDOW_SECONDS] + [turn.now]
    live.lost_at[name] = times
    if len(times) < LOSS_LIMIT:
        return None
    held = job.losses.get(name, 0) + 1
    job.losses[name] = held
    pause = min(HOLD_BASE_SECONDS * 2 ** min(held - 1, 20), MAX_HOLD_SECONDS)
    live.held_until[name] = turn.now + pause
    job.holds[name] = pause
    return len(times), pause


def say_spares(turn: Turn, held: dict[tuple[int, float], list[str]]) -> None:
    """Names those that are held, by how often they were lost and for how long they are: one cause is one line."""
    for (times, pause), who in held.items():
        if len(who) == 1:
            text = f"{who[0]} was lost {times} times in {LOSS_WINDOW_SECONDS:.0f} s: a spare for {pause:.0f} s"
        else:
            text = f"{names(who)} were each lost {times} times in {LOSS_WINDOW_SECONDS:.0f} s: spares for {pause:.0f} s"
        turn.notice(text, True)


def forget_losses(turn: Turn) -> None:
    """Forgets names that were not lost for long, or whose hold is over, so that what is remembered stays bounded."""
    live, job = turn.live, turn.job
    for name in [name for name, until in live.held_until.items() if turn.now >= until]:
        # `Turn.is_held` asks for those only who are here, and others may never come back.
        del live.held_until[name]
        job.holds.pop(name, None)
    for name, times in list(live.lost_at.items()):
        if turn.now - times[-1] > FORGIVEN_AFTER_SECONDS * (1 + job.losses.get(name, 0)):
            del live.lost_at[name]
            job.losses.pop(name, None)


def hear(turn: Turn, node: Node) -> bool:
    """Notes a sign of life. Returns whether nobody had been heard for so long that the clock stood still."""
    job = turn.job
    stood = turn.live.clock.word(turn.now, job.settings.node_timeout, heartbeat_of(job))
    if stood:
        turn.heard = turn.live.clock.at(turn.now)
    presence = turn.presence(node)
    presence.heard, presence.spoke = turn.heard, True
    presence.at = turn.now - turn.live.stood_seconds
    return stood


def in_rank_order(job: Job, nodes: Sequence[Node]) -> list[Node]:
    """Survivors in their old relative order, newcomers after them by arrival."""
    world = job.world
    ranks = world.by_incarnation if world is not None else {}

    def place(node: Node) -> tuple[int, int]:
        member = ranks.get(node.incarnation)
        return (1 << 30 if member is None else member.group_rank), node.order

    return sorted(nodes, key=place)


def agree_on_directory(turn: Turn) -> None:
    """Until a world has opened, makes the directory that most nodes share the job's; at first the first agent's."""
    job = turn.job
    if job.epoch or len(job.checkpoints):
        return
    counts = Counter(node.probe for node in job.nodes.values() if node.probe and not node.leaving)
    probe, count = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if count > counts[job.probe]:
        job.probe = probe
        for node in list(job.nodes.values()):
            turn.update(node, sees_directory=node.probe == probe)


def is_candidate(turn: Turn, node: Node) -> bool:
    """Whether the node may be part of the next world, as far as is known."""
    resume = resume_point(turn.job)
    return (
        node.sees_directory
        and not node.leaving
        and not node.refused
        and (resume is None or node.unreadable != resume.digest)
        and turn.is_fresh(node)
    )


def are_enough(turn: Turn) -> bool:
    """Whether as many nodes are here as a world needs at least, joined or not."""
    return sum(is_candidate(turn, node) for node in turn.job.nodes.values()) >= turn.job.settings.least_nodes


def answers(turn: Turn, node: Node, *, any_parts: bool = False) -> bool:
    """Whether the node has joined the present round and said whether it sees the resume point.

    `any_parts`: also if it now needs other parts of that than it has.
    """
    joined, resume = node.joined, resume_point(turn.job)
    return (
        joined is not None
        and joined.round == turn.job.round
        and (resume is None or resume.digest == joined.resume or resume.digest in joined.seen)
        and (any_parts or not turn.live.gathering.lacks(node, resume))
    )


def has_answered(turn: Turn, node: Node, *, any_parts: bool = False) -> bool:
    """The same, and the node is not merely presumed alive."""
    return turn.presence(node).spoke and answers(turn, node, any_parts=any_parts)


def sees_resume(turn: Turn, node: Node) -> bool:
    resume = resume_point(turn.job)
    return resume is None or (node.joined is not None and resume.digest in node.joined.seen)


def expected(turn: Turn) -> list[Node]:
    """The agents that gathering waits for, answered or not: fresh, not leaving, not held, not overdue.

    It does not wait for a name that was lost again and again in this round, because that would hold everybody up.
    """
    job, gathering = turn.job, turn.live.gathering
    found, late = [], []
    for node in job.nodes.values():
        if not is_candidate(turn, node) or turn.is_held(node):
            continue
        if not has_answered(turn, node):
            if node.name in gathering.overdue or gathering.is_crash_looping(node.name, turn.now):
                continue
            asked = gathering.asked.setdefault(node.name, turn.heard)
            if turn.overdue(asked + job.settings.join_timeout):
                gathering.overdue.add(node.name)
                late.append(node.name)
                continue
        found.append(node)
    if late:
        have = "has" if len(late) == 1 else "have"
        text = f"{names(late)} {have} not joined within {job.settings.join_timeout:.0f} s: going on without"
        turn.notice(f"{text} {'it' if len(late) == 1 else 'them'}")
    return in_rank_order(turn.job, found)


def eligible(turn: Turn, *, any_parts: bool = False) -> list[Node]:
    """Nodes that have joined and can take part; held ones only if a world of the others would be too small."""
    nodes = [n for n in turn.job.nodes.values() if has_answered(turn, n, any_parts=any_parts) and sees_resume(turn, n)]
    nodes = [n for n in nodes if is_candidate(turn, n)]
    free = [n for n in nodes if not turn.is_held(n)]
    if len(free) < turn.job.settings.least_nodes:
        held = in_rank_order(turn.job, [n for n in nodes if turn.is_held(n)])
        free += held[: turn.job.settings.least_nodes - len(free)]
    return in_rank_order(turn.job, free)


def counts(turn: Turn, nodes: list[Node]) -> range:
    """How many of these nodes a world may have, the most first: a multiple of the unit, from `min` to `max`."""
    settings = turn.job.settings
    unit = max(1, settings.node_unit)
    most = min(len(nodes), turn.job.most_nodes)
    return range(most - most % unit, settings.least_nodes - 1, -unit)


def select(turn: Turn, nodes: list[Node]) -> list[Node]:
    """The members of a world of these nodes: as many as possible, but not as many as are known to fail, see `shapes`.

    If all numbers failed, that is not considered. Empty if a world would be too small.
    """
    possible = counts(turn, nodes)
    return (shapes.best(turn, nodes, possible) or nodes[: possible[0]]) if possible else []


def of_size(nodes: list[Node], world_size: int, settings: Settings, most: int) -> list[Node]:
    """The first of these nodes, at most `most`, that together have exactly `world_size` workers, in their order.

    Of nodes with the same number of workers the first are taken, so only the number of nodes of each kind is searched.
    """
    kinds: dict[int, list[Node]] = {}
    for node in nodes:
        kinds.setdefault(node.nproc, []).append(node)
    unit, least = max(1, settings.node_unit), settings.least_nodes
    most = min(len(nodes), most)
    there = [(nproc, len(alike)) for nproc, alike in kinds.items()]
    taken = how_many(there, world_size, range(most - most % unit, least - 1, -unit))
    if not taken:
        return []
    chosen = {node.name for more, alike in zip(taken, kinds.values(), strict=True) for node in alike[:more]}
    return [node for node in nodes if node.name in chosen]


def may_call_session(turn: Turn) -> bool:
    """Whether the open world's script imports a session and has not called session() yet: it may still do so."""
    return not turn.job.has_session and any(node.expects_session for node in members_of(turn))


def members_of(turn: Turn) -> list[Node]:
    """The nodes of the last opened world that are there."""
    members = turn.job.world.members if turn.job.world is not None else ()
    nodes = (turn.job.node_by(member.incarnation) for member in members)
    return [node for node in nodes if node is not None]


def newcomers(turn: Turn, presumed: bool = False) -> list[Node]:
    """Live nodes outside the open world that wait for a place and have announced themselves.

    `presumed`: also nodes that a restarted master has not heard yet, and that have not seen yet what has come to the
    disk meanwhile. A drain that began for them goes on; none begins.
    """
    world = turn.job.world
    # What is in memory is fetched once it is needed.
    start = turn.job.checkpoint(world.resume) if world is not None else None
    return [
        node
        for node in turn.job.nodes.values()
        if node.joined is not None
        and (world is None or world.member(node.incarnation) is None)
        and (presumed or start is None or bool(start.parts) or start.digest in node.joined.seen)
        and (presumed or turn.presence(node).spoke)
        and is_candidate(turn, node)
        and not turn.is_held(node)
    ]
