"""The memory of nodes in the simulation: parts of checkpoints that vanish with their agents, and travel."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from dalsegno.agent.decisions import events as ev
from dalsegno.protos import control_pb2

from .disk import Sealed

if TYPE_CHECKING:
    from .agents import SimAgent
    from .plan import Plan
    from .real_agent import RealAgent
    from .world import Simulation

# How many schedules have memory checkpoints.
SHARE = 0.35
# In how many of them no agent reaches another one's memory.
WALLED = 0.15
# And in how many of these the master dies when a leaver is gone.
FORGETFUL = 0.5
# In how many of all, all nodes leave while the disk is full and no master is heard.
UNHEARD = 0.15
# In how many the ranks finish right behind their last save, which is in memory alone then.
HASTY = 0.25
# A part takes so long to another node, seconds, and so many at a time are fetched; and in how many schedules, and how
# long, where that is slow.
TRANSFER = (0.01, 1.0)
AT_ONCE = 4
SLOW = 0.3
SLOW_TRANSFER = (0.3, 3.0)
# How long the disk takes for a step that was in memory, seconds.
WRITE = (0.1, 2.0)
# How long a node looks at what it has of a step, or at what of that is on the disk, seconds.
LOOK = (0.05, 1.0)
# The newest steps of the open epoch that a node keeps.
KEPT = 2


def memory_of(plan: Plan) -> None:
    """Some schedules keep checkpoints in memory, every so many steps."""
    random = Random(f"memory {plan.seed}")
    if plan.silent or random.random() >= SHARE:
        return
    plan.memory_every = random.choice((1, 2, 2, 3))
    for settings in (plan.settings, plan.other_settings):
        settings.memory_replicas = 1 + plan.seed % 7 // 6
    plan.survivors = random.choice((0.0, 0.3, 0.8))
    plan.walled = random.random() < WALLED
    plan.slow_replicas = random.random() < SLOW
    plan.forgetful = plan.walled and random.random() < FORGETFUL
    if random.random() < UNHEARD:
        plan.happenings = sorted([*plan.happenings, (random.uniform(4.0, plan.fault_time), "leave_unheard")])
    plan.hasty = random.random() < HASTY


@dataclass
class Step:
    """What one node has of one step: the parts, by the group ranks that wrote them; all have the same manifest."""

    message: control_pb2.Checkpoint
    history: tuple[tuple[int, int], ...]
    parts: set[int] = field(default_factory=set)
    # Agents that hold this node's own part, by their addresses.
    copies: set[str] = field(default_factory=set)
    # A buddy could not be brought it.
    unsent: bool = False


class Memory:
    """One agent's. It goes with the process."""

    def __init__(self, agent: SimAgent | RealAgent) -> None:
        self._agent, self._sim = agent, agent.sim
        self.address = f"{agent.host}:{agent.number}" if agent.sim.plan.memory_every else ""
        # What ranks have written, and what this agent knows to be whole.
        self._written: dict[str, tuple[control_pb2.Checkpoint, tuple[tuple[int, int], ...], tuple[int, ...]]] = {}
        self.steps: dict[str, Step] = {}
        self._epoch = 0
        self._group_rank = 0
        self._buddies: tuple[str, ...] = ()
        # What was to be sent last, what is under way to each buddy, and what waits for that.
        self._last = ""
        self._under_way: dict[str, str] = {}
        self._waiting: dict[str, str] = {}
        self._behind: dict[str, str] = {}
        # Digest of what nobody wants on the disk any more.
        self.unwanted = ""

    def open_epoch(self, world: control_pb2.World) -> None:
        self.opened(world.epoch, world.place.group_rank, tuple(world.place.buddies))

    def opened(self, epoch: int, group_rank: int, buddies: tuple[str, ...]) -> None:
        self._behind.clear()
        for address in set(self._waiting) - set(buddies):
            del self._waiting[address]
        new = set(buddies) - set(self._buddies)
        self._epoch, self._group_rank, self._buddies = epoch, group_rank, buddies
        last = self.steps.get(self._last)
        if last is not None and last.message.epoch == epoch:
            for address in sorted(new):
                self._offer(address, self._last)

    def write(self, message: control_pb2.Checkpoint, history: tuple[tuple[int, int], ...], *parts: int) -> None:
        """The ranks of this node have written their part, or one of them, alone, all: its own comes first."""
        self._written[message.ref.digest] = (message, history, parts)

    def has(self, digest: str, part: int) -> bool:
        """Whether it is here, whole."""
        return self._agent.alive and self.had(digest, part)

    def had(self, digest: str, part: int) -> bool:
        """Whether it is here, or was when this agent died."""
        return digest in self.steps and part in self.steps[digest].parts

    def has_all(self, digest: str) -> bool:
        """Whether all parts of it are."""
        step = self.steps.get(digest)
        return step is not None and all(
            self.has(digest, part) for part in range(self._sim.ledger.parts_of(step.message.epoch))
        )

    def hold(self, action: ev.HoldPart) -> None:
        """The own part: known here, and sent to the buddies where people wait for it."""
        written = self._written.get(action.digest)
        if written is None:
            return
        message, history, parts = written
        for part in parts:
            self._put(message, history, part)
        if action.urgent:
            self.send(message.ref.digest, urgent=True)

    def send(self, digest: str, urgent: bool = False) -> None:
        """The own part goes to the buddies, unless it was the last that was to."""
        last = self._sim.disk.ever.get(self._last)
        if digest != self._last and self.has(digest, self._group_rank):
            step = self.steps[digest]
            if last is not None and order_of(last.message) > order_of(step.message):
                step.unsent = True
                self._tell(step)
                return
            self._last = digest
            for address in self._buddies:
                self._offer(address, digest, urgent)

    def gather(self, action: ev.PrepareJoin | ev.MakeDurable, deliver: Callable[[str], object]) -> None:
        """Fetches what is missing, from the first that has it; `deliver(failure)` once all is here or cannot be."""
        Gathering(self, action, deliver).go_on()

    def make_durable(self, action: ev.MakeDurable) -> None:
        if self.unwanted == action.ref.digest:
            self.unwanted = ""
        if action.look:
            self._after(LOOK, self._look_for, action)
            return
        if action.write or action.seal:
            self._after(WRITE, self._write_parts, action)
            return
        if not action.parts:
            self._after(WRITE, self._write_down, action.ref)
            return

        def fetched(failure: str) -> None:
            if failure:
                self._not_written(action.ref, failure)
            else:
                self._after(WRITE, self._write_down, action.ref)

        self.gather(action, fetched)

    def keep(self, epoch: int, digests: frozenset[str]) -> None:
        newest = sorted((s for s in self.steps.values() if s.message.epoch == epoch), key=lambda s: s.message.step)
        kept = digests | {step.message.ref.digest for step in newest[-KEPT:]}
        kept |= {digest for digest, step in self.steps.items() if step.message.epoch > epoch}
        dropped = [known for known in self.steps if known not in kept]
        if not dropped:
            return
        before = outlives_a_node(self._sim, epoch)
        gone = [self.steps.pop(digest) for digest in dropped]
        # A node whose end the master has not noticed yet still counts for it.
        after = outlives_a_node(self._sim, epoch, self._sim.ledger.registered)
        self._sim.ledger.dropped(self._agent.label, epoch, before, after)
        for step in gone:
            self._agent.deliver(ev.HeldChanged(step.message, ()))

    def _after(self, between: tuple[float, float], call: object, *args: object) -> None:
        self._sim.clock.after(self._sim.random.uniform(*between), self._agent.run, call, *args)

    def _put(self, message: control_pb2.Checkpoint, history: tuple[tuple[int, int], ...], part: int) -> None:
        if message.ref.digest not in self.steps:
            self._sim.ledger.takes_more(self._agent, [one.message for one in self.steps.values()])
        step = self.steps.setdefault(message.ref.digest, Step(message, history))
        step.parts.add(part)
        self._tell(step)

    def _tell(self, step: Step) -> None:
        parts = tuple(sorted(step.parts))
        self._agent.deliver(ev.HeldChanged(step.message, parts, len(step.copies), step.unsent))

    def _offer(self, address: str, digest: str, urgent: bool = False) -> None:
        """One after the other; of those that wait the newest, and behind an urgent one that which waited."""
        if address in self._under_way:
            before = self._waiting.get(address, "")
            if urgent and before:
                before, self._behind[address] = self._behind.get(address, ""), before
            waited = self.steps.get(before)
            self._waiting[address] = digest
            if waited is not None:
                waited.unsent = True
                self._tell(waited)
            return
        self._under_way[address] = digest
        slow = self._sim.plan.slow_replicas
        self._after(SLOW_TRANSFER if slow else TRANSFER, self._send, address, digest)

    def _send(self, address: str, digest: str) -> None:
        del self._under_way[address]
        if address in self._waiting:
            self._offer(address, self._waiting.pop(address))
            if address in self._behind:
                self._waiting[address] = self._behind.pop(address)
        buddy, step = self._reached(address), self.steps.get(digest)
        if step is None:
            return
        part = self._group_rank if step.message.epoch == self._epoch else -1
        if buddy is not None and part in step.parts and step.message.epoch >= buddy.memory._epoch:
            buddy.run(buddy.memory._put, step.message, step.history, part)
            step.copies.add(address)
        else:
            step.unsent = True
        self._tell(step)

    def _reached(self, address: str) -> SimAgent | None:
        return None if self._sim.plan.walled and address != self.address else peer(self._sim, address)

    @staticmethod
    def _wanted(action: ev.PrepareJoin | ev.MakeDurable) -> str:
        ref = action.ref if isinstance(action, ev.MakeDurable) else action.resume
        assert ref is not None
        return ref.digest

    def fetch(self, digest: str, held: control_pb2.HeldPart) -> bool:
        """Takes a part from the first that has it; whether somebody has."""
        for address in held.addresses:
            other = self._reached(address)
            if other is not None and other.memory.has(digest, held.group_rank):
                step = other.memory.steps[digest]
                self._put(step.message, step.history, held.group_rank)
                return True
        return False

    def _not_written(self, ref: control_pb2.CheckpointRef, why: str) -> None:
        self._sim.conversions.failed[ref.digest] += 1  # Nor can it be converted.
        self._agent.deliver(ev.MadeDurable(ref, why))

    def _write_parts(self, action: ev.MakeDurable) -> None:
        """Those of this node, or the seal."""
        step, ref = self.steps.get(action.ref.digest), action.ref
        problem = self._cannot_write(step, ref)
        if step is not None and not problem and set(action.write) - step.parts:
            problem = "not all of it is here any more"
        if step is None or problem:
            self._agent.deliver(ev.MadeDurable(ref, problem, action.write))
        elif action.write:
            self._sim.disk.spilled.setdefault(ref.name, set()).update(action.write)
            self._agent.deliver(ev.MadeDurable(ref, "", action.write))
        else:
            self._seal(step, ref, ordered=True)

    def _look_for(self, action: ev.MakeDurable) -> None:
        """Whether others have written what is not here."""
        step, ref = self.steps.get(action.ref.digest), action.ref
        problem = self._cannot_write(step, ref)
        there = (
            ref.name in self._sim.disk.sealed
            or step is None
            or self._sim.disk.spilled.get(ref.name, set()) - step.parts
        )
        absent = not problem and not there
        self._agent.deliver(ev.MadeDurable(ref, "it is not there" if absent else problem, action.write, absent=absent))

    def _cannot_write(self, step: Step | None, ref: control_pb2.CheckpointRef) -> str:
        if step is None:
            return "it is gone"
        if self.unwanted == ref.digest:
            return "a newer one counts"
        blocked = self._sim.disk.full or self._agent.host in self._sim.disk.blind
        return "no space left on device" if blocked else ""

    def _write_down(self, ref: control_pb2.CheckpointRef) -> None:
        step = self.steps.get(ref.digest)
        problem = self._cannot_write(step, ref)
        if step is None or problem:
            self._not_written(ref, problem)
            return
        self._sim.disk.spilled.setdefault(ref.name, set()).update(step.parts)
        self._seal(step, ref)

    def _seal(self, step: Step, ref: control_pb2.CheckpointRef, ordered: bool = False) -> None:
        disk = self._sim.disk
        if len(disk.spilled.get(ref.name, ())) < self._sim.ledger.parts_of(step.message.epoch):
            if ordered:
                self._agent.deliver(ev.MadeDurable(ref, "files lack", absent=True))
                return
            written = tuple(sorted(step.parts))
            self._agent.deliver(ev.MadeDurable(ref, "some parts are elsewhere", written=written))
            return
        message = control_pb2.Checkpoint()
        message.CopyFrom(step.message)
        message.in_memory = False
        if ref.name not in disk.sealed:
            disk.seal(message, step.history, self._agent.host)
        self._agent.deliver(ev.MadeDurable(ref))


