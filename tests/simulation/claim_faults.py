"""What happens to embedded masters, their agents, their machines and their directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc

from .claim_plan import populate
from .machines import THEM, US, Computer, Namespace, Site

if TYPE_CHECKING:
    from .claims import Agent, Master, World

T = TypeVar("T")
# What another program's server answers to our call.
STRANGERS = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNKNOWN,
)


def pick(world: World, among: Sequence[T]) -> T | None:
    return world.random.choice(among) if among else None


def serving(world: World) -> Master | None:
    """The master, or one of those that run."""
    return pick(world, [master for master in world.masters if master.runs and master.port])


def happen(world: World, name: str) -> None:
    world.trace("fault", "{}", name)
    FAULTS[name](world)


def calm(world: World) -> None:
    """Nothing more happens, what can be repaired is, and somebody is there."""
    world.trace("fault", "all over")
    world.calm_since = world.clock.now
    world.starts_fail = world.full = False
    for site in world.sites():
        site.slow_until = 0.0
    for master in world.masters:
        master.deaf_until = 0.0
    for agent in world.agents:
        agent.process.hold_chance = 0.0
        agent.thaw()
    if not world.living() or world.random.random() < 0.4:
        join(world)
    world.ledger.calm()


# ---- masters --------------------------------------------------------------------------------------------------------


def kill_master(world: World) -> None:
    master = serving(world)
    if master is not None:
        master.end("killed")


def stop_master(world: World) -> None:
    master = serving(world)
    if master is not None:
        master.stop()


def pause_master(world: World) -> None:
    """Stopped, and continued: in time, or not."""
    master = serving(world)
    if master is not None:
        master.stop()
        world.clock.after(world.random.uniform(0.2, 20.0), master.go_on)


def slow_master(world: World) -> None:
    """Its disk hangs."""
    master = serving(world)
    if master is not None:
        master.deaf_until = world.clock.now + world.random.choice((4.0, 15.0, 80.0))


def failing_starts(world: World) -> None:
    """No master can be started for a while, and the one that is there ends."""
    world.starts_fail = True
    kill_master(world)

    def again() -> None:
        world.starts_fail = False

    world.clock.after(world.random.uniform(3.0, 30.0), again)


# ---- agents ---------------------------------------------------------------------------------------------------------


def join(world: World) -> None:
    site = pick(world, world.sites())
    if site is not None:
        world.join(site)


def join_at_once(world: World) -> None:
    for _ in range(world.random.randint(2, 3)):
        join(world)


def kill_agent(world: World) -> None:
    agent = pick(world, world.living())
    if agent is not None:
        agent.end()


def kill_agents(world: World) -> None:
    """All at once where a master is, which lives on; others may still be served by it."""
    master = serving(world)
    for agent in world.living():
        if master is not None and agent.site is master.site:
            agent.end()


def kill_starter(world: World) -> None:
    """In the middle of starting a master."""
    kill_master(world)
    _when_one_starts(world, lambda agent: agent.end())


def freeze_starter(world: World) -> None:
    """In the middle of starting a master, with the lock for it; longer than others wait for that, now and then."""
    kill_master(world)

    def freeze(agent: Agent) -> None:
        if agent.runs:
            agent.freeze()
            world.clock.after(world.random.choice((2.0, 20.0, 100.0)), agent.thaw)

    _when_one_starts(world, freeze)


def _when_one_starts(world: World, call: Callable[[Agent], None], looks: int = 60) -> None:
    starter = pick(world, [agent for agent in world.living() if agent.starts is not None])
    if starter is not None:
        world.clock.after(world.random.uniform(0.0, 2.0), call, starter)
    elif looks:
        world.clock.after(0.2, _when_one_starts, world, call, looks - 1)


def freeze_agent(world: World) -> None:
    """Ctrl-Z in its terminal."""
    agent = pick(world, [agent for agent in world.living() if agent.runs])
    if agent is not None:
        agent.freeze()
        world.clock.after(world.random.uniform(3.0, 60.0), agent.thaw)


def freeze_all(world: World) -> None:
    """Where the master is all stand still, it perhaps, too; and somebody comes who cannot reach it."""
    serves = serving(world)
    if serves is None:
        return
    seconds = world.random.choice((5.0, 15.0, 30.0, 50.0))
    for agent in world.living():
        if agent.site is serves.site and agent.runs:
            agent.freeze()
            world.clock.after(seconds, agent.thaw)
    if world.random.random() < 0.5:
        serves.stop()
        world.clock.after(seconds, serves.go_on)
    site = pick(world, [site for site in world.sites() if not site.reaches(serves.site)])
    if site is not None:
        world.join(site)


def leave(world: World) -> None:
    agent = pick(world, [agent for agent in world.living() if agent.started_at is not None])
    if agent is not None:
        agent.leaving = True


# ---- machines -------------------------------------------------------------------------------------------------------


def _end(world: World, site: Site) -> int:
    """Of all processes there; how many agents it had."""
    there = [agent for agent in world.living() if agent.site is site]
    for agent in there:
        agent.end()
    for master in world.masters:
        if master.site is site:
            master.end("its machine or container ended")
    return len(there)


def restart_site(world: World) -> None:
    """A container ends, and its successor comes: namespaces of its own, or of the same names."""
    site = pick(world, world.sites())
    if site is None:
        return
    computer, kind = site.computer, site.kind
    number = computer.sites.index(site)
    names = {space.name for other in computer.sites for space in (other.pids, other.net) if other is not site}
    made = computer.made
    if world.random.random() < 0.5:
        # The names of those that ended are given again.
        computer.made = 2
    agents = _end(world, site)
    computer.sites[number] = Site(
        kind,
        computer,
        _anew(computer, "pid", names) if kind in ("pod", "container") else site.pids,
        _anew(computer, "net", names) if kind in ("network", "container") else site.net,
    )
    computer.made = max(made, computer.made)
    for _ in range(agents):
        world.clock.after(world.random.uniform(0.5, 5.0), _come_back, world, computer, number)


def _anew(computer: Computer, kind: str, names: set[str]) -> Namespace:
    while (made := computer.namespace(kind)).name in names:
        pass
    return made


def reboot(world: World) -> None:
    """All of a machine: namespaces have the names of before, and strangers may have the numbers of before."""
    master = serving(world)
    computer = master.site.computer if master is not None else pick(world, world.computers)
    if computer is None:
        return
    before = [master for master in world.masters if master.lives and master.site.computer is computer]
    sites = computer.sites
    agents = [_end(world, site) for site in sites]
    computer.boot(world.clock.now)
    populate(computer, tuple(site.kind for site in sites))
    for master in before:
        # What a machine starts, it starts in the same order after each boot.
        site = computer.sites[sites.index(master.site)]
        if world.random.random() < 0.7:
            proc = site.pids.fork(master.proc.started, "stranger", pid=master.pid)
            proc.state = world.random.choice("ST")
    for number, count in enumerate(agents):
        for _ in range(count):
            world.clock.after(world.random.uniform(2.0, 12.0), _come_back, world, computer, number)


def _come_back(world: World, computer: Computer, number: int) -> None:
    world.join(computer.sites[number])


def reuse_number(world: World) -> None:
    """The master ends, and its number is a stranger's at once."""
    master = serving(world)
    if master is not None:
        master.end("killed")
        starter = master.parent
        if starter.alive and (starter.process.frozen or starter.starts is master):
            return  # A zombie keeps its number until whoever started it looks.
        master.site.pids.reap(master.proc)
        site = master.site
        started = site.computer.ticks(world.clock.now) + 1
        proc = site.pids.fork(started, "stranger", world.random.choice((US, THEM)), master.pid)
        proc.state = world.random.choice("SST")


