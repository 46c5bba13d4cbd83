"""Which parts of a step in memory the ranks of a node load, said without the product's words for it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from dalsegno.protos import control_pb2

if TYPE_CHECKING:
    from dalsegno.master.brain.state import World

    from .ledger import Ledger
    from .plan import Plan

# In how many schedules ranks load what lies in their node's place; and in how many of these they say so, and do not.
BY_PLACE = 0.6
MISTAKEN = 0.15
# And in how many of the former they say what ranks of another world load.
CUT = 0.7


# Elements of what is cut, and the unit in which it is.
LONGEST, UNIT = 40, 2


def parts_of(plan: Plan) -> None:
    """Some schedules' ranks load some parts only."""
    random = Random(f"by place {plan.seed}")
    plan.by_place = bool(plan.memory_every) and random.random() < BY_PLACE
    plan.reads_all = plan.by_place and random.random() < MISTAKEN
    if plan.by_place and random.random() < CUT:
        plan.lengths = tuple(sorted(random.sample(range(1, LONGEST), random.randint(0, 3))))


def loaded_by(
    message: control_pb2.Checkpoint, saved_by: Sequence[int], layout: Sequence[int], rank: int
) -> frozenset[int]:
    """The parts that ranks load on the node of this group rank; both worlds are given by their nodes' ranks."""
    if message.shape.by_place and list(saved_by) == list(layout):
        return frozenset({0, rank})
    if not message.shape.by_place or not message.shape.HasField("reads"):
        return frozenset(range(len(saved_by)))
    old = [node for node, ranks in enumerate(saved_by) for _ in range(ranks)]
    new = [node for node, ranks in enumerate(layout) for _ in range(ranks)]
    if len(old) == len(new):
        return frozenset({0} | {old[place] for place, node in enumerate(new) if node == rank})
    # Element by element: who has it now loads it from who had it.
    lengths, unit = message.shape.reads.lengths, message.shape.reads.alignment
    found = {0}
    for length in lengths:
        for element in range(length):
            if new[owner(element, length, len(new), unit)] == rank:
                found.add(old[owner(element, length, len(old), unit)])
    return frozenset(found)


def owner(element: int, length: int, ranks: int, unit: int) -> int:
    """The rank that has an element of so many, which are dealt out in units: as many to each rank as the first has."""
    each = 0
    while each * ranks < length:
        each += unit
    return element // each


def check_opened(ledger: Ledger, world: World, message: control_pb2.Checkpoint) -> None:
    """Each node has what it loads, and each part is on as many nodes as the job wants."""
    sim, saved_by = ledger.sim, ledger.worlds[message.epoch].layout
    agents = [sim.by_incarnation(member.incarnation) for member in world.members]
    there = [agent for agent in agents if agent is not None and agent.alive]
    layout = [member.nproc for member in world.members]
    digest, name = message.ref.digest, message.ref.name
    for rank, agent in enumerate(agents):
        if agent is not None:
            wanted = loaded_by(message, saved_by, layout, rank)
            missing = sorted(part for part in wanted if not agent.memory.has(digest, part))
            what = f"epoch {world.epoch} starts from {name}, {world.members[rank].node} lacks {missing}"
            ledger.require(not missing, "nodes have what is loaded", what)
    if len(there) < len(agents):
        return  # What one had that has just died is not known to the master.
    copies = min(len(there), 1 + sim.plan.settings.memory_replicas)
    for part in range(len(saved_by)):
        has = sum(agent.memory.has(digest, part) for agent in there)
        ledger.require(has >= copies, "parts have copies", f"epoch {world.epoch}: part {part} of {name} is on {has}")
