"""Embedded masters on virtual machines: the product's `EmbeddedMaster`, claims and locks of several agents of one job.

Ours are the kernels that they ask (`machines`), the masters' processes, and the network between them. The job's
directory is a real one, which all machines share.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import grpc
from google.protobuf.message import Message

from dalsegno.agent.control import awake, embedded, inquiry, locks, spawning
from dalsegno.agent.control import claim as claim_files
from dalsegno.agent.control.claim import Claim
from dalsegno.agent.control.embedded import EmbeddedMaster, MasterError
from dalsegno.agent.storage import private
from dalsegno.elastic.checkpoint.files import move_over
from dalsegno.protos import control_pb2

from . import shims, threads
from .claim_ledger import ClaimLedger
from .claim_plan import ClaimPlan
from .clock import Clock
from .ledger import Violation
from .machines import QUICK, Computer, Locks, Proc, SimMachine, Site
from .threads import Event, Kernel, Process, running
from .wire import CallError

# Seconds. How long a master stays without any agent; how long an agent waits for one that starts, or for an answer.
IDLE, STARTED_WITHIN, ANSWERED_WITHIN = 30.0, 60.0, 3.0
# How long a master waits for its store's lock.
STORE_WITHIN = 30.0
# Few, so that they are used again.
PORTS = range(5000, 5006)
# Beyond that many events something is busy without getting anywhere.
MOST_EVENTS = 600_000


class Master:
    """A master's process. For the agent that started it also what `subprocess.Popen` is."""

    # Of one that has ended: nothing but kills ends them here.
    returncode = -9

    def __init__(self, world: World, site: Site, parent: Agent) -> None:
        self.world = world
        self.site = site
        self.parent = parent
        self.number = len(world.masters) + 1
        self.label = f"master-{self.number}"
        self.proc = site.pids.fork(site.computer.ticks(world.clock.now), "master")
        self.proc.master = self
        self.generation = 0
        self.port = 0
        self.token = ""
        self.why = ""
        self.heard = self.answers_since = world.clock.now
        # Its disk hangs until then.
        self.deaf_until = 0.0
        self.stopped_at = -1e9
        # Since when somebody who could has vouched for it; None: just now nobody can.
        self.vouched_since: float | None = None
        # Its claim was written.
        self.claimed = False
        self.said = Event()
        world.clock.after(world.random.uniform(0.2, world.plan.slowest_start), self._open, world.clock.now)

    @property
    def pid(self) -> int:
        return self.proc.pid

    @property
    def lives(self) -> bool:
        return self.proc.lives

    @property
    def runs(self) -> bool:
        return self.lives and self.proc.state != "T"

    @property
    def answers(self) -> bool:
        return self.runs and self.port > 0 and self.deaf_until <= self.world.clock.now

    def _open(self, since: float) -> None:
        """Its store, its port, its first line."""
        world = self.world
        if not self.lives:
            return
        if self.proc.state == "T":
            world.clock.after(1.0, self._open, since)
        elif world.starts_fail or not world.token():
            self.end("could not start")
        elif any(m.lives and not m.runs and m.holds_store for m in world.masters):
            if world.clock.now - since > STORE_WITHIN:
                self.end("could not have the store's lock")
            else:
                world.clock.after(1.0, self._open, since)
        elif not self.parent.alive:
            self.end("unwanted")
        else:
            world.generation += 1
            self.generation, self.token = world.generation, world.token()
            free = [port for port in PORTS if port not in self.site.net.listeners]
            self.port = world.random.choice(free)
            self.site.net.listeners[self.port] = self
            self.heard = self.answers_since = world.clock.now
            world.trace(self.label, "serves at {}, generation {}", self.port, self.generation)
            self.said.set()
            self._look()

    @property
    def holds_store(self) -> bool:
        return self.generation > 0 and self.world.plan.stopped_holds_store

    def _look(self) -> None:
        """Whether it is still needed; it writes now and then, and finds out that another one did."""
        if not self.lives:
            return
        if self.answers:
            if self.world.generation > self.generation:
                self.end("superseded")
            elif self.world.clock.now - self.heard > IDLE:
                self.end("idle")
        self.world.clock.after(self.world.random.uniform(1.0, 4.0), self._look)

    def end(self, why: str) -> None:
        if not self.lives:
            return
        self.why = why
        self.world.trace(self.label, "ends: {}", why)
        # Whoever started it has not looked yet.
        self.proc.state = "Z"
        if not self.parent.alive:
            self.site.pids.reap(self.proc)
        if self.site.net.listeners.get(self.port) is self:
            del self.site.net.listeners[self.port]
        self.world.ledger.ended(self)
        self.said.set()

    def stop(self) -> None:
        if self.runs:
            self.world.trace(self.label, "is stopped")
            self.proc.state, self.stopped_at = "T", self.world.clock.now
            self.world.ledger.stopped(self)

    def go_on(self) -> None:
        if self.lives and not self.runs:
            self.world.trace(self.label, "goes on")
            self.proc.state = "S"
            self.stopped_at = self.answers_since = self.world.clock.now

    # ---- as a child -------------------------------------------------------------------------------------------------

    def poll(self) -> int | None:
        if self.lives:
            return None
        self.site.pids.reap(self.proc)
        return -9

    def kill(self) -> None:
        self.end("ended by whoever started it")

    def wait(self, timeout: float | None = None) -> int | None:
        return self.poll()


