"""A script that fails with some numbers of workers as soon as it has loaded: who joins may not end the job by that."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from dalsegno.master.brain.shapes import LIVED_SECONDS, TRIES
from dalsegno.master.brain.state import World

if TYPE_CHECKING:
    from .ledger import Ledger
    from .plan import Plan
    from .workers import Collective

# How many schedules have such a script.
REFUSES_SOME = 0.3
# In these nothing else fails, so that not a single failure is to be counted.
CALM = ("planned", "master")
KINDS = (*CALM, "masters", "crashes", "late")


def shapes_of(plan: Plan) -> None:
    """Chooses the sizes with which it fails: never the least one, so that there is always a world that works."""
    random = Random(f"shapes {plan.seed}")
    if plan.kind not in KINDS or plan.mixed or random.random() >= REFUSES_SOME:
        return
    settings = plan.settings
    least = -(-settings.min_nodes // settings.node_unit) * settings.node_unit
    larger = range(least + settings.node_unit, settings.max_nodes + 1, settings.node_unit)
    plan.bad_sizes = frozenset(count * plan.nproc for count in larger if random.random() < 0.5)
    # If nothing ever works, the job ends.
    calm = plan.kind in CALM and all(name not in ("refusing_node", "changed_script") for _, name in plan.happenings)
    plan.settings.max_restarts = plan.other_settings.max_restarts = random.choice((0, 1)) if calm else 3


def fails(run: Collective) -> bool:
    """Whether the script refuses the size of this world. Its ranks then all end with an error."""
    if run.world.world_size not in run.sim.plan.bad_sizes:
        return False
    run.sim.trace("workers", "epoch {} fails with {} ranks", run.epoch, run.world.world_size)
    run.sim.ledger.shapes.happened(run)
    run.is_broken = True
    for group in run.groups.values():
        group.exits(0.01 + 0.05 * run.sim.random.random(), 1, ranks=1)
    return True


class ShapeChecks:
    """Which worlds failed by their size, and what must follow."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # Members by incarnation of each world that failed.
        self._tried: list[frozenset[str]] = []
        # Steps in memory with which a world has failed already.
        self._in_parts: set[str] = set()
        self._limit = ledger.sim.plan.settings.max_nodes
        self._opened_at, self._lived, self._stepped = ledger.sim.clock.now, False, False

    @property
    def _has_worked(self) -> bool:
        """Whether some world is known to have. Of a script without a session nobody hears steps: it has to live."""
        return self._lived if self._ledger.sim.plan.silent else self._stepped

    def stepped(self, heard: bool) -> None:
        """A world has made a step. If its agents are dead nobody knows of it."""
        self._stepped = self._stepped or heard

    def forgotten(self) -> None:
        """The store is lost, and nobody remembers the run."""
        self._stepped = False

    def happened(self, run: Collective) -> None:
        """A world has failed by its size."""
        opened = self._ledger.worlds[run.epoch]
        if opened.resharded:
            return  # That may be what did not work: it is tried once more, with files that load anywhere.
        if self._may_lack_parts(opened.resume):
            return  # Or that is: it is tried once more, and all nodes fetch all of it.
        self._tried.append(frozenset(group.agent.client.incarnation for group in run.groups.values()))

    def _may_lack_parts(self, resume: str) -> bool:
        """Whether nodes may have had some parts only of what is in memory; of each step that is tried once."""
        entry = self._ledger.sim.disk.ever.get(resume)
        if entry is None or not entry.message.in_memory or resume in self._in_parts:
            return False
        self._in_parts.add(resume)
        return entry.message.shape.by_place or entry.message.shape.HasField("reads")

    def scaled(self, nodes: int) -> None:
        """A person asks for so many nodes: with another number the master forgets what failed before."""
        if nodes != self._limit:
            self._limit = nodes
            self._tried.clear()

    @property
    def excuse_the_end(self) -> bool:
        """Nothing is known to have worked, so the script may be what is wrong."""
        return bool(self._ledger.sim.plan.bad_sizes) and not self._has_worked

    def opening(self, world: World) -> None:
        """What failed is not tried again by the same nodes, where others have worked."""
        ledger = self._ledger
        self._lived = self._lived or ledger.sim.clock.now - self._opened_at > LIVED_SECONDS
        self._opened_at = ledger.sim.clock.now
        if not self._stepped or ledger.sim.plan.kind != "planned":
            return
        ledger.require(
            self._tried.count(frozenset(world.by_incarnation)) < TRIES,
            "what failed is not tried again",
            f"epoch {world.epoch} opened with {world.size} ranks again",
        )

    def ended(self, message: str) -> None:
        """The job has failed: not because of who joined it."""
        ledger = self._ledger
        if self._tried and self._has_worked and not ledger.script_failures:
            ledger.require(ledger.refusals.excuse_the_end, "a newcomer ends no healthy job", message)