class Gathering:
    """Some parts at a time; `deliver(failure)` once all are here or cannot be."""

    def __init__(
        self, memory: Memory, action: ev.PrepareJoin | ev.MakeDurable, deliver: Callable[[str], object]
    ) -> None:
        self._memory, self._deliver, self._digest = memory, deliver, memory._wanted(action)
        missing = [held for held in action.parts if not memory.has(self._digest, held.group_rank)]
        memory._sim.random.shuffle(missing)
        self._missing = sorted(missing, key=lambda held: held.leaves)  # from its end
        self._under_way = 0
        self._failure = ""
        self._parts = action.some if isinstance(action, ev.PrepareJoin) else None

    def _has_parts(self, parts: Collection[int]) -> bool:
        return all(self._memory.has(self._digest, part) for part in parts)

    def go_on(self) -> None:
        while self._missing and self._under_way < AT_ONCE and not self._failure:
            self._under_way += 1
            self._memory._after(TRANSFER, self._fetch, self._missing.pop())
        if not self._under_way:
            there = self._memory.has_all(self._digest) if self._parts is None else self._has_parts(self._parts)
            self._deliver(
                self._failure or ("" if there else "some of it is in no part that was named, or here no more")
            )

    def _fetch(self, held: control_pb2.HeldPart) -> None:
        self._under_way -= 1
        if not self._memory.fetch(self._digest, held):
            self._failure = f"nobody has part {held.group_rank}"
        self.go_on()