class Agent:
    """One `dlrover-run`: looks for the master, calls it every second, and says when nobody answers."""

    def __init__(self, world: World, number: int, site: Site) -> None:
        self.world = world
        self.number = number
        self.label = f"agent-{number}"
        self.site = site
        self.alive = True
        self.leaving = False
        self.refused = ""
        self.said: list[tuple[float, str]] = []
        self.came_at = world.clock.now
        self.started_at: float | None = None
        # When and by whom it was answered last.
        self.beat_at = -1.0
        self.beat_of: Master | None = None
        # When something last kept it from moving the claim.
        self.hindered_at = world.clock.now
        # The master that it is starting.
        self.starts: Master | None = None
        self.embedded: EmbeddedMaster | None = None
        self.process = Process(world.kernel, self.label, site.computer.host, world.random.uniform(0.0, 5000.0))
        self.process.owner = self
        self.process.hold_chance, self.process.hold_longest = world.plan.holds
        self.proc = site.pids.fork(site.computer.ticks(world.clock.now), "agent")
        self.process.spawn(self._main, "main")

    @property
    def runs(self) -> bool:
        return self.alive and not self.process.frozen

    def _main(self) -> None:
        world = self.world
        self.embedded = EmbeddedMaster(
            world.directory,
            "job",
            world.plan.node_timeout,
            self._say,
            patience_seconds=world.plan.patience,
            machine=SimMachine(world, self),
        )
        try:
            self.embedded.start()
        except (MasterError, OSError) as error:
            self.refused = str(error)
            world.trace(self.label, "gives up: {}", error)
            self.embedded.close()
        else:
            self.started_at = world.clock.now
            world.trace(self.label, "uses {}", self.embedded.addresses())
            self._live(self.embedded)
        world.clock.after(0.0, self.end)

    def _live(self, master: EmbeddedMaster) -> None:
        token = ""
        while not self.leaving:
            # why: its work; the simulated clock passes
            self.world.kernel.sleep(1.0)
            with contextlib.suppress(OSError, ValueError):
                token = master.credentials().token or ""
            code = None
            for address in master.addresses():
                code = self.world.call(self, address, token, ANSWERED_WITHIN, beats=True)
            if code is not grpc.StatusCode.OK:
                master.missing()
        master.close()

    def _say(self, text: str, warning: bool) -> None:
        self.world.trace(self.label, "says: {}", text)
        self.said.append((self.world.clock.now, text))

    def end(self) -> None:
        """Its process is gone, and what hung on it."""
        if not self.alive:
            return
        self.world.trace(self.label, "is gone")
        self.alive = False
        if self.starts is not None and self.starts.lives:
            self.world.ledger.allow("an agent died while it started a master")
        with contextlib.suppress(AssertionError):
            self.process.kill()
        self.world.locks.drop(self)
        self.site.pids.reap(self.proc)
        for master in self.world.masters:
            if master.parent is self and not master.lives:
                self.site.pids.reap(master.proc)

    def freeze(self) -> None:
        self.world.trace(self.label, "is stopped")
        self.process.frozen = True
        self.proc.state = "T"

    def thaw(self) -> None:
        if self.alive and self.process.frozen:
            self.world.trace(self.label, "goes on")
            self.proc.state = "S"
            self.hindered_at = self.world.clock.now
            self.process.thaw()


