"""One turn of deciding: the state, the time, and the few verbs that all parts of the brain share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from dalsegno.protos import control_pb2
from dalsegno.protos.contract import PROGRESS_SECONDS

from .chronicle import EVENTS, REMARKS, JobEvent, Kind
from .gathering import Gathering
from .listening import HEARTBEAT_SECONDS
from .live import DrainLife, EpochLife, Live, RunLife, State
from .presences import Presence
from .state import Job, Member, MemberState, Node, Phase, Run, World

# Seconds after which a closed stream counts as a death.
CLOSED_GRACE_SECONDS = 1.0
# How many messages a second the master wants from all agents together; and the least seconds between two reports.
WORDS = 150.0
# The least number of heartbeats in a node-timeout. An unanswered one is repeated after a third of the interval, so a
# second one always fits if the first was lost.
LEAST_BEATS = 2.25
# Slots of a heartbeat's interval: the heartbeats of one slot come together. At 1,000 nodes that halves their cost, most
# of which is waking up.
SLOTS = 25
# Of more nodes than this only the number is printed.
NAMED = 4
# The most nodes of which an event lists the names.
LISTED = 16
# The most causes of one change that are named.
CAUSES = 8


@dataclass
class Turn:
    """One turn. `due` and `overdue` note the earliest time that anything waits for: the brain's next Tick."""

    state: State
    now: float

    def __post_init__(self) -> None:
        # What the listening clock shows, for everything that waits for an agent to speak.
        self.heard = self.live.clock.at(self.now)

    @property
    def job(self) -> Job:
        return self.state.job

    @property
    def live(self) -> Live:
        return self.state.live

    @property
    def open(self) -> EpochLife:
        """What is known of the open epoch."""
        return self.state.live.epoch

    @property
    def drain_life(self) -> DrainLife:
        """What is known of the drain under way."""
        life = self.open.drain
        if life is None:
            raise AssertionError(f"phase {self.job.phase.value} without a drain")
        return life

    def due(self, when: float) -> bool:
        """Whether `when` has come; if not, the brain is woken then."""
        if self.now >= when:
            return True
        if self.state.wake is None or when < self.state.wake:
            self.state.wake = when
        return False

    def overdue(self, when: float) -> bool:
        """The same by the listening clock. While that stands still, the next message wakes the brain."""
        if self.heard >= when:
            return True
        clock = self.live.clock
        # Rounding may turn it into now in real time; then it counts as now.
        return not clock.stands_still(self.now) and self.due(clock.real(self.now, when))

    @property
    def unix(self) -> float:
        """Unix seconds, for people."""
        return round(self.now + self.live.unix_offset, 3)

    def notice(self, text: str, warning: bool = False, kind: Kind = Kind.REMARK, **about: Any) -> None:
        """Adds an event with one line for every agent's console. `about`: other fields of `JobEvent`."""
        self.note(kind, text, warning=warning, said=True, **about)

    def note(self, kind: Kind, text: str, *, said: bool = False, **about: Any) -> None:
        """Adds an event that consoles do not show, unless it is `said`."""
        job = self.job
        job.events = (*job.events, self._event(text, kind=kind, said=said, **about))[-EVENTS:]
        if said:
            job.noticed = job.sequence

    def quote(self, text: str, warning: bool, nodes: Iterable[str]) -> None:
        """Adds what agents said about their own nodes. Their consoles have shown it; others' do not."""
        job, listed = self.job, list(nodes)
        event = self._event(f"{names(listed)}: {text}", warning=warning, said=False, nodes=about(listed))
        job.remarks = (*job.remarks, event)[-REMARKS:]

    def _event(self, text: str, **about: Any) -> JobEvent:
        """The next one."""
        self.job.sequence += 1
        return JobEvent(self.job.sequence, text, at=self.unix, epoch=self.job.epoch, **about)

    def mark(self, name: str) -> None:
        """Notes the end of one part of the pause that goes on."""
        if self.live.pause is not None:
            self.live.pause = self.live.pause.with_mark(name, self.now)

    def cause(self, text: str) -> None:
        """Adds a reason why the next world will be another one."""
        causes = self.job.next.causes
        if text not in causes:
            self.update_next(causes=(*causes, text)[-CAUSES:])

    def enter(self, phase: Phase) -> None:
        """Enters a phase. What lasts as long as the previous phase is dropped with that."""
        if self.job.phase is not phase:
            self.job.phase = phase
            self.job.drain = self.open.drain = None
            self.begin_phase()

    def begin_phase(self) -> None:
        """Makes the phase begin now: what it waits for is waited for from here on."""
        self.live.phase_since, self.live.phase_heard = self.now, self.heard

    def gather_anew(self) -> None:
        """Begins a round: agents are asked now."""
        self.live.gathering = Gathering()

    def update(self, node: Node, **changes: Any) -> Node:
        """The node with some fields changed."""
        new = replace(node, **changes)
        self.job.nodes.put(node.name, new)
        return new

    def update_next(self, **changes: Any) -> None:
        """Changes some of what is known of the next world."""
        self.job.next = replace(self.job.next, **changes)

    def begin_run(self, run: Run) -> None:
        """Begins another run: what the last one committed, and what was heard of it, no longer counts."""
        job = self.job
        for record in list(job.checkpoints):
            job.checkpoints.drop(record.digest)
        job.run, job.late, job.pruned, job.history = run, (), (), ()
        self.live.run = RunLife()
        # What nodes had of it in memory. Of the nodes themselves what is known stays: some may be here already.
        self.live.held.steps, self.live.held.writing = {}, ""

    def update_run(self, **changes: Any) -> None:
        """Changes some fields of the run."""
        self.job.run = replace(self.job.run, **changes)

    def update_told(self, **changes: bool) -> None:
        """Notes what people have been told about the open world, if there is one."""
        job = self.job
        if job.opened is not None:
            job.opened = replace(job.opened, told=replace(job.opened.told, **changes))

    def presence(self, node: Node) -> Presence:
        """How this process hears a registered node."""
        return self.live.nodes[node.name]

    def is_fresh(self, node: Node) -> bool:
        """Whether the node was heard lately and has an open stream, so that it can be given orders."""
        presence = self.presence(node)
        if presence.closed is not None and self.overdue(presence.closed + CLOSED_GRACE_SECONDS):
            return False
        beat = heartbeat_of(self.job)
        patience_seconds = 3 * beat if beat == HEARTBEAT_SECONDS else 2 * beat
        return not self.overdue(presence.heard + max(patience_seconds, self.job.settings.node_timeout / 3))

    def is_held(self, node: Node) -> bool:
        """Whether the node was lost too often lately, and is a spare for now."""
        until = self.live.held_until.get(node.name)
        if until is None:
            return False
        if self.due(until):
            self.job.holds.pop(node.name, None)
            del self.live.held_until[node.name]
            return False
        return True

    def part(self, node: Node) -> MemberState | None:
        """The state of its ranks in the open epoch; None if it has none."""
        return self.job.parts.get(node.incarnation)

    def is_working(self, node: Node) -> bool:
        """Whether its ranks of the open epoch are meant to be running."""
        return self.job.phase.has_workers and self.part(node) is MemberState.RUNNING

    def set_part(self, member: Member, part: MemberState) -> None:
        self.job.parts[member.incarnation] = part


