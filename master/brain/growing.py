"""When a world grows: what newcomers are waited for, and for how long. See docs/architecture.md."""

from __future__ import annotations

from dalsegno.protos.contract import GROW_SOON_SECONDS

from . import announcements, beside, conversion, durable, shapes, waits
from .checkpoints import only_size, resume_point
from .membership import counts, may_call_session, members_of, newcomers, select
from .state import Checkpoint, MemberState, Node
from .turn import Turn, names, of_nodes, world_of

# Seconds after the newcomers' Join, and after the first step, from which nodes that are not warm are taken as they are.
# The others train on meanwhile. So it is longer than an agent waits for its imports (120) and for its script to run
# ahead (600) before it says that there is nothing to wait for.
WARM_LIMIT_SECONDS = 750.0
# Seconds that a growth waits for the next commit of a script without a session, if something could be resumed.
GROW_WAIT_SECONDS = 300.0
# The auto grow interval: this many times the cost of the last growth, at most MAX_GROW_SECONDS seconds.
GROW_FACTOR = 20.0
MAX_GROW_SECONDS = 60.0
# Seconds without a growth after a conversion for one has failed; they double.
GROW_HOLD_SECONDS = 30.0
MAX_GROW_HOLD_SECONDS = 600.0


def wants_to_grow(turn: Turn) -> bool:
    """Whether a growth starts: the newcomers are warm, this epoch has made a step and the interval has passed."""
    job, live, world = turn.job, turn.live, world_of(turn)
    if len(job.nodes) <= len(world.members) and all(job.node_by(member.incarnation) for member in world.members):
        return False  # only the members are here
    if turn.open.ended or any(part is not MemberState.RUNNING for part in job.parts.values()):
        return False
    new = to_take_in(turn)
    if not new:
        return False
    if not job.has_session:
        return wants_to_restart(turn, new)
    who = f"{names(sorted(node.name for node in new))} joined: taken in"
    if turn.open.first_step_at is None:
        waits.say(turn, "first step", f"{who} after the first step of epoch {world.epoch}")
        return False
    if turn.open.saves_nothing and not may_lose_steps(turn, new):
        return False
    if turn.open.put_off:
        waits.say(turn, "put off", f"{who} with the next commit, as growing was put off")
        return False
    held = max(live.grow_hold_until, (live.run.growth_done_at or float("-inf")) + grow_interval(turn))
    if not turn.due(held):
        auto = "--grow-interval" + (" auto" if job.settings.grow_interval < 0 else "")
        left, text = held - turn.now, f"{who} when the last growth is long enough ago"
        waits.say(turn, "interval", text, left, auto, now=left > waits.SAID_AFTER_SECONDS)
        return False
    return is_warm(turn, members_of(turn), new) and not beside.holds_growth(turn, new)


def wants_to_restart(turn: Turn, new: list[Node]) -> bool:
    """Whether all workers of a script without a session restart now, to take the newcomers in."""
    since = unheard_since(turn, new)
    # After an outage a hello may still be on its way.
    heard = turn.overdue(turn.live.phase_heard + turn.job.settings.node_timeout)
    if heard and turn.live.committed > since:
        return True
    until = restart_by(turn, since)
    if until is not None and turn.overdue(until):
        return True
    announcements.waiting_to_grow(turn, new, until, since)
    return False


def may_lose_steps(turn: Turn, new: list[Node]) -> bool:
    """Whether a growth may begin although the drain saves nothing: a commit is there, or it was waited for."""
    since = oldest_join(turn, new)
    until = restart_by(turn, since)
    if turn.live.committed > since or (until is not None and turn.overdue(until)):
        return True
    announcements.unsaved_growth(turn, new, until)
    return False


def restart_by(turn: Turn, since: float) -> float | None:
    """When they restart even if no commit comes; None: they do not.

    While session() may still come, time alone is no reason. Neither is it where steps are made, or may be, and nothing
    could be resumed, unless somebody has said so: by a time, or by asking for a number of nodes since they have joined.
    (For a script from which nobody hears of steps or commits its agents have set a time.)
    """
    job, wait = turn.job, turn.job.settings.grow_wait
    if may_call_session(turn):
        return None
    if wait >= 0:
        return since + wait
    if resume_point(job) is not None:
        return since + GROW_WAIT_SECONDS
    if job.has_session or announcements.saves_in_its_own_way(turn) or turn.open.first_step_at is not None:
        return turn.live.scaled_at if turn.live.scaled_at > since else None
    return since + GROW_SOON_SECONDS


