"""RUNNING, DRAINING and the end: what each waits for, its deadline and its way out. See docs/architecture.md.

WAITING <-> FORMING (gathering beside the conversion gate -> open) -> RUNNING <-> DRAINING -> FORMING ... -> end
"""

from __future__ import annotations

from . import announcements
from .membership import newcomers, select
from .scaling import is_too_large, of_nodes, wants_to_shrink
from .state import Drain, Failure, Node, Part, Phase, World
from .turn import Turn

# Newcomers that are not warm by then are taken as they are (seconds after their Join).
WARM_LIMIT = 30.0
# Auto grow interval: this many times what the last growth cost, at most GROW_MAX seconds.
GROW_FACTOR = 20.0
GROW_MAX = 60.0
# A stall, once the epoch has made a step: this many times the longest step, save or evaluation, at least STALL_MIN.
STALL_FACTOR = 20.0
STALL_MIN = 60.0


# ---- running --------------------------------------------------------------------------------------------------------


def running(turn: Turn) -> bool:
    """The world trains: what ends that."""
    job = turn.job
    if end_of_epoch(turn):
        return True
    parts = [member.part for member in world_of(turn).members]
    leavers = [n.name for n in job.nodes.values() if n.leaving and turn.is_working(n)]
    if leavers or Part.DRAINED in parts:
        start_drain(turn, growth=False, reason=f"{', '.join(leavers)} leaves" if leavers else "drained by its nodes")
        return True
    if stalled(turn):
        return True
    if wants_to_shrink(turn):
        shrink(turn)
        return True
    if wants_to_grow(turn):
        new = newcomers(turn)
        if turn.job.has_session:
            job.grown = True
            start_drain(turn, growth=True, reason=f"{', '.join(n.name for n in new)} joins")
        else:
            # The next world is presented when it opens: this one was not heard of either.
            world_of(turn).presented = True
            announcements.restart_to_grow(turn, new, turn.live.committed_at > unheard_since(turn, new))
            regroup(turn)
        return True
    if not job.has_session and turn.due(turn.live.phase_since + announcements.SESSION_WITHIN):
        announcements.without_steps(turn, world_of(turn))
    return False


def shrink(turn: Turn) -> None:
    """The world is larger than the job was scaled to."""
    text = f"scaled to {of_nodes(turn.job.limit)}"
    if turn.job.has_session:
        start_drain(turn, growth=False, reason=text)
        if turn.job.drain is not None:
            turn.job.drain.shrink = True
        return
    world_of(turn).presented = True
    turn.notice(f"all workers restart, {text}: the script has no session() and cannot be drained", True)
    regroup(turn)


def world_of(turn: Turn) -> World:
    """The last opened world, which this phase cannot be without."""
    world = turn.job.world
    if world is None:
        raise AssertionError(f"phase {turn.job.phase.value} without a world")
    return world


def end_of_epoch(turn: Turn) -> bool:
    """All parts ended, or one of them broke."""
    job = turn.job
    parts = [member.part for member in world_of(turn).members]
    if Part.LOST in parts or Part.FAILED in parts:
        if hopeless(turn):
            failure = job.pending_failure
            end(turn, Phase.FAILED, f"{failure.node}: {failure.message}" if failure else "every node failed at once")
        else:
            unplanned(turn)
        return True
    if all(part is Part.FINISHED for part in parts):
        last = max(turn.live.steps.values(), default=0)
        end(turn, Phase.SUCCEEDED, f"the run finished at step {last}" if last else "the run finished")
        return True
    if all(part in (Part.DRAINED, Part.FINISHED) for part in parts):
        regroup(turn)
        return True
    return False


def hopeless(turn: Turn) -> bool:
    """Every node's workers failed before the run ever made a step: trying again would not help."""
    parts = [member.part for member in world_of(turn).members]
    return (
        not turn.job.ever_stepped
        and not world_of(turn).presented
        and all(part is Part.FAILED for part in parts)
        and turn.job.verification is None
    )


