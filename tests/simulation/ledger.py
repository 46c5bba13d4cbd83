"""The global view: what all masters and nodes ever did, and the invariants over it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions import handling
from dalsegno.agent.decisions.decision import is_saved, what_is_unsaved
from dalsegno.agent.decisions.state import Workers
from dalsegno.master.brain.checkpoints import in_use_digests, resume_point
from dalsegno.master.brain.forming import LEAST_QUIET_SECONDS, QUIET_TIMES
from dalsegno.master.brain.state import Checkpoint, Job, Phase, SaveOrder, Settings, World
from dalsegno.protos import control_pb2

from . import parts
from .behind import Behind
from .masters import decoded
from .orders import check_save, was_stopped
from .refusals import Refusals
from .shapes import ShapeChecks
from .syncs import is_over

if TYPE_CHECKING:
    from .agents import SimAgent
    from .world import Simulation


# Without faults a scale-down is done by then (seconds): start, load, step, save, form. A silent script has 30 s before.
SCALED_WITHIN = 15.0
SCALED_SILENT = 45.0
# What was disturbed is over when it was noticed, and the next world stands (seconds, besides the node-timeout).
SETTLING = 5.0


class Violation(AssertionError):
    """An invariant does not hold. `name` says which."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


@dataclass
class Opened:
    """One world as it was opened."""

    members: tuple[str, ...]
    resume: str
    universal: bool
    resumed_step: int
    grown: bool
    resharded: bool
    # How many ranks each node had.
    layout: tuple[int, ...]


def nnodes(settings: Settings | control_pb2.Settings) -> tuple[int, int]:
    return settings.min_nodes, settings.max_nodes


