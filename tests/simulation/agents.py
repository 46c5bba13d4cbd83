"""The real decisions in a simulated agent process: workers, conversion, checkpoint files and the master around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions import handling
from dalsegno.protos import control_pb2

from .client import Client
from .clock import Timer
from .faults import leaver_is_gone
from .memory import Memory
from .stores import Stores
from .workers import Group

if TYPE_CHECKING:
    from .world import Simulation

# How long a Join looks for a resume point that is not in sight (file caches), seconds.
LOOK_FOR = 3.0
# A verification on a slow disk: so many words of progress, that many seconds apart; longer than a stall in all.
SLOW_PARTS = 8
SLOW_PART = (60.0, 150.0)


class SimAgent:
    """One `dlrover-run` process on one host."""

    def __init__(self, sim: Simulation, number: int, host: str, name: str) -> None:
        self.sim = sim
        self.number = number
        self.label = f"agent-{number}"
        self.host = host
        self.asked_name = name
        self.nproc = sim.plan.nproc + (number % 3 if sim.plan.mixed else 0)
        self.settings = sim.plan.other_settings if number % 2 else sim.plan.settings
        # Those in force, as a master told them last.
        self.told: control_pb2.Settings | None = None
        self.alive = True
        # Whether the job may count on it.
        self.counts = True
        # It stands still for longer than the schedule's faults last.
        self.stuck = False
        # It was told to leave, whether it has heard of it or not.
        self.noticed = False
        # When; and whether that notice was over before everything was saved.
        self.noticed_at: float | None = None
        self.ran_out = False
        self.exit_code: int | None = None
        # The code with which its last registration was refused.
        self.refused_with = ""
        self.warm = False
        self.frozen = False
        self.client = Client(self)
        self.memory = Memory(self)
        self.stores = Stores(self)
        self.state = handling.fresh(
            handling.AgentSettings(
                nproc=self.nproc,
                node_name=name,
                drain_timeout=sim.plan.settings.drain_timeout,
                master_outage_timeout=sim.plan.outage_timeout,
            )
        )
        self.group: Group | None = None
        # Its workers that were running when it was told to leave.
        self.group_at_notice: Group | None = None
        # Their world had broken by then: what it lost it would have lost without the notice.
        self.broken_at_notice = False
        self.seen_epoch = 0
        self.registrations = 0
        self._offset = sim.random.uniform(0.0, 5000.0)
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._timer: Timer | None = None
        self._looking: Timer | None = None
        self._converting: Timer | None = None
        sim.clock.after(sim.random.uniform(0.3, 3.0) * sim.plan.warm_factor, self._warmed)
        self.deliver(ev.Started())

    # ---- the process ------------------------------------------------------------------------------------------------

    def run(self, call: Callable[..., None], *args: Any) -> None:
        """Runs a callback in this process: never when it is gone, later when it is stopped."""
        if not self.alive:
            return
        if self.frozen:
            self._backlog.append((call, args))
        else:
            call(*args)

    def deliver(self, event: ev.Event) -> None:
        self.run(self._handle, event)

    def directed(self, directive: control_pb2.Directive) -> None:
        self.seen_epoch = max(self.seen_epoch, directive.epoch)
        self.told = directive.settings if directive.HasField("settings") else self.told
        self._handle(ev.Directed(directive))

    def _handle(self, event: ev.Event) -> None:
        if isinstance(event, ev.Registered):
            self.told = event.reply.settings
        if isinstance(event, ev.Replication) and event.said is not None and event.said.replicated:
            self.sim.ledger.said_replicated(event.said.epoch, event.said.replicated)
        if isinstance(event, ev.Refused):
            self.refused_with = event.code
        if isinstance(event, ev.WorkerExited | ev.WorkersStopped) and self.group is not None:
            step = self.group.counted(event.epoch)
            if step is not None:
                self._handle(ev.StepsCounted(event.epoch, step))
        if self.sim.tracing and not isinstance(event, ev.Directed | ev.Tick):
            self.sim.trace(self.label, "hears {}", short(event))
        self.state, actions = handling.handle(self.state, event, self.sim.clock.now + self._offset)
        for action in actions:
            if not self.alive:
                return
            self._carry_out(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.state.wake is not None:
            delay = max(0.01, self.state.wake - self._offset - self.sim.clock.now)
            self._timer = self.sim.clock.after(delay, self.deliver, ev.Tick())

    def freeze(self, with_workers: bool) -> None:
        self.sim.trace(self.label, "is stopped{}", ", its workers too" if with_workers else "")
        self.frozen = True
        if with_workers and self.group is not None:
            self.group.frozen = True

    def thaw(self) -> None:
        if not self.alive:
            return
        self.sim.trace(self.label, "continues")
        self.frozen = False
        if self.group is not None and self.group.frozen:
            self.group.frozen = False
            self.group.collective.thaw()
        backlog, self._backlog = self._backlog, []
        for call, args in backlog:
            self.run(call, *args)

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
        self.alive = False
        if self.sim.patrol is not None:
            self.sim.patrol.gone[self.client.incarnation] = self.label
        self.client.close()
        for timer in (self._timer, self._looking, self._converting):
            if timer is not None:
                timer.cancel()

    def _warmed(self) -> None:
        self.warm = True
        self.deliver(ev.StandbyWarm())

    # ---- actions ----------------------------------------------------------------------------------------------------

    def _carry_out(self, action: ev.Action) -> None:
        if self.sim.tracing:
            self.sim.trace(self.label, "-> {}", short(action))
        match action:
            case ev.Register():
                self._register(action.previous_incarnation, action.node)
            case ev.Call():
                self.client.call(action.method, action.request)
            case ev.PrepareJoin():
                port = self.stores.open((self.client.generation, action.round))[1]
                self._prepare_join(action, port, self.sim.clock.now + LOOK_FOR)
            case ev.StartWorkers() if self.sim.starts_fail:
                self.sim.starts_fail -= 1
                self.sim.ledger.script_failures += 1
                self.sim.ledger.disturbed()
                self.sim.clock.after(0.05, self.deliver, ev.StartFailed(action.world.epoch, "no such interpreter"))
            case ev.StartWorkers():
                self.stores.use(action.world, mine=action.world.place.group_rank == 0)
                self.memory.open_epoch(action.world)
                self.group = self.sim.start_workers(self, action.world)
            case ev.StopWorkers():
                self._stop_workers(action.epoch)
            case ev.TellWorkers():
                if self.group is not None:
                    flags = (action.drain, action.master_seen, action.ending, action.to_memory, action.keep)
                    self.group.tell(*flags, action.save_order)
            case ev.ReadManifest():
                self.sim.clock.after(self.sim.random.uniform(0.01, 0.3), self.run, self._read, action)
            case ev.StartConversion():
                self.sim.conversions.start(self, action.conversion)
            case ev.StopConversion():
                self.sim.conversions.stop(self, action.lease)
            case ev.HoldPart():
                self.memory.hold(action)
            case ev.SendPart():
                self.memory.send(action.digest)
            case ev.Doubt():
                self.sim.clock.after(self.sim.random.uniform(0.05, 1.0), self.deliver, ev.Doubted(action.ref))
            case ev.MakeDurable():
                self.memory.make_durable(action)
            case ev.StopWriting():
                self.memory.unwanted = action.ref.digest
            case ev.KeepInMemory():
                self.memory.keep(action.epoch, action.digests)
            case ev.Verify():
                self._schedule_verification(action.verification, 0)
            case ev.Look():
                self.sim.clock.after(self.sim.random.uniform(0.05, 2.0), self.run, self._look, action)
            case ev.Prune():
                self.sim.clock.after(self.sim.random.uniform(0.05, 1.0), self.run, self._prune, action)
            case ev.MarkFinished():
                if action.run_id not in self.sim.disk.finished:
                    self.sim.disk.finished.append(action.run_id)
            case ev.Exit():
                self._exit(action)
            case ev.Sweep():
                self.sim.ledger.swept(action.epoch, action.converting)
                self.sim.disk.sweep(action.epoch, action.step)
            case ev.Say() | ev.WriteLatest():
                pass
            case _:
                # Nothing here has another address, or parts of Flash Checkpoint's: who plays that must carry it out.
                raise AssertionError(f"nobody carries out {short(action)}")

    def _register(self, previous: str, node: str) -> None:
        self.registrations += 1
        disk = self.sim.disk
        self.client.register(
            control_pb2.RegisterRequest(
                job_id="job",
                incarnation=f"{self.label}.{self.registrations}",
                protocol=1,
                secret=self.client.secret,
                host=self.host,
                node=node,
                nproc=self.nproc,
                settings=self.settings,
                known_settings=self.told,
                probe=disk.read_probe(self.host),
                inventory=disk.inventory(self.host),
                epoch=max(self.seen_epoch, self.state.started),
                generation=self.client.generation,
                finished_runs=disk.finished_runs(self.host),
                previous_incarnation=previous,
                peer_address=self.memory.address,
                # Nothing is to be found: what is asked for must only never keep a world from opening.
                adopts=True,
            )
        )

    def _prepare_join(self, action: ev.PrepareJoin, port: int, until: float) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        disk = self.sim.disk
        wanted = action.resume.digest if action.resume is not None else ""
        if action.parts:
            self.memory.gather(action, lambda failure: self._gathered(action, port, failure))
            return
        if wanted and disk.find(self.host, wanted) is None and (action.patient or self.sim.clock.now < until):
            self._looking = self.sim.clock.after(0.4, self.run, self._prepare_join, action, port, until)
            return
        self.sim.clock.after(
            self.sim.random.uniform(0.01, 0.1),
            self.deliver,
            ev.JoinPrepared(
                action.round,
                wanted,
                self.host,
                port,
                disk.read_probe(self.host),
                tuple(disk.inventory(self.host)),
                took=_took(action),
            ),
        )

    def _gathered(self, action: ev.PrepareJoin, port: int, failure: str) -> None:
        assert action.resume is not None
        digest, disk = action.resume.digest, self.sim.disk
        if failure and not action.anyway:
            self.deliver(ev.JoinFailed(action.round, digest, failure, action.some))
            return
        fetched = () if failure else (self.memory.steps[digest].message,)
        inventory = (*disk.inventory(self.host), *fetched)
        probe, lacks = disk.read_probe(self.host), bool(failure)
        self.deliver(
            ev.JoinPrepared(
                action.round,
                digest,
                self.host,
                port,
                probe,
                inventory,
                lacks=lacks,
                took=_took(action),
                parts=action.some,
            )
        )

    def _stop_workers(self, epoch: int) -> None:
        if self.group is not None and self.group.collective.epoch == epoch:
            self.group.die()
        self.sim.clock.after(self.sim.random.uniform(0.01, 0.5), self.deliver, ev.WorkersStopped(epoch))

    def _read(self, action: ev.ReadManifest) -> None:
        entry = self.sim.disk.find(self.host, action.digest)
        message = entry.message if entry is not None else None
        self._handle(ev.ManifestRead(action.name, message, "" if message is not None else "no such directory"))

    def _schedule_verification(self, wanted: control_pb2.Verification, moved: int) -> None:
        slow = self.sim.plan.slow_disk and moved < SLOW_PARTS
        delay = self.sim.random.uniform(*(SLOW_PART if slow else (0.1, 1.0)))
        self.sim.clock.after(delay, self.run, self._read_on if slow else self._verify, wanted, moved)

    def _read_on(self, wanted: control_pb2.Verification, moved: int) -> None:
        self._handle(ev.VerificationMoved(wanted.number, moved + 1))
        self._schedule_verification(wanted, moved + 1)

    def _verify(self, wanted: control_pb2.Verification, moved: int) -> None:
        entry = self.sim.disk.find(self.host, wanted.ref.digest)
        if entry is None or self.sim.reads_fail:
            why = "not in sight" if entry is None else "input/output error"
            self._handle(ev.VerificationDone(wanted.number, False, why, inconclusive=True))
        else:
            intact = not entry.damaged
            self._handle(ev.VerificationDone(wanted.number, intact, "" if intact else "part-0.pt: checksum"))

    def _look(self, action: ev.Look) -> None:
        if self.sim.disk.find(self.host, action.ref.digest) is not None:
            self._handle(ev.Sighted(action.ref))

    def _prune(self, action: ev.Prune) -> None:
        for ref in action.refs:
            self.sim.ledger.pruned(self, ref)
            self.sim.disk.delete(ref.name)
        self._handle(ev.Pruned(action.refs))

    def _exit(self, action: ev.Exit) -> None:
        self.exit_code = action.code
        self.sim.ledger.exited(self, action.code)
        leaver_is_gone(self.sim, action.code)
        self._gone()
        if self.group is not None:
            self.group.die()


def short(value: object) -> str:
    """One line for a trace."""
    return " ".join(str(value).split())[:220]


def _took(action: ev.PrepareJoin) -> int:
    return action.take.epoch if action.take is not None else 0
