"""The real agent in a simulated process: its loop, effects, client, mailbox, console and connector, on its threads.

Ours is what lies beyond: workers, the checkpoint directory, conversions, the network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from dalsegno.agent.control.connection import Connector
from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions import handling
from dalsegno.agent.shell import effects, own_memory
from dalsegno.agent.shell.config import AgentConfig
from dalsegno.agent.shell.console import RunConsole
from dalsegno.agent.shell.effects import Effects
from dalsegno.agent.shell.elastic_agent import ElasticAgent
from dalsegno.agent.shell.mailbox import Mailbox
from dalsegno.agent.shell.telling import Teller
from dalsegno.agent.storage.job_directory import JobDirectory, Survey
from dalsegno.agent.workers import workers
from dalsegno.agent.workers.workers import WorkersContext
from dalsegno.agent.workers.working_directory import WorkingDirectory
from dalsegno.protos import control_pb2, worker_pb2

from . import threads
from .agents import LOOK_FOR, SLOW_PART, SLOW_PARTS, short
from .faults import leaver_is_gone
from .memory import Memory
from .processes import Worker
from .real_memory import Tier
from .stores import Stores
from .threads import Hands, Process, running
from .wire import Credentials, Endpoint
from .workers import Group

if TYPE_CHECKING:
    from .world import Simulation

# As `elastic_agent`: what unanswered calls may still take at the end, seconds.
LAST_CALLS = 3.0


class Box(Mailbox[ev.Event]):
    """The product's mailbox, which shows since when its reader is at work on what it read."""

    def __init__(self, agent: RealAgent) -> None:
        super().__init__()
        self._agent = agent

    def get(self, timeout_seconds: float | None) -> ev.Event | None:
        self._agent.at_work_since = None
        event = super().get(timeout_seconds)
        self._agent.at_work_since = self._agent.sim.clock.now
        self._agent.held_before = self._agent.main.held
        return event


class Shell(ElasticAgent):
    """The product's loop over simulated workers."""

    def __init__(self, agent: RealAgent, config: AgentConfig, mailbox: Box, hands: Effects) -> None:
        # Not its own __init__: that prepares torch's part.
        self._agent = agent
        self._config = config
        self._mailbox = mailbox
        self._effects = hands
        self._pool = None
        self._starts = self._prepared_for = 0
        self._ending = None
        self._record: Any = _Nothing()
        self._context: Any = None
        self._state = agent.fresh_state()
        self._link: Any = _Link(agent)
        self._adoption: Any = _NoAdoption()
        self._hub: Any = _Nothing()
        self._teller = Teller(None)
        self._beside: Any = _NoSaver()
        self._watch: Any = _Signals(agent)
        self._worker_group: Any = _Nothing()

    def _handle(self, event: ev.Event) -> None:
        agent = self._agent
        if agent.sim.tracing and not isinstance(event, ev.Directed | ev.Tick):
            agent.sim.trace(agent.label, "hears {}", short(event))
        if isinstance(event, ev.Refused):
            agent.refused_with = event.code
        if isinstance(event, ev.StandbyWarm) and not agent.warm:
            return  # Said by a shell without a pool; `agent` says it in its time.
        super()._handle(event)

    def _perform(self, action: ev.Action) -> None:
        if self._agent.sim.tracing:
            self._agent.sim.trace(self._agent.label, "-> {}", short(action))
        super()._perform(action)

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        agent, sim, world = self._agent, self._agent.sim, self._state.world
        assert world is not None
        if sim.starts_fail:
            sim.starts_fail -= 1
            sim.ledger.script_failures += 1
            sim.ledger.disturbed()
            raise FileNotFoundError("no such interpreter")
        self._starts += 1
        agent.group = sim.start_workers(agent, world)
        self._context = Workers(agent, agent.group, self._link, self._exited(world.epoch, self._starts, 0))
        self._context.start()
        return self._context.pids()


class _Nothing:
    """Parts of the shell that have no work here."""

    workers: tuple[()] = ()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _NoAdoption(_Nothing):
    """The product's `Adoption`, for scripts with a session."""

    met = False
    signs = ()