def to_take_in(turn: Turn) -> list[Node]:
    """The newcomers by which the world could grow; none if no larger world could be opened."""
    job, world = turn.job, world_of(turn)
    new = newcomers(turn)
    grown = select(turn, members_of(turn) + new) if new else []
    if len(grown) <= len(world.members) or only_size(job) not in (0, sum(node.nproc for node in grown)):
        say_put_off(turn, members_of(turn) + new)
        return []
    chosen = {node.incarnation for node in grown}
    return [node for node in new if node.incarnation in chosen]


def say_put_off(turn: Turn, nodes: list[Node]) -> None:
    """Says when newcomers are taken in with whom the world has a number of workers that failed at its start."""
    larger = [count for count in counts(turn, nodes) if count > len(world_of(turn).members)]
    found = shapes.put_off(turn, nodes, larger)
    if found is None:
        return
    shape, new, at = found
    left, who = at - turn.now, names(sorted(node.name for node in new))
    text = f"{who} joined: with {of_nodes(shape.nodes)} the script failed at its start; they are tried again with {who}"
    waits.say(turn, "shape", text, left, now=left > waits.SAID_AFTER_SECONDS)


def is_warm(turn: Turn, members: list[Node], new: list[Node]) -> bool:
    """Whether all nodes of the next world can start at once; otherwise everybody would wait for the slowest start."""
    epoch = turn.open
    cold = [node.name for node in new if not node.warm] + [node.name for node in members if node.name in epoch.cold]
    assert epoch.first_step_at is not None
    since = max(oldest_join(turn, new), epoch.first_step_heard)
    if not cold or turn.overdue(since + WARM_LIMIT_SECONDS):
        return True
    who = f"{names(sorted(node.name for node in new))} joined: taken in as soon as the script has started on"
    text = f"{who} {names(sorted(cold))}; training goes on meanwhile"
    waits.say(turn, "starts", text, since + WARM_LIMIT_SECONDS - turn.heard)
    return False


def oldest_join(turn: Turn, new: list[Node]) -> float:
    """When the first of the newcomers announced itself, by the listening clock."""
    joins = (turn.presence(node).joined for node in new)
    return min(turn.heard if joined is None else joined for joined in joins)


def unheard_since(turn: Turn, new: list[Node]) -> float:
    """Since when a script without a session is waited for: its earlier commits are no reason to restart.

    A script with a session may not have said hello yet. If commits of an earlier epoch counted, no world would ever
    start.
    """
    return max(oldest_join(turn, new), turn.live.phase_heard)


def grow_interval(turn: Turn) -> float:
    """Least seconds between two growths."""
    job = turn.job
    if job.settings.grow_interval >= 0:
        return job.settings.grow_interval
    return min(MAX_GROW_SECONDS, GROW_FACTOR * job.run.growth_cost_seconds) if job.run.growths else 0.0


def is_unwritten(turn: Turn, resume: Checkpoint) -> bool:
    """It is in memory, and nobody can write it to the disk."""
    return resume.parts > 0 and durable.cannot_write(turn, resume)


def hold_growth(turn: Turn, resume: Checkpoint) -> None:
    """The world that opens has the old shape: further growth is held for a doubling time.

    If no conversion can ever succeed, neither can one of later checkpoints, and no growth begins again.
    """
    job = turn.job
    if conversion.is_vain(turn):
        return
    reason = job.conversion.reason if job.conversion is not None else ""
    if is_unwritten(turn, resume):
        reason = beside.UNWRITTEN
        turn.live.held.step(resume).urgent = False
    job.conversion_failures += 1
    hold = growth_hold(job.conversion_failures)
    text = f"nobody could convert {resume.name} ({reason}): going on in its old shape"
    turn.notice(f"{text}; a growth is tried again after {hold:.0f} s", True)
    turn.live.grow_hold_until = turn.now + hold


def growth_hold(failures: int) -> float:
    """Seconds without a growth after so many failed conversions for one in a row."""
    return min(GROW_HOLD_SECONDS * 2.0 ** (failures - 1), MAX_GROW_HOLD_SECONDS) if failures else 0.0
