"""What happens to the shells: slow disks, blocked terminals, many deaths at once, newcomers that crash in a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .faults import maybe_replace
from .real_agent import RealAgent

if TYPE_CHECKING:
    from .world import Simulation

# Seconds.
STUCK = 150.0
# A write that takes longer than this may cost a leaver its notice, in seconds.
NOTICEABLE = 1.0


def slow_store(sim: Simulation) -> None:
    """Every write of the master's record takes seconds for a while."""
    until = sim.random.uniform(3.0, 20.0)
    sim.store_delay = sim.random.choice((0.3, 1.0, 3.0, 6.0))
    sim.trace("disk", "takes {} s for a write of the master", sim.store_delay)
    if sim.store_delay > NOTICEABLE:
        sim.ledger.disturbed(until + sim.store_delay)

    def again() -> None:
        sim.store_delay = 0.0

    sim.clock.after(until, again)


def failing_store(sim: Simulation) -> None:
    """The master's record cannot be written for a while, now and then longer than it is patient."""
    until = sim.random.choice((1.0, 5.0, 15.0, 35.0))
    sim.trace("disk", "refuses the master's writes for {} s", until)
    sim.ledger.disturbed(until)
    sim.store_fails = True

    def again() -> None:
        sim.store_fails = False

    sim.clock.after(until, again)


def blocked_console(sim: Simulation) -> None:
    """Ctrl-S in one agent's terminal: nobody loses anything by it."""
    agent = sim.pick([agent for agent in sim.living() if isinstance(agent, RealAgent)])
    if agent is not None:
        sim.trace(agent.label, "its terminal is stopped")
        agent.process.console_blocked = True

        def again() -> None:
            agent.process.console_blocked = False

        sim.clock.after(sim.random.uniform(5.0, 60.0), again)


def several_deaths(sim: Simulation) -> None:
    """A rack without power: many nodes in the same instant."""
    there = sim.living()
    dead = sim.random.sample(there, k=sim.random.randint(len(there) // 2, len(there))) if there else []
    for agent in dead:
        agent.kill()
    for agent in dead[: 2 * sim.plan.settings.min_nodes]:
        maybe_replace(sim, agent)


def several_leave(sim: Simulation) -> None:
    """Half of them at once."""
    from .faults import leave

    for agent in sim.living()[::2]:
        leave(sim, agent)


def stuck_node(sim: Simulation) -> None:
    """A whole node stands still, its connections open, for minutes; then it is reset."""
    agent = sim.pick([a for a in sim.living() if not a.frozen and a.host not in sim.network.cut])
    if agent is None or sim.patrol is None or len(sim.living()) < 2:
        return
    sim.ledger.disturbed(STUCK)
    agent.counts = False
    agent.stuck = True
    sim.patrol.stuck[agent.client.incarnation] = agent.label
    agent.freeze(with_workers=True)
    sim.clock.after(STUCK, agent.kill)


def restart_named(sim: Simulation) -> None:
    """A node with a name is started anew while it still lives: its supervisor kills it a moment later."""
    agent = sim.pick([agent for agent in sim.living() if agent.asked_name and not agent.frozen])
    if agent is not None:
        sim.start_later(agent.host, agent.asked_name)
        sim.clock.after(sim.random.uniform(0.1, 2.0), agent.kill)
    elif len(sim.living()) < sim.plan.settings.max_nodes and "steady" not in [a.asked_name for a in sim.agents]:
        sim.start_agent(name="steady")
        sim.clock.after(sim.random.uniform(2.0, 8.0), restart_named, sim)


def crash_loop(sim: Simulation) -> None:
    """A newcomer that registers and dies, again and again, for as long as the job lasts."""
    host = sim.random.choice(("host-a", "host-b"))
    name = sim.random.choice((None, None, "looper"))
    longest = sim.random.choice((0.6, 0.9, 3.0))

    def live() -> None:
        if sim.ledger.success is not None:
            return
        agent = sim.start_agent(host, name)
        agent.counts = False
        lives = sim.random.uniform(0.15, longest)
        sim.clock.after(lives, agent.kill)
        sim.clock.after(lives + 0.02, live)

    live()


def hold_up_master(sim: Simulation) -> None:
    """Something else wants its processor, again and again, for as long as the job lasts."""
    if sim.master.loop is not None:
        sim.master.loop.hold_up(sim.random.uniform(1.1, 1.6))
    sim.clock.after(sim.random.uniform(2.0, sim.plan.held_up), hold_up_master, sim)


MENU = (
    slow_store,
    failing_store,
    blocked_console,
    blocked_console,
    several_deaths,
    restart_named,
    restart_named,
    stuck_node,
)
SHELL_FAULTS = {call.__name__: call for call in (*MENU, several_leave)}
