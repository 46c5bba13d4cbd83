"""A simulated save in the background: written and sealed by threads, without a collective, while steps are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.protos import control_pb2, worker_pb2

from .syncs import patience

if TYPE_CHECKING:
    from .workers import Collective, Group
    from .world import Simulation

# A thread of a stopped process goes on with it; rank 0's looks for the others' parts this often.
LOOK_EVERY = 0.2


class Flight:
    """Every node's ranks write their part, each in its own time, and rank 0's seal it when all parts are there.

    Also when a peer has died meanwhile, as long as rank 0 itself is there. Settled by the collective alone.
    """

    def __init__(self, collective: Collective, message: control_pb2.Checkpoint, *, drain: bool) -> None:
        self.message, self.drain, self.history = message, drain, collective.history
        self.name, self.step = message.ref.name, message.step
        self.failed = self.sealed = False
        self._sim, self._collective = collective.sim, collective
        self._lead = next(group for group in collective.groups.values() if group.first_rank == 0)
        self._missing = set(collective.groups)
        plan = self._sim.plan
        for key, group in collective.groups.items():
            seconds = self._sim.random.uniform(0.5, 1.5) * plan.save_time
            # Up to several steps late, but a notice of 8 s is to be enough for two of them and the drain's own.
            seconds += 0.0 if drain else self._sim.random.choice((0.0, 0.5, 1.2))
            # A disk that is too slow: the thread is given up.
            seconds += min(self._sim.sync_time, patience(self._sim))
            self._sim.clock.after(seconds, self._written, key, group)

    def lacks(self, group: Group) -> bool:
        """Its part is not written."""
        return any(self._collective.groups[key] is group for key in self._missing)

    @property
    def over(self) -> bool:
        return self.failed or self.sealed

    def bystanders(self) -> list[Group]:
        """Whose part is written, while rank 0 has not sealed it: the checkpoint does not need them any more."""
        done = [group for key, group in self._collective.groups.items() if key not in self._missing and group.alive]
        waits = not self.over and self._lead.alive and not self._lead.frozen
        return [group for group in done if waits and group is not self._lead]

    def _written(self, key: str, group: Group) -> None:
        if not group.alive:
            return
        if group.frozen:
            self._sim.clock.after(LOOK_EVERY, self._written, key, group)
        elif self._sim.disk.full or self._sim.sync_time > patience(self._sim):
            self.failed = True
        else:
            self._missing.discard(key)
            if not self._missing:
                self._sim.clock.after(self._sim.random.uniform(0.0, LOOK_EVERY), self._seal)

    def _seal(self) -> None:
        if not self._lead.alive:
            return
        if self._lead.frozen:
            self._sim.clock.after(LOOK_EVERY, self._seal)
            return
        if self.name in self._sim.disk.sealed:
            return  # By another, after a leaver was gone.
        self._sim.disk.seal(self.message, self.history, self._lead.agent.host)
        self.sealed = True
        self._sim.trace("workers", "epoch {} sealed {} behind its steps", self.message.epoch, self.name)
        said = worker_pb2.Sealed(name=self.name, digest=self.message.ref.digest, step=self.step)
        self._lead.says(0.003, 0, sealed=said)


def late_seal(sim: Simulation) -> None:
    """A node whose part of a save is written is lost: rank 0 seals the checkpoint, or is stopped before it can."""

    def strike(tries: int) -> None:
        if sim.faults_over:
            return
        run = sim.collectives[max(sim.collectives)] if sim.collectives else None
        found = run.flight.bystanders() if run is not None and run.flight is not None else []
        if not found:
            if tries:
                sim.clock.after(0.05, strike, tries - 1)
            return
        group = sim.random.choice(found)
        sim.trace("workers", "{} is lost, its part of a save is written", group.agent.label)
        if sim.random.random() < 0.5:
            group.agent.kill()
        else:
            sim.ledger.script_failures += 1
            sim.ledger.disturbed()
            group.crash(1)

    strike(400)
