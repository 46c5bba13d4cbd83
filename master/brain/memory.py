"""Memory checkpoints: which nodes hold which parts, and which step the run goes on from.

Each node holds its *part*, the files of its own ranks, and those of its buddies. Nodes say what they hold, again to
each new master; nothing of it is stored. While every part of a step has a living holder the step is *held*. When a
world ends, the newest held step is recorded like a commit, with the number of its parts, before anybody starts from it.
`durable` brings it to the checkpoint directory, and what the ranks want there. From then on it is a commit like others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice

from dalsegno.protos import control_pb2

from . import checkpoints, replication
from .described import from_proto
from .doubts import is_looked_at, say_given_up, set_aside
from .holders import Source, copies, is_there, is_whole, missing, sole_keepers, sources, unaccounted, who_looks
from .live import HeldStep, State
from .membership import answers
from .membership import is_candidate as may_join
from .state import Checkpoint, Job, Member, MemberState, Node, Phase
from .turn import Turn, names

__all__ = (
    "adopt",
    "buddies",
    "copies_of",
    "is_candidate",
    "is_due",
    "is_gone",
    "is_held",
    "lacks_parts",
    "needed",
    "next_to",
    "passed_over",
    "report",
    "seeks",
    "sources_of",
    "to_memory",
    "would_go_on_from",
)

# A part of the resume point that nobody holds is lost after so long (seconds): a new master hears its holders one by
# one.
LOST_AFTER_SECONDS = 3.0
# Nodes that are there have so long to say all that they hold.
TOLD_WITHIN_SECONDS = 10.0
# Nodes look on the disk for so long, all of them together, before what nobody holds is given up.
LOOK_WITHIN_SECONDS = 30.0
# A node that says that it gathers is waited for so long at most, and --join-timeout behind that (seconds).
GATHERED_WITHIN_SECONDS = 600.0
# So long it counts whether most nodes are still at it (seconds).
MOST_AT_IT_SECONDS = 0.25
# Why a step does not count any more.
GONE = "the nodes that held a part of it are gone"
# Steps of one epoch that are remembered: nodes hold two or three, and not all the same ones.
MOST_STEPS = 8


def to_memory(state: State, somebody_stays: bool) -> bool:
    """Whether a drain's save goes to memory: some node stays that can hold it, and all of them can be reached.

    And no node is here that could not fetch such a step lately, or has no memory for it, and may want a place.
    """
    job = state.job
    if job.settings.memory_replicas <= 0 or job.world is None or not somebody_stays:
        return False
    if any(job.node_by(incarnation) is not None for incarnation in state.live.held.unfetched):
        return False
    if any(job.node_by(member.incarnation) is None for member in job.world.members):
        return False
    return all(node.peer_address or not wants_place(job, node) for node in job.nodes.values())


def wants_place(job: Job, node: Node) -> bool:
    """Whether a node has a place in the world, or may have one in the next."""
    assert job.world is not None
    may_have = node.sees_directory and not node.leaving and not node.refused
    return may_have or job.world.member(node.incarnation) is not None


def buddies(job: Job, members: Sequence[Member], member: Member) -> list[str]:
    """Addresses of those that are to hold this part, too: the next in rank order, on other hosts if possible.

    Args:
        members: of the world, by their group ranks.
    """
    wanted = job.settings.memory_replicas
    found = next_to(job, members, member.group_rank + 1, [member], wanted, leavers=True)
    return [node.peer_address for node in found]


def next_to(
    job: Job, members: Sequence[Member], start: int, have: Sequence[Member], wanted: int, *, leavers: bool = False
) -> list[Node]:
    """So many more nodes for a part, if they are there: the next in rank order, on other hosts if possible.

    Args:
        members: of the world, by their group ranks.
        start: the group rank to begin with.
        have: those that have it.
        leavers: nodes that leave count, too.
    """
    if wanted <= 0:
        return []
    known, hosts = {member.incarnation for member in have}, {member.host for member in have}
    elsewhere: list[Node] = []
    beside: list[Node] = []
    for other in chain(islice(members, start, None), islice(members, start)):
        node = job.node_by(other.incarnation)
        if node is None or not node.peer_address or other.incarnation in known or (node.leaving and not leavers):
            continue
        (beside if other.host in hosts else elsewhere).append(node)
        hosts.add(other.host)
        if len(elsewhere) >= wanted:
            break
    return [*elsewhere, *beside][:wanted]


# ---- what nodes hold ------------------------------------------------------------------------------------------------


def report(turn: Turn, node: Node, message: control_pb2.HeldRequest) -> tuple[str, str]:
    """A node says which parts of a step it holds, all of them each time; that it has said so of all steps; or that it
    still gathers the resume point.

    Returns (status code, detail).
    """
    held, digest = turn.live.held, message.checkpoint.ref.digest
    if message.all:
        if len(held.told_all) > 2 * len(turn.job.nodes):
            held.told_all = {known: None for known in held.told_all if turn.job.node_by(known)}
        held.told_all[node.incarnation] = None
        return "OK", ""
    note_gathering(turn, node, message.gathering or digest)
    if message.gathering:
        return "OK", ""
    step = held.steps.get(digest)
    if step is None and message.parts:
        record = worth_knowing(turn, node, message.checkpoint)
        if record is None:
            return "OK", ""
        step = held.step(record)
    if step is not None:
        step.hold(node.incarnation, message.parts)
        # Agents remember only of the open epoch what the ranks want.
        step.wanted = step.wanted or message.make_durable or is_named(turn.job, message.checkpoint)
        member = turn.job.world.member(node.incarnation) if turn.job.world is not None else None
        if member is not None and turn.job.world is not None and step.record.epoch == turn.job.epoch:
            if member.group_rank in message.parts:
                step.own.add(member.group_rank)
            step.note_sending(member.group_rank, message)
            replication.heard(turn, member, step, message)
        forget_old(turn)
    return "OK", ""


def note_gathering(turn: Turn, node: Node, digest: str) -> None:
    """A node that is at it with the resume point is not late, while fewer than half of the others are done.

    Not without an end: it may be at it in vain.
    """
    asked = turn.live.gathering.asked
    resume = checkpoints.resume_point(turn.job)
    if resume is None or resume.digest != digest or node.name not in asked or answers(turn, node):
        return
    since = turn.live.gathering.gathers.setdefault(node.name, turn.heard)
    if turn.heard - since <= GATHERED_WITHIN_SECONDS and are_most_at_it(turn):
        asked[node.name] = turn.heard


def are_most_at_it(turn: Turn) -> bool:
    """Whether fewer than half of all nodes have joined: what they do at present takes its time.

    A thousand nodes tell of each of their parts, so all are looked at now and then only.
    """
    gathering = turn.live.gathering
    at, found = gathering.most_at_it
    if turn.heard - at >= MOST_AT_IT_SECONDS:
        # Spares that see another directory, or cannot take part, are waited for by nobody.
        nodes = turn.job.nodes.values()
        others = [node for node in nodes if may_join(turn, node) and node.name not in gathering.overdue]
        found = 2 * sum(answers(turn, other) for other in others) < len(others)
        gathering.most_at_it = turn.heard, found
    return found


def worth_knowing(turn: Turn, node: Node, said: control_pb2.Checkpoint) -> Checkpoint | None:
    """The record of a step that the run may go on from: the recorded one, or a newer one of the last epoch.

    A new one counts on the word of a node of that epoch alone. Of what is older there is only the candidate.
    """
    job, world = turn.job, turn.job.world
    known = job.checkpoint(said.ref.digest)
    if known is not None:
        return known if known.parts and not known.retired else None
    if said.run_id != job.run_id:
        return None
    if is_named(job, said) and said.epoch < job.epoch:
        return replace(from_proto(said), parts=nodes_of(job, said.epoch))
    if world is None or said.epoch != job.epoch or world.epoch != job.epoch or job.next.spoilt == job.epoch:
        return None
    newest = max(world.resumed_step, job.checkpoints.last_step(job.epoch))
    if world.member(node.incarnation) is None or (said.step <= newest and not is_named(job, said)):
        return None
    return replace(from_proto(said), parts=len(world.members), layout=tuple(one.nproc for one in world.members))


def is_named(job: Job, said: control_pb2.Checkpoint) -> bool:
    """What the run goes on from calls this older step its candidate: so a new master knows it again."""
    head, name = job.checkpoints.head, said.ref.name
    named = head is not None and head.candidate == name == said.best
    return named and (said.epoch == job.epoch or (said.epoch < job.epoch and nodes_of(job, said.epoch) > 0))


def nodes_of(job: Job, epoch: int) -> int:
    """How many nodes the world of an older epoch had; 0: it is not known any more."""
    return next((entry.nodes for entry in reversed(job.history) if entry.epoch == epoch), 0)


def forget_old(turn: Turn) -> None:
    """Keeps the newest steps, what is recorded, on its way to the disk or to buddies, and what may be the best.

    And the newest step that waits for the disk, as nodes do: any number of others may come before its turn.
    """
    job, held = turn.job, turn.live.held
    head = job.checkpoints.head
    waits = (step.record.digest for step in held.newest_first() if is_due(job, step))
    own = (step for step in held.newest_first() if step.wanted and step.record.best == step.record.name)
    candidates = {next((step.record.name for step in own), ""), "" if head is None else head.candidate}
    digests = {held.writing, next(waits, ""), *replication.kept(held.replicas)}
    for step in held.newest_first()[MOST_STEPS:]:
        record = step.record
        if job.checkpoint(record.digest) is None and record.digest not in digests and record.name not in candidates:
            del held.steps[record.digest]


def copies_of(state: State, record: Checkpoint) -> int:
    """How many nodes have each part of a held step, at least."""
    return copies(state.job, state.live.held.steps[record.digest])


def is_candidate(job: Job, step: HeldStep) -> bool:
    """It was the best so far, of this epoch or as of what the run goes on from, and nothing better is recorded since.

    Only what is on the disk may be named as the best.
    """
    record, head = step.record, job.checkpoints.head
    if not step.wanted or record.best != record.name or job.checkpoint(record.digest) is not None:
        return False
    if record.epoch != job.epoch and (head is None or head.candidate != record.name):
        return False
    return not any(known.best == known.name and known.age > record.age for known in job.checkpoints.usable)


def is_due(job: Job, step: HeldStep) -> bool:
    """The ranks of the last world want it on the disk, and neither it nor anything newer is there."""
    record = step.record
    newer = record.epoch == job.epoch and record.step > job.checkpoints.last_step(job.epoch)
    return step.wanted and newer and job.checkpoint(record.digest) is None


def newest_held(state: State) -> HeldStep | None:
    """The newest step of which each part has a living holder, or is on the disk."""
    return next((step for step in state.live.held.newest_first() if is_there(state.job, step)), None)


def lacks_parts(turn: Turn) -> bool:
    """Whether the run would go on from the disk, although newer steps are in memory: of each some part has no holder.

    A new master hears the holders one by one.
    """
    job, head = turn.job, turn.job.checkpoints.head
    if head is not None and head.parts:
        return False
    newer = [step for step in turn.live.held.steps.values() if may_count(job, step.record, head)]
    return bool(newer) and not any(is_there(job, step) for step in newer)


def is_held(turn: Turn, step: int) -> bool:
    """The open epoch's ranks have saved this step to memory, or a later one."""
    newest = newest_held(turn.state)
    return newest is not None and newest.record.epoch == turn.job.epoch and newest.record.step >= step