def unplanned(turn: Turn) -> None:
    """Survivors stop at once and go back to the last commit."""
    turn.live.trouble = True
    turn.job.grown = False
    regroup(turn)


def regroup(turn: Turn) -> None:
    """The open epoch is over on every node; gather for the next."""
    job, live = turn.job, turn.live
    job.left_step = max([*live.steps.values(), world_of(turn).resumed_step])
    live.paused_since = max(live.advanced.values(), default=turn.now)
    announcements.close_record(turn, world_of(turn), job.left_step)
    job.drain = None
    live.drain_deadline = None
    live.asked_at, live.unexpected = {}, set()
    for node in job.nodes.values():
        if node.leaving and world_of(turn).member(node.incarnation) is not None:
            cause = f"{node.name} left"
            if cause not in job.causes:
                job.causes.append(cause)
    turn.enter(Phase.FORMING)


def stalled(turn: Turn) -> bool:
    """No rank advances, no save grows and, after the training's end, nobody finishes for too long."""
    job, live = turn.job, turn.live
    limit = job.settings.stall_timeout
    if limit <= 0 or live.deaf:
        return False
    if not job.has_session:
        # Nobody hears of steps: their absence says nothing.
        if turn.due(max(live.moved_at, live.phase_since) + limit):
            announcements.perhaps_stalled(turn, world_of(turn))
        return False
    ended = bool(live.ended) or any(member.part is Part.FINISHED for member in world_of(turn).members)
    if live.first_step_at is not None and not ended:
        # What was taken for a stall may have been the first evaluation: each time more patience, up to the setting.
        limit = min(limit, max(STALL_MIN, STALL_FACTOR * live.longest) * 2.0**job.stalls)
    if not turn.due(live.moved_at + limit):
        return False
    what = "the training ended, but not all ranks finished" if ended else "no rank made a step"
    text = f"{what} for {limit:.0f} s (--stall-timeout)"
    turn.notice(text, True)
    job.causes.append("stalled")
    job.stalls += 1
    if job.pending_failure is None:
        job.pending_failure = Failure(job.epoch, "the world", text, max(live.steps.values(), default=0))
    unplanned(turn)
    return True


def wants_to_grow(turn: Turn) -> bool:
    """A growth starts when the newcomers are warm, this epoch has made a step and the interval has passed."""
    job, live = turn.job, turn.live
    new = newcomers(turn)
    world = world_of(turn)
    members = [n for n in (job.node_by(m.incarnation) for m in world.members) if n is not None]
    if not new or live.ended or any(m.part is not Part.RUNNING for m in world.members):
        return False
    if len(select(turn, members + new)) <= len(world.members):
        return False
    if not job.has_session:
        since = unheard_since(turn, new)
        # After an outage a hello may still be on its way.
        heard = turn.due(max(live.phase_since, live.forgiven_at) + job.settings.node_timeout)
        if (heard and live.committed_at > since) or turn.due(since + job.settings.grow_wait):
            return True
        if world.presented:
            announcements.waiting_to_grow(turn, new, since + job.settings.grow_wait)
        return False
    if live.first_step_at is None or live.grow_after_commit:
        return False
    if not turn.due(max(live.grow_hold_until, (live.growth_done_at or float("-inf")) + grow_interval(turn))):
        return False
    return all(node.warm for node in new) or turn.due(oldest_join(turn, new) + WARM_LIMIT)


def oldest_join(turn: Turn, new: list[Node]) -> float:
    """When the first of the newcomers announced itself."""
    return min(turn.live.joined_at.get(node.name, turn.now) for node in new)


def unheard_since(turn: Turn, new: list[Node]) -> float:
    """From when on a script without a session is waited for: its commits before that are no reason to restart.

    Nor has one with a session said hello yet: if what an earlier epoch committed counted, no world would ever start.
    """
    return max(oldest_join(turn, new), turn.live.phase_since, turn.live.forgiven_at)


