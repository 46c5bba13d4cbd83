"""Memory checkpoints on their way to the disk: which one is written, which node writes which part, and who seals it.

One step at a time is written, of three kinds. What a change has left in memory is what the run goes on from, and is on
the record already: one node writes all of it behind the world's first step. What the ranks want on the disk, instead of
writing it there themselves: each node writes its part while the world trains; one of them seals it when all parts are
there, and only then is it recorded. And of these the candidates, which were the best so far: they are written before
others, although newer ones may be on the disk, and also behind a change of the world.

What nodes have said of that is not stored: a new master has them look again at what they wrote.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dalsegno.protos import control_pb2

from . import checkpoints
from .holders import able, has_holder, holders, is_there, is_whole, missing, suffices, unaccounted, who_looks
from .live import HeldStep, SharedLine, State, Unwritten
from .membership import in_rank_order
from .memory import is_candidate, is_due, is_gone
from .remarks import MOST_LINES, TOGETHER_SECONDS
from .state import Checkpoint, Job, MemberState, Node, Phase
from .turn import Turn, names

__all__ = (
    "WriteOrder",
    "best_in_memory",
    "cannot_write",
    "due",
    "durable",
    "is_stuck",
    "on_disk",
    "orders",
    "owed",
    "tend",
    "want_by_parts",
    "want_durable",
    "write_while_waiting",
)

# A node that could not write a step to the disk is asked again so much later (seconds).
ASKED_AGAIN_SECONDS = 10.0
# A job that lacks nodes has so much time to find them before it writes what it has in memory alone (seconds).
LACKS_NODES_SECONDS = 5.0


@dataclass(frozen=True)
class WriteOrder:
    """What one node does to bring a memory checkpoint to the disk.

    Attributes:
        write: Only these parts; empty: all of it.
        seal: Every part is written, only the seal is missing.
        look: The parts are elsewhere, and perhaps on the disk.
    """

    record: Checkpoint
    write: tuple[int, ...] = ()
    seal: bool = False
    look: bool = False


def want_durable(turn: Turn, record: Checkpoint) -> None:
    """It must be on the disk before a world can open: only files there can be converted."""
    turn.live.held.step(record).urgent = True


def want_by_parts(turn: Turn, record: Checkpoint) -> None:
    """No world opens now, so all nodes have time for it: each writes what it has."""
    step = turn.live.held.step(record)
    step.by_parts = not step.together
    want_durable(turn, record)


def write_while_waiting(turn: Turn) -> None:
    """Brings what is in memory alone to the disk while nodes lack: more of them may go before others come."""
    record = checkpoints.in_memory_alone(turn.job)
    if record is not None and turn.due(turn.live.phase_since + LACKS_NODES_SECONDS):
        want_by_parts(turn, record)


def want_in_parts(turn: Turn, record: Checkpoint) -> bool:
    """Nodes cannot fetch it from each other: each writes the parts that it has. Returns whether that is news."""
    step = turn.live.held.step(record)
    news, step.in_parts = not step.in_parts, True
    if news:
        # A node that could not write all of it could not fetch it.
        step.unable.clear()
    want_durable(turn, record)
    return news


def cannot_write(turn: Turn, record: Checkpoint) -> bool:
    """Whether two nodes, or all that there are, have failed to write a step to the disk, one of them just now."""
    step = turn.live.held.step(record)
    return bool(step.unable) and len(step.told) >= min(2, sum(node.sees_directory for node in turn.job.nodes.values()))


# ---- what is written ------------------------------------------------------------------------------------------------


def tend(turn: Turn) -> None:
    """Chooses the next step that the ranks want on the disk, and asks nodes again that could not write to it."""
    held = turn.live.held
    for said in [said for said, line in held.unwritten.items() if turn.due(line.until)]:
        say_unwritten(turn, held.unwritten.pop(said).nodes, *said)
    note_what_is_gone(turn)
    choose_who_writes(turn)
    for step in held.steps.values():
        forget_written(turn, step)
        for incarnation, at in list(step.unable.items()):
            if turn.due(at):
                del step.unable[incarnation]
    job, under_way = turn.job, held.steps.get(held.writing)
    goes_on = under_way is not None and is_wanted(turn.state, under_way) and can_go_on(job, under_way)
    if under_way is not None and goes_on and not is_stuck(job, under_way):
        return
    able_now = [step for step in held.newest_first() if is_wanted(turn.state, step) and can_begin(turn.state, step)]
    # What nobody can write just now comes last. A candidate of an older epoch, this one's newest one, what is newest.
    able_now.sort(
        key=lambda step: (not is_stuck(job, step), is_candidate(job, step), step.record.epoch < job.epoch), reverse=True
    )
    chosen = next(iter(able_now), None)
    if goes_on and (chosen is None or is_stuck(job, chosen)):
        return
    held.writing = chosen.record.digest if chosen is not None else ""


def note_what_is_gone(turn: Turn) -> None:
    """Of what is recorded, and in memory alone, a part may be nowhere any more while a world trains.

    What is saved since does not wait for that. Between two worlds the run goes back instead: `memory.lost`.
    """
    job, held = turn.job, turn.live.held
    if not job.phase.has_workers:
        return
    for record in job.checkpoints.in_memory:
        if record.digest not in held.steps and record is not job.checkpoints.head:
            continue
        step = held.step(record)
        # A node that comes does not undo it before it has said that it holds the part.
        gone = is_gone(turn, record) or step.gone
        # What somebody holds, and cannot write just now, is tried again.
        step.gone = gone and not step.written.issuperset(missing(job, step))
        if step.gone and not step.gone_said:
            step.gone_said = True
            turn.notice(
                f"a part of {record.name} is in no memory any more, nor on the disk: newer steps go there", True
            )


def choose_who_writes(turn: Turn) -> None:
    """Of a step that nobody had to fetch as a whole each node writes what it has, unless that does not work.

    All of it may be more than a node has room for.
    """
    record, node = writer(turn.state) or (None, None)
    if record is None or node is None or not record.by_place:
        return
    step = turn.live.held.steps[record.digest]
    step.together = step.together or (step.by_parts and is_stuck(turn.job, step))
    step.by_parts = not step.together and (step.by_parts or lacks(step, node) > 0)


def is_wanted(state: State, step: HeldStep) -> bool:
    """The ranks of the open world want it on the disk, and nothing newer is there; or it is a candidate.

    While a world forms disks and cores have other work.
    """
    job = state.job
    if has_to_wait(state, step):
        return False
    if job.phase.has_workers:
        return is_due(job, step) or is_candidate(job, step)
    waits = job.phase is Phase.WAITING or job.ending is not None
    return waits and is_candidate(job, step)


def has_to_wait(state: State, step: HeldStep) -> bool:
    """What the run began from goes first. But if it cannot, another step begins, and is ended if that can be."""
    job, held = state.job, state.live.held
    record = checkpoints.in_memory_alone(job)
    first = held.steps.get(record.digest) if record is not None else None
    if record is None or first is None:
        return record is not None
    if first.gone or not job.phase.has_workers:
        return not first.gone
    in_parts = first.in_parts or first.by_parts
    unable = is_stuck(job, first) if in_parts else first.unable and not able(first, job.nodes.values())
    return not unable and not (held.writing == step.record.digest and not is_stuck(job, step))


def owed(state: State) -> HeldStep | None:
    """What is to come to the disk before the job ends, or None: what the run goes on from, if that is in memory alone.

    Then what was the best.
    """
    record = checkpoints.in_memory_alone(state.job)
    return state.live.held.step(record) if record is not None else best_in_memory(state)


def due(state: State) -> HeldStep | None:
    """The newest step that the ranks of the last world want on the disk, if it is not there; or None."""
    return next((step for step in state.live.held.newest_first() if is_due(state.job, step)), None)


def best_in_memory(state: State) -> HeldStep | None:
    """The best step so far, if it is in memory alone and can be brought to the disk; or None."""
    job, held = state.job, state.live.held
    record = recorded_best(job)
    if record is not None and (known := held.steps.get(record.digest)) is not None and is_there(job, known):
        return known
    can = (step for step in held.newest_first() if is_candidate(job, step))
    return next((step for step in can if can_begin(state, step) or is_being_written(state, step)), None)


def is_being_written(state: State, step: HeldStep) -> bool:
    return state.live.held.writing == step.record.digest and can_go_on(state.job, step)


def recorded_best(job: Job) -> Checkpoint | None:
    """What the run goes on from calls this one the best, and it is in memory alone."""
    head = job.checkpoints.head
    best = head.best if head is not None else ""
    return next((known for known in job.checkpoints.in_memory if known.name == best), None)


def can_begin(state: State, step: HeldStep) -> bool:
    """All parts are there, and all nodes have told of their own: else a buddy that is heard first would write them."""
    job = state.job
    told = step.record.epoch != job.epoch or all(has_told(state, step, part) for part in range(step.record.parts))
    return told and is_whole(job, step)


def has_told(state: State, step: HeldStep, part: int) -> bool:
    """The node whose ranks made this part has told of it, or will not: another master never hears who is gone."""
    job = state.job
    if part in step.own or job.world is None:
        return part in step.own
    member = job.world.members[part]
    if job.node_by(member.incarnation) is None:
        return True
    return job.part(member) is not MemberState.RUNNING and member.incarnation in state.live.held.told_all


def can_go_on(job: Job, step: HeldStep) -> bool:
    """Somebody has each part that is not written yet, and somebody has one to seal it by."""
    return suffices(step, [has_holder(job, step, part) for part in range(step.record.parts)])


def is_stuck(job: Job, step: HeldStep) -> bool:
    """Of some part all holders have just failed to write it, or all of them to seal it: others need not wait for it."""
    if not step.unable:
        return False
    return not suffices(step, [bool(able(step, holders(job, step, part))) for part in range(step.record.parts)])


def orders(state: State) -> dict[str, WriteOrder]:
    """What each node writes or looks for, by incarnation."""
    return orders_to_write(state) | orders_to_look(state)


def orders_to_look(state: State) -> dict[str, WriteOrder]:
    """Of parts that nobody holds: they may be on the disk, written by nodes that are gone."""
    found: dict[str, WriteOrder] = {}
    for step in state.live.held.steps.values():
        node = first_of(state.job, who_looks(state.job, step)) if step.sought else None
        if node is not None:
            found[node.incarnation] = WriteOrder(step.record, tuple(unaccounted(state.job, step)), look=True)
    return found


def orders_to_write(state: State) -> dict[str, WriteOrder]:
    """Of the one step that is brought to the disk."""
    whole = writer(state)
    if whole is not None:
        record, node = whole
        step = state.live.held.steps.get(record.digest)
        in_parts = step is not None and (step.in_parts or step.by_parts)
        if step is not None and (in_parts or (not is_whole(state.job, step) and is_there(state.job, step))):
            return orders_of_parts(state.job, step)
        return {node.incarnation: WriteOrder(record)}
    step = state.live.held.steps.get(state.live.held.writing)
    return {} if step is None or not is_wanted(state, step) else orders_of_parts(state.job, step)


def orders_of_parts(job: Job, step: HeldStep) -> dict[str, WriteOrder]:
    """Each part is written by the node whose ranks made it, or by another one that has it.

    A part of which no holder can write just now waits.
    """
    world, record = job.world, step.record
    missing = [part for part in range(record.parts) if part not in step.written]
    if not missing:
        there = {node.incarnation: node for part in range(record.parts) for node in holders(job, step, part)}
        sealer = first_of(job, able(step, there.values()))
        return {} if sealer is None else {sealer.incarnation: WriteOrder(record, seal=True)}
    parts: dict[str, list[int]] = {}
    for part in missing:
        can = able(step, holders(job, step, part))
        own = world.members[part].incarnation if world is not None and part < len(world.members) else ""
        node = next((node for node in can if node.incarnation == own), None) or first_of(job, can)
        if node is not None:
            parts.setdefault(node.incarnation, []).append(part)
    return {incarnation: WriteOrder(record, tuple(own)) for incarnation, own in parts.items()}


def first_of(job: Job, nodes: list[Node]) -> Node | None:
    """In rank order; who leaves comes last."""
    return min(in_rank_order(job, nodes), key=lambda node: node.leaving, default=None)


def writer(state: State) -> tuple[Checkpoint, Node] | None:
    """What the run goes on from, if that is in memory alone, and the node that writes it. None: there is none.

    Behind the first step of the world that began from it, because until then disks and cores have other work. Before,
    where nobody stays who could hold it, or where only files on the disk help.
    """
    job, live = state.job, state.live
    # What universal files are owed of cannot wait for the newest.
    recorded = (checkpoints.owed(job), job.checkpoints.head, recorded_best(job))
    in_memory = (record for record in recorded if record is not None and record.parts)
    known = ((record, step) for record in in_memory if (step := live.held.steps.get(record.digest)) is not None)
    record, step = next((one for one in known if not one[1].gone), (None, None))
    if record is None or step is None:
        return None
    begun = live.held.steps.get(live.held.writing)
    if begun is not None and record is checkpoints.in_memory_alone(job) and is_wanted(state, begun):
        return None
    started = job.phase.has_workers and live.epoch.first_step_at is not None
    somebody_stays = any(not node.leaving for node in job.nodes.values())
    if somebody_stays and not started and not step.urgent:
        return None

    candidates = in_rank_order(job, able(step, job.nodes.values()))
    chosen = min(candidates, key=lambda node: (node.leaving, lacks(step, node)), default=None)
    return (record, chosen) if chosen is not None else None


def lacks(step: HeldStep, node: Node) -> int:
    """How many parts of a step a node does not have."""
    return step.record.parts - len(step.by_node.get(node.incarnation, ()))


# ---- what nodes say -------------------------------------------------------------------------------------------------


def durable(turn: Turn, node: Node, message: control_pb2.DurableRequest) -> tuple[str, str]:
    """A memory checkpoint, or parts of it, are on the disk, or could not be written. Returns (status code, detail)."""
    job, digest = turn.job, message.ref.digest
    record, step = job.checkpoint(digest), turn.live.held.steps.get(digest)
    if not message.failure:
        turn.live.held.complaints.pop(node.name, None)
    if step is not None and answers_a_look(turn, node, message):
        heard_of_look(turn, node, message, step)
    elif message.absent and message.parts:
        pass  # It is not looked for any more.
    elif record is None:
        if step is not None and (step.wanted or not message.failure):
            heard_of_unrecorded(turn, node, message, step)
    elif not record.parts or record.retired:
        pass  # It is there already.
    elif message.failure:
        step = turn.live.held.step(record)
        sealing = not message.parts and len(step.written) == record.parts
        by_parts = step.in_parts or step.by_parts
        if sealing and by_parts:
            not_sealed(step, message)
        # All of it was ordered before anybody knew that nodes cannot fetch it.
        if message.parts or sealing or not by_parts:
            cannot(turn, node, step, message.failure)
    elif message.parts:
        # The ranks wanted it, and by now the run goes on from it: other nodes write all of it.
        note_written(turn, turn.live.held.step(record), message)
    else:
        checkpoints.now_on_disk(turn, record, node.name)
    return "OK", ""


def answers_a_look(turn: Turn, node: Node, message: control_pb2.DurableRequest) -> bool:
    """Whether this is what the node was asked to look for."""
    order = orders_to_look(turn.state).get(node.incarnation)
    return order is not None and order.record.digest == message.ref.digest and order.write == tuple(message.parts)


def heard_of_look(turn: Turn, node: Node, message: control_pb2.DurableRequest, step: HeldStep) -> None:
    """A node has looked for parts on the disk. What is there of them shows itself as they are sealed."""
    if not message.failure:
        step.sighted.update(message.parts)
        note_written(turn, step, message)
    elif message.absent:
        step.absent.update(message.parts)
    else:
        step.looked.add(node.incarnation)


def not_sealed(step: HeldStep, message: control_pb2.DurableRequest) -> None:
    """A node that could not seal it may have missed what others wrote: they look at it again.

    What was only seen there counts no more if files lack.
    """
    step.written.clear()
    if message.absent:
        step.absent |= step.sighted


def heard_of_unrecorded(turn: Turn, node: Node, message: control_pb2.DurableRequest, step: HeldStep) -> None:
    """A node has told how it got on with a step that the ranks want on the disk.

    Or it has written unasked, because it leaves, or could not hear the master.
    """
    held = turn.live.held
    if message.failure:
        if step.record.digest == held.writing:
            if not message.parts:
                not_sealed(step, message)
            cannot(turn, node, step, message.failure)
    elif message.parts:
        note_written(turn, step, message)
    elif may_seal(turn, node, step):
        checkpoints.record_written(turn, step.record, node.name, candidate=is_candidate(turn.job, step))


def forget_written(turn: Turn, step: HeldStep) -> None:
    """A new epoch deletes what was not sealed."""
    if step.written_in != turn.job.epoch:
        step.written_in, step.sought = turn.job.epoch, False
        step.written.clear()


def note_written(turn: Turn, step: HeldStep, message: control_pb2.DurableRequest) -> None:
    """These parts are on the disk."""
    forget_written(turn, step)
    step.written.update(part for part in message.parts if part < step.record.parts)
    step.absent -= step.written
    step.stuck_since = None


def may_seal(turn: Turn, node: Node, step: HeldStep) -> bool:
    """A member, or who was asked to: what is left of an older world's candidate may be with a spare alone."""
    world = turn.job.world
    if world is not None and world.member(node.incarnation) is not None:
        return True
    order = orders(turn.state).get(node.incarnation)
    return order is not None and order.seal and order.record.digest == step.record.digest