def peer(sim: Simulation, address: str) -> SimAgent | None:
    """The agent that serves this address, if it is there and answers."""
    number = int(address.rpartition(":")[2])
    agent = sim.agents[number]
    return agent if agent.alive and not agent.frozen else None


def order_of(message: control_pb2.Checkpoint) -> tuple[int, int, str]:
    return message.epoch, message.step, message.ref.name


def outlives_a_node(sim: Simulation, epoch: int, dead_too: Collection[str] = ()) -> int:
    """The newest step of an epoch of which each part is on as many nodes as the job wants; -1: there is none.

    `dead_too`: incarnations that count although they may be dead.
    """
    parts = sim.ledger.parts_of(epoch)
    wanted = min(1 + sim.plan.settings.memory_replicas, parts)
    there = [agent.memory for agent in sim.agents if agent.alive or agent.client.incarnation in dead_too]
    known = {digest: step.message for memory in there for digest, step in memory.steps.items()}
    found = (
        message.step
        for digest, message in known.items()
        if message.epoch == epoch
        and all(sum(memory.had(digest, part) for memory in there) >= wanted for part in range(parts))
    )
    return max(found, default=-1)


def remember(sim: Simulation, message: control_pb2.Checkpoint, history: tuple[tuple[int, int], ...]) -> None:
    """What was ever sealed is known to the checks, wherever it is."""
    sim.disk.ever[message.ref.digest] = Sealed(message, history, "", sim.clock.now)
