"""One event's worth of deciding: the state, the time, and the few verbs that every part of the brain shares."""

from __future__ import annotations

from dataclasses import dataclass

from .state import Job, Live, Node, Notice, Part, Phase, State

# How often agents are told to send a heartbeat (the agent's default), seconds.
HEARTBEAT = 1.0
# A closed stream counts as a death after this long, seconds.
CLOSED_GRACE = 1.0
# Without a word from anybody for this long the trouble is taken to be the master's own: the first at most, and before a
# short node-timeout ends, but never so early that it is only the time between two heartbeats. Seconds.
DEAF_AFTER = 2.5 * HEARTBEAT
DEAF_LEAST = 1.5 * HEARTBEAT
# Notices kept for agents that connect later.
NOTICES = 40
HISTORY = 500


@dataclass
class Turn:
    """`due` notes the earliest moment that anything waits for: the brain's next Tick."""

    state: State
    now: float

    @property
    def job(self) -> Job:
        return self.state.job

    @property
    def live(self) -> Live:
        return self.state.live

    def due(self, when: float) -> bool:
        """Whether `when` has come; if not, the brain is woken then."""
        if self.now >= when:
            return True
        if self.state.wake is None or when < self.state.wake:
            self.state.wake = when
        return False

    def notice(self, text: str, warning: bool = False) -> None:
        """One line for every agent's console."""
        self.job.noticed += 1
        self.job.notices.append(Notice(self.job.noticed, text, warning))
        del self.job.notices[:-NOTICES]

    def enter(self, phase: Phase) -> None:
        if self.job.phase is not phase:
            self.job.phase = phase
            self.live.phase_since = self.now

    def is_fresh(self, node: Node) -> bool:
        """Heard lately, over an open stream: it can be given orders."""
        live = self.live
        if node.name in live.closed and self.due(live.closed[node.name] + CLOSED_GRACE):
            return False
        return not self.due(
            live.heard.get(node.name, self.now) + max(3 * HEARTBEAT, self.job.settings.node_timeout / 3)
        )

    def is_held(self, node: Node) -> bool:
        """Lost too often lately: a spare for now."""
        until = self.live.held_until.get(node.name)
        if until is None:
            return False
        if self.due(until):
            self.job.holds.pop(node.name, None)
            return False
        return True

    def is_working(self, node: Node) -> bool:
        """Its ranks of the open epoch are meant to be running."""
        world = self.job.world
        if world is None or not self.job.phase.has_workers:
            return False
        member = world.member(node.incarnation)
        return member is not None and member.part is Part.RUNNING
