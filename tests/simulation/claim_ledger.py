"""What must hold of embedded masters, whatever happens to them, their agents and their machines."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from .ledger import Violation
from .machines import US, Proc

if TYPE_CHECKING:
    from .claims import Agent, Master, World

# Seconds. Somebody who can vouch for a master does so within that time; a claim is watched for longer.
VOUCHED_WITHIN, LEAST_WATCH = 8.0, 10.0
# An agent is hindered for a moment after what hindered it is over.
RECOVERS_WITHIN = 5.0
# Whoever is stopped just before it is killed was stopped.
RECENT = 5.0
# After the last fault all is well within that time, and stays so for this long.
SETTLES_WITHIN, STAYS = 240.0, 20.0
# After the master's end in calm the next one is there: where its process was seen, and where its claim is watched.
SEEN_WITHIN, WATCHED_WITHIN = 45.0, 80.0
# An agent that starts finds a master or gives up by then: locks, patience, and a master's start.
STARTS_WITHIN = 330.0
# Ends that another start is no answer to.
_SUPERSEDED = "superseded"


class ClaimLedger:
    """Every check notes and raises a `Violation`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.violation: Violation | None = None
        self.over = False
        # So many starts have a reason, by reason.
        self.reasons: Counter[str] = Counter({"the first": 1})
        self._settled_since: float | None = None
        self._deadline = 0.0
        self._ended_in_calm = False
        self._generation = 0

    def fail(self, name: str, text: str) -> None:
        # Threads of the product may swallow it.
        self.violation = self.violation or Violation(name, text)
        raise self.violation

    def allow(self, reason: str) -> None:
        self.reasons[reason] += 1

    # ---- what happens -----------------------------------------------------------------------------------------------

    def ended(self, master: Master) -> None:
        if master.why != _SUPERSEDED:
            self.allow(master.why)

    def stopped(self, master: Master) -> None:
        self.allow("a master was stopped")

    def spawns(self, agent: Agent) -> None:
        """An agent is about to start a master."""
        world, now = self.world, self.world.clock.now
        master = world.claimed()
        if master is not None and master.runs:
            who = f"{agent.label} starts one beside {master.label}, which runs"
            if self._is_known(master) and now - master.stopped_at > RECENT:
                still = now - world.versions[-1][0]
                if agent.site.sees(master.site):
                    self.fail("a living master is not replaced", f"{who}, as it could see")
                if still < max(LEAST_WATCH, world.plan.node_timeout):
                    self.fail("a living master is not replaced", f"{who} and was vouched for {still:.1f} s ago")
            self.allow("a master that nobody vouched for")
        starts = len(world.masters) + 1
        if starts > self.reasons.total():
            self.fail("generations are bounded", f"{starts} masters, and reasons for {dict(self.reasons)}")

    def killed(self, agent: Agent, proc: Proc) -> None:
        """An agent sends SIGKILL."""
        master = proc.master
        if master is None or proc.owner != US:
            self.fail("no stranger is killed", f"{agent.label} kills process {proc.pid}, a {proc.what} of {proc.owner}")
        elif master is not self.world.claimed():
            self.fail("no stranger is killed", f"{agent.label} kills {master.label}, which has no claim")
        elif master.runs and self._is_known(master) and self.world.clock.now - master.stopped_at > RECENT:
            self.fail("a living master is not killed", f"{agent.label} kills {master.label}")

    def _is_known(self, master: Master) -> bool:
        """Whether it has the token that agents have."""
        return master.token == self.world.token()

    # ---- every second -----------------------------------------------------------------------------------------------

    def patrol(self) -> None:
        world = self.world
        world.clock.after(1.0, self.patrol)
        if world.living() and world.directory.exists():
            self._note_vouchers()
            for agent in world.living():
                waited = world.clock.now - max(agent.came_at, agent.hindered_at)
                if agent.started_at is None and waited > STARTS_WITHIN:
                    self.fail("starts end", f"{agent.label} has looked for a master for {waited:.0f} s")
        if world.calm_since is not None:
            self._watch_calm()

    def _note_vouchers(self) -> None:
        now = self.world.clock.now
        holder = self.world.locks.holders.get("claim.lock")
        locked = holder is not None and (not holder.runs or holder.site.slow_until > now)
        for agent in self.world.living():
            slow = agent.site.slow_until > now
            if agent.process.frozen or slow or locked or self.world.full or agent.leaving:
                agent.hindered_at = now
        master = self.world.claimed()
        for other in self.world.masters:
            if other is not master or not other.lives:
                other.vouched_since = None
        if master is None or not master.lives:
            return
        if not master.answers:
            master.answers_since = now
        if not any(self._vouches(agent, master) for agent in self.world.living()):
            master.vouched_since = None
        elif master.vouched_since is None:
            master.vouched_since = now
        elif min(now - master.vouched_since, still := now - self.world.versions[-1][0]) > VOUCHED_WITHIN:
            self.fail("who can vouch for a master does", f"the claim of {master.label} stands still for {still:.1f} s")

    def _vouches(self, agent: Agent, master: Master) -> bool:
        """Whether its claim is this agent's to move, and nothing keeps it from that."""
        now = self.world.clock.now
        if agent.started_at is None or now - max(agent.hindered_at, agent.started_at) < RECOVERS_WITHIN:
            return False
        answered = now - max(master.answers_since, agent.started_at) > 2 * RECOVERS_WITHIN and self._is_known(master)
        return agent.site.sees(master.site) or (agent.site.reaches(master.site) and answered)

    # ---- when no more faults come -----------------------------------------------------------------------------------

    def calm(self) -> None:
        """From now on nothing happens, and all must become well."""
        self._deadline = self.world.clock.now + SETTLES_WITHIN
        self._generation = self.world.generation

    def _watch_calm(self) -> None:
        world, now = self.world, self.world.clock.now
        wrong = self._unsettled()
        if wrong or world.generation != self._generation:
            self._settled_since, self._generation = None, world.generation
            if now > self._deadline:
                self.fail("all becomes well", f"{wrong or 'generations grow'}; {self.where()}")
            return
        if self._settled_since is None:
            self._settled_since = now
        if now - self._settled_since < STAYS:
            return
        newest = self._newest()
        if self._ended_in_calm or newest is None:
            self.over = True
            return
        # One more time, with nothing else in the way.
        self._ended_in_calm = True
        self._settled_since = None
        seen = any(agent.site.sees(newest.site) for agent in world.living())
        self._deadline = now + (SEEN_WITHIN if seen else WATCHED_WITHIN + world.plan.node_timeout)
        newest.end("killed in calm")

    def _newest(self) -> Master | None:
        return max((m for m in self.world.masters if m.answers), key=lambda m: m.generation, default=None)

    def _unsettled(self) -> str:
        """What is not as it should be; empty: all is."""
        world, now = self.world, self.world.clock.now
        living, newest = world.living(), self._newest()
        if newest is None and living:
            # One that is stopped where nobody sees it may have the store's lock: then all say so.
            stopped = [m for m in world.masters if m.lives and not m.runs and m.holds_store]
            held = any(not any(agent.site.sees(m.site) for agent in living) for m in stopped)
            silent = [a.label for a in living if a.started_at is None or not self._has_said(a)]
            return "" if held and not silent else "no master answers"
        others = [m.label for m in world.masters if m.runs and m is not newest]
        if newest is None or others:
            return f"{others} run besides" if others else ""
        for agent in living:
            if agent.started_at is None:
                return f"{agent.label} still looks for a master"
            # Or it has no token to show, and cannot see whom it would have to end for another one.
            shut_out = not self._is_known(newest) and not agent.site.sees(newest.site)
            if shut_out or not agent.site.reaches(newest.site):
                if agent.beat_of is not newest and not self._has_said(agent):
                    return f"{agent.label} cannot reach {newest.label} and says nothing"
            elif agent.beat_of is not newest or now - agent.beat_at > RECENT:
                return f"{agent.label} is not served by {newest.label}"
        if world.claimed() is not newest:
            return f"the claim is not that of {newest.label}"
        return ""

    def _has_said(self, agent: Agent) -> bool:
        return bool(agent.said) and agent.said[-1][0] >= agent.beat_at

    def where(self) -> str:
        """For whoever reads of a violation."""
        world = self.world
        masters = [f"{m.label}:{m.why or m.proc.state}" for m in world.masters[-4:]]
        agents: list[Any] = [f"{a.label}:{'up' if a.started_at is not None else 'looks'}" for a in world.living()]
        return f"after {world.clock.now:.0f} s and {world.clock.events} events: {masters}, {agents}"