class _NoSaver(_Nothing):
    """The product's `Beside`, for scripts that use nothing of DLRover."""

    def stopped(self, epoch: int) -> ev.WorkersStopped:
        return ev.WorkersStopped(epoch)


class _Signals:
    """The product's `SignalWatch`: nothing to install."""

    def __init__(self, agent: RealAgent) -> None:
        self._agent = agent

    def to(self, listener: Callable[[int], None], has_workers: Callable[[], bool]) -> _Signals:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _Link:
    """The workers' socket. What a worker said is read before its end is heard of."""

    def __init__(self, agent: RealAgent) -> None:
        self._agent = agent

    def tell(self, told: worker_pb2.ToWorker) -> None:
        if self._agent.group is not None:
            flags = (told.drain, told.master_seen, told.ending, told.to_memory, told.keep)
            self._agent.group.tell(*flags, told.save_order)

    def started(self, local_rank: int, pid: Callable[[], int]) -> None: ...

    def clean(self, pid: int) -> None: ...

    def flush(self, pid: int, timeout: float) -> bool:
        return True

    def last_step(self, epoch: int, rank: int) -> int | None:
        return None if self._agent.group is None else self._agent.group.counted(epoch)


class Workers(WorkersContext):
    """The product's watching and stopping of workers. What torch does with their files has no work here."""

    def __init__(self, agent: RealAgent, group: Group, link: _Link, on_exit: Callable[[int, int, str], None]) -> None:
        # Not its own __init__: that prepares torch's part.
        self._agent = agent
        self._group = group
        self._link = link  # type: ignore[assignment]
        self._lifeline: Any = _Nothing()
        self._home, self._pool = WorkingDirectory(), None
        self._on_exit = on_exit
        self._running = []
        self._lock = threads.Lock()  # type: ignore[assignment]
        self._stopping = False
        self._output = None
        self._tail_logs = []
        self.filtered_stdout = self.filtered_stderr = None
        self.nprocs = agent.nproc

    def pids(self) -> dict[int, int]:
        return {rank: one.process.pid for rank, one in enumerate(self._running)}

    def _adopt(self, rank: int, directory: str) -> None:
        return None

    def _start_cold(self, rank: int) -> Any:
        ends = functools.partial(self._agent.sim.random.uniform, 0.01, 0.5)
        process = self._agent.process.kernel.processes.start(self._group.die, ends)
        self._agent.ranks[rank] = process
        return workers._ColdProcess(process)  # type: ignore[arg-type]

    def _reason(self, rank: int, code: int) -> str:
        return ""


