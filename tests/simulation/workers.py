"""Simulated training: one collective per epoch. A step is made only while all ranks of the world take part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.agent.decisions import events as ev
from dalsegno.protos import control_pb2, worker_pb2

from . import faults
from .disk import Sealed, digest_of
from .flights import Flight
from .memory import remember
from .parts import UNIT, loaded_by
from .refusals import LINE, are_refused
from .shapes import fails
from .syncs import DrainSave, outlasts_notice, patience

if TYPE_CHECKING:
    from .agents import SimAgent
    from .world import Simulation

# In how many of the schedules where the last save is in memory alone all nodes are killed behind it.
CUT_AT_THE_END = 0.4


class Group:
    """One node's ranks of one epoch."""

    def __init__(self, agent: SimAgent, collective: Collective, first_rank: int) -> None:
        self.agent = agent
        self.collective = collective
        self.first_rank = first_rank
        self.alive = True
        self.up = False
        self.frozen = False
        self.drain = False
        self.master_seen = False
        self.ending = 0
        self.to_memory = False
        self.save_order = 0
        # It was told that the world has broken; and has saved what it held.
        self.keep = self.kept = False
        # When it died or stood still for good.
        self.stopped_at: float | None = None
        # In force when these ranks were started.
        self.settings = agent.told or agent.settings
        # What its agent was told: who hears of the world later may hear that its checkpoint has come to the disk.
        self.from_memory = False

    def tell(
        self,
        drain: bool,
        master_seen: bool,
        ending: int = 0,
        to_memory: bool = False,
        keep: bool = False,
        save_order: int = 0,
    ) -> None:
        self.drain, self.to_memory, self.save_order = drain, to_memory, save_order
        if keep and not self.keep:
            self.keep = True
            self.agent.sim.clock.after(self.agent.sim.random.uniform(0.001, 0.5), self.collective.survive, self)
        self.master_seen = master_seen
        self.ending = ending
        if ending and self.alive and self.collective.drain_save is not None:
            self.collective.broken()

    def says(self, delay: float, rank: int, **body: object) -> None:
        """One rank's message reaches the agent, also if the rank dies meanwhile (it is in the socket)."""
        message = worker_pb2.ToAgent(**body)  # type: ignore[arg-type]
        event = ev.WorkerSaid(self.collective.epoch, self.first_rank + rank, message)
        self.agent.sim.clock.after(delay, self.agent.deliver, event)

    def counted(self, epoch: int) -> int | None:
        """The last step that its ranks have made, where that is their epoch, and they have a session."""
        there = self.up and not self.collective.sim.plan.silent and self.collective.epoch == epoch
        return self.collective.step if there else None

    def exits(self, delay: float, code: int, ranks: int | None = None) -> None:
        """Its ranks end by themselves."""
        self.alive = False
        for rank in range(self.agent.nproc if ranks is None else ranks):
            event = ev.WorkerExited(self.collective.epoch, rank, code, "")
            self.agent.sim.clock.after(delay + 0.001 * rank, self.agent.deliver, event)

    def hang(self) -> None:
        """One rank stops in its own code, for ever: only a kill ends it."""
        self.frozen = True
        self.stopped_at = self.agent.sim.clock.now

    def die(self) -> None:
        """Killed from outside: nobody reads an exit code, the peers notice."""
        if self.alive:
            outlasts_notice(self)
            self.alive = False
            self.stopped_at = self.stopped_at or self.agent.sim.clock.now
            self.collective.broken()

    def crash(self, code: int) -> None:
        """One rank ends with an error."""
        if self.alive:
            self.stopped_at = self.stopped_at or self.agent.sim.clock.now
            self.exits(0.01, code, ranks=1)
            self.collective.broken()