class Ledger:
    """Every check raises `Violation`."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.violation: Violation | None = None
        self.worlds: dict[int, Opened] = {}
        self.committed: dict[str, int] = {}
        self.epoch = 0
        self.head: tuple[int, int, str] = (0, -1, "")
        # It is in the memory of nodes alone.
        self.head_in_memory = False
        # By epoch, the newest step of which agents were told that it outlives a node.
        self.replicated: dict[int, int] = {}
        # Incarnations of the nodes that the master knows, dead or alive.
        self.registered: set[str] = set()
        self.executed: list[tuple[int, int]] = []
        # The epoch that was the last one when the run went back to an older commit; -1: it never did.
        self.fell_back_in = -1
        # The store was lost, and no world was opened since.
        self.amnesia = False
        self.stores_lost = 0
        # Min and max nodes; who remembered which when the store was lost; whether its successor still listens.
        self.nnodes = (0, 0)
        self.remembered: dict[str, tuple[int, int]] = {}
        self.listening = False
        # The last step that was committed before the present drain began; boundaries whose saves failed, by epoch.
        self.drained_after: int | None = None
        self.failed_drains: dict[int, list[int]] = {}
        self.noticed = 0
        # The last growth: its epoch, when its first step was heard, what it cost (seconds); the next one is draining.
        self.grown: tuple[int, float, float] | None = None
        self.growing = False
        # Epochs of a silent script of which the console says that they began.
        self.presented: set[int] = set()
        self.refusals = Refusals(self)
        self.shapes = ShapeChecks(self)
        self.behind = Behind(self)
        # Epochs of which people were told what they cost.
        self.told: set[int] = set()
        # The most nodes that a world may have since a person said so, and when that was.
        self.limit = sim.plan.settings.max_nodes
        self.limit_at = 0.0
        # When something other than joins and notices happened, from and to; when each world was opened.
        self._disturbed: list[tuple[float, float]] = []
        self.opened_at: dict[int, float] = {}
        # Some node was out of the master's sight, or did not see what others had sealed.
        self.hidden = False
        # Workers that failed by themselves.
        self.script_failures = 0
        self.success: bool | None = None
        self.message = ""
        self.finished_step = 0
        self.reopened = False
        # The job has failed for good, as one of its masters knew; how often it had been taken up by then.
        self.over: int | None = None
        # A save that somebody has ordered, as the record had it last.
        self.save_order: SaveOrder | None = None
        # How often somebody has stopped the job.
        self.stops = 0
        # Why the job lives in another directory than ours: the schedule ends with that, unchecked. Empty: it does not.
        self.elsewhere = ""
        self.ever_stepped = False
        self.arrivals = 0
        self.arrived_at = 0.0
        self.first_arrival_at = float("inf")
        # How often each name arrived.
        self.came: Counter[str] = Counter()
        self.left_drained: list[tuple[str, str]] = []
        # Epochs that some node left at once: what it alone had in memory went with it, whatever others were told.
        self.left_at_once: set[int] = set()
        # Digests, see `killed`.
        self.went_with_the_killed: set[str] = set()
        self.killed_addresses: set[str] = set()
        self.last_step_at = 0.0

    def require(self, holds: bool, name: str, text: str) -> None:
        if not holds:
            self.violated(name, text)
            raise self.violation or AssertionError

    def violated(self, name: str, text: str) -> None:
        """The schedule ends with it, also where the code under test keeps what is raised in it to itself."""
        self.violation = self.violation or Violation(name, text)

    def disturbed(self, lasts: float = 0.0) -> None:
        """Something other than a join or a notice happens for `lasts` seconds: changes meanwhile may cost steps."""
        now = self.sim.clock.now
        self._disturbed.append((now, now + lasts))

    @property
    def quiet_since(self) -> float:
        """When what has happened last was over, with the time in which all learn of it."""
        return max((end for _, end in self._disturbed), default=0.0) + self.sim.plan.settings.node_timeout

    def is_excused(self, epoch: int) -> bool:
        """Whether a change that ends this epoch now may cost steps: since it began not all was planned."""
        if self.sim.plan.silent:
            return True  # It can save nothing.
        since = self.opened_at.get(epoch, 0.0)
        settled = self.sim.plan.settings.node_timeout + SETTLING
        return any(end + settled >= since for _, end in self._disturbed)

    # ---- the master -------------------------------------------------------------------------------------------------

    def store_lost(self) -> None:
        self.amnesia = True
        self.listening = False
        self.stores_lost += 1
        self.over = None
        # Nobody remembers what it cost, nor the limit.
        self.grown = None
        self.limit = self.sim.plan.settings.max_nodes
        # Nor who came.
        self.arrivals, self.first_arrival_at = 0, float("inf")
        self.came.clear()
        last = max(self.worlds, default=0)
        # Where no world was opened, what one master told counts no more than what the next one does.
        self.remembered = {
            agent.label: nnodes(agent.told)
            for agent in self.sim.agents
            if last and agent.alive and agent.told is not None and agent.seen_epoch >= last
        }

    def scaled_to(self, nodes: int) -> None:
        """The master has accepted it."""
        self.limit, self.limit_at = nodes, self.sim.clock.now

    def heard(self, job: Job) -> None:
        """After each event of the brain, also where several share a turn."""
        new = [node.name for node in job.nodes.values() if node.order > self.arrivals]
        self.arrivals = job.arrivals
        self.came.update(new)
        # Who comes for the third time was lost twice: it holds nobody up.
        if any(self.came[name] <= 2 for name in new):
            self.arrived_at = self.sim.clock.now
            self.first_arrival_at = min(self.first_arrival_at, self.arrived_at)

    def master_moved(self, job: Job) -> None:
        """After every event that may have changed durable state."""
        self.registered = {node.incarnation for node in job.nodes.values()}
        if self.sim.tracing:
            self.sim.trace_job(job)
        self.reopened = self.success is not None and (job.run.number > 1 or not job.phase.is_terminal)
        if self.reopened:
            return  # An embedded job's next run; this schedule is about the first.
        self._is_over(job)
        if job.epoch and job.probe != self.sim.disk.probe:
            self._moved(job)
            return
        if self.amnesia:
            self._heard_out(job)
        elif job.settled:
            if self.nnodes != nnodes(job.settings):
                self.limit = job.settings.max_nodes  # Other agents, other bounds.
            self.nnodes = nnodes(job.settings)
        if self.amnesia and (job.recollection.listening or job.world is None):
            return
        if self.amnesia and not self._remembered(job):
            # The store is lost, and nobody who registered knew of the run: for this job it never was.
            self.epoch = 0
            self.nnodes, self.limit = nnodes(job.settings), job.settings.max_nodes
            self.worlds.clear()
            self.executed.clear()
            self.shapes.forgotten()
            self.sim.collectives.clear()
            self.failed_drains.clear()
        self._drains(job)
        self._growths(job)
        self.require(
            self.sim.conversions.hangs > 0 or not any("no progress for" in notice.text for notice in job.notices),
            "who moves keeps the lease",
            "a conversion that moves was taken for a stalled one",
        )
        check_save(self.sim, self.save_order, job)
        self.save_order = job.save_order
        self._commits(job)
        self._head(job)
        self._epochs(job)
        self._presented(job)
        self._told(job)
        self.refusals.noted(job)
        if job.phase.is_terminal and job.phase is not Phase.STOPPED:
            self._ended(job)

    def _moved(self, job: Job) -> None:
        """The job lives in what blind nodes have mounted there, and how that ends is not our subject.

        Only before its first world has opened, or where the record is lost, may it come to that; and then only where
        no more nodes share the right directory.
        """
        if not self.stores_lost:
            self.require(
                not self.worlds, "one directory", f"epoch {job.epoch} is in {job.probe}, earlier ones were not"
            )
            counts = Counter(node.probe for node in job.nodes.values() if not node.leaving)
            self.require(
                counts[job.probe] >= counts[self.sim.disk.probe],
                "one directory",
                f"epoch {job.epoch} is in {job.probe}, of nodes see {dict(counts)}",
            )
        self.elsewhere = "its store was lost" if self.stores_lost else "its first nodes were blind"

    def _is_over(self, job: Job) -> None:
        """Whether it has failed for good, until an agent takes it up again. In most schedules its master dies then."""
        if job.phase.is_terminal or self.over not in (None, job.run.reopened):
            self.over = None
        if job.ending is None or self.over is not None:
            return
        self.over = job.run.reopened
        random = Random(f"over {self.sim.plan.seed}")
        if random.random() < 0.8:
            self.sim.clock.after(random.uniform(0.0, 0.5), self.sim.master.crash)

    def _drains(self, job: Job) -> None:
        """A growth is put off by the failure of its own save, not by late news of an earlier one's."""
        news = [notice.text for notice in job.notices if notice.sequence > self.noticed]
        self.noticed = job.noticed
        says_so = any(text.startswith("growing is put off: its save failed") for text in news)
        if self.drained_after is not None and says_so:
            failed = self.failed_drains.get(job.epoch, [])
            self.require(
                any(step > self.drained_after for step in failed),
                "its own save failed",
                f"growing was put off after step {self.drained_after} was committed, saves failed at {failed}",
            )
        if job.drain is None:
            self.drained_after = None
        elif self.drained_after is None:
            committed = [record.step for record in job.checkpoints if record.epoch == job.epoch]
            self.drained_after = max(committed, default=job.world.resumed_step if job.world is not None else 0)

    def _growths(self, job: Job) -> None:
        """Between two growths lies the interval; "auto" is 20 times what the last one cost, at most a minute."""
        world, setting = job.world, job.settings.grow_interval
        known = self.grown[0] if self.grown is not None else 0
        if world is not None and world.grown and job.told.first_step and world.epoch != known:
            cost = next((record.paused for record in job.history if record.epoch == world.epoch), 0.0)
            self.grown = world.epoch, self.sim.clock.now, cost
        growing, self.growing = self.growing, job.drain is not None and job.drain.growth
        if self.growing and not growing and self.grown is not None:
            epoch, at, cost = self.grown
            interval = setting if setting >= 0 else min(60.0, 20.0 * cost)
            passed = self.sim.clock.now - at
            self.require(
                passed >= interval - 0.05,
                "the interval between growths",
                f"epoch {epoch} cost {cost:.2f} s, and the next growth began {passed:.2f} s after its first step",
            )

    def _heard_out(self, job: Job) -> None:
        """When a master with an empty store has listened to everybody, min is still min, and max still max."""
        listened, self.listening = self.listening, job.recollection.listening
        if not listened or job.recollection.listening:
            return
        agents = [self.sim.by_incarnation(node.incarnation) for node in job.nodes.values()]
        last = max(self.worlds, default=0)
        saved = [
            e.message
            for e in self.sim.disk.sealed.values()
            if e.message.epoch == last and e.sealed_at < self.sim.master.started_at
        ]
        expected = {self.remembered[a.label] for a in agents if a is not None and a.label in self.remembered}
        if self.nnodes not in expected and saved:
            expected.add((saved[-1].min_nodes, saved[-1].max_nodes))
        # Who was away while another store was lost remembers as high an epoch of another record: either may count.
        # Of a job that is started again after a stop the first agent says how large it is.
        self.require(
            not expected or nnodes(job.settings) in expected or self.stops > 0,
            "settings stand",
            f"--nnodes {nnodes(job.settings)}, it was {' or '.join(map(str, sorted(expected)))}",
        )

    def _commits(self, job: Job) -> None:
        self.behind.recorded(job)
        for record in job.checkpoints:
            if record.digest in self.committed:
                continue
            entry = self.sim.disk.ever.get(record.digest)
            self.require(entry is not None, "commits are sealed", f"{record.name} was never sealed")
            if not self.amnesia:
                named = any(other.candidate == record.name for other in job.checkpoints)
                self.require(
                    record.epoch >= self.epoch or named,
                    "closed epochs",
                    f"{record.name} committed after {self.epoch} opened",
                )
            self.committed[record.digest] = record.step

    def _head(self, job: Job) -> None:
        head = resume_point(job)
        now = (head.epoch, head.step, head.digest) if head is not None else (0, -1, "")
        in_memory, self.head_in_memory = self.head_in_memory, head is not None and bool(head.parts)
        if in_memory and now[:2] < self.head[:2]:
            self._gone_from_memory(job)
            self.fell_back_in = job.epoch
        elif now[1] < self.head[1] or now[:2] < self.head[:2]:
            before = job.checkpoint(self.head[2])
            self.require(
                before is not None and before.damaged and any("damaged" in n.text for n in job.notices),
                "committed steps grow",
                f"the head went from step {self.head[1]} of epoch {self.head[0]} to {now[1]} of {now[0]}",
            )
            entry = self.sim.disk.ever.get(self.head[2])
            self.require(
                entry is None or entry.damaged,
                "no verifying checkpoint is skipped",
                f"{self.head[2]} was retired as damaged and is not",
            )
            self.fell_back_in = job.epoch
        self.head = now

    def _gone_from_memory(self, job: Job) -> None:
        """The run goes back from a step in memory: some part of it is nowhere, as far as the master can see."""
        digest, epoch = self.head[2], self.head[0]
        whole = self._is_whole(job, digest, epoch) or self._is_written(job, digest, epoch)
        bad = any(known == digest for _, known in self.sim.misread) or "cannot load it" in str(job.notices[-3:])
        self.require(
            not whole or bad or self.amnesia,
            "no held step is skipped",
            f"{digest} was given up, and all of it is there",
        )

    def _nothing_in_memory(self, job: Job) -> None:
        """A failed job goes on from what is on the disk, as far as anybody is left that could write it there."""
        head = resume_point(job)
        here = [self.sim.by_incarnation(node.incarnation) for node in job.nodes.values()]
        there = any(agent is not None and agent.memory.steps for agent in here)
        self.require(
            head is None or not head.parts or not there,
            "what fails is on the disk",
            f"the job failed while {head.name if head is not None else ''} was in memory alone",
        )

    def said_replicated(self, epoch: int, digest: str) -> None:
        """The master says to some node that each part of a step is on as many nodes as the job wants."""
        step = self.sim.disk.ever[digest].message.step
        self.replicated[epoch] = max(step, self.replicated.get(epoch, -1))

    def dropped(self, agent: object, epoch: int, before: int, after: int) -> None:
        """A node gives up steps in memory: the newest step of which each part was on enough nodes, and is."""
        sealed = (entry.message for entry in self.sim.disk.sealed.values())
        durable = max((one.step for one in sealed if one.epoch == epoch), default=-1)
        self.require(
            epoch != self.epoch or max(after, durable) >= min(before, self.replicated.get(epoch, -1)),
            "a step that outlives a node is kept",
            f"{agent} drops step {before} of epoch {epoch}, of the others no newer one than {after} outlives a node",
        )

    def takes_more(self, agent: SimAgent, steps: Sequence[control_pb2.Checkpoint]) -> None:
        """Another step comes into a node's memory, which has these: of worlds that are over only what may be needed."""
        state = agent.state
        if state.workers is not Workers.NONE or state.place.order is None or state.leaving:
            return
        old = [step for step in steps if step.epoch < state.open_epoch and step.ref.digest not in state.memory.kept[1]]
        names = ", ".join(step.ref.name for step in old)
        self.require(not old, "memory is given back", f"{agent.label} holds {names} behind epoch {state.open_epoch}")

    def _is_whole(self, job: Job, digest: str, epoch: int) -> bool:
        """Each part of a step in memory is on some node that the master knows."""
        here = [self.sim.by_incarnation(node.incarnation) for node in job.nodes.values()]
        there = [agent for agent in here if agent is not None]
        return all(any(agent.memory.has(digest, part) for agent in there) for part in range(self.parts_of(epoch)))

    def _is_written(self, job: Job, digest: str, epoch: int) -> bool:
        """Each part is on the disk, or with a node that can write it there, and one can seal it."""
        disk = self.sim.disk
        here = [self.sim.by_incarnation(node.incarnation) for node in job.nodes.values()]
        able = [agent for agent in here if agent is not None and agent.host not in disk.blind]
        parts = range(self.parts_of(epoch))
        held = {part for part in parts if any(agent.memory.has(digest, part) for agent in able)}
        written = disk.spilled.get(disk.ever[digest].message.ref.name, set())
        return bool(held) and not disk.full and held | written >= set(parts)

    def killed(self, agent: SimAgent) -> None:
        """Notes the steps in memory of which this node alone had a part: a leaver cannot know that it is gone."""
        self.killed_addresses.add(agent.memory.address)
        disk, memories = self.sim.disk, [other.memory for other in self.sim.agents if other is not agent]
        for digest, step in agent.memory.steps.items():
            name = step.message.ref.name
            if digest in self.committed or name in disk.sealed:
                continue
            written = disk.spilled.get(name, set())
            if any(part not in written and not any(one.has(digest, part) for one in memories) for part in step.parts):
                self.went_with_the_killed.add(digest)

    def parts_of(self, epoch: int) -> int:
        """How many nodes the world of this epoch had."""
        return len(self.worlds[epoch].members) if epoch in self.worlds else 0

    def _epochs(self, job: Job) -> None:
        self.require(job.epoch >= self.epoch, "epochs grow", f"from {self.epoch} to {job.epoch}")
        self.epoch = job.epoch
        world = job.world
        if world is None:
            return
        grown = self._is_growth(world)
        opened = Opened(
            tuple(member.incarnation for member in world.members),
            world.resume,
            world.universal,
            world.resumed_step,
            grown,
            world.resharded,
            tuple(member.nproc for member in world.members),
        )
        known = self.worlds.get(world.epoch)
        if known is not None:
            opened.grown = known.grown
        if known is None or (self.amnesia and known != opened):
            self._opening(job, world, opened)
            self.amnesia = False
            self.worlds[world.epoch] = opened
        else:
            self.require(opened == known, "one world per epoch", f"epoch {world.epoch}: {known} and {opened}")

    def _opening(self, job: Job, world: World, opened: Opened) -> None:
        settings = job.settings
        count = len(world.members)
        self.require(self.over is None, "over is over", f"epoch {world.epoch} opened, and the job had failed for good")
        self.require(world.epoch > max(self.worlds, default=0), "epochs grow", f"{world.epoch} was passed already")
        self.require(
            settings.min_nodes <= count <= settings.max_nodes and count % settings.node_unit == 0,
            "size of the world",
            f"{count} nodes",
        )
        self.require(count <= self.limit, "scaled", f"epoch {world.epoch} has {count} nodes, allowed are {self.limit}")
        self.require(world.resume == self.head[2], "newest commit", f"epoch {world.epoch} starts from {world.resume!r}")
        self.opened_at[world.epoch] = self.sim.clock.now
        self._nothing_lost(world)
        self._nothing_owed(job, f"epoch {world.epoch} opened")
        self.refusals.opening(world)
        self.shapes.opening(world)
        if world.resume:
            self._resumable(world)
        self._seen_by_members(world)
        if world.epoch == 1 and count < job.most_nodes - job.most_nodes % settings.node_unit:
            quiet = self.sim.clock.now - self.arrived_at
            longest = max(LEAST_QUIET_SECONDS, QUIET_TIMES * settings.quiet_time)
            held_off = self.sim.clock.now - self.first_arrival_at >= longest
            self.require(
                quiet >= settings.quiet_time - 0.001 or held_off,
                "quiet time",
                f"opened {quiet:.2f} s after an arrival",
            )
        if opened.grown:
            before = [(epoch, world) for epoch, world in self.worlds.items() if world.grown]
            self.require(
                self.sim.plan.silent
                or not before
                or self.fell_back_in >= before[-1][0]
                or opened.resumed_step > before[-1][1].resumed_step,
                "a step between growths",
                f"epoch {world.epoch} grows at step {opened.resumed_step} again",
            )

    def _nothing_lost(self, world: World) -> None:
        """A change that nothing but joins and notices brought about goes on from the last step that was made."""
        made, step = max(self.executed, default=(0, 0))
        damaged = any(e.damaged and e.message.step > world.resumed_step for e in self.sim.disk.ever.values())
        self.require(
            step <= world.resumed_step or damaged or self.is_excused(made),
            "planned changes lose nothing",
            f"epoch {world.epoch} goes on from step {world.resumed_step}, epoch {made} had made {step}",
        )

    def _nothing_owed(self, job: Job, what: str) -> None:
        """What a world has re-sharded has universal files before the next change, if somebody can make them."""
        last = self.worlds.get(max(self.worlds, default=0))
        wanted = self.sim.plan.settings.universal_checkpoint
        if last is None or not last.resharded or not wanted or self.amnesia:
            return
        record = job.checkpoint(last.resume)
        self.require(
            record is None
            or record.damaged
            or not record.reshards  # It did not work: what is needed instead the gate sees to.
            or bool(record.universal_digest)
            or (bool(record.parts) and not self._is_whole(job, record.digest, record.epoch))
            or self.sim.conversions.failed[last.resume] > 0
            or (job.phase.is_terminal and all(node.leaving for node in job.nodes.values())),  # Nobody stays for them.
            "universal files at each change",
            f"{what}, and nobody has made those of {last.resume}",
        )

    def _presented(self, job: Job) -> None:
        """Of a silent script's worlds people are told all the same: of the later ones when they open."""
        world = job.world
        if world is None or not self.sim.plan.silent or world.epoch in self.presented:
            return
        if any(notice.text.startswith(f"epoch {world.epoch}: ") for notice in job.notices):
            self.presented.add(world.epoch)
        self.require(
            world.epoch in self.presented or world.epoch - 1 not in self.presented,
            "worlds are presented",
            f"epoch {world.epoch} opened without a word, epoch {world.epoch - 1} was presented",
        )

    def _told(self, job: Job) -> None:
        """How many steps a change has cost is told exactly, or as the least that it can be."""
        record = job.history[-1] if job.history else None
        if record is None or not record.heard or record.epoch in self.told or self.stores_lost:
            return
        self.told.add(record.epoch)
        # Of worlds in between no step was heard of in time: what a rank tells behind the end counts.
        heard = max((entry.epoch for entry in job.history[:-1] if entry.heard), default=0)
        before = self.worlds.get(heard)
        made = [step for epoch, step in self.executed if heard <= epoch < record.epoch]
        made.append(record.resumed_step if before is None else before.resumed_step)
        lost = max(0, max(made) - record.resumed_step)
        self.require(
            record.lost_steps <= lost if record.lost_more else record.lost_steps == lost,
            "lost steps are told as they are",
            f"epoch {record.epoch} lost {lost} steps, told were {record.lost_steps}{' or more' * record.lost_more}",
        )

    def _is_growth(self, world: World) -> bool:
        """Larger than the world before, of which nobody was lost: newcomers are its only cause."""
        before = self.worlds.get(world.epoch - 1)
        members = {member.incarnation for member in world.members}
        return before is not None and set(before.members) < members and all(c.endswith(" joined") for c in world.causes)

    def _remembered(self, job: Job) -> bool:
        """Whether a registered agent, or what is sealed, tells of the last opened epoch."""
        last = max(self.worlds, default=0)
        agents = [self.sim.by_incarnation(node.incarnation) for node in job.nodes.values()]
        sealed = any(
            entry.message.epoch == last and entry.sealed_at < self.sim.master.started_at
            for entry in self.sim.disk.sealed.values()
        )
        return sealed or any(agent is not None and agent.seen_epoch >= last for agent in agents)

    def _resumable(self, world: World) -> None:
        entry = self.sim.disk.ever.get(world.resume)
        if self.head_in_memory:
            assert entry is not None
            parts.check_opened(self, world, entry.message)
            return
        self.require(
            entry is not None and entry.message.ref.name in self.sim.disk.sealed,
            "resume point exists",
            f"epoch {world.epoch} starts from {world.resume}, which was deleted",
        )

    def _seen_by_members(self, world: World) -> None:
        for member in world.members:
            agent = self.sim.by_incarnation(member.incarnation)
            self.require(
                agent is None or agent.host not in self.sim.disk.blind,
                "members see the directory",
                f"{member.incarnation} does not",
            )

    def _ended(self, job: Job) -> None:
        success = job.phase is Phase.SUCCEEDED
        if self.success is None:
            self.sim.trace("master", "ended: {}", job.message)
            self.finished_step = self.head[1]
            if success:
                self._nothing_owed(job, "the job succeeded")
            else:
                self._nothing_in_memory(job)
        self.require(self.success in (None, success), "one end", f"{job.phase.value}, and not before")
        self.success = success
        self.ever_stepped = job.run.ever_stepped
        self.message = job.message

    def directive_sent(self, directive: control_pb2.Directive) -> None:
        """Whoever gets a world gets the same one."""
        world = directive.drain.run if directive.WhichOneof("order") == "drain" else directive.run
        if world.epoch and not self.elsewhere:
            known = self.worlds.get(world.epoch)
            place = world.place
            self.require(
                known is not None
                and known.members[place.group_rank] == place.incarnation
                and (world.nodes, world.resume.source.ref.digest) == (len(known.members), known.resume),
                "same resume point",
                f"epoch {world.epoch}: told {place} from {world.resume.source.ref.name!r}, opened was {known}",
            )

    # ---- the nodes --------------------------------------------------------------------------------------------------

    def stepped(self, epoch: int, step: int, heard: bool) -> None:
        """`heard`: an agent was there that may tell of it, and a master that may hear it."""
        self.executed.append((epoch, step))
        self.shapes.stepped(heard)
        self.behind.stepped(epoch)
        known = self.worlds.get(epoch)
        if (
            self.sim.plan.kind == "planned"
            and not self.sim.plan.sync_time
            and known is not None
            and len(known.members) > self.limit
        ):
            within = SCALED_SILENT if self.sim.plan.silent else SCALED_WITHIN
            self.require(
                self.sim.clock.now < self.limit_at + within,
                "scaled in time",
                f"epoch {epoch} still has {len(known.members)} nodes, not {self.limit}",
            )
        self.last_step_at = self.sim.clock.now

    def pruned(self, agent: SimAgent, ref: control_pb2.CheckpointRef) -> None:
        """A directory is about to be deleted. What somebody reads comes first, then what the master's record says."""
        self.sim.trace(agent.label, "deletes {}", ref.name)
        for run in self.sim.collectives.values():
            loading = not run.loaded and not run.is_broken and any(group.alive for group in run.groups.values())
            self.require(
                not loading or run.world.resume.source.ref.digest != ref.digest, "what is loaded stays", ref.name
            )
        self.require(not self.sim.conversions.reads(ref.digest), "what is converted stays", ref.name)
        job = self.sim.master.job
        if job is None and self.sim.master.stored:
            job = decoded(self.sim.master.stored)
        if job is None or self.amnesia:
            return
        record = job.checkpoint(ref.digest)
        newest = resume_point(job)
        self.require(newest is None or newest.digest != ref.digest, "the resume point stays", ref.name)
        self.require(
            not job.phase.has_workers or ref.digest not in in_use_digests(job), "what is in use stays", ref.name
        )
        self.require(record is None or record.retired, "deleted only when retired", ref.name)
        self._fallback_stays(job, ref.digest, record)
        self.require(
            newest is None
            or ref.name not in (newest.best, newest.candidate)
            or (record is not None and record.damaged),
            "the best stays",
            ref.name,
        )

    def swept(self, epoch: int, converting: str) -> None:
        """What epochs before this one began, and never sealed, is about to be deleted."""
        for source in self.sim.conversions.sources():
            self.require(
                source.message.epoch >= epoch or source.message.ref.name == converting,
                "what is converted stays",
                f"a form of {source.message.ref.name}",
            )

    def _fallback_stays(self, job: Job, digest: str, record: Checkpoint | None) -> None:
        """A damaged one's files are kept until a newer one is committed."""
        newest = resume_point(job)
        late = next((one for one in job.late if one.digest == digest), None)
        if late is not None:
            self.require(
                record is None and newest is not None and newest.age > late.age,
                "what came too late stays for a while",
                late.name,
            )
        if record is not None and record.damaged:
            self.require(
                newest is not None and (newest.epoch, newest.step) > (record.epoch, record.step),
                "damaged files stay for a while",
                record.name,
            )

    def exited(self, agent: SimAgent, code: int) -> None:
        self.sim.trace(agent.label, "exits {}", code)
        state = agent.state
        if code == ev.EXIT_FINISHED:
            self.require(self.success is True, "exit codes", f"{agent.label} exits 0 before the end")
        elif code == ev.EXIT_FAILED and not was_stopped(agent):
            self.require(self.success is False, "exit codes", f"{agent.label} exits 1, the job has not failed")
        elif code == ev.EXIT_FAILED and not state.leaving:
            self.require(bool(self.stops), "exit codes", f"{agent.label} exits 1, nobody has stopped the job")
        elif code in (ev.EXIT_LEFT, ev.EXIT_LEFT_UNSAVED, ev.EXIT_FAILED):
            if code == ev.EXIT_FAILED:
                code = ev.EXIT_LEFT_UNSAVED if what_is_unsaved(state) else ev.EXIT_LEFT
            self.require(state.leaving, "exit codes", f"{agent.label} exits {code} without a notice")
            if (
                code == ev.EXIT_LEFT
                and state.epoch.outcome is handling.Outcome.DRAINED
                and state.epoch.drained is not None
            ):
                self._left_drained(agent, state.epoch.drained.digest)
            if code == ev.EXIT_LEFT and agent.group_at_notice is not None:
                run = agent.group_at_notice.collective
                sealed = (self.sim.disk.ever[digest].message for digest in self.committed)
                # Its ranks may be gone before they have settled what a thread has sealed behind their steps.
                committed = any((entry.epoch, entry.step) == (run.epoch, run.step) for entry in sealed)
                committed = committed or (agent.broken_at_notice and not is_saved(state))
                if not state.contact.up:
                    # What it has sealed waits on the disk for a master.
                    waiting = (entry.message for entry in self.sim.disk.sealed.values())
                    committed = committed or any((one.epoch, one.step) == (run.epoch, run.step) for one in waiting)
                # Ranks that finish right behind a save in memory: another node has this one's part.
                own = (one for one in agent.memory.steps.values() if one.message.step == run.step and one.copies)
                committed = committed or (self.sim.plan.hasty and any(one.message.epoch == run.epoch for one in own))
                self.require(
                    run.saved_step == run.step or committed,
                    "left with everything saved",
                    f"{agent.label}: step {run.step} of epoch {run.epoch} was made, {run.saved_step} saved",
                )
            if code == ev.EXIT_LEFT_UNSAVED:
                self.left_at_once.add(state.started)
                # Taken for dead after it had drained, it cannot know that everything was recorded; before a rank's
                # first hello it does not know a script that reports every step from one that reports none.
                unknowing = (state.fenced and state.epoch.drained is not None) or not state.session_known
                ran_out = agent.ran_out or is_over(agent)  # Others may still complete its save.
                excused = unknowing or ran_out or self.is_excused(state.started)
                # Only a copy in another memory would tell it that its part is not lost.
                excused = excused or self.sim.plan.walled or self.sim.plan.slow_replicas
                self.require(excused, "planned changes lose nothing", f"{agent.label} exits {code}")
        else:
            # A name that somebody holds, or no master at the start.
            taken = agent.refused_with == "ALREADY_EXISTS" and bool(agent.asked_name)
            unheard = not agent.refused_with and not state.incarnation
            why = f"{agent.label} exits {code} ({agent.refused_with})"
            self.require(code == ev.EXIT_USAGE and (taken or unheard), "exit codes", why)

    def _left_drained(self, agent: SimAgent, digest: str) -> None:
        """It has left with everything saved. Without a master nobody tells it that who held a copy was killed."""
        self.left_drained.append((agent.label, digest))
        step = agent.memory.steps.get(digest)
        if step is not None and not agent.state.contact.up and step.copies & self.killed_addresses:
            self.went_with_the_killed.add(digest)

    # ---- at the end -------------------------------------------------------------------------------------------------

    def finished(self) -> None:
        """The schedule is over: the kept history and the exits."""
        if self.success is False:
            over_budget = self.sim.plan.settings.max_restarts < 100 and "max-restarts" in self.message
            at_once = not self.ever_stepped
            self.shapes.ended(self.message)
            self.require(
                self.refusals.excuse_the_end
                or self.shapes.excuse_the_end
                or (self.script_failures > 0 and (over_budget or at_once)),
                "no failure without a reason",
                self.message,
            )
            return
        steps = self.sim.plan.steps
        if self.sim.plan.silent:
            last = [step for epoch, step in self.executed if epoch == self.epoch]
            self.require(last == list(range(1, steps + 1)), "each sample once", f"epoch {self.epoch} made {last}")
            self.require(self.epoch in self.presented, "worlds are presented", f"not a word of epoch {self.epoch}")
            return
        self.require(self.head[1] == steps, "the end is saved", f"the last commit is of step {self.head[1]}")
        entry = self.sim.disk.ever[self.head[2]]
        kept = [step for _, step in entry.history]
        self.require(kept == list(range(1, steps + 1)), "each sample once", f"kept history {entry.history}")
        for label, digest in [] if self.hidden else self.left_drained:
            if self.stores_lost and self.sim.disk.ever[digest].message.in_memory:
                continue  # What is in memory alone is in no store that could be read back.
            message = self.sim.disk.ever[digest].message
            saved = (
                digest in self.committed or message.epoch in self.left_at_once or digest in self.went_with_the_killed
            )
            self.require(saved, "left with everything saved", f"{label}: {digest} was not committed")
