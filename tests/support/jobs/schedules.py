"""Random schedules over real masters and a real etcd: `python -m tests.support.jobs.schedules --seed 1 --runs 200`.

Each has three masters, three members and light agents. Masters and members are killed and started again, stopped, and
cut off, and agents lose their way to masters, while the job waits for nodes, forms a world, runs or drains. The seed
decides all of that. A failure prints the seed, and the command that repeats it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dalsegno.master.record.chunks import Head, decoded
from dalsegno.master.record.codec import JobCodec
from dalsegno.master.record.store import open_store
from dalsegno.protos import control_pb2
from tests.support.jobs.etcd_members import Members, assert_one_history, etcd_members
from tests.support.jobs.light import Crew, Light
from tests.support.jobs.master_process import settings
from tests.support.jobs.proxy import Proxy
from tests.support.jobs.seeds import run_seeds
from tests.support.jobs.several_masters import Several

PHASES = ("waiting", "forming", "running", "draining")
TARGETS = ("leader", "standby", "member", "etcd's leader")
WAYS = ("killed", "stopped", "cut off", "held")
# Whom the agents do not reach for a while. Connections are held and not cut: one that closes is taken for a death.
UNREACHED = ("leader", "standby", "all masters")
# Seconds within which the job must go on once all is healed; the machine may be loaded.
PATIENCE = 40.0
# Seconds of silence after which a node is dead. Where much else runs on the cores a heartbeat came 10 s late.
NODE_TIMEOUT = 20.0


@dataclass(frozen=True)
class Fault:
    """Who goes, how, after how many seconds, and for how long."""

    target: str
    way: str
    after: float
    lasts: float

    def __str__(self) -> str:
        return f"{self.target} {self.way} after {self.after:.1f} s for {self.lasts:.1f} s"


@dataclass(frozen=True)
class Schedule:
    """One run. Faults begin together, each after its own time."""

    seed: int
    phase: str
    faults: tuple[Fault, ...]
    # Seconds after which the agents do what the phase has held back.
    release: float

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.phase}; {'; '.join(map(str, self.faults))}; released after {self.release:.1f} s"
        )


def schedule(seed: int) -> Schedule:
    """What this seed means."""
    draw = random.Random(f"schedule {seed}")
    faults = tuple(
        Fault(
            draw.choice(TARGETS),
            draw.choice(WAYS),
            draw.uniform(0.0, 1.0),
            draw.choice((draw.uniform(0.1, 1.5), draw.uniform(3.0, 6.0))),
        )
        for _ in range(draw.choice((1, 1, 2)))
    )
    made = Schedule(seed, draw.choice(PHASES), faults, draw.uniform(0.0, 3.0))
    # Drawn apart, so that the other faults of a seed are what they were before agents could be cut off.
    draw = random.Random(f"agents {seed}")
    if draw.random() < 0.5:
        return made
    lasts = draw.choice((draw.uniform(0.1, 1.5), draw.uniform(3.0, 6.0)))
    return replace(made, faults=(*faults, Fault(f"agents to {draw.choice(UNREACHED)}", "held", draw.random(), lasts)))


class Stage:
    """Three members, three masters whose ways to etcd are proxies, and light agents. Close it."""

    def __init__(self, directory: Path, node_timeout: float = NODE_TIMEOUT) -> None:
        self._stack = contextlib.ExitStack()
        try:
            self.members: Members = self._stack.enter_context(etcd_members(directory / "etcd", 3, wired=True))
            self.ways = {f"m{number}": [Proxy(one) for one in self.members.endpoints] for number in range(3)}
            for proxies in self.ways.values():
                for proxy in proxies:
                    self._stack.callback(proxy.close)
            stores = {name: f"etcd://{','.join(way.address for way in ways)}" for name, ways in self.ways.items()}
            job = Several(directory / "job", members=self.members, stores=stores, wired=True)
            self.job = self._stack.enter_context(job)
            wanted = settings((2, 6), node_timeout=node_timeout, quiet_time=0.3, grow_interval=0.1)
            self.crew = Crew(self.job.job, list(self.job.addresses.values()), wanted)
            self._stack.callback(self.crew.close)
            self.job.leader()
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Ends all of it."""
        self._stack.close()

    def wait(self, look: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
        """Until this is so."""
        deadline = time.monotonic() + seconds
        while not look():
            assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s\n{self.seen()}"
            time.sleep(0.05)  # why: other processes' state has no event here

    def seen(self) -> str:
        """What the agents have seen last, for a person."""
        said = [f"{one.name}: epoch {one.epoch}, {one.orders[-5:]}" for one in self.crew.agents.values()]
        logs = [f"---- {name}\n{self._log(name)}" for name in self.job.ports]
        return "\n".join([*said, f"errors: {self.crew.errors[-12:]}", *logs])

    def _log(self, name: str) -> str:
        path = self.job.directory / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-15:]) if path.exists() else ""

    def wait_world(self, *names: str, above: int = 0) -> int:
        """Until these are in one world of just them; returns its epoch."""
        agents = [self.crew.agents[name] for name in names]

        def there() -> bool:
            epochs = {agent.epoch for agent in agents}
            return len(epochs) == 1 and min(epochs) > above and all(agent.nodes == len(names) for agent in agents)

        self.wait(there, f"a world of {', '.join(names)}")
        return agents[0].epoch

    def wait_order(self, order: str, *names: str) -> None:
        """Until these have been told that."""
        for name in names:
            agent = self.crew.agents[name]
            self.wait(lambda agent=agent: agent.orders[-1:] == [order], f"{name}: {order}")

    # What goes.

    def strike(self, fault: Fault) -> Callable[[], None]:
        """The fault begins; returns what ends it."""
        if fault.target.startswith("agents to "):
            return self._hold_agents(fault.target.removeprefix("agents to "))
        if "standby" in fault.target or fault.target == "leader":
            return self._strike_master(fault)
        number = int(fault.lasts * 1000) % 3
        if fault.target == "etcd's leader" and (leads := self.members.find_leader()) is not None:
            number = leads
        return self._strike_member(number, fault.way)

    def _strike_master(self, fault: Fault) -> Callable[[], None]:
        leads = next((name for name in self.job.masters if not isinstance(self.job.ask(name), str)), "m0")
        others = sorted(set(self.job.masters) - {leads})
        name = leads if fault.target == "leader" else others[int(fault.lasts * 1000) % 2]
        if fault.way == "killed":
            self.job.signal_master(name, signal.SIGKILL)
            return lambda: self._start_master(name)
        if fault.way == "stopped":
            self.job.signal_master(name, signal.SIGSTOP)
            return lambda: self.job.signal_master(name, signal.SIGCONT)
        for way in self.ways[name]:
            way.cut() if fault.way == "cut off" else way.freeze()
        return lambda: [way.mend() for way in self.ways[name]] and None

    def _hold_agents(self, whom: str) -> Callable[[], None]:
        """Nothing goes between the agents and these masters any more."""
        leads = next((name for name in self.job.masters if not isinstance(self.job.ask(name), str)), "m0")
        others = [name for name in self.job.masters if name != leads]
        names = {"leader": [leads], "standby": others[:1]}.get(whom, [leads, *others])
        for name in names:
            self.job.ways[name].freeze()
        return lambda: [self.job.ways[name].mend() for name in names] and None

    def _start_master(self, name: str) -> None:
        """Once only, whatever has killed it; it need not listen yet."""
        if self.job.masters[name].poll() is not None:
            self.job.launch(name)

    def _strike_member(self, number: int, way: str) -> Callable[[], None]:
        if way in ("cut off", "held"):
            self.members.wires.isolate(number, "cut" if way == "cut off" else "hold")
            return self.members.wires.heal
        self.members.send(number, signal.SIGKILL if way == "killed" else signal.SIGSTOP)
        if way == "killed":
            return lambda: self.members.start(number) if self.members.gone(number) else None
        return lambda: self.members.send(number, signal.SIGCONT)

    # What must be true.

    def heads(self) -> list[Head]:
        """All that the record's head has ever been."""
        return [decoded(data) for data in self.members.history(f"/dalsegno/{self.job.job}/head")]

    def check(self) -> None:
        """One chain of heads, one writer in each generation, nothing forgotten, nobody declared dead."""
        assert_one_history(self.heads())
        agents = list(self.crew.agents.values())
        fenced = {agent.name: len(agent.incarnations) - 1 for agent in agents if len(agent.incarnations) != 1}
        assert not fenced, f"declared dead though it was there: {fenced}\n{self.seen()}"
        assert_nothing_forgotten(agents)
        store = open_store(self.members.url, self.job.job)
        try:
            record = JobCodec().decode(store.load())
        finally:
            store.close()
        known = {node.incarnation for node in record.nodes.values()}
        assert all(agent.incarnation in known for agent in agents), "a registration is forgotten"
        assert record.epoch >= max(epoch for agent in agents for _, epoch, _ in agent.told), "an epoch is forgotten"