def sources_of(state: State, record: Checkpoint, most: int = 0) -> tuple[Source, ...]:
    """Where each part of a memory checkpoint can be fetched, by the group rank that wrote it; () of one on the disk.

    Args:
        most: See `holders.sources`.
    """
    step = state.live.held.steps.get(record.digest) if record.parts else None
    return sources(state.job, step, most) if step is not None else (Source(),) * record.parts


def needed(state: State) -> frozenset[str]:
    """The incarnations of leavers that stay: of what the run may go on from nobody who stays has a part that they have.

    The same holds for what may be the best. Where nobody stays, one of the leavers writes it to the disk. While a drain
    lasts other parts may be on their way: who is released before they are there would take for saved what is not.
    """
    job = state.job
    leavers = {node.incarnation: node for node in job.nodes.values() if node.leaving}
    if not leavers:
        return frozenset()
    found = {incarnation for incarnation, node in leavers.items() if is_unheard(state, node)}
    steps = state.live.held.newest_first()
    if len(leavers) < len(job.nodes):
        for step in steps:
            if is_candidate(job, step):
                found |= sole_keepers(job, step)
    # Of those that are left, the newest step that is whole decides: nothing older is gone back to.
    for step in steps:
        if not may_count(job, step.record, job.checkpoints.head):
            continue
        found |= sole_keepers(job, step)
        if is_whole(job, step):
            break
        if job.phase is Phase.DRAINING:
            found |= step.by_node.keys() & leavers.keys()
    return frozenset(found)