def cannot(turn: Turn, node: Node, step: HeldStep, failure: str) -> None:
    """A node could not write it: another one does, or the same one after a pause.

    People are told once of each node and step. What is the same with each step is said once until the node can write;
    but while no step reaches the disk also with the second one, the fourth, the eighth, and so on.
    """
    held = turn.live.held
    step.unable[node.incarnation] = turn.now + ASKED_AGAIN_SECONDS
    step.failures += 1
    if step.stuck_since is None and is_stuck(turn.job, step):
        step.stuck_since = turn.heard
    on_the_disk, known = checkpoints.newest_on_disk(turn.job), held.complaints.get(node.name)
    newest = on_the_disk.digest if on_the_disk is not None else ""
    is_news = known is None or known.why != failure
    if known is None or is_news or known.newest != newest:
        known = held.complaints[node.name] = Unwritten(failure, newest)
    elif node.incarnation not in step.told:
        known.steps += 1
        is_news = known.steps.bit_count() == 1
    if node.incarnation not in step.told:
        step.told[node.incarnation] = None
        if is_news:
            tell_unwritten(turn, node, step.record.name, failure)


def tell_unwritten(turn: Turn, node: Node, step: str, failure: str) -> None:
    """Names the first node that cannot write a step for a reason at once, and those of the next seconds together."""
    lines, said = turn.live.held.unwritten, (step, failure)
    if said in lines:
        lines[said].nodes[node.name] = None
        return
    if len(lines) < MOST_LINES:
        lines[said] = SharedLine(turn.now + TOGETHER_SECONDS)
    say_unwritten(turn, [node.name], step, failure)


def say_unwritten(turn: Turn, who: Iterable[str], step: str, failure: str) -> None:
    """Says that nodes could not write a step to the disk, if there are any."""
    if listed := names(who):
        turn.notice(f"{listed} could not write {step} to the disk: {failure}", True)


def on_disk(turn: Turn, inventory: Iterable[control_pb2.Checkpoint], node: Node) -> None:
    """A node has a memory checkpoint in sight on the disk: leavers have written it there."""
    for entry in inventory if turn.job.checkpoints.in_memory else ():
        record = turn.job.checkpoint(entry.ref.digest)
        if record is not None and record.parts and not record.retired and not entry.in_memory:
            checkpoints.now_on_disk(turn, record, node.name)
