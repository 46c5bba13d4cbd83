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


def parts_of(plan: Plan) -> None:
    """Some schedules' ranks load some parts only."""
    random = Random(f"by place {plan.seed}")
    plan.by_place = bool(plan.memory_every) and random.random() < BY_PLACE
    plan.reads_all = plan.by_place and random.random() < MISTAKEN


def loaded_by(
    message: control_pb2.Checkpoint, saved_by: Sequence[int], layout: Sequence[int], rank: int
) -> frozenset[int]:
    """The parts that ranks load on the node of this group rank; both worlds are given by their nodes' ranks."""
    by_place = message.shape.by_place and list(saved_by) == list(layout)
    return frozenset({0, rank}) if by_place else frozenset(range(len(saved_by)))


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
