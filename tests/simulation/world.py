"""One schedule: the job of a plan, everything that happens to it, and the checks."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
from random import Random
from typing import Any

from dalsegno.master.brain.state import Job
from dalsegno.protos import control_pb2

from . import real_agent, real_master, shims, syncs
from .agents import SimAgent
from .clock import Clock
from .conversions import Conversions
from .disk import Disk
from .faults import FAULTS
from .ledger import Ledger, Violation
from .masters import SimMaster
from .network import Network
from .patrol import Patrol
from .plan import HOSTS, Plan
from .processes import Table
from .real_agent import RealAgent
from .real_master import RealMaster
from .shell_faults import SHELL_FAULTS, crash_loop, hold_up_master
from .threads import Kernel
from .workers import Collective, Group

# Of a crowd, so many agents run with all their threads.
MOST_WHOLE = 6
# Beyond that many events something is busy without getting anywhere.
MOST_EVENTS = 60_000
# After the last fault: what a job may take beyond its work (retries of conversions pause up to 60 s), seconds.
PATIENCE = 240.0
# The same with a slow disk: a few conversions and verifications, each as long as `conversions` and `agents` make them.
SLOW_PATIENCE, SLOW_MOST_EVENTS = 6000.0, 600_000


def shared(world: control_pb2.World) -> bytes:
    """What all members are told of a world."""
    message = control_pb2.World()
    message.CopyFrom(world)
    message.ClearField("place")
    # The same files: by the time a slower member hears, they may have reached the disk.
    message.resume.source.ClearField("in_memory")
    return message.SerializeToString()


class Simulation:
    """Runs one plan to its end; `run` raises `Violation` (or whatever the code under test raises)."""

    def __init__(self, plan: Plan, tracing: bool = False) -> None:
        self.plan = plan
        self.tracing = tracing
        self.lines: list[str] = []
        self.random = Random(f"events {plan.seed}")
        self.clock = Clock()
        self.kernel = Kernel(self.clock, Random(f"threads {plan.seed}"))
        self.kernel.processes = Table(self.kernel)
        self.network = Network(self.clock, Random(f"network {plan.seed}"))
        self.network.loss, self.network.duplication, self.network.slow = plan.loss, plan.duplication, plan.slow
        self.disk = Disk(self.clock)
        self.conversions = Conversions(self)
        self.conversions_fail = False
        # Verifiers cannot tell anything.
        self.reads_fail = False
        # (host, digest): what one host's workers cannot load although it verifies.
        self.misread: set[tuple[str, str]] = set()
        # Nodes whose ranks make all ranks of their world refuse; and whether all do, at a resume.
        self.refusing: set[str] = set()
        self.script_changed = False
        self.starts_fail = 0
        # How long the master's store takes for a write (seconds; 0: as usual), and whether it can write at all.
        self.store_delay = 0.0
        self.store_fails = False
        # So many worlds have a node that does not come to its end.
        self.ends_hang = 0
        # How long the disk takes to sync now, seconds.
        self.sync_time = plan.sync_time
        self.ledger = Ledger(self)
        self.collectives: dict[int, Collective] = {}
        self.agents: list[SimAgent] = []
        self._ports = 20_000
        self._said = ""
        self.faults_over = False
        self.master: Any = RealMaster(self) if plan.shells else SimMaster(self)
        self.network.master = self.master
        self.patrol = Patrol(self) if plan.shells else None
        if plan.loss or plan.slow:
            self.ledger.disturbed(plan.fault_time)

    # ---- for the parts ----------------------------------------------------------------------------------------------

    def trace(self, who: str, text: str, *values: Any) -> None:
        if self.tracing:
            self.lines.append(f"{self.clock.now:8.3f} {who:>9} {text.format(*values)}")

    def trace_job(self, job: Job) -> None:
        parts = {m.node: job.part(m).value for m in job.world.members} if job.world is not None else {}
        lease = f" lease {job.conversion.lease} of {job.conversion.owner}" if job.conversion is not None else ""
        line = f"{job.phase.value} epoch {job.epoch} {parts} nodes {list(job.nodes)}{lease}"
        if line != self._said:
            self._said = line
            self.trace("master", "{}", line)

    def holds(self) -> tuple[float, float]:
        """How likely a thread of a new process is held back, and for how long at most (seconds)."""
        return (0.0, 0.0) if self.faults_over else self.plan.holds

    def fresh_port(self) -> int:
        self._ports += 1
        return self._ports

    def living(self) -> list[SimAgent]:
        """Agents that are there, not about to leave, and not of the kind that always crashes."""
        there = [agent for agent in self.agents if agent.alive and agent.counts and not agent.noticed]
        return [agent for agent in there if not agent.state.leaving]

    def pick(self, agents: list[SimAgent]) -> SimAgent | None:
        return self.random.choice(agents) if agents else None

    def by_incarnation(self, incarnation: str) -> SimAgent | None:
        return next((a for a in self.agents if a.alive and a.client.incarnation == incarnation), None)

    def start_agent(self, host: str = "", name: str | None = "") -> SimAgent:
        """`name`: as its person gave it; None: none; empty: as the plan has it."""
        number = len(self.agents)
        host = host or self.random.choice(HOSTS)
        if name is None:
            name = ""
        elif not name and self.plan.named and self.random.random() < 0.5:
            name = f"node-{number}"
        # Of a crowd only the first ones are whole processes; all speak to the real master.
        whole = self.plan.shells and (not self.plan.crowd or number < MOST_WHOLE)
        agent: Any = RealAgent(self, number, host, name) if whole else SimAgent(self, number, host, name)
        self.agents.append(agent)
        self.trace(agent.label, "starts on {} {}", host, name)
        return agent

    def start_later(self, host: str = "", name: str = "") -> None:
        """As `start_agent`, but an ended embedded job is left in peace: it would start a new run."""
        if self.ledger.success is None or not self.plan.embedded:
            self.start_agent(host, name)

    def start_workers(self, agent: SimAgent, world: control_pb2.World) -> Group:
        """`StartWorkers` of one agent: its ranks of the world's collective."""
        before = agent.group
        self.ledger.require(
            before is None or not before.alive, "one epoch at a time", f"{agent.label} still runs another epoch"
        )
        run = self.collectives.get(world.epoch)
        if run is None:
            run = self.collectives[world.epoch] = Collective(self, world)
        self.ledger.require(shared(run.world) == shared(world), "one world per epoch", f"epoch {world.epoch}")
        return run.join(agent, world)

    # ---- the schedule -----------------------------------------------------------------------------------------------

    def run(self) -> str:
        """To the end of the job. Returns a digest of everything that happened."""
        if not self.plan.shells:
            return self._run()
        logging.disable()
        # What it finds and ends must not depend on when it looks.
        gc.disable()
        try:
            with shims.installed(self.kernel, self.plan.seed), real_agent.patched(), real_master.fake_grpc():
                try:
                    return self._run()
                finally:
                    self._end()
        finally:
            gc.enable()
            logging.disable(logging.NOTSET)

    def _end(self) -> None:
        """Nothing goes on behind the schedule."""
        self.kernel.failure = None
        if self.master.loop is not None:
            self.master.loop.kill()
        for agent in self.agents:
            if isinstance(agent, RealAgent):
                with contextlib.suppress(AssertionError):
                    agent.process.kill()

    def _run(self) -> str:
        plan = self.plan
        self.trace("plan", "{}", plan)
        self.clock.after(0.0, self.master.start)
        for _ in range(plan.start_nodes):
            self.clock.after(self.random.uniform(0.0, 2.0), self.start_later)
        if plan.blind_start:
            self.clock.after(self.random.uniform(2.05, 2.4), self._happen, "blind_host")
        if plan.held_up:
            self.clock.after(2.0, hold_up_master, self)
        for _ in range(plan.loopers):
            self.clock.after(self.random.uniform(0.0, 5.0), crash_loop, self)
        for at, name in plan.happenings:
            self.clock.after(at, self._happen, name)
        self.clock.after(plan.fault_time, self._heal)
        patience, most_events = (SLOW_PATIENCE, SLOW_MOST_EVENTS) if plan.slow_disk else (PATIENCE, MOST_EVENTS)
        if plan.shells:
            # Each lock and wait of each thread is one.
            most_events *= 5 + plan.crowd
        save_time = 1.5 * plan.save_time + plan.sync_time
        give_up = plan.fault_time + patience + plan.steps * (1.3 * plan.step_time + save_time)
        while not self._over():
            if not self.clock.step() or self.clock.now > give_up or self.clock.events > most_events:
                raise Violation("liveness", self._where())
            if self.ledger.violation is not None:
                raise self.ledger.violation
        if not self.ledger.elsewhere:
            self.ledger.finished()
        summary = (self.ledger.executed, self.clock.events, self.clock.now, self.ledger.message)
        return hashlib.sha256(repr(summary).encode()).hexdigest()

    def _over(self) -> bool:
        if self.ledger.reopened or self.ledger.elsewhere:
            return True
        over = self.ledger.success is not None and self.faults_over
        return over and not any(agent.alive and not agent.stuck for agent in self.agents)

    def _happen(self, name: str) -> None:
        if not self.faults_over and self.ledger.success is None:
            self.trace("fault", "{}", name)
            (FAULTS | SHELL_FAULTS)[name](self)

    def _heal(self) -> None:
        """Faults are over: everything that can be repaired is."""
        self.trace("fault", "all over")
        self.faults_over = True
        self.network.loss = self.network.duplication = self.network.slow = 0.0
        for host in list(self.network.cut):
            self.network.heal(host)
        for agent in self.agents:
            if isinstance(agent, RealAgent):
                agent.process.console_blocked = False
                agent.process.hold_chance = 0.0
            if agent.alive and agent.frozen and not agent.stuck:
                agent.thaw()
            if agent.host in self.disk.blind:
                agent.kill()
        self.disk.full = self.conversions_fail = self.reads_fail = False
        self.starts_fail = self.ends_hang = 0
        self.store_delay, self.store_fails = 0.0, False
        if self.sync_time > syncs.patience(self):
            self.sync_time = 0.0
        self.misread.clear()
        self.conversions.hung = False
        self.disk.blind.clear()
        self.disk.lag.clear()
        self.master.crash_at = ""
        self.master.resume()
        self._nurse()

    def _nurse(self) -> None:
        """At least `min` nodes stay."""
        settings = self.plan.settings
        wanted = max(settings.min_nodes, settings.node_unit)
        if self.ledger.success is None:
            nodes = list(self.master.job.nodes.values()) if self.master.job is not None else []
            strangers = {node.incarnation for node in nodes if not node.sees_directory}
            strangers |= {node.incarnation for node in nodes if node.refused}
            head = self.ledger.head[2]
            strangers |= {node.incarnation for node in nodes if head and node.unreadable == head}
            usable = [agent for agent in self.living() if agent.client.incarnation not in strangers]
            for _ in range(wanted - len(usable)):
                self.start_agent()
        self.clock.after(5.0, self._nurse)

    def _where(self) -> str:
        job = self.master.job
        phase = f"{job.phase.value}, epoch {job.epoch}" if job is not None else "no master"
        left = [f"{a.label}:{a.state.workers.value}/{a.state.epoch.outcome.value}" for a in self.agents if a.alive]
        return (
            f"after {self.clock.now:.0f} s and {self.clock.events} events: {phase}, last step at"
            f" {self.ledger.last_step_at:.0f} s, head {self.ledger.head[1]}/{self.plan.steps}, agents {left}"
        )
