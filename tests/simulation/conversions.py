"""Conversion jobs: progress file by file, and every way to fail."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dalsegno.agent.decisions import events as ev
from dalsegno.protos import control_pb2

from .clock import Timer
from .disk import Sealed, digest_of

if TYPE_CHECKING:
    from .agents import SimAgent
    from .world import Simulation

FILES = 3
# With a slow disk each file is seen to grow so often, that many seconds apart; a file takes longer than a stall.
SLOW_PARTS = 6
SLOW_PART = (20.0, 60.0)


class Conversions:
    """At most one job per agent process."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self._jobs: dict[SimAgent, tuple[int, Timer]] = {}
        # The lease of whoever began last: what the others make is of no use to anybody.
        self._lease = 0
        self.made = 0
        self.hung = False
        # How many hung so far.
        self.hangs = 0
        # How many of each source failed, or hung.
        self.failed: Counter[str] = Counter()
        self._parts = SLOW_PARTS if sim.plan.slow_disk else 1

    def start(self, agent: SimAgent, wanted: control_pb2.Conversion) -> None:
        """Begins; the outcome is decided as it goes."""
        self.sim.ledger.require(agent not in self._jobs, "one conversion", f"{agent.label} converts twice at once")
        self._lease = wanted.lease
        self._schedule(agent, wanted, 0)

    def stop(self, agent: SimAgent, lease: int) -> None:
        job = self._jobs.pop(agent, None)
        if job is not None:
            job[1].cancel()

    def owners(self) -> list[SimAgent]:
        return [agent for agent in self._jobs if agent.alive]

    def sources(self) -> list[Sealed]:
        """What is being converted now, and not for a lease that others got, or nobody, while its agent stood still."""
        digests = [
            timer.args[2].source.ref.digest
            for agent, (lease, timer) in self._jobs.items()
            if agent.alive and lease == self._lease and not (agent.frozen and self._is_taken_back(lease))
        ]
        return [self.sim.disk.ever[digest] for digest in digests]

    def _is_taken_back(self, lease: int) -> bool:
        """Nobody wants what it makes any more: a world has opened that does not need it."""
        job = self.sim.master.job
        return job is not None and (job.conversion is None or job.conversion.lease != lease)

    def reads(self, digest: str) -> bool:
        """A live conversion reads this checkpoint. (One that stands still has lost its lease long ago.)"""
        return any(
            agent.alive and not agent.stuck and timer.call is not None and timer.args[2].source.ref.digest == digest
            for agent, (_, timer) in self._jobs.items()
        )

    def _schedule(self, agent: SimAgent, wanted: control_pb2.Conversion, done: int) -> None:
        if self.sim.plan.slow_disk:
            delay = self.sim.random.uniform(*SLOW_PART)
        else:
            delay = self.sim.plan.convert_time / (FILES + 1) * self.sim.random.uniform(0.5, 1.5)
        self._jobs[agent] = (wanted.lease, self.sim.clock.after(delay, agent.run, self._move, agent, wanted, done))

    def _move(self, agent: SimAgent, wanted: control_pb2.Conversion, done: int) -> None:
        sim = self.sim
        job = self._jobs.get(agent)
        if job is None or job[0] != wanted.lease or not agent.alive:
            return
        name = f"{wanted.source.ref.name}.universal.{wanted.lease}"
        if self.hung:
            # No progress any more, and no end: the lease has to be taken away.
            sim.trace(agent.label, "its conversion hangs")
            self.hung = False
            self.hangs += 1
            self.failed[wanted.source.ref.digest] += 1
            return
        if done == 0 and not sim.disk.begin(name):
            self._end(agent, wanted, control_pb2.CONVERSION_STATE_ENVIRONMENT, f"{name} exists")
            return
        source = sim.disk.find(agent.host, wanted.source.ref.digest)
        if source is None:
            self._end(agent, wanted, control_pb2.CONVERSION_STATE_ENVIRONMENT, "the source is not in sight")
        elif source.damaged:
            self._end(agent, wanted, control_pb2.CONVERSION_STATE_SOURCE_BAD, "part-0.pt: checksum")
        elif sim.disk.full or sim.conversions_fail:
            self._end(agent, wanted, control_pb2.CONVERSION_STATE_ENVIRONMENT, "no space left on device")
        elif done < FILES * self._parts:
            state, files = control_pb2.CONVERSION_STATE_WORKING, (done + 1) // self._parts
            agent.deliver(ev.ConversionUpdate(wanted.lease, state, files, FILES, bytes_done=done + 1))
            if self._jobs.get(agent, (0,))[0] == wanted.lease:
                self._schedule(agent, wanted, done + 1)
        else:
            made = control_pb2.Checkpoint()
            made.CopyFrom(source.message)
            made.ref.name, made.ref.digest = name, digest_of(name)
            made.form = control_pb2.FORM_UNIVERSAL
            made.source.CopyFrom(wanted.source.ref)
            sim.disk.seal(made, source.history, agent.host)
            self.made += 1
            sim.trace(agent.label, "sealed {}", name)
            self._end(agent, wanted, control_pb2.CONVERSION_STATE_READY, "", made)

    def _end(
        self,
        agent: SimAgent,
        wanted: control_pb2.Conversion,
        state: control_pb2.ConversionState.ValueType,
        message: str,
        made: control_pb2.Checkpoint | None = None,
    ) -> None:
        self._jobs.pop(agent, None)
        self.failed[wanted.source.ref.digest] += made is None
        agent.deliver(ev.ConversionUpdate(wanted.lease, state, FILES, FILES, message, made))
