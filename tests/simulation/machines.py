"""Machines, containers and processes as a kernel shows them: what the product's `Machine` says of a simulated place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.agent.control.machine import Machine, ProcessPlace
from dalsegno.protos.processes import Status

if TYPE_CHECKING:
    from .claims import Agent, World

# Whose the job is, and somebody else.
US, THEM = 1000, 1001
# Clock ticks in a second.
TICKS = 100
# What a system call, or one on a network file system, may take (seconds).
QUICK = 0.004


@dataclass(eq=False)
class Proc:
    """One process in its number space. `what` is "master", "agent" or "stranger"."""

    pid: int
    started: int
    owner: int
    what: str
    state: str = "S"
    master: Any = None

    @property
    def lives(self) -> bool:
        return self.state not in ("Z", "X")


class Namespace:
    """Of processes or of networks; a container has its own, or another's."""

    def __init__(self, kind: str, number: int, first_pid: int) -> None:
        self.name = f"{kind}:[{number}]"
        # By number.
        self.processes: dict[int, Proc] = {}
        # By port: a master, or what a stranger's server answers.
        self.listeners: dict[int, Any] = {}
        self._last = first_pid

    def fork(self, started: int, what: str, owner: int = US, pid: int = 0) -> Proc:
        if not pid:
            self._last += 1
            while self._last in self.processes:
                self._last += 1
            pid = self._last
        made = self.processes[pid] = Proc(pid, started, owner, what)
        return made

    def reap(self, proc: Proc) -> None:
        proc.state = "X"
        if self.processes.get(proc.pid) is proc:
            del self.processes[proc.pid]


@dataclass(eq=False)
class Computer:
    """A kernel. Its clock of ticks and its identifier begin anew with every boot."""

    number: int
    host: str
    booted_at: float = 0.0
    boots: int = 1
    sites: list[Site] = field(default_factory=list)
    made: int = 0

    @property
    def boot_id(self) -> str:
        return f"boot-{self.number}.{self.boots}"

    def ticks(self, now: float) -> int:
        """What the kernel notes of a process that starts now."""
        return 1000 + int((now - self.booted_at) * TICKS)

    def namespace(self, kind: str) -> Namespace:
        """A new one. The first ones have the same names on all machines and after all boots."""
        self.made += 1
        return Namespace(kind, 4026531835 + self.made, first_pid=20 + 3 * (self.made % 4))

    def boot(self, now: float) -> None:
        self.boots, self.booted_at, self.made = self.boots + 1, now, 0


@dataclass(eq=False)
class Site:
    """Where agents run: a container, or the machine itself (`kind`, see `claim_plan`)."""

    kind: str
    computer: Computer
    pids: Namespace
    net: Namespace
    # Seconds that the directory takes for an access from there, and until when.
    slow: float = 0.0
    slow_until: float = 0.0

    @property
    def place(self) -> ProcessPlace:
        # A container does not know the machine under it.
        machine = f"machine-{self.computer.number}" if self.kind not in ("pod", "container") else ""
        return ProcessPlace(self.computer.host, self.computer.boot_id, self.pids.name, self.net.name, machine)

    def sees(self, other: Site) -> bool:
        return self.pids is other.pids and self.reaches(other)

    def reaches(self, other: Site) -> bool:
        return self.net is other.net


class Locks:
    """flock of the job's directory, on all machines alike: held by an open file, freed with its process."""

    def __init__(self) -> None:
        self.holders: dict[str, Agent] = {}

    def take(self, name: str, agent: Agent) -> Callable[[], None] | None:
        if name in self.holders:
            return None
        self.holders[name] = agent

        def free() -> None:
            if self.holders.get(name) is agent:
                del self.holders[name]

        return free

    def drop(self, agent: Agent) -> None:
        """Its process is gone."""
        self.holders = {name: holder for name, holder in self.holders.items() if holder is not agent}

    def are_held_by(self, agent: Agent) -> bool:
        return agent in self.holders.values()


class SimMachine(Machine):
    """What one agent's kernel says."""

    def __init__(self, world: World, agent: Agent) -> None:
        self._world = world
        self._agent = agent

    def place(self) -> ProcessPlace:
        return self._agent.site.place

    def pid(self) -> int:
        return self._agent.proc.pid

    def user(self) -> int:
        return US

    def status(self, pid: int) -> Status | None:
        proc = self._agent.site.pids.processes.get(pid)
        return None if proc is None else Status(proc.state, proc.started)

    def owner_of(self, pid: int) -> int | None:
        proc = self._agent.site.pids.processes.get(pid)
        return None if proc is None else proc.owner

    def signal(self, pid: int, signum: int) -> None:
        self._world.kernel.sleep(self._world.random.uniform(0.0, QUICK))
        proc = self._agent.site.pids.processes.get(pid)
        if proc is None:
            raise ProcessLookupError(3, "No such process")
        self._world.signalled(self._agent, proc)
        if proc.owner != US:
            raise PermissionError(1, "Operation not permitted")
        proc.master.end("killed by an agent")

    def lock(self, path: Path) -> Callable[[], None] | None:
        self._world.disk_access(self._agent)
        return self._world.locks.take(path.name, self._agent)