def grow_interval(turn: Turn) -> float:
    """Least seconds between two growths."""
    job = turn.job
    if job.settings.grow_interval >= 0:
        return job.settings.grow_interval
    return min(GROW_MAX, GROW_FACTOR * job.growth_cost) if job.growths else 0.0


# ---- draining -------------------------------------------------------------------------------------------------------


def start_drain(turn: Turn, growth: bool, reason: str) -> None:
    """Everybody saves at one boundary and stops."""
    turn.job.drain = Drain(growth=growth, reason=reason, after=last_step(turn))
    turn.live.drain_deadline = turn.now + turn.job.settings.drain_timeout if growth else notice_end(turn)
    turn.enter(Phase.DRAINING)


def last_step(turn: Turn) -> int:
    """The last step that the open world is known to have made."""
    world = world_of(turn)
    committed = (record.step for record in turn.job.checkpoints if record.epoch == world.epoch)
    return max([world.resumed_step, *turn.live.steps.values(), *committed])


def notice_end(turn: Turn) -> float:
    """When the first of the leavers is gone."""
    job, live = turn.job, turn.live
    leavers = [node.name for node in job.nodes.values() if node.leaving and turn.is_working(node)]
    ends = [live.leave_by[name] for name in leavers if name in live.leave_by]
    return min(ends, default=turn.now + job.settings.drain_timeout)


def draining(turn: Turn) -> bool:
    """The ranks are saving to stop: its end, its deadline, its withdrawal."""
    job, live = turn.job, turn.live
    drain = job.drain
    if drain is None:
        raise AssertionError("draining without a drain")
    if end_of_epoch(turn):
        return True
    leaving = any(n.leaving and turn.is_working(n) for n in job.nodes.values())
    drained = any(member.part is Part.DRAINED for member in world_of(turn).members)
    if leaving and drain.optional:
        drain.growth = drain.shrink = False
        live.drain_deadline = notice_end(turn)
        return True
    if drain.growth and not drain.agreed and not drained and not newcomers(turn, presumed=True):
        withdraw(turn, "the newcomer is gone")
        return True
    if drain.shrink and not drain.agreed and not drained and not is_too_large(turn):
        withdraw(turn, "it is not wanted any more")
        return True
    # Where nobody goes it may take as long as ranks advance or its save grows; a leaver's notice runs out regardless.
    deadline = live.drain_deadline or turn.now
    if drain.optional:
        deadline = max(deadline, live.moved_at + job.settings.drain_timeout)
    if not turn.due(deadline):
        return False
    if drain.optional and not drain.agreed and not drained:
        withdraw(turn, f"the ranks did not agree on a boundary within {job.settings.drain_timeout:.0f} s")
    else:
        turn.notice(f"the drain ({drain.reason}) did not end in time: going back to the last commit", True)
        job.causes.append("drain timed out")
        unplanned(turn)
    return True


def withdraw(turn: Turn, why: str) -> None:
    """Nobody goes and nobody comes now; the ranks train on, and it is tried again at the next commit."""
    shrinks = turn.job.drain is not None and turn.job.drain.shrink
    turn.notice(f"{'scaling down' if shrinks else 'growing'} is put off: {why}")
    turn.job.drain = None
    turn.job.grown = False
    turn.live.drain_deadline = None
    turn.live.grow_after_commit = True
    turn.live.moved_at = turn.now
    turn.enter(Phase.RUNNING)


# ---- the end --------------------------------------------------------------------------------------------------------


def end(turn: Turn, phase: Phase, message: str) -> None:
    """The job is over, well or not."""
    job = turn.job
    job.message = message
    job.conversion = None
    job.verification = None
    job.drain = None
    if job.world is not None:
        announcements.close_record(turn, job.world, max([*turn.live.steps.values(), job.world.resumed_step]))
    turn.notice(message, phase is Phase.FAILED)
    turn.enter(phase)
