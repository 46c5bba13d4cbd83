"""Looks at the shells every second: what must never stand still, and what must be over in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.agent.decisions.state import Workers
from dalsegno.protos import control_pb2

from .real_agent import RealAgent

if TYPE_CHECKING:
    from .world import Simulation

INTERVAL = 1.0
# Seconds: one event may keep an agent's loop busy so long, its threads' being held back not counted.
BUSY = 6.0
# Beyond the notice and the wait for the release: stopping workers, last calls.
LEAVING = 40.0
# Beyond twice the node-timeout: until a node that is gone is no node of the job any more.
NOTICING = 30.0
# How long a turn of the master may take on a processor of its own, as many nodes as there may be.
TURN = 1.0
# Until the end of workers that are gone is heard of.
STOPPED = 10.0
# Until an agent heeds what came over its stream.
TOLD = 5.0
# Until a node that registered has joined (a resume point that is not in sight is looked for meanwhile).
JOINING = 30.0


class Patrol:
    """Counts, for everything that must end, the seconds in which nothing excuses that it goes on."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self._seconds: dict[tuple[str, str], float] = {}
        # Who is gone for good, by incarnation.
        self.gone: dict[str, str] = {}
        # Who is stopped, for longer than anybody can wait, by incarnation.
        self.stuck: dict[str, str] = {}
        sim.clock.after(INTERVAL, self._look)

    def _look(self) -> None:
        sim = self.sim
        if sim.ledger.elsewhere or sim.ledger.reopened:
            return
        serving = sim.master.up and sim.master.loop is not None and not sim.master.loop.frozen and not sim.store_fails
        for agent in self._real():
            if agent.alive:
                self._decisions(agent)
                self._leave(agent)
                self._stopping(agent)
                self._told(agent)
        if sim.plan.slowness == 1.0 and sim.master.longest() > TURN:
            sim.ledger.violated("turns are short", f"the master was at work for {sim.master.longest():.1f} s at once")
        if serving and sim.ledger.success is None:
            self._nodes()
        sim.clock.after(INTERVAL, self._look)

    def _count(self, what: str, who: str, holds: bool, most: float, text: str) -> None:
        """`holds`, second after second: at most `most` of them in a row."""
        key = (what, who)
        if not holds:
            self._seconds.pop(key, None)
            return
        self._seconds[key] = self._seconds.get(key, 0.0) + INTERVAL
        if self._seconds[key] > most:
            self.sim.ledger.violated(what, f"{who} {text}, for {most:.0f} s")

    def _decisions(self, agent: RealAgent) -> None:
        """Whatever blocks, an agent decides on."""
        since = agent.at_work_since
        most = BUSY + agent.main.held - agent.held_before
        busy = since is not None and not agent.frozen and self.sim.clock.now - since > most
        if busy:
            self.sim.ledger.violated("decisions go on", f"{agent.label} is at work on one event for {most:.0f} s")

    def _leave(self, agent: RealAgent) -> None:
        """A notice ends, whatever the workers, the master and the terminal do."""
        settings = agent.state.settings
        most = settings.drain_timeout + settings.release_timeout + LEAVING
        leaving = agent.state.leaving and not agent.frozen
        self._count("a leave ends", agent.label, leaving, most, f"is still there ({agent.state.workers.value})")

    def _stopping(self, agent: RealAgent) -> None:
        """Workers that are gone are heard of, whoever found that out."""
        gone = agent.state.workers is Workers.STOPPING and all(r.code is not None for r in agent.ranks.values())
        lost = gone and not agent.frozen
        self._count("who stopped is heard of", agent.label, lost, STOPPED + agent.main.held, "waits for its workers")

    def _told(self, agent: RealAgent) -> None:
        """What came over the stream counts: the master does not repeat it."""
        state, newest = agent.state, agent.endpoint.newest
        busy = (
            state.door.registering or state.fenced or state.leaving or agent.frozen or state.workers is not Workers.NONE
        )
        lost = False
        if newest is not None and agent.has_stream and not busy and newest.generation >= state.generation:
            match newest.WhichOneof("order"):
                case "gather":
                    lost = not isinstance(state.place.order, control_pb2.Gather)
                case "wait":
                    lost = not isinstance(state.place.order, control_pb2.Wait)
                case "run":
                    lost = newest.run.epoch > state.started
        self._count("who is told knows", agent.label, lost, TOLD + agent.main.held, "does not do what it was told")

    def _real(self) -> list[RealAgent]:
        return [agent for agent in self.sim.agents if isinstance(agent, RealAgent)]

    def _nodes(self) -> None:
        sim, job = self.sim, self.sim.master.job
        if job is None:
            return
        heard = [a for a in self._real() if a.alive and not a.frozen and a.host not in sim.network.cut and a.has_stream]
        noticing = 2 * sim.plan.settings.node_timeout + NOTICING
        for node in job.nodes.values():
            gone = node.incarnation in self.gone or node.incarnation in self.stuck
            self._count(
                "who is gone is noticed", node.incarnation, gone and bool(heard), noticing, "is gone and still a node"
            )
        for agent in heard:
            known = next((n for n in job.nodes.values() if n.incarnation == agent.client.incarnation), None)
            idle = agent.state.workers is Workers.NONE and not agent.state.leaving and not agent.state.epoch.exits
            blind = agent.host in sim.disk.blind or sim.disk.lag.get(agent.host, 0.0) > 0
            lost = known is not None and known.joined is None and idle and not blind and not job.recollection.listening
            self._count(
                "who is there joins", agent.label, lost and not job.phase.has_workers, JOINING, "has not joined"
            )
