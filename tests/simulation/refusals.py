"""Ranks that refuse to train what they are given: a newcomer with other data, or a script that was changed for all."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from dalsegno.master.brain.state import Job, World
from dalsegno.protos.reads import Reads

if TYPE_CHECKING:
    from .ledger import Ledger
    from .workers import Collective
    from .world import Simulation

# How many schedules have some, and how many of these are of a script that refuses at every resume.
REFUSALS, CHANGED = 0.05, 0.3
LINE = "the resume point is another optimizer's"


def refusals_of(seed: int, fault_time: float, *, alone: bool) -> list[tuple[float, str]]:
    """What happens in one schedule, and when. `alone`: a single node may go on.

    Where it may not, each newcomer might be the one whose script is another: people are told of each, and wait.
    """
    random = Random(f"refusals {seed}")
    if random.random() >= REFUSALS:
        return []
    if random.random() < CHANGED and alone:
        return [(random.uniform(3.0, fault_time), "changed_script")]
    return [(random.uniform(1.0, fault_time), "refusing_node") for _ in range(random.randint(1, 2))]


def refusing_node(sim: Simulation) -> None:
    """Its script, data or number of ranks are not the run's; all ranks of a world with it find that out."""
    if sim.ledger.success is None or not sim.plan.embedded:
        sim.refusing.add(sim.start_agent().label)


def changed_script(sim: Simulation) -> None:
    """From now on nobody can train what was saved: no restart mends that."""
    sim.script_changed = True


def are_refused(run: Collective) -> bool:
    """Whether the ranks of a world refuse, all alike."""
    sim = run.sim
    changed = sim.script_changed and run.world.HasField("resume")
    return changed or any(group.agent.label in sim.refusing for group in run.groups.values())


@dataclass(frozen=True)
class _World:
    """Members by incarnation: all, and those who had never made a step of this run."""

    members: frozenset[str]
    new: frozenset[str]
    # Whether it can be loaded at all is tried: then it is converted instead, or all nodes fetch all parts.
    tried: bool

    @property
    def is_mixed(self) -> bool:
        return bool(self.new) and self.new != self.members


class Refusals:
    """Which worlds refused, and what must follow."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._worlds: dict[int, _World] = {}
        self._refused: set[int] = set()

    @property
    def excuse_the_end(self) -> bool:
        """The job ended because of one."""
        return bool(self._refused) and LINE in self._ledger.message

    def happened(self, epoch: int) -> None:
        """All ranks of this world know."""
        self._refused.add(epoch)

    def noted(self, job: Job) -> None:
        """After each move of the master: has it said too much of one?"""
        world = job.world
        if world is not None and world.epoch not in self._worlds:
            new = frozenset(member.incarnation for member in world.members if not member.proven)
            record = job.checkpoint(world.resume)
            some = record is not None and record.parts > 0 and record.by_place and record.reads != Reads()
            self._worlds[world.epoch] = _World(frozenset(world.by_incarnation), new, world.resharded or some)
        said = sum(LINE in notice.text for notice in job.notices)
        mixed = sum(self._worlds[epoch].is_mixed for epoch in self._refused)
        self._ledger.require(
            said <= mixed or self._ledger.stores_lost > 0, "one line", f"{said} lines of {mixed} newcomers' refusals"
        )

    def opening(self, world: World) -> None:
        """The world after one: without those who brought it, and none where nobody did."""
        before, ledger = self._worlds.get(world.epoch - 1), self._ledger
        if before is None or before.tried or world.epoch - 1 not in self._refused:
            return
        told = any(ledger.sim.by_incarnation(incarnation) is not None for incarnation in before.members)
        if ledger.stores_lost or ledger.is_excused(world.epoch - 1) or not told:
            return  # Who was to tell of it may be gone, or is: all were told to leave while the master was away.
        ledger.require(
            before.is_mixed,
            "a refusal ends the job",
            f"epoch {world.epoch} opened, although all alike had refused epoch {world.epoch - 1}",
        )
        again = before.new & set(world.by_incarnation)
        ledger.require(not again, "who refuses is put aside", f"epoch {world.epoch} has {sorted(again)} again")