class Files:
    """The product's `Storage`, over the simulated disk, on two threads of the agent."""

    def __init__(self, agent: RealAgent) -> None:
        self._agent = agent
        self._sim = agent.sim
        self._quick = Hands(agent.process, "storage")
        self._slow = Hands(agent.process, "storage-slow")
        self.deletion, self.keeps_spares = threads.Lock(), False
        self._look = self._turn = 0

    def _later(self, low: float, high: float, hands: Hands, call: Callable[..., object], *args: Any) -> None:
        process = self._agent.process
        self._sim.clock.after(self._sim.random.uniform(low, high), process.run, hands.give, call, *args)

    def _seen(self) -> Survey:
        disk, host = self._sim.disk, self._agent.host
        return Survey(disk.read_probe(host), tuple(disk.inventory(host)), tuple(disk.finished_runs(host)))

    def survey(
        self,
        deliver: Callable[[Survey], None],
        failed: Callable[[str], None],
        patient: bool = True,
        again: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._later(0.001, 0.05, self._quick, lambda: deliver(self._seen()))

    def look(
        self,
        run_id: str,
        resume: control_pb2.CheckpointRef | None,
        patient: bool,
        deliver: Callable[[Survey], None],
        seconds: float = LOOK_FOR,
        newer_than: tuple[int, int] | None = None,
        turn: int = 0,
        failed: Callable[[str], None] = lambda why: None,
    ) -> None:
        if turn < self._turn:
            return
        self._turn = turn
        self._look += 1
        wanted = resume.digest if resume is not None else ""
        self._look_on(self._look, wanted, patient, self._sim.clock.now + LOOK_FOR, deliver)

    def _look_on(
        self, number: int, wanted: str, patient: bool, until: float, deliver: Callable[[Survey], None]
    ) -> None:
        sim, agent = self._sim, self._agent
        if number != self._look:
            return
        if wanted and sim.disk.find(agent.host, wanted) is None and (patient or sim.clock.now < until):
            sim.clock.after(0.4, agent.process.run, self._look_on, number, wanted, patient, until, deliver)
            return
        self._later(0.01, 0.1, self._quick, lambda: number == self._look and deliver(self._seen()))

    def read_manifest(self, run_id: str, name: str, digest: str, deliver: Callable[[ev.ManifestRead], None]) -> None:
        def work() -> None:
            entry = self._sim.disk.find(self._agent.host, digest)
            message = entry.message if entry is not None else None
            deliver(ev.ManifestRead(name, message, "" if message is not None else "no such directory"))

        self._later(0.01, 0.3, self._quick, work)

    def verify(self, run_id: str, wanted: control_pb2.Verification, deliver: Callable[[Any], None]) -> None:
        self._verify_on(wanted, deliver, 0)

    def _verify_on(self, wanted: control_pb2.Verification, deliver: Callable[[Any], None], moved: int) -> None:
        sim, agent = self._sim, self._agent
        slow = sim.plan.slow_disk and moved < SLOW_PARTS

        def work() -> None:
            if slow:
                deliver(ev.VerificationMoved(wanted.number, moved + 1))
                self._verify_on(wanted, deliver, moved + 1)
                return
            entry = sim.disk.find(agent.host, wanted.ref.digest)
            if entry is None or sim.reads_fail:
                why = "not in sight" if entry is None else "input/output error"
                deliver(ev.VerificationDone(wanted.number, False, why, inconclusive=True))
            else:
                damage = "part-0.pt: checksum" if entry.damaged else ""
                deliver(ev.VerificationDone(wanted.number, not damage, damage))

        self._later(*(SLOW_PART if slow else (0.1, 1.0)), self._slow, work)

    def sight(
        self, run_id: str, ref: control_pb2.CheckpointRef, deliver: Callable[[ev.Sighted], None], looks: int = 20
    ) -> None:
        def work() -> None:
            if self._sim.disk.find(self._agent.host, ref.digest) is not None:
                deliver(ev.Sighted(ref))
            elif looks > 1:
                self.sight(run_id, ref, deliver, looks - 1)

        self._later(0.05, 2.0, self._quick, work)

    def prune(self, run_id: str, refs: Any, deliver: Callable[[ev.Pruned], None]) -> None:
        def work() -> None:
            for ref in refs:
                self._sim.ledger.pruned(self._agent, ref)
                self._sim.disk.delete(ref.name)
            deliver(ev.Pruned(tuple(refs)))

        self._later(0.05, 1.0, self._slow, work)

    def mark_finished(self, run_id: str, step: int, head: control_pb2.CheckpointRef | None) -> None:
        if run_id not in self._sim.disk.finished:
            self._sim.disk.finished.append(run_id)

    def sweep(self, run_id: str, epoch: int, step: int = 0, converting: str = "") -> None:
        self._sim.ledger.swept(epoch, converting)
        self._sim.disk.sweep(epoch, step)

    def write_latest(self, run_id: str, head: control_pb2.Checkpoint) -> None: ...

    def close(self) -> None: ...


class Converting:
    """The product's `ConversionJob`, over the simulated ones."""

    def __init__(self, agent: RealAgent) -> None:
        self._agent = agent

    def start(self, run_dir: Path, conversion: control_pb2.Conversion) -> None:
        self._agent.sim.conversions.start(self._agent, conversion)  # type: ignore[arg-type]

    def stop(self, lease: int | None = None) -> None:
        self._agent.sim.conversions.stop(self._agent, lease or 0)  # type: ignore[arg-type]


@dataclasses.dataclass
class Spokesman:
    """What `agent.client` of the light agent tells: who this process is for the master."""

    incarnation: str = ""


class RealAgent:
    """One `dlrover-run` process on one host. The same handle as `agents.SimAgent`."""

    def __init__(self, sim: Simulation, number: int, host: str, name: str) -> None:
        self.sim = sim
        self.number = number
        self.label = f"agent-{number}"
        self.host = host
        self.asked_name = name
        self.nproc = sim.plan.nproc + (number % 3 if sim.plan.mixed else 0)
        self.settings = sim.plan.other_settings if number % 2 else sim.plan.settings
        self.alive = True
        # Whether the job may count on it.
        self.counts = True
        # It stands still for longer than the schedule's faults last.
        self.stuck = False
        # It was told to leave, whether it has heard of it or not.
        self.noticed = False
        self.noticed_at: float | None = None
        self.ran_out = False
        self.exit_code: int | None = None
        self.warm = False
        self.group: Group | None = None
        self.group_at_notice: Group | None = None
        self.broken_at_notice = False
        # Its worker processes, by local rank.
        self.ranks: dict[int, Worker] = {}
        # Since when its loop has been at work on one event (seconds); None: it waits for the next one.
        self.at_work_since: float | None = None
        # How long its loop's thread had been held back until then.
        self.held_before = 0.0
        # The code with which its last registration was refused.
        self.refused_with = ""
        self.memory = Memory(self)
        self.effects: Effects | None = None
        self.shell: Shell | None = None
        self._nobody = self.fresh_state()
        self.process = Process(sim.kernel, self.label, host, sim.random.uniform(0.0, 5000.0))
        self.process.owner = self
        self.process.hold_chance, self.process.hold_longest = sim.holds()
        self.endpoint = Endpoint(self.process, sim.network)
        self._sockets = Hands(self.process, "sockets")
        self.main = self.process.spawn(self._main, "main")
        sim.clock.after(sim.random.uniform(0.3, 3.0) * sim.plan.warm_factor, self.process.run, self._warmed)

    def fresh_state(self) -> handling.AgentState:
        return handling.fresh(
            handling.AgentSettings(
                nproc=self.nproc,
                node_name=self.asked_name,
                drain_timeout=self.sim.plan.settings.drain_timeout,
                master_outage_timeout=self.sim.plan.outage_timeout,
                connect_timeout=self.sim.plan.connect_timeout,
            )
        )

    # ---- what the simulation sees ------------------------------------------------------------------------------------

    @property
    def state(self) -> handling.AgentState:
        return self.shell._state if self.shell is not None else self._nobody

    @property
    def client(self) -> Spokesman:
        return Spokesman(self.effects.client._incarnation if self.effects is not None else "")

    @property
    def told(self) -> control_pb2.Settings | None:
        return self.effects._told if self.effects is not None else None

    @property
    def seen_epoch(self) -> int:
        return self.effects._epoch if self.effects is not None else 0

    @property
    def _tier(self) -> Tier:
        tier: Any = self.effects.memory if self.effects is not None else None
        assert isinstance(tier, Tier)
        return tier

    @property
    def has_stream(self) -> bool:
        return any(stream.client_open and stream.master_open for stream in self.endpoint.streams)

    @property
    def frozen(self) -> bool:
        return self.process.frozen

    def run(self, call: Callable[..., None], *args: Any) -> None:
        self.process.run(call, *args)

    # ---- the process ------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        config = AgentConfig(
            job_id="job",
            nproc=self.nproc,
            settings=self.settings,
            checkpoint_dir=Path("checkpoints"),
            log_dir=Path("logs"),
            node_name=self.asked_name,
            master_outage_timeout=self.sim.plan.outage_timeout,
            connect_timeout=self.sim.plan.connect_timeout,
        )
        mailbox = Box(self)
        console = RunConsole()
        # An address, so that no name is looked up.
        connector = Connector(lambda: ("127.0.0.1:1",), lambda: Credentials(self.endpoint))  # type: ignore[arg-type]
        self.effects = Effects(
            config,
            JobDirectory(config.checkpoint_dir, "job"),
            connector,
            ["127.0.0.1:1"],
            _Nothing(),  # type: ignore[arg-type]
            mailbox,
            console.say,
        )
        self.shell = Shell(self, config, mailbox, self.effects)
        self.shell._invoke_run()
        ending = self.shell.ending
        self.exit_code = ending.code
        self.sim.ledger.exited(self, ending.code)
        leaver_is_gone(self.sim, ending.code)
        self.shell._end_context()
        self.at_work_since = None
        self.effects.close(LAST_CALLS)
        self.sim.clock.after(0.0, self._gone)

    def deliver(self, event: ev.Event) -> None:
        """Something beyond the shell happened: one of its threads hears it."""
        self.process.run(self._sockets.give, self._hear, event)

    def _hear(self, event: ev.Event) -> None:
        if self.shell is None or self.effects is None:
            self.sim.clock.after(0.01, self.deliver, event)
            return
        match event:
            case ev.WorkerSaid():
                self.shell._worker_said(event.epoch, event.rank, event.message)
            case ev.WorkerExited():
                if self.group is not None and event.epoch == self.group.collective.epoch:
                    self.ranks[event.local_rank].end(event.code)
            case ev.Signalled():
                self.shell._signalled(event.number)
            case ev.ConversionUpdate():
                self.effects._converting(event)
            case ev.HeldChanged():
                self._tier.changed(self.effects.run_id, event)
            case ev.MadeDurable():
                self._tier.made(event)
            case _:
                self.shell._mailbox.put(event)

    def _warmed(self) -> None:
        self.warm = True
        prepared_for = 0 if self.shell is None else self.shell._prepared_for
        self.deliver(ev.StandbyWarm(prepared_for))

    def freeze(self, with_workers: bool) -> None:
        self.sim.trace(self.label, "is stopped{}", ", its workers too" if with_workers else "")
        self.process.frozen = True
        if with_workers and self.group is not None:
            self.group.frozen = True

    def thaw(self) -> None:
        if not self.alive:
            return
        self.sim.trace(self.label, "continues")
        if self.group is not None and self.group.frozen:
            self.group.frozen = False
            self.group.collective.thaw()
        # A clock that went on while it stood still is not its loop's fault.
        if self.at_work_since is not None:
            self.at_work_since = self.sim.clock.now
        self.process.thaw()

    def kill(self, workers_after: float = 0.0) -> None:
        """SIGKILL; the keeper kills its workers soon after."""
        if not self.alive:
            return
        self.sim.trace(self.label, "is killed")
        self.sim.ledger.disturbed(workers_after)
        self.sim.ledger.killed(self)
        self._gone()
        if self.group is not None:
            self.sim.clock.after(workers_after, self.group.die)

    def _gone(self) -> None:
        if self.alive:
            self.alive = False
            if self.sim.patrol is not None:
                self.sim.patrol.gone[self.client.incarnation] = self.label
            self.process.kill()
            self.endpoint.close()


def _here() -> RealAgent:
    owner: RealAgent = running().here().owner
    return owner


def _files(directory: JobDirectory) -> Files:
    return Files(_here())


def _stores(address: str) -> Stores:
    return Stores(_here())


def _tier(
    _job: str, _host: str, _token: object, _budget: object, on_change: Callable[..., None], _say: object, **_: object
) -> Tier:
    return Tier(_here(), on_change)


def _converting(*_: object) -> Converting:
    return Converting(_here())


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """While it lasts, `Effects` of every agent finds the simulated rim."""
    with (
        mock.patch.object(effects, "Storage", _files),
        mock.patch.object(effects, "StoreServers", _stores),
        mock.patch.object(effects, "ConversionJob", _converting),
        mock.patch.object(own_memory, "MemoryTier", _tier),
    ):
        yield