class Collective:
    """The ranks of one world: load, step, save, drain, finish."""

    def __init__(self, sim: Simulation, world: control_pb2.World) -> None:
        self.sim = sim
        self.world = world
        self.epoch = world.epoch
        self.groups: dict[str, Group] = {}
        self.step = world.resume.source.step if world.HasField("resume") else 0
        self.history: tuple[tuple[int, int], ...] = ()
        self.loaded = False
        self.saved_step = self.step
        # Number of the last order to save that was carried out.
        self.ordered = 0
        # No agent hears the master, as of the last step; and what agents were to bring to the disk, by its name.
        self.unheard, self.coming = False, ""
        self.attempt = 0
        self.is_broken = False
        self.flight: Flight | None = None
        # Of a drain, while it goes on.
        self.drain_save: DrainSave | None = None
        # What waits because a member is stopped (SIGSTOP).
        self._stuck: list[tuple[object, tuple[object, ...]]] = []

    # ---- forming ----------------------------------------------------------------------------------------------------

    def join(self, agent: SimAgent, world: control_pb2.World) -> Group:
        group = Group(agent, self, world.place.first_rank)
        group.from_memory = world.resume.source.in_memory
        self.groups[agent.client.incarnation] = group
        delay = self.sim.random.uniform(0.05, 0.4) if agent.warm else self.sim.random.uniform(0.5, 3.0)
        self.sim.clock.after(delay, self._up, group)
        # Its successors' start, beside the training.
        ahead = self.sim.random.uniform(0.3, 3.0) * self.sim.plan.warm_factor
        self.sim.clock.after(delay + ahead, agent.deliver, ev.StandbyWarm(self.epoch))
        return group

    def _up(self, group: Group) -> None:
        if not group.alive:
            return
        group.up = True
        for rank in range(0 if self.sim.plan.silent else group.agent.nproc):
            group.says(0.002, rank, hello=worker_pb2.Hello(protocol=1, epoch=self.epoch, rank=group.first_rank + rank))
        if len(self.groups) == self.world.nodes and all(g.up and g.alive for g in self.groups.values()):
            self._later(self.sim.plan.load_time, self._load)

    def _later(self, delay: float, call: object, *args: object) -> None:
        self.sim.clock.after(delay, self._together, call, args)

    def _together(self, call: object, args: tuple[object, ...]) -> None:
        """Carries on if everybody takes part; with a stopped member it waits, with a dead one it never happens."""
        if self.is_broken or not all(group.alive for group in self.groups.values()):
            return
        if any(group.frozen for group in self.groups.values()):
            self._stuck.append((call, args))
            return
        call(*args)  # type: ignore[operator]

    def thaw(self) -> None:
        stuck, self._stuck = self._stuck, []
        for call, args in stuck:
            self._later(0.01, call, *args)

    def broken(self) -> None:
        """A member is gone: some peers get an error at some time, others hang in the collective."""
        if self.is_broken:
            return
        self.is_broken = True
        if self.drain_save is not None:
            self.drain_save.end_apart()
            return
        for group in self.groups.values():
            if group.alive and self.sim.random.random() < 0.6:
                self.sim.clock.after(self.sim.random.uniform(0.02, 4.0), self._error, group)

    def _error(self, group: Group) -> None:
        if group.alive and not self.survive(group):
            group.crash(1)

    def survive(self, group: Group) -> bool:
        """Saves the last boundary on one node alone, where that is still held, and ends there."""
        sim = self.sim
        first = self.world.resume.source.step if self.world.HasField("resume") else 0
        if not sim.plan.survivors or group.kept or not (group.alive and group.up) or group.frozen or self.step <= first:
            return False
        if self.flight is not None or sim.random.random() >= sim.plan.survivors:
            return False
        group.kept = True
        own, nodes = self.group_rank(group), len(self.groups)
        message = self.manifest(f"step-{self.step}.e{self.epoch}.{1000 + own}", self._lead.settings, in_memory=True)
        message.shape.by_place = False  # All of it is in this one's part.
        remember(sim, message, self.history)
        group.says(0.001, 0, keeping=worker_pb2.Keeping(step=self.step))
        sim.clock.after(sim.random.uniform(0.01, 0.5), self._survived, group, message, self.history, own, nodes)
        return True

    def _survived(
        self, group: Group, message: control_pb2.Checkpoint, history: tuple[tuple[int, int], ...], own: int, nodes: int
    ) -> None:
        if not group.alive:
            return
        group.agent.memory.write(message, history, own, *(part for part in range(nodes) if part != own))
        sealed = worker_pb2.Sealed(name=message.ref.name, digest=message.ref.digest, step=message.step, in_memory=True)
        group.says(0.002, 0, sealed=sealed)
        self.sim.clock.after(0.01, group.crash, 1)

    # ---- loading ----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        world = self.world
        if are_refused(self):
            self._refuse()
            return
        source: Sealed | None = None
        if world.HasField("resume"):
            universal = world.resume.form == control_pb2.FORM_UNIVERSAL
            ref = world.resume.universal if universal else world.resume.source.ref
            bad = [group for group in self.groups.values() if self._cannot_load(group, ref)]
            if bad:
                self._bad_checkpoint(bad, ref, world.resume.form)
                return
            source = self.sim.disk.ever[ref.digest]
            size = world.world_size
            shape = source.message.shape
            same = universal or shape.any_world_size or shape.world_size == size
            self.sim.ledger.require(
                same or (shape.reshards and not self.sim.plan.settings.universal_gate),
                "loads",
                f"epoch {self.epoch} of {size} ranks loads {ref.name} as it is",
            )
            if self._misses_parts():
                self.sim.trace("workers", "epoch {} misses parts of {}", self.epoch, ref.name)
                for group in self.groups.values():
                    group.crash(1)
                return
            if not same and self.sim.plan.cannot_reshard:
                self.sim.trace("workers", "epoch {} cannot re-shard {}", self.epoch, ref.name)
                for group in self.groups.values():
                    group.crash(1)
                return
        if fails(self):
            return
        self.history = source.history if source is not None else ()
        self.loaded = True
        self.sim.trace("workers", "epoch {} loaded step {}", self.epoch, self.step)
        self._next()

    def _refuse(self) -> None:
        """All ranks know it, say so, and end."""
        self.sim.trace("workers", "epoch {} is refused", self.epoch)
        self.is_broken = True
        self.sim.ledger.refusals.happened(self.epoch)
        for group in self.groups.values():
            for rank in range(group.agent.nproc):
                group.says(0.002, rank, refused=worker_pb2.Refused(message=LINE))
            group.exits(0.02, 1)

    def _cannot_load(self, group: Group, ref: control_pb2.CheckpointRef) -> bool:
        source = self.world.resume.source
        if group.from_memory:
            there = group.agent.memory.steps.get(source.ref.digest)
            self.sim.ledger.require(
                there is not None and self._loaded_by(group) <= there.parts,
                "nodes have what is loaded",
                f"epoch {self.epoch}: {group.agent.label} has {there and there.parts} of {ref.name}",
            )
            return (group.agent.host, ref.digest) in self.sim.misread
        entry = self.sim.disk.find(group.agent.host, ref.digest)
        return entry is None or entry.damaged or (group.agent.host, ref.digest) in self.sim.misread

    def _loaded_by(self, group: Group) -> frozenset[int]:
        """Which parts of the resume point, in memory, a node's ranks load."""
        worlds, source = self.sim.ledger.worlds, self.world.resume.source
        saved_by, layout = worlds[source.epoch].layout, worlds[self.epoch].layout
        return loaded_by(source, saved_by, layout, self.group_rank(group))

    def _misses_parts(self) -> bool:
        """The ranks load other parts than they have said, and some node lacks one."""
        source = self.world.resume.source
        if not self.sim.plan.reads_all or not source.in_memory:
            return False
        return not all(group.agent.memory.has_all(source.ref.digest) for group in self.groups.values())

    def _bad_checkpoint(self, bad: list[Group], ref: control_pb2.CheckpointRef, form: int) -> None:
        self.sim.trace("workers", "epoch {}: {} cannot load {}", self.epoch, [g.agent.label for g in bad], ref.name)
        said = worker_pb2.BadCheckpoint(
            name=ref.name, digest=ref.digest, form=form, file="part-0.pt", message="checksum"
        )
        for group in bad:
            group.says(0.002, 0, bad_checkpoint=said)
            group.exits(0.02, ev.WORKER_BAD_CHECKPOINT, ranks=1)
        self.broken()

    # ---- stepping ---------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        if self.step >= self.sim.plan.steps:
            self._end()
            return
        groups = self.groups.values()
        drain = any(group.drain for group in groups)
        seen = any(group.master_seen for group in groups)
        order = max(group.save_order for group in groups)
        duration = self.sim.plan.step_time * self.sim.random.uniform(0.8, 1.3)
        self._later(duration, self._stepped, drain, seen, order, duration)

    def _stepped(self, drain: bool, seen: bool, order: int, seconds: float) -> None:
        self.step, self.unheard = self.step + 1, not seen
        self.history = (*self.history, (self.epoch, self.step))
        cut = self.sim.network.cut
        heard = any(group.agent.alive and group.agent.host not in cut for group in self.groups.values())
        self.sim.ledger.stepped(self.epoch, self.step, heard)
        if self.sim.plan.silent:
            self._next()
            return
        progress = worker_pb2.Progress(
            step=self.step, loss=1.0 / self.step, seconds=seconds, longest=1.0, anyone_sees_master=seen
        )
        progress.may_keep = bool(self.sim.plan.survivors)
        for group in self.groups.values():
            group.says(0.001 + 0.005 * self.sim.random.random(), 0, progress=progress)
        if drain and self.step < self.sim.plan.steps:
            for group in self.groups.values():
                for rank in range(group.agent.nproc):
                    group.says(0.007, rank, draining=worker_pb2.Draining(step=self.step))
        if self.flight is not None and self.flight.failed:
            # Some rank could not write its part: the step's exchange has told all.
            self._settled()
        ordered, self.ordered = order > self.ordered, max(order, self.ordered)
        ordered = self._owes() or ordered
        if drain or ordered or self.step >= self.sim.plan.steps or self.step % self.sim.plan.save_every == 0:
            self._save(drain and self.step < self.sim.plan.steps)
        elif self._saves_to_memory():
            self._later(0.01, self._save_to_memory, False)
        else:
            self._next()

    # ---- saving -----------------------------------------------------------------------------------------------------

    def _name(self) -> str:
        return f"step-{self.step}.e{self.epoch}.{self.attempt}"

    def _save(self, drain: bool) -> None:
        if self.flight is not None:
            # The one before is waited for first.
            self._settle(drain)
            return
        if self.saved_step == self.step:
            self._saved(drain, None)
            return
        if drain and self._drains_to_memory():
            self._later(0.01, self._save_to_memory, True)
            return
        if not drain and self._goes_through_memory():
            self._later(0.01, self._save_to_memory, False, True)
            return
        self.attempt += 1
        name = self._name()
        while not self.sim.disk.begin(name):
            # Only a job whose store and agents were all lost can come by the same epoch again.
            self.sim.ledger.require(self.sim.ledger.stores_lost > 0, "names", f"{name} exists already")
            self.attempt += 1
            name = self._name()
        for group in self.groups.values():
            group.says(0.01, 0, saving=worker_pb2.Saving(name=name, bytes=1000 * self.attempt))
        seconds = self.sim.plan.save_time * self.sim.random.uniform(0.5, 1.5)
        self.drain_save = DrainSave(self, name, seconds) if drain else None
        if self.sim.plan.background:
            self._begin_flight(name, drain)
            return
        self._later(seconds, self._sync, name, drain)

    def _saves_to_memory(self) -> bool:
        """It is due, and no durable save is under way: what that has is hardly older."""
        every = self.sim.plan.memory_every
        return bool(every) and self.step % every == 0 and (self.flight is None or self.flight.over)

    def _drains_to_memory(self) -> bool:
        """Every rank that was told of the drain was told so."""
        groups = self.groups.values()
        return bool(self.sim.plan.memory_every) and all(group.to_memory or not group.drain for group in groups)

    def _goes_through_memory(self) -> bool:
        """The agents bring it to the disk, while they hear a master; the last one if the ranks do not wait for it."""
        plan = self.sim.plan
        return bool(plan.memory_every) and (self.step < plan.steps or plan.hasty) and not self.unheard

    def _owes(self) -> bool:
        """The master's silence begins, and what it was to have brought to the disk is not there."""
        coming = self.coming if self.unheard else ""
        self.coming = "" if coming else self.coming
        return bool(coming) and coming not in self.sim.disk.sealed

    def _save_to_memory(self, drain: bool, to_disk: bool = False) -> None:
        """Each node's ranks write their part into its memory, and train on."""
        self.attempt += 1
        message = self.manifest(self._name(), self._lead.settings, in_memory=True, to_disk=to_disk)
        remember(self.sim, message, self.history)
        sealed = worker_pb2.Sealed(name=message.ref.name, digest=message.ref.digest, step=self.step, in_memory=True)
        sealed.make_durable = to_disk
        if to_disk:
            self.coming = message.ref.name
            self.sim.ledger.behind.wanted(self.epoch, self.step)
        for group in self.groups.values():
            group.agent.memory.write(message, self.history, self.group_rank(group))
            group.says(0.003, 0, sealed=sealed)
        if drain:
            self.saved_step = self.step
            self._later(0.004, self._saved, True, message.ref, True)
        else:
            self._next()

    def group_rank(self, group: Group) -> int:
        """Of this node in the world."""
        return sorted(other.first_rank for other in self.groups.values()).index(group.first_rank)

    def _sync(self, name: str, drain: bool) -> None:
        """The disk takes its time. Nothing moves meanwhile, and ranks give it up before they are taken for stuck."""
        sync, most = self.sim.sync_time, patience(self.sim)
        for group in self.groups.values() if sync else ():
            group.says(0.01, 0, saving=worker_pb2.Saving(name=name, bytes=1000 * self.attempt, written=1000))
        if sync <= most:
            self._later(sync, self._parts_written, name, drain)
        else:
            self._later(most, self._give_up, name, drain)

    def _give_up(self, name: str, drain: bool) -> None:
        self._say_failed(name, self.step, drain)
        self._after_failure()

    def _begin_flight(self, name: str, drain: bool) -> None:
        self.flight = Flight(self, self.manifest(name, self._lead.settings), drain=drain)
        if drain or self.step >= self.sim.plan.steps:
            self._settle(drain)
        else:
            self._later(0.02, self._next)

    def _settle(self, drain: bool) -> None:
        """All ranks wait for the save in the background; then for that of the present step."""
        flight = self.flight
        assert flight is not None
        if not flight.over:
            self._later(0.1, self._settle, drain)
            return
        self._settled()
        if flight.sealed or flight.step != self.step:
            self._save(drain)
        else:
            self._after_failure()

    def _settled(self) -> None:
        flight, self.flight = self.flight, None
        assert flight is not None
        if flight.sealed:
            self.saved_step = flight.step
        else:
            self._say_failed(flight.name, flight.step, flight.drain)

    def _parts_written(self, name: str, drain: bool) -> None:
        if self.sim.disk.full:
            self._say_failed(name, self.step, drain)
            self._after_failure()
            return
        lead = self._lead
        message = self.manifest(name, lead.settings)
        self.sim.disk.seal(message, self.history, lead.agent.host)
        self.sim.trace("workers", "epoch {} sealed {}", self.epoch, name)
        self.saved_step = self.step
        lead.says(0.003, 0, sealed=worker_pb2.Sealed(name=name, digest=message.ref.digest, step=self.step))
        self._later(0.004, self._saved, drain, message.ref)

    @property
    def _lead(self) -> Group:
        return next(group for group in self.groups.values() if group.first_rank == 0)

    def _say_failed(self, name: str, step: int, drain: bool) -> None:
        self.sim.trace("workers", "epoch {}: saving {} failed, disk full or stuck", self.epoch, name)
        self.drain_save = None
        if drain:
            self.sim.ledger.failed_drains.setdefault(self.epoch, []).append(step)
        failed = worker_pb2.SaveFailed(name=name, reason="no space left on device", drain=drain, step=step)
        for group in self.groups.values():
            group.says(0.002, 0, save_failed=failed)

    def _after_failure(self) -> None:
        if self.step < self.sim.plan.steps:
            self._next()
        else:
            self._later(0.5, self._save, False)

    def manifest(
        self, name: str, settings: control_pb2.Settings, *, in_memory: bool = False, to_disk: bool = False
    ) -> control_pb2.Checkpoint:
        message = control_pb2.Checkpoint(
            ref=control_pb2.CheckpointRef(name=name, digest=digest_of(name)),
            run_id=self.world.run_id,
            step=self.step,
            epoch=self.epoch,
            form=control_pb2.FORM_SHARDED,
            shape=control_pb2.Shape(
                world_size=self.world.world_size,
                strategy="deepspeed-zero-1",
                any_world_size=self.sim.plan.any_world_size,
                reshards=self.sim.plan.reshards,
                by_place=self.sim.plan.by_place,
            ),
            position=control_pb2.Position(data_epoch=0, samples=16 * self.step),
            bytes=1000,
            min_nodes=settings.min_nodes,
            max_nodes=settings.max_nodes,
            in_memory=in_memory,
        )
        if self.sim.plan.lengths is not None:
            message.shape.reads.CopyFrom(control_pb2.Reads(lengths=self.sim.plan.lengths, alignment=UNIT))
        if self.world.HasField("resume"):
            message.resumed_from.CopyFrom(self.world.resume.source.ref)
        # Good and bad values in turn, so that the best is now the newest and now long past.
        message.metric = float(self.step * 37 % 23)
        message.best, message.candidate = self._bests()
        ever = {entry.message.ref.name: entry.message for entry in self.sim.disk.ever.values()}
        known = [ever[one] for one in (message.best, message.candidate) if one in ever]
        if in_memory and not to_disk:
            message.ClearField("metric")  # What is best comes to the disk.
        elif all(message.metric < one.metric for one in known):
            message.best, message.candidate = name, ""
        return message

    def _bests(self) -> tuple[str, str]:
        """Names of the best as of now, which is on the disk, and of what is on its way there to be that."""
        source, disk = self.world.resume.source, self.sim.disk
        best, candidate = source.best, source.candidate
        for message in (entry.message for entry in disk.ever.values() if entry.message.epoch == self.epoch):
            if message.best != message.ref.name:
                best, candidate = message.best, message.candidate
            elif message.in_memory:
                candidate = message.ref.name
            else:
                best, candidate = message.ref.name, ""
        return (candidate, "") if candidate in disk.sealed else (best, candidate)

    def _saved(self, drain: bool, ref: control_pb2.CheckpointRef | None, in_memory: bool = False) -> None:
        if self.step >= self.sim.plan.steps:
            self._end()
            return
        self.drain_save = None
        # All ask each other: the change may have been withdrawn meanwhile.
        if not drain or not any(group.drain for group in self.groups.values()):
            self._next()
            return
        if ref is None:
            ref = next(
                (s.message.ref for s in self.sim.disk.ever.values() if s.history == self.history), self._resumed_ref()
            )
        self.sim.trace("workers", "epoch {} drained at step {}", self.epoch, self.step)
        drained = worker_pb2.Drained(name=ref.name, digest=ref.digest, step=self.step, in_memory=in_memory)
        for group in self.groups.values():
            for rank in range(group.agent.nproc):
                group.says(0.002, rank, drained=drained)
            group.exits(self.sim.random.uniform(0.01, 0.3), ev.WORKER_DRAINED)

    def _resumed_ref(self) -> control_pb2.CheckpointRef:
        return self.world.resume.source.ref if self.world.HasField("resume") else control_pb2.CheckpointRef()

    def _end(self) -> None:
        """The script's training reached its end; the last step is saved."""
        self.sim.trace("workers", "epoch {} finished at step {}", self.epoch, self.step)
        if self.sim.plan.hasty and not self.sim.plan.shells and self.sim.random.random() < CUT_AT_THE_END:
            self.sim.clock.after(self.sim.random.uniform(0.0, 2.0), faults.power_cut, self.sim)
        hanging = None
        if self.sim.ends_hang:
            self.sim.ends_hang -= 1
            hanging = self.sim.random.choice(list(self.groups.values()))
        for group in self.groups.values():
            for rank in range(0 if self.sim.plan.silent else group.agent.nproc):
                group.says(0.002, rank, finished=worker_pb2.Finished(step=self.step))
            if group is hanging:
                self.sim.trace(group.agent.label, "its ranks hang after their last step")
                self.sim.ledger.disturbed()
                group.hang()
            else:
                group.exits(self.sim.random.uniform(0.01, 0.5), 0)