def assert_nothing_forgotten(agents: Sequence[Light]) -> None:
    """What a master has promised, each later one knows."""
    promised = sorted(one for agent in agents for one in agent.promised)
    told = sorted(one for agent in agents for one in agent.told)
    for generation, _, step in told:
        earlier = [its for before, its in promised if before < generation]
        assert not earlier or step >= max(earlier), f"generation {generation} has step {step}, promised: {max(earlier)}"
    epochs = [max(epoch for g, epoch, _ in told if g == generation) for generation in sorted({g for g, _, _ in told})]
    assert epochs == sorted(epochs), f"epochs fall: {epochs}"


@contextlib.contextmanager
def stage(directory: Path, node_timeout: float = NODE_TIMEOUT) -> Iterator[Stage]:
    """One, closed in the end."""
    made = Stage(directory, node_timeout)
    try:
        yield made
    finally:
        made.close()


def play(plan: Schedule, directory: Path) -> float:
    """Runs one; returns the seconds from the healing until the next change of the world was done."""
    with stage(directory) as on:
        names = _prepare(on, plan.phase)
        ends = [(fault.after + fault.lasts, fault) for fault in plan.faults]
        _strike(on, plan)
        healed = time.monotonic()
        assert ends
        epoch = on.wait_world(*names)
        # Whatever has happened, a change of the world works again, and so does a commit.
        on.crew.start("last")
        epoch = on.wait_world(*names, "last", above=epoch)
        took = time.monotonic() - healed
        promised = len(on.crew.agents["a"].promised)
        on.wait(lambda: len(on.crew.agents["a"].promised) > promised, f"a commit in epoch {epoch}")
        step = on.crew.agents["a"].promised[-1][1]

        def known() -> bool:
            said = on.job.status()
            return isinstance(said, control_pb2.StatusReply) and said.head.step >= step

        on.wait(known, f"a master that knows step {step}")
        on.check()
        return took