def is_unheard(state: State, node: Node) -> bool:
    """This master is new, and has not heard from a node what it holds."""
    in_use = state.job.settings.memory_replicas > 0 and bool(node.peer_address)
    return in_use and node.incarnation not in state.live.held.told_all


def may_count(job: Job, record: Checkpoint, head: Checkpoint | None) -> bool:
    """The run may go on from this step in memory: it does, or it is a newer one of the last epoch."""
    if head is not None and record.digest == head.digest:
        return head.parts > 0
    # Where a person wanted an earlier step, what nodes still hold does not undo that.
    of_the_last = record.epoch == job.epoch and not checkpoints.has_gone_back(job)
    return of_the_last and (head is None or record.age > head.age)


# ---- what counts ----------------------------------------------------------------------------------------------------


def would_go_on_from(state: State) -> Checkpoint | None:
    """The newest held step, if the run goes on from it when its world ends; None: from what is recorded."""
    job, newest = state.job, newest_held(state)
    if newest is None or job.checkpoint(newest.record.digest) is not None:
        return None
    return newest.record if may_count(job, newest.record, checkpoints.resume_point(job)) else None


def adopt(turn: Turn) -> bool:
    """Between two worlds: the newest held step becomes the one that the run goes on from. Returns whether one did."""
    record = would_go_on_from(turn.state)
    if record is not None:
        checkpoints.put_newer(turn, record)
    return record is not None


