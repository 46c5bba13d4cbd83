"""Disks that sync slowly, without a byte that moves: a drain's save on one, and how it ends when a leaver is gone."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from dalsegno.agent.decisions import events as ev
from dalsegno.elastic.saving.apart import PATIENCE_SHARE, WORD_SECONDS
from dalsegno.protos import control_pb2, worker_pb2

if TYPE_CHECKING:
    from .agents import SimAgent
    from .workers import Collective, Group
    from .world import Simulation

# A sync in seconds: longer than a join may take, than a notice, a node's silence, half a stall, a stall.
SYNCS = (6.0, 10.0, 18.0, 28.0, 55.0)
# How many schedules have one: more of those in which nothing excuses a lost step.
SLOW_SYNCS, SLOW_PLANNED = 0.15, 0.4
LOOK_EVERY = 0.3
# A notice is over so much earlier than by the settings, seconds: who is killed then was not in a hurry.
EARLY = 0.5


def sync_of(seed: int, planned: bool) -> float:
    """Of one schedule's disk; 0: it is fast."""
    random = Random(f"sync {seed}")
    return random.choice(SYNCS) if random.random() < (SLOW_PLANNED if planned else SLOW_SYNCS) else 0.0


def patience(sim: Simulation) -> float:
    """How long ranks wait for a disk."""
    return PATIENCE_SHARE * sim.plan.settings.stall_timeout


def is_over(agent: SimAgent) -> bool:
    """Its notice has run out, or is about to, on a slow disk."""
    sim = agent.sim
    if agent.noticed_at is None or not sim.plan.sync_time:
        return False
    return sim.clock.now >= agent.noticed_at + sim.plan.settings.drain_timeout - EARLY


def outlasts_notice(group: Group) -> None:
    """A node's workers end, perhaps because a notice in their world is over: may that cost a step?

    Whoever counts the seconds first ends them, a leaver's agent or the master, which has the others' workers end, too.
    """
    for leaver in group.collective.groups.values():
        if is_over(leaver.agent):
            leaver.agent.ran_out = True
            if not _loses_nothing(leaver):
                group.agent.sim.ledger.disturbed()


def _loses_nothing(leaver: Group) -> bool:
    """Where nothing but joins and notices happens: its part is there, and somebody stays to seal the others'."""
    sim, run = leaver.agent.sim, leaver.collective
    stays = [other for other in run.groups.values() if other.alive and not other.agent.noticed]
    whole = run.drain_save is not None and run.drain_save.is_there(leaver)
    quick = sim.sync_time < patience(sim) / 2
    return sim.plan.kind == "planned" and whole and bool(stays) and quick


class DrainSave:
    """One that is under way. Each node's part is written in its own time."""

    def __init__(self, collective: Collective, name: str, seconds: float) -> None:
        self.name, self._collective, self._sim = name, collective, collective.sim
        random = Random(f"parts {collective.sim.plan.seed} {name}")
        now = self._sim.clock.now
        self._written = {id(group): now + random.random() * seconds for group in collective.groups.values()}
        self._ends_apart = False

    def is_there(self, group: Group) -> bool:
        """Its part is written, or was when it ended."""
        flight = self._collective.flight
        if flight is not None:
            return not flight.lacks(group)
        until = self._sim.clock.now if group.stopped_at is None else group.stopped_at
        return self._written[id(group)] <= until

    def end_apart(self) -> None:
        """A peer is gone, or the master has said so: who is left ends by itself."""
        if self._ends_apart:
            return
        self._ends_apart = True
        for group in self._collective.groups.values():
            self._sim.clock.after(LOOK_EVERY, self._end, group, self._sim.clock.now + WORD_SECONDS)

    def _end(self, group: Group, until: float) -> None:
        if not group.alive:
            return
        ending, again = group.ending, group.frozen or not self.is_there(group)
        if not again and ending == control_pb2.ENDING_TOGETHER and self._sim.clock.now >= until:
            group.crash(1)
        elif not again and ending == control_pb2.ENDING_WRITE:
            self._drained(group, control_pb2.CheckpointRef())
        elif not again and ending == control_pb2.ENDING_SEAL:
            self._complete(group)
        else:
            self._sim.clock.after(LOOK_EVERY, self._end, group, until)

    def _complete(self, group: Group) -> None:
        missing = [other.agent.label for other in self._collective.groups.values() if not self.is_there(other)]
        if missing:
            self._sim.trace("workers", "{}: the part of {} is missing", self.name, missing)
            group.crash(1)
            return
        self._sim.clock.after(self._sim.sync_time * self._sim.random.random(), self._seal, group)

    def _seal(self, group: Group) -> None:
        if not group.alive:
            return
        run = self._collective
        message = run.flight.message if run.flight is not None else run.manifest(self.name, group.settings)
        if self.name not in self._sim.disk.sealed:
            self._sim.disk.seal(message, run.history, group.agent.host)
        run.saved_step = run.step
        self._sim.trace("workers", "{} seals {} without who is gone", group.agent.label, self.name)
        sealed = worker_pb2.Sealed(name=self.name, digest=message.ref.digest, step=run.step)
        group.says(0.003, 0, sealed=sealed)
        self._drained(group, message.ref)

    def _drained(self, group: Group, ref: control_pb2.CheckpointRef) -> None:
        drained = worker_pb2.Drained(name=ref.name, digest=ref.digest, step=self._collective.step)
        for rank in range(group.agent.nproc):
            group.says(0.005, rank, drained=drained)
        group.exits(self._sim.random.uniform(0.01, 0.3), ev.WORKER_DRAINED)