def _prepare(on: Stage, phase: str) -> list[str]:
    """Brings the job into the phase; returns who will be in the world in the end."""
    crew = on.crew
    crew.start("a", *(["Join"] if phase == "forming" else []))
    crew.train(0.2)
    if phase == "waiting":
        on.wait(lambda: crew.agents["a"].orders, "a directive")
        return ["a", "b"]
    crew.start("b", *(["Join"] if phase == "forming" else []))
    if phase == "forming":
        on.wait_order("gather", "a", "b")
        return ["a", "b"]
    on.wait_world("a", "b")
    on.wait(lambda: crew.agents["a"].promised, "a commit")
    if phase == "running":
        return ["a", "b"]
    for agent in crew.agents.values():
        agent.held.add("ReportDrained")
    crew.start("c")
    on.wait_order("drain", "a", "b")
    return ["a", "b", "c"]


def _strike(on: Stage, plan: Schedule) -> None:
    """All faults, each at its time, and the release; returns when all is healed."""
    began = time.monotonic()
    due: list[tuple[float, int, object]] = [(plan.release, -1, None)]
    due += [(fault.after, number, fault) for number, fault in enumerate(plan.faults)]
    while due:
        due.sort(key=lambda entry: entry[:2])
        at, number, what = due.pop(0)
        time.sleep(max(0.0, began + at - time.monotonic()))  # why: when each happens is what is tried
        if what is None:
            on.crew.release()
            if plan.phase == "waiting":
                on.crew.start("b")
        elif isinstance(what, Fault):
            with contextlib.suppress(ProcessLookupError):
                due.append((what.after + what.lasts, number, on.strike(what)))
        else:
            assert callable(what)
            what()
    for number in range(3):
        on.members.wait(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if all that ran kept what must be true."""

    def run(seed: int, directory: Path) -> str:
        return f"healed {play(schedule(seed), directory):.1f} s"

    return run_seeds("tests.support.jobs.schedules", str(__doc__), schedule, run, arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