class Channel:
    """`grpc.Channel`, as far as `EmbeddedMaster` uses it."""

    def __init__(self, world: World, address: str, token: str) -> None:
        self._world, self._address, self._token = world, address, token

    def unary_unary(self, method: str, **_: Any) -> Callable[..., Message]:
        return self._status

    def unary_stream(self, method: str, **_: Any) -> None: ...

    def _status(self, request: Message, timeout: float, metadata: object = None) -> Message:
        code = self._world.call(here(), self._address, self._token, timeout)
        if code is not grpc.StatusCode.OK:
            raise CallError(code.name, "as simulated")
        return control_pb2.StatusReply()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Log:
    """The product's log: a bug that it reports is a finding."""

    def __init__(self, world: World) -> None:
        self._world = world

    def warning(self, text: str, *values: object) -> None:
        self._world.trace(here().label, "logs: {}", text % values)

    info = warning

    def exception(self, text: str, *values: object) -> None:
        import traceback

        self._world.ledger.fail("no bug", f"{here().label}: {traceback.format_exc()}")


def here() -> Agent:
    agent: Agent = running().here().owner
    return agent


class World:
    """Runs one plan to its end; `run` raises `Violation`."""

    def __init__(self, plan: ClaimPlan, tracing: bool = False) -> None:
        self.plan = plan
        self.tracing = tracing
        self.lines: list[str] = []
        self.random = Random(f"claims {plan.seed}")
        self.clock = Clock()
        self.kernel = Kernel(self.clock, Random(f"threads {plan.seed}"))
        self.locks = Locks()
        self.masters: list[Master] = []
        self.agents: list[Agent] = []
        self.computers: list[Computer] = []
        # Of the store, which all masters share.
        self.generation = 0
        self.starts_fail = False
        self.full = False
        self.calm_since: float | None = None
        # What was written as the claim: when, on which machine.
        self.versions: list[tuple[float, Computer, bytes]] = []
        self.ledger = ClaimLedger(self)

    # ---- for the parts ----------------------------------------------------------------------------------------------

    def trace(self, who: str, text: str, *values: Any) -> None:
        if self.tracing:
            self.lines.append(f"{self.clock.now:8.3f} {who:>9} {text.format(*values)}")

    def sites(self) -> list[Site]:
        return [site for computer in self.computers for site in computer.sites]

    def living(self) -> list[Agent]:
        return [agent for agent in self.agents if agent.alive]

    def join(self, site: Site) -> Agent:
        agent = Agent(self, len(self.agents) + 1, site)
        self.trace(agent.label, "comes to {}", site.place)
        self.agents.append(agent)
        return agent

    def claim(self) -> Claim | None:
        """As it is on the disk now."""
        return Claim.parse(self.versions[-1][2]) if self.versions else None

    def claimed(self) -> Master | None:
        """Whose claim it is."""
        claim = self.claim()
        return None if claim is None else next(m for m in self.masters if m.generation == claim.generation)

    def token(self) -> str:
        try:
            return spawning.read_token(self.directory)
        except spawning.TokenLostError:
            return ""

    def call(
        self, agent: Agent, address: str, token: str | None, timeout: float, beats: bool = False
    ) -> grpc.StatusCode:
        """A call to whoever listens there: what it answers."""
        self.kernel.sleep(self.random.uniform(0.001, 0.02))
        there = agent.site.net.listeners.get(int(address.rpartition(":")[2]))
        if there is None:
            return grpc.StatusCode.UNAVAILABLE
        if not isinstance(there, Master):
            code: grpc.StatusCode = there
            return code
        if not there.answers:
            self.kernel.sleep(timeout)
            return grpc.StatusCode.DEADLINE_EXCEEDED
        if there.token != token:
            return grpc.StatusCode.UNAUTHENTICATED
        if beats:
            there.heard = self.clock.now
            if there.generation == self.generation:
                # Another one will find out in a moment that it was superseded.
                agent.beat_at, agent.beat_of = self.clock.now, there
        return grpc.StatusCode.OK

    def signalled(self, agent: Agent, proc: Proc) -> None:
        self.trace(agent.label, "kills process {} ({})", proc.pid, proc.what)
        self.ledger.killed(agent, proc)

    def disk_access(self, agent: Agent) -> None:
        slow = agent.site.slow if agent.site.slow_until > self.clock.now else 0.0
        self.kernel.sleep(self.random.uniform(0.0, QUICK) + slow)

    def _start_master(self, directory: Path, job_id: str, command: object, listen: object) -> spawning.SpawnedMaster:
        agent = here()
        self.ledger.spawns(agent)
        master = agent.starts = Master(self, agent.site, agent)
        self.masters.append(master)
        self.trace(agent.label, "starts {} as process {}", master.label, master.pid)
        master.said.wait(STARTED_WITHIN)
        if not master.port:
            master.end("took too long to start")
            agent.starts = None
            raise MasterError(f"the embedded master did not start: it {master.why}")
        return spawning.SpawnedMaster(master, f"127.0.0.1:{master.port}", master.generation, "")  # type: ignore[arg-type]

    # ---- the claim's file -------------------------------------------------------------------------------------------

    def _open(self, path: Path, flags: int) -> int:
        agent = here()
        self.disk_access(agent)
        if path.name == "claim.json" and self.plan.lag and not self.locks.are_held_by(agent):
            seen = [
                content
                for at, computer, content in self.versions
                if computer is agent.site.computer or at <= self.clock.now - self.plan.lag
            ]
            if not seen:
                raise FileNotFoundError(2, "No such file or directory", str(path))
            stale = self.directory / "stale"
            stale.write_bytes(seen[-1])
            return os.open(stale, os.O_RDONLY)
        return private.open_private(path, flags)

    def _move_over(self, aside: Path, path: Path) -> None:
        agent = here()
        self.disk_access(agent)
        if self.full:
            raise OSError(28, "No space left on device")
        content = aside.read_bytes()
        move_over(aside, path)
        self.versions.append((self.clock.now, agent.site.computer, content))
        if agent.starts is not None and json.loads(content)["generation"] == agent.starts.generation:
            agent.starts.claimed, agent.starts = True, None
        self.disk_access(agent)

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        world = self

        class Credentials:
            def __init__(self, token: str) -> None:
                self.token, self.metadata = token, ()

            def channel(self, address: str, target: str = "") -> Channel:
                return Channel(world, address, self.token)

        others: list[tuple[Any, str, Any]] = [
            (embedded, "start_master", self._start_master),
            (embedded, "Credentials", Credentials),
            (embedded, "logger", _Log(self)),
            (inquiry, "logger", _Log(self)),
            (claim_files, "open_private", self._open),
            (claim_files, "move_over", self._move_over),
            (claim_files, "os", shims.Shim(os, fsync=lambda fd: None)),
            (spawning, "os", shims.Shim(os, fsync=lambda fd: None)),
        ]
        modules = (awake, claim_files, embedded, inquiry, locks, private)
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            self.directory = Path(directory) / "job"
            stack.enter_context(shims.installed(self.kernel, self.plan.seed, modules))
            for owner, name, other in others:
                stack.enter_context(mock.patch.object(owner, name, other))
            yield

    # ---- one schedule -----------------------------------------------------------------------------------------------

    def run(self) -> str:
        """A digest of what happened."""
        with self._installed():
            try:
                return self._run()
            finally:
                for agent in self.agents:
                    with contextlib.suppress(AssertionError):
                        agent.process.kill()

    def _run(self) -> str:
        self.trace("plan", "{}", self.plan)
        self.plan.build(self)
        self.clock.after(1.0, self.ledger.patrol)
        while not self.ledger.over:
            if not self.clock.step() or self.clock.events > MOST_EVENTS:
                raise Violation("liveness", f"nothing comes to an end: {self.ledger.where()}")
            if self.ledger.violation is not None:
                raise self.ledger.violation
        said = [(agent.label, agent.said, agent.refused) for agent in self.agents]
        summary = (self.clock.events, self.clock.now, self.generation, [m.why for m in self.masters], said)
        return hashlib.sha256(repr(summary).replace(str(self.directory), "").encode()).hexdigest()


__all__ = ["Agent", "Master", "World", "threads"]
