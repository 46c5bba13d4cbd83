"""Everything that can happen to a job, by name. Each picks its victim among who is there at that moment."""

from __future__ import annotations

import signal
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from dalsegno.agent.decisions import events as ev
from dalsegno.master.brain.events import Called, Reply
from dalsegno.protos import control_pb2

from .flights import late_seal
from .orders import at_notice, order_leave, order_save, stop_and_start
from .plan import HOSTS
from .publishing import publish
from .refusals import changed_script, refusing_node

if TYPE_CHECKING:
    from .agents import SimAgent
    from .world import Simulation

# Seconds within which all nodes of `leave_unheard` are told to go.
ALL_TOLD = 4.0


def join(sim: Simulation) -> None:
    if len(sim.living()) < sim.plan.settings.max_nodes + 1:
        sim.start_agent()


def leave(sim: Simulation, agent: SimAgent | None = None) -> None:
    agent = agent or sim.pick(sim.living())
    if agent is not None and not agent.frozen:
        sim.trace(agent.label, "gets SIGTERM")
        if not agent.state.leaving:
            at_notice(agent)
        agent.noticed = True
        agent.noticed_at = sim.clock.now
        agent.deliver(ev.Signalled(signal.SIGTERM))


def all_leave(sim: Simulation) -> None:
    """Everybody goes at once; others come later."""
    for agent in sim.living():
        leave(sim, agent)
    for _ in range(sim.plan.settings.min_nodes):
        sim.clock.after(sim.random.uniform(0.5, 12.0), sim.start_later)


def leave_unheard(sim: Simulation) -> None:
    """All go while the disk is full, and the master is heard no more: each may count on a copy that goes, too.

    Each is told at a moment of its own, before or behind the master's last word; others come later.
    """
    random = Random(f"leave unheard {sim.plan.seed} {sim.clock.now}")
    full = random.uniform(0.5, 40.0)
    sim.ledger.disturbed(max(full, ALL_TOLD + sim.plan.settings.drain_timeout))
    sim.trace("disk", "is full")
    sim.disk.full = True
    sim.clock.after(full, free_space, sim)
    sim.clock.after(random.uniform(0.0, ALL_TOLD / 2), unreachable, sim, random.uniform(12.0, 40.0))
    for agent in sim.living():
        sim.clock.after(random.uniform(0.0, ALL_TOLD), leave, sim, agent)
    for _ in range(sim.plan.settings.min_nodes):
        sim.clock.after(ALL_TOLD + random.uniform(0.5, 12.0), sim.start_later)


def scale(sim: Simulation) -> None:
    """A person wants another number of nodes."""
    settings = sim.plan.settings
    wanted = sim.random.randint(settings.min_nodes, settings.max_nodes)

    def answered(reply: Reply) -> None:
        sim.trace("person", "scale {}: {} {}", wanted, reply.code, reply.detail)
        if reply.code == "OK":
            sim.ledger.scaled_to(wanted)

    # What is being allowed may happen before the person has the answer.
    sim.ledger.limit = max(sim.ledger.limit, wanted)
    sim.ledger.shapes.scaled(wanted)
    sim.master.receive(Called(control_pb2.ScaleRequest(job_id="job", nodes=wanted)), answered)


def kill_node(sim: Simulation) -> None:
    agent = sim.pick(sim.living())
    if agent is not None:
        agent.kill()
        maybe_replace(sim, agent)


def kill_agent(sim: Simulation) -> None:
    """Alone: the keeper kills its workers a moment later."""
    agent = sim.pick(sim.living())
    if agent is not None:
        agent.kill(workers_after=sim.random.uniform(0.01, 1.0))
        maybe_replace(sim, agent)


def maybe_replace(sim: Simulation, agent: SimAgent) -> None:
    if sim.random.random() < 0.6:
        name = agent.asked_name
        sim.clock.after(sim.random.uniform(0.5, 10.0), sim.start_later, agent.host, name)