def heartbeat_of(job: Job) -> float:
    """Seconds between two heartbeats of an agent: the more agents, the rarer, so that the master's load is bounded."""
    return min(
        max(HEARTBEAT_SECONDS, len(job.nodes) / WORDS), max(HEARTBEAT_SECONDS, job.settings.node_timeout / LEAST_BEATS)
    )


def progress_of(job: Job) -> float:
    """Seconds between two progress reports of an agent, if only the number of the step has changed."""
    return min(max(PROGRESS_SECONDS, len(job.nodes) / WORDS), heartbeat_of(job))


def pace_of(turn: Turn) -> control_pb2.Pace:
    """How often agents should speak, and when."""
    heartbeat = heartbeat_of(turn.job)
    slot = heartbeat / SLOTS
    return control_pb2.Pace(
        heartbeat_seconds=heartbeat,
        progress_seconds=progress_of(turn.job),
        slot_seconds=slot,
        slot_in_seconds=slot - turn.now % slot,
    )


def of_nodes(count: int) -> str:
    """A number of nodes, for a person."""
    return f"{count} node{'s' if count != 1 else ''}"


def about(nodes: Iterable[str]) -> tuple[str, ...]:
    """Nodes, for an event: not more of them than a list can show."""
    return tuple(islice(nodes, LISTED))


def names(nodes: Iterable[str]) -> str:
    """Nodes, for a person: the first few, and how many more."""
    listed = list(nodes)
    if len(listed) <= NAMED:
        return ", ".join(listed)
    return f"{', '.join(listed[: NAMED - 1])} and {len(listed) - NAMED + 1} more"


def world_of(turn: Turn) -> World:
    """The last opened world, which must exist in this phase."""
    world = turn.job.world
    if world is None:
        raise AssertionError(f"phase {turn.job.phase.value} without a world")
    return world
