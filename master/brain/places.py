"""Which place each node takes in the next world, and which parts of a memory checkpoint it needs there.

A state may be larger than one node's memory. Where each rank loads only what its own place has saved (`Shape.by_place`)
and the next world has as many ranks in each place, a node needs the part of its place, and the first one, in which lies
what is alike on all ranks; and the parts of which it is to be a buddy, so that they have as many copies as before. It
is told of these only. In a world of another size it needs the parts in which its ranks have something to load, which
the lengths of what is cut say (`Shape.reads`). If a checkpoint does not say them, and once a world could not start with
some parts, each node needs all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.protos.reads import parts_read

from . import failures
from .checkpoints import resharded, resume_point, same_shape
from .gathering import Needs
from .live import HeldStep, Live
from .membership import eligible, has_answered, in_rank_order, select
from .memory import next_to
from .state import Checkpoint, Job, Member, Node
from .turn import Turn

__all__ = ("arranged", "could_not_start", "fits", "may_lack", "opened", "plan")

# So often, and once for each node, the nodes of the next world may change in one gathering before each of them fetches
# all parts.
MOST_PLANS = 32
# A node that stays is waited for so long where spares could fill the world that have other parts (seconds).
SLOW_SECONDS = 10.0


def arranged(turn: Turn, resume: Checkpoint | None, nodes: Sequence[Node]) -> list[Node]:
    """The same, by their group ranks: survivors before newcomers.

    If they go on from what lies in their places, and as many come as there were, who stays keeps its place, and so does
    an agent that comes again under its name. The first one is that of a node that was there, if there is one.
    """
    step, world = step_of(turn.live, resume), turn.job.world
    if step is None or world is None or len(nodes) != len(world.members):
        return list(nodes)
    nproc = [member.nproc for member in world.members]
    places = {member.group_rank: node for node in nodes if (member := world.member(node.incarnation)) is not None}
    if places and 0 not in places:
        first = next((rank for rank in sorted(places) if places[rank].nproc == nproc[0]), min(places))
        places[0] = places.pop(first)
    placed = {node.incarnation for node in places.values()}
    by_name = {member.node: member.group_rank for member in world.members}
    left: list[Node] = []
    for node in (node for node in nodes if node.incarnation not in placed):
        rank = by_name.get(node.name)
        if rank is None or rank in places or node.nproc != nproc[rank]:
            left.append(node)
        else:
            places[rank] = node
    for rank in (rank for rank in range(len(nodes)) if rank not in places):
        places[rank] = next((node for node in left if node.nproc == nproc[rank]), left[0])
        left.remove(places[rank])
    return [places[rank] for rank in range(len(nodes))]


def plan(turn: Turn, expected: Sequence[Node]) -> bool:
    """Decides what each node needs: of those that can be in the next world. Returns whether that has changed.

    Whether a node has what it needs by the plan makes no difference to who that is.

    Args:
        expected: the nodes that gathering waits for, answered or not.
    """
    gathering, resume = turn.live.gathering, resume_point(turn.job)
    step, too_often = step_of(turn.live, resume), gathering.plans > MOST_PLANS + len(turn.job.nodes)
    if resume is None or step is None or too_often:
        return follow(turn, None)
    here = {node.name: node for node in eligible(turn, any_parts=True)}
    here |= {node.name: node for node in expected if not has_answered(turn, node, any_parts=True)}
    prospects = in_rank_order(turn.job, list(here.values()))
    needed = of_prospects(turn, resume, step, prospects)
    return follow(turn, None if needed is None else Needs(resume.digest, needed))


def follow(turn: Turn, new: Needs | None) -> bool:
    """From now on this is the plan. Returns whether it is another one."""
    gathering, nodes, resume = turn.live.gathering, turn.job.nodes.values(), resume_point(turn.job)
    if new == gathering.plan:
        return False
    before = {node.name for node in nodes if gathering.lacks(node, resume)}
    gathering.plan = new
    gathering.plans += 1
    for node in nodes:
        if node.name not in before and gathering.lacks(node, resume):
            # It has answered in time, and is asked for more now.
            gathering.asked.pop(node.name, None)
    return True


def fits(turn: Turn, resume: Checkpoint | None, nodes: Sequence[Node]) -> bool:
    """Whether these nodes, by their group ranks, have what each needs there. If not, each fetches all parts."""
    joined = {node.incarnation: node.joined.parts for node in nodes if node.joined is not None}
    partial = {incarnation: parts for incarnation, parts in joined.items() if parts is not None}
    if resume is None or not resume.parts or not partial:
        return True
    step = step_of(turn.live, resume)
    needed = None if step is None else of_world(turn.job, step, nodes)
    if needed is not None and all(needed[incarnation] <= parts for incarnation, parts in partial.items()):
        return True
    turn.live.gathering.plans = MOST_PLANS + len(turn.job.nodes) + 1
    follow(turn, None)
    return False


def awaits(turn: Turn, waited_for: Sequence[Node]) -> bool:
    """Whether nodes that are to be in the next world may only be slow. Spares have not what is in those places."""
    gathering, resume = turn.live.gathering, resume_point(turn.job)
    if gathering.plan is None or resume is None or gathering.plan.digest != resume.digest:
        return False
    slow = [node for node in waited_for if node.incarnation in gathering.plan.needed]
    asked = [gathering.asked.get(node.name, turn.heard) for node in slow]
    return bool(asked) and not turn.overdue(max(asked) + SLOW_SECONDS)


def opened(turn: Turn) -> None:
    """A world has opened, with what its plan has brought to each node."""
    known = turn.live.gathering.plan
    turn.live.held.opened_with = known.digest if known is not None else ""


def may_lack(turn: Turn) -> bool:
    """Whether the open world has not made a step, and its ranks may miss a part that their nodes do not have.

    What nodes had as the world opened is not stored.
    """
    world, known = turn.job.world, turn.live.held.opened_with
    record = turn.job.checkpoint(world.resume) if world is not None else None
    if world is None or record is None or turn.job.told.first_step:
        return False
    return known == world.resume or (known is None and record.by_place and record.parts > 0)


def could_not_start(turn: Turn, resume: Checkpoint | None) -> bool:
    """The ranks have failed before a step in a world of which each node had some parts only. True: all are fetched now.

    It is counted as the script's only if it fails again. While a node is silent it may be lost, too: then the next
    world shows it.
    """
    world, step = turn.job.world, step_of(turn.live, resume)
    if world is None or step is None or turn.job.run.budget.pending is None:
        return False
    if not may_lack(turn) or world.resume != step.record.digest:
        return False
    if not all(failures.answers(turn, member) and not failures.broke_it(turn, member) for member in world.members):
        return False
    step.needs_all = True
    if turn.job.run.budget.pending.refused:
        turn.cause("the ranks refused to load it")
    turn.notice(
        f"the ranks failed before their first step, and each node had only its parts of {step.record.name} in memory:"
        " each fetches all of it now"
    )
    failures.acquit(turn)
    return True


def of_prospects(
    turn: Turn, resume: Checkpoint, step: HeldStep, prospects: Sequence[Node]
) -> dict[str, frozenset[int]] | None:
    """What each of them needs, by incarnation; None: all parts."""
    job = turn.job
    chosen = select(turn, list(prospects))
    if chosen:
        return of_world(job, step, arranged(turn, resume, chosen))
    # More nodes must come. Those that are here keep their places then.
    return None if job.world is None else of_members(job, step, job.world.members)


def step_of(live: Live, resume: Checkpoint | None) -> HeldStep | None:
    """The resume point, if parts of it may be enough and it is known where its ranks were."""
    if resume is None or not resume.parts or not resume.by_place:
        return None
    step = live.held.steps.get(resume.digest)
    return None if step is None or not step.record.layout or step.needs_all else step


def of_world(job: Job, step: HeldStep, nodes: Sequence[Node]) -> dict[str, frozenset[int]] | None:
    """What the nodes of a world need, in order of their group ranks; None: all parts."""
    members = [Member(n.name, n.incarnation, n.host, n.nproc, rank, False) for rank, n in enumerate(nodes)]
    return of_members(job, step, members)


def of_members(job: Job, step: HeldStep, members: Sequence[Member]) -> dict[str, frozenset[int]] | None:
    """What the members of a world need, some of which may be gone; None: all parts."""
    record, nproc = step.record, tuple(member.nproc for member in members)
    if nproc == record.layout:
        read = [frozenset({0, member.group_rank}) for member in members]
    elif record.reads is not None and (same_shape(record, sum(nproc)) or resharded(job, record, sum(nproc))):
        read = list(parts_read(record.reads, record.layout, nproc))
    else:
        return None
    several_hosts = len({member.host for member in members}) > 1
    needed = {member.incarnation: set(parts) for member, parts in zip(members, read, strict=True)}
    for part, have in enumerate(staying(job, members, read, record.parts)):
        # From where its own node is, or would be.
        own = part * len(members) // record.parts
        for node in more_holders(job, members, own, have, several_hosts=several_hosts):
            needed[node.incarnation].add(part)
    return {incarnation: frozenset(parts) for incarnation, parts in needed.items()}


def more_holders(
    job: Job, members: Sequence[Member], start: int, have: Sequence[Member], *, several_hosts: bool
) -> list[Node]:
    """Who is to hold a part besides: until it is on as many nodes as the job wants, and not on one host alone."""
    wanted, hosts = 1 + job.settings.memory_replicas - len(have), {member.host for member in have}
    if wanted > 0 or job.settings.memory_replicas <= 0 or len(hosts) > 1 or not several_hosts:
        return next_to(job, members, start, have, wanted)
    return [node for node in next_to(job, members, start, have, 1) if node.host not in hosts]


def staying(job: Job, members: Sequence[Member], read: Sequence[frozenset[int]], parts: int) -> list[list[Member]]:
    """By part, the members that load it and do not leave."""
    found: list[list[Member]] = [[] for _ in range(parts)]
    for member, own in zip(members, read, strict=True):
        node = job.node_by(member.incarnation)
        if node is not None and not node.leaving:
            for part in own:
                found[part].append(member)
    return found