def lose_host(sim: Simulation) -> None:
    """Its cable, then its power: nobody is told."""
    agent = sim.pick(sim.living())
    if agent is not None and agent.host not in sim.network.cut:
        sim.ledger.disturbed()
        host = agent.host
        sim.network.cut_off(host, "silent")
        for other in sim.living():
            if other.host == host:
                other.kill()
        sim.clock.after(sim.random.uniform(5.0, 15.0), sim.network.heal, host)


def crash_worker(sim: Simulation) -> None:
    agent = sim.pick([a for a in sim.living() if a.group is not None and a.group.alive and not a.frozen])
    if agent is not None and agent.group is not None:
        sim.ledger.disturbed()
        sim.ledger.script_failures += 1
        sim.trace(agent.label, "a worker crashes")
        agent.group.crash(sim.random.choice((1, -9, -11)))


def kill_newcomer(sim: Simulation) -> None:
    """A node that joins and dies again, before or after its world opens."""
    agent = sim.start_agent()
    sim.clock.after(sim.random.uniform(0.2, 8.0), agent.kill)


def no_verdict(sim: Simulation) -> None:
    """As `weak_reader`, and whoever is to verify cannot read anything for a while."""
    weak_reader(sim)
    sim.trace("disk", "cannot be read")
    until = sim.random.uniform(5.0, 40.0)
    sim.ledger.disturbed(until)
    sim.reads_fail = True

    def again() -> None:
        sim.reads_fail = False

    sim.clock.after(until, again)


def flapping_node(sim: Simulation) -> None:
    """The same node comes and dies, over and over, sometimes after its world's first step."""
    host = sim.random.choice(HOSTS)
    lives = sim.random.randint(3, 5)

    def live() -> None:
        nonlocal lives
        lives -= 1
        if sim.faults_over or sim.ledger.success is not None:
            return
        agent = sim.start_agent(host, "flapper")
        sim.clock.after(sim.random.uniform(2.0, 9.0), agent.kill)
        if lives:
            sim.clock.after(sim.random.uniform(9.5, 13.0), live)

    if all(agent.asked_name != "flapper" for agent in sim.agents):
        live()


def hung_worker(sim: Simulation) -> None:
    """One rank's own code hangs: nobody dies, nobody advances."""
    agent = sim.pick([a for a in sim.living() if a.group is not None and a.group.alive and not a.frozen])
    if agent is not None and agent.group is not None:
        sim.ledger.disturbed()
        sim.ledger.script_failures += 1
        sim.trace(agent.label, "a worker hangs")
        agent.group.hang()


def hung_end(sim: Simulation) -> None:
    """One node's ranks make the last step, and hang in what the script does after it."""
    sim.ledger.script_failures += 1
    sim.ends_hang += 1


def impatient_leave(sim: Simulation) -> None:
    """SIGTERM, and again: with it, or later, which means now."""
    agent = sim.pick(sim.living())
    if agent is not None and not agent.frozen:
        sim.ledger.disturbed(1.0)
        leave(sim, agent)
        sim.clock.after(sim.random.uniform(0.01, 2.0), agent.deliver, ev.Signalled(signal.SIGINT))


def failing_start(sim: Simulation) -> None:
    """The next workers cannot be started."""
    sim.starts_fail += sim.random.randint(1, 3)


def kill_converter(sim: Simulation) -> None:
    """Whoever converts next, or now."""

    def strike(tries: int) -> None:
        if sim.faults_over:
            return
        owners = sim.conversions.owners()
        if owners:
            owners[0].kill()
            maybe_replace(sim, owners[0])
        elif tries:
            sim.clock.after(0.3, strike, tries - 1)

    strike(30)


def cut_closed(sim: Simulation) -> None:
    cut(sim, "closed")


def cut_silent(sim: Simulation) -> None:
    cut(sim, "silent")


def cut(sim: Simulation, how: str) -> None:
    agent = sim.pick(sim.living())
    if agent is not None and agent.host not in sim.network.cut:
        until = sim.random.uniform(0.5, 20.0)
        sim.ledger.disturbed(until)
        sim.ledger.hidden = True
        sim.trace(agent.host, "is cut off from the master ({})", how)
        sim.network.cut_off(agent.host, how)
        sim.clock.after(until, sim.network.heal, agent.host)