def reuse_port(world: World) -> None:
    """The master ends, and its port is that of a stranger's server."""
    master = serving(world)
    if master is not None:
        master.end("killed")
        master.site.net.listeners[master.port] = world.random.choice(STRANGERS)


# ---- the directory --------------------------------------------------------------------------------------------------


def slow_directory(world: World) -> None:
    """From one site."""
    site = pick(world, world.sites())
    if site is not None:
        site.slow = world.random.choice((0.3, 1.0, 3.0))
        site.slow_until = world.clock.now + world.random.uniform(5.0, 25.0)


def full_directory(world: World) -> None:
    """No claim can be written for a while."""
    world.full = True
    if world.random.random() < 0.7:
        kill_master(world)

    def again() -> None:
        world.full = False

    world.clock.after(world.random.uniform(2.0, 20.0), again)


def lose_token(world: World) -> None:
    """The file is damaged: nobody can speak to the master any more."""
    path = world.directory / "token"
    if path.exists():
        path.write_bytes(b"\xff\xfe")
        world.ledger.allow("the token was lost")


FAULTS: dict[str, Callable[[World], None]] = {
    call.__name__: call
    for call in (
        kill_master,
        stop_master,
        pause_master,
        slow_master,
        failing_starts,
        join,
        join_at_once,
        kill_agent,
        kill_agents,
        kill_starter,
        freeze_starter,
        freeze_agent,
        freeze_all,
        leave,
        restart_site,
        reboot,
        reuse_number,
        reuse_port,
        slow_directory,
        full_directory,
        lose_token,
    )
}