def is_gone(turn: Turn, record: Checkpoint) -> bool:
    """Whether a part of a step has had no holder for a while, as all nodes have said, and is not on the disk.

    A node looks there first: who wrote it may be gone, and what it said of that forgotten. A node that has not spoken
    to this master may hold it until it is lost: perhaps the master is the one that is cut off. One that has come may
    still be about to say what it holds, and one that could not load its copy what of it is good.
    """
    step = turn.live.held.step(record)
    if is_there(turn.job, step):
        found(step)
        return False
    if is_looked_at(turn, step):
        return False
    if step.missing_since is None:
        step.missing_since = turn.heard
    nodes = turn.job.nodes.values()
    if any(not turn.presence(node).spoke for node in nodes):
        return False
    patience = TOLD_WITHIN_SECONDS if any(is_unheard(turn.state, node) for node in nodes) else LOST_AFTER_SECONDS
    if not turn.overdue(step.missing_since + patience):
        return False
    return not is_sought(turn, step)


def is_sought(turn: Turn, step: HeldStep) -> bool:
    """Whether a node is to look on the disk for what nobody holds of a step. Not without an end: a disk may hang."""
    if step.sought_since is None:
        step.sought_since = turn.heard
    over = turn.overdue(step.sought_since + LOOK_WITHIN_SECONDS)
    step.sought = not over and bool(who_looks(turn.job, step))
    return step.sought


def found(step: HeldStep) -> None:
    """All of it is somewhere, as far as is known: nothing is looked for."""
    step.missing_since, step.gone, step.sought, step.sought_since = None, False, False, None
    step.looked.clear()
    step.absent &= step.sighted


def seeks(turn: Turn, resume: Checkpoint | None) -> bool:
    """Whether a node looks on the disk for what leavers had of the newest step, before a world opens without that."""
    job = turn.job
    step = next(iter(turn.live.held.newest_first()), None)
    if step is None or job.checkpoint(step.record.digest) is not None or not may_count(job, step.record, resume):
        return False
    if is_there(job, step) or not went_with_leavers(job, step):
        found(step)
        return False
    return is_sought(turn, step)


def went_with_leavers(job: Job, step: HeldStep) -> bool:
    """The ranks that wrote what is missing have ended as they should: their node may have brought it to the disk."""
    world, lost = job.world, unaccounted(job, step)
    if world is None or not lost:
        return False
    ended = (MemberState.DRAINED, MemberState.FINISHED, MemberState.LEFT)
    return all(part < len(world.members) and job.part(world.members[part]) in ended for part in lost)


def lost(turn: Turn, resume: Checkpoint | None) -> bool:
    """A part of the resume point is nowhere any more, as all nodes have said: the run goes back. True: it did."""
    if resume is None or not resume.parts:
        return False
    if not is_gone(turn, resume):
        return False
    step = turn.live.held.step(resume)
    why = GONE
    if step.doubted:
        why = "there is no other copy of the part that could not be loaded"
    set_aside(turn, resume)
    # Nothing of it is anywhere: an older step of its epoch may still count.
    turn.job.checkpoints.drop(resume.digest)
    adopt(turn)
    say_given_up(turn, resume, why)
    return True


def passed_over(turn: Turn, resume: Checkpoint | None) -> None:
    """A world opens from the disk: says which newer step was in memory, if a part of that is lost for good."""
    job = turn.job
    if resume is not None and resume.parts:
        return
    for step in turn.live.held.newest_first():
        record = step.record
        unknown = job.checkpoint(record.digest) is None
        if unknown and may_count(job, record, resume) and not is_whole(job, step):
            lacking = missing(job, step)
            gone = [member.node for member in job.world.members if member.group_rank in lacking] if job.world else []
            turn.notice(f"{record.name} was in memory, and nobody who is here has the part of {names(gone)}")
            return