def cut_all(sim: Simulation) -> None:
    """The master's own network is gone."""
    until = sim.random.uniform(0.5, 15.0)
    sim.ledger.disturbed(until)
    sim.ledger.hidden = True
    sim.trace("master", "is cut off from everybody")
    how = sim.random.choice(("closed", "silent"))
    for host in HOSTS:
        if host not in sim.network.cut:
            sim.network.cut_off(host, how)
            sim.clock.after(until, sim.network.heal, host)


def master_unreachable(sim: Simulation) -> None:
    """As `cut_all`, for long, and silently: nobody may lose a step by it."""
    unreachable(sim, sim.random.uniform(5.0, 60.0))


def unreachable(sim: Simulation, until: float) -> None:
    """For so many seconds."""
    sim.trace("master", "cannot be reached")
    for host in HOSTS:
        if host not in sim.network.cut:
            sim.network.cut_off(host, "silent")
            sim.clock.after(until, sim.network.heal, host)


def new_master_unreachable(sim: Simulation) -> None:
    """The next master comes up where nobody reaches it for longer than a node-timeout: nobody may lose a step by it."""
    crash_master(sim)
    unreachable(sim, sim.master.downtime + sim.random.uniform(1.2, 2.5) * sim.plan.settings.node_timeout)


def long_pause_of_master(sim: Simulation) -> None:
    """Longer than every deadline."""
    sim.master.pause()
    sim.clock.after(sim.random.uniform(15.0, 60.0), sim.master.resume)


def freeze_agent(sim: Simulation) -> None:
    freeze(sim, False)


def freeze_node(sim: Simulation) -> None:
    freeze(sim, True)


def freeze(sim: Simulation, with_workers: bool) -> None:
    agent = sim.pick([a for a in sim.living() if not a.frozen])
    if agent is not None:
        until = sim.random.uniform(0.5, 20.0)
        sim.ledger.disturbed(until)
        agent.freeze(with_workers)
        sim.clock.after(until, agent.thaw)


def late_commit(sim: Simulation) -> None:
    """The agent whose rank 0 has just sealed a checkpoint stops; a peer's crash makes the others go on without it.

    They do not see what was sealed (file caches), so its epoch is closed when the commit arrives after all.
    """
    sim.ledger.disturbed(40.0)

    def strike(tries: int) -> None:
        if sim.faults_over:
            return
        fresh = [e for e in sim.disk.sealed.values() if sim.clock.now - e.sealed_at < 0.1 and e.message.epoch]
        run = sim.collectives.get(fresh[-1].message.epoch) if fresh else None
        groups = [group for group in run.groups.values() if group.alive] if run is not None else []
        if len(groups) < 2:
            if tries:
                sim.clock.after(0.05, strike, tries - 1)
            return
        sim.ledger.hidden = True
        for host in HOSTS:
            sim.disk.lag[host] = 15.0
        lead = next((group for group in groups if group.first_rank == 0), None)
        if lead is not None and not lead.agent.frozen:
            lead.agent.freeze(with_workers=False)
            sim.clock.after(sim.random.uniform(3.5, 9.0), lead.agent.thaw)
            sim.ledger.script_failures += 1
            groups[-1].crash(1)

    strike(200)


def crash_master(sim: Simulation) -> None:
    sim.master.downtime = sim.random.uniform(0.2, 10.0)
    sim.master.crash()


def power_cut(sim: Simulation) -> None:
    """All nodes at once, perhaps with the master; others come."""
    if sim.ledger.success is None:
        sim.trace("fault", "power_cut")
        for agent in sim.agents:  # leavers, too: they would take a copy for safe that has just gone
            if agent.alive:
                agent.kill()
                sim.clock.after(sim.random.uniform(0.1, 20.0), sim.start_later)
        if sim.random.random() < 0.5:
            crash_master(sim)


def leaver_is_gone(sim: Simulation, code: int) -> None:
    """An agent has ended. In some schedules the master forgets what it had said."""
    if sim.plan.forgetful and code in (ev.EXIT_LEFT, ev.EXIT_LEFT_UNSAVED):
        sim.clock.after(sim.random.uniform(0.0, 1.0), crash_master, sim)


def crash_handled(sim: Simulation) -> None:
    arm(sim, "handled")


def crash_saved(sim: Simulation) -> None:
    arm(sim, "saved")


def arm(sim: Simulation, when: str) -> None:
    """At one of the next events, between two of its steps."""
    sim.master.downtime = sim.random.uniform(0.2, 10.0)
    sim.master.crash_at = when
    sim.master.crash_events = sim.random.randint(1, 12)


def pause_master(sim: Simulation) -> None:
    sim.master.pause()
    sim.clock.after(sim.random.uniform(0.3, 15.0), sim.master.resume)


def leave_while_away(sim: Simulation) -> None:
    """SIGTERM to a node while the master is down."""
    crash_master(sim)
    sim.clock.after(sim.random.uniform(0.05, 1.0), leave, sim)


def lose_store(sim: Simulation) -> None:
    """The master dies with its disk: agents are asked to register anew, and stop their workers."""
    sim.ledger.disturbed(5.0)
    sim.master.downtime = sim.random.uniform(0.5, 5.0)
    sim.master.crash()
    sim.master.lose_store()


def disk_full(sim: Simulation) -> None:
    sim.trace("disk", "is full")
    until = sim.random.uniform(1.0, 15.0)
    sim.ledger.disturbed(until)
    sim.disk.full = True
    sim.clock.after(until, free_space, sim)


def little_room(sim: Simulation) -> None:
    """For a while the first node's looks at the disk, late ones among them, say that the next save has no room."""
    until = sim.clock.now + sim.random.uniform(1.0, 15.0)

    def look() -> None:
        missing = sim.random.choice((1, 1000, 1 << 20, 1 << 50))
        for agent in sim.living():
            agent.deliver(ev.RoomMissing(missing))
        if sim.clock.now < until:
            sim.clock.after(sim.random.uniform(0.1, 3.0), look)

    look()


def unheard_failure(sim: Simulation) -> None:
    """The save of a growth's drain fails; one node cannot tell the master so before the growth is tried again."""
    sim.ledger.disturbed(60.0)
    sim.ledger.hidden = True
    victim: list[tuple[int, str]] = []

    def drain_of_growth() -> bool:
        job = sim.master.job
        return job is not None and job.drain is not None and job.drain.growth

    def begun() -> bool:
        job = sim.master.job
        members = job.world.members if job is not None and job.world is not None else []
        hosts = [member.host for member in members]
        others = [host for host in hosts[1:] if host != hosts[0] and host not in sim.network.cut]
        if job is not None and others and drain_of_growth():
            victim.append((job.epoch, others[0]))
        return bool(victim)

    def fail() -> None:
        sim.trace("disk", "is full")
        sim.disk.full = True
        sim.network.cut_off(victim[0][1], "closed")
        when(sim, lambda: victim[0][0] in sim.ledger.failed_drains, failed)

    def failed() -> None:
        free_space(sim)
        when(sim, lambda: not drain_of_growth(), lambda: when(sim, drain_of_growth, heal))

    def heal() -> None:
        sim.clock.after(sim.random.uniform(0.0, 1.0), sim.network.heal, victim[0][1])

    when(sim, begun, fail)


def when(sim: Simulation, holds: Callable[[], bool], act: Callable[[], None], tries: int = 600) -> None:
    """Acts once it holds, looking every 50 ms; after 30 s, or when faults are over, it never does."""
    if sim.faults_over:
        return
    if holds():
        act()
    elif tries:
        sim.clock.after(0.05, when, sim, holds, act, tries - 1)


def free_space(sim: Simulation) -> None:
    sim.trace("disk", "has room again")
    sim.disk.full = False


def damage_newest(sim: Simulation) -> None:
    """A byte flips in the newest sealed checkpoint. Never in all of them: the run must be able to go on."""
    sharded = [entry for entry in sim.disk.sealed.values() if ".universal." not in entry.message.ref.name]
    if sharded:
        sim.trace("disk", "{} is damaged", sharded[-1].message.ref.name)
        sim.ledger.disturbed()
        sharded[-1].damaged = True
        if sim.random.random() < 0.5:
            # Before a newer one hides it.
            sim.clock.after(sim.random.uniform(0.05, 2.0), crash_worker, sim)


def damage_source(sim: Simulation) -> None:
    """While it is being converted."""
    sim.ledger.disturbed(12.0)

    def strike(tries: int) -> None:
        if sim.faults_over:
            return
        sources = sim.conversions.sources()
        if sources:
            sim.trace("disk", "{} is damaged", sources[0].message.ref.name)
            sources[0].damaged = True
        elif tries:
            sim.clock.after(0.3, strike, tries - 1)

    strike(40)


def hung_converter(sim: Simulation) -> None:
    sim.ledger.disturbed(130.0)
    sim.conversions.hung = True


def weak_reader(sim: Simulation) -> None:
    """One host's workers cannot load the newest checkpoint, which is whole."""
    agent = sim.pick(sim.living())
    host = agent.host if agent is not None else HOSTS[0]
    sim.ledger.disturbed()
    sim.ledger.script_failures += 1
    for entry in sim.disk.sealed.values():
        sim.misread.add((host, entry.message.ref.digest))
    crash_worker(sim)


def damage_form(sim: Simulation) -> None:
    forms = [entry for entry in sim.disk.sealed.values() if ".universal." in entry.message.ref.name]
    if forms:
        sim.trace("disk", "{} is damaged", forms[-1].message.ref.name)
        sim.ledger.disturbed()
        forms[-1].damaged = True


def blind_host(sim: Simulation) -> None:
    """A node comes without the directory mounted."""
    free = [host for host in HOSTS if all(agent.host != host for agent in sim.agents if agent.alive)]
    job = sim.master.job
    if free and sim.living() and job is not None and job.probe == sim.disk.probe:
        host = free[0]
        until = sim.random.uniform(3.0, 20.0)
        sim.ledger.disturbed(until)
        sim.disk.blind.add(host)
        sim.start_agent(host)
        sim.clock.after(until, sim.disk.blind.discard, host)


def lagging_host(sim: Simulation) -> None:
    sim.ledger.hidden = True
    sim.disk.lag[sim.random.choice(HOSTS)] = sim.random.uniform(0.5, 12.0)


def no_conversion(sim: Simulation) -> None:
    sim.trace("disk", "conversions fail")
    until = sim.random.uniform(2.0, 25.0)
    sim.ledger.disturbed(until)
    sim.conversions_fail = True
    join(sim)

    def again() -> None:
        sim.conversions_fail = False

    sim.clock.after(until, again)


FAULTS: dict[str, Callable[[Simulation], None]] = {
    call.__name__: call
    for call in (
        join,
        leave,
        all_leave,
        leave_unheard,
        scale,
        order_leave,
        order_save,
        stop_and_start,
        publish,
        kill_node,
        kill_agent,
        lose_host,
        crash_worker,
        kill_newcomer,
        kill_converter,
        cut_closed,
        cut_silent,
        cut_all,
        master_unreachable,
        new_master_unreachable,
        long_pause_of_master,
        freeze_agent,
        freeze_node,
        late_commit,
        late_seal,
        crash_master,
        crash_handled,
        crash_saved,
        pause_master,
        leave_while_away,
        lose_store,
        disk_full,
        little_room,
        unheard_failure,
        damage_newest,
        damage_form,
        damage_source,
        hung_converter,
        weak_reader,
        no_verdict,
        flapping_node,
        hung_worker,
        hung_end,
        impatient_leave,
        failing_start,
        blind_host,
        lagging_host,
        no_conversion,
        refusing_node,
        changed_script,
    )
}
