"""RUNNING, DRAINING and the end: what each waits for, its deadline and its way out. See docs/architecture.md.

WAITING <-> FORMING (gathering beside the conversion gate -> open) -> RUNNING <-> DRAINING -> FORMING ... -> end
"""

from __future__ import annotations

from dataclasses import replace

from dalsegno.protos.contract import FIRST_OF_SURVIVORS

from . import announcements, beside, ending, failures, refusals, saves, waits
from .chronicle import Kind
from .going_back import stands_at
from .growing import to_take_in, unheard_since, wants_to_grow
from .live import DrainLife, Pause
from .membership import may_call_session, newcomers
from .scaling import is_too_large, wants_to_shrink
from .state import Drain, Failure, MemberState, NextWorld, Phase
from .stopped import how_stopped
from .turn import Turn, names, of_nodes, world_of

# What the end of the job is called, by its last phase.
ENDS = {Phase.SUCCEEDED: Kind.FINISHED, Phase.FAILED: Kind.ENDED, Phase.STOPPED: Kind.STOPPED}
# A stall after the epoch's first step: this many times the longest step, save or evaluation, and at least so many
# seconds.
STALL_FACTOR = 20.0
LEAST_STALL_SECONDS = 60.0
# Ranks that are asked to save must agree on a boundary within so many of the longest steps, or within --drain-timeout
# if that is longer.
AGREE_FACTOR = 2.0
# Seconds after the start of its workers within which a script with a session says hello, by experience.
HELLO_WITHIN_SECONDS = 5.0


# ---- running --------------------------------------------------------------------------------------------------------


def running(turn: Turn) -> bool:
    """RUNNING: the world trains; this looks for what ends it."""
    job = turn.job
    if end_of_epoch(turn):
        return True
    if beside.is_over(turn):
        return False
    leavers = [node.name for node in job.nodes.leavers if turn.is_working(node)]
    if leavers or MemberState.DRAINED in job.parts.values():
        go_without(turn, leavers)
        return True
    if stalled(turn):
        return True
    if wants_to_shrink(turn):
        shrink(turn)
        return True
    if wants_to_grow(turn):
        grow(turn)
        return True
    if not job.has_session and turn.overdue(turn.live.phase_heard + announcements.SESSION_WITHIN_SECONDS):
        announcements.without_steps(turn, world_of(turn))
    announcements.no_step_yet(turn, world_of(turn))
    return False


def go_without(turn: Turn, leavers: list[str]) -> None:
    """Drains because nodes leave, or because ranks have drained without the master's order: everybody saves and stops.

    Ranks without a session cannot save, so nobody waits for them. After an outage a hello may still be on its way. Nor
    is there anything to save where ranks have drained by themselves before the first step, as those do that have stayed
    and cannot follow new ones to it.
    """
    job = turn.job
    if not leavers and not job.told.first_step:
        drained = [member.node for member in world_of(turn).members if job.part(member) is MemberState.DRAINED]
        unplanned(turn)
        turn.cause(f"the workers of {names(drained)} began anew")
        return
    if leavers and not job.has_session and turn.overdue(turn.live.phase_heard + HELLO_WITHIN_SECONDS):
        go_on_unheard(turn)
        regroup(turn)
        return
    if job.stopping and leavers:
        start_drain(turn, "the job stops by order")
        return
    goes = "leaves" if len(leavers) == 1 else "leave"
    start_drain(turn, f"{names(leavers)} {goes}" if leavers else "drained by its nodes")


def grow(turn: Turn) -> None:
    """Drains, or restarts the workers, to take newcomers in."""
    job, new = turn.job, to_take_in(turn)
    if job.has_session:
        start_drain(turn, f"{names(n.name for n in new)} {'joins' if len(new) == 1 else 'join'}", growth=True)
        return
    go_on_unheard(turn)
    since = unheard_since(turn, new)
    announcements.restart_to_grow(turn, new, turn.live.committed > since, turn.live.scaled_at > since)
    regroup(turn)


def shrink(turn: Turn) -> None:
    """Makes the world smaller if it is larger than the job was scaled to."""
    text = f"scaled to {of_nodes(turn.job.limit)}"
    if turn.job.has_session:
        start_drain(turn, text, shrink=True)
        return
    go_on_unheard(turn)
    turn.notice(f"all workers restart, {text}: {announcements.no_session(turn)} and cannot be drained", True)
    regroup(turn)


def go_on_unheard(turn: Turn) -> None:
    """Has the next world presented when it opens, because nothing was heard of this one either.

    A world that has not reached its session() yet proves nothing: it has made no step, and the next one may be heard.
    """
    if not may_call_session(turn) and not turn.job.told.first_step:
        turn.update_told(start=True)


def end_of_epoch(turn: Turn) -> bool:
    """Ends the epoch if all parts ended, or one of them broke."""
    job = turn.job
    parts = set(job.parts.values())
    if MemberState.LOST in parts or MemberState.FAILED in parts:
        if refusals.ends_job(turn):
            end_refused(turn)
        elif hopeless(turn):
            failure = job.run.budget.pending
            # Each agent's last line says so, too.
            text = f"{failure.node}: {failure.message}" if failure else "every node failed at once"
            end(turn, Phase.FAILED, text, notice=False)
        else:
            unplanned(turn)
        return True
    if MemberState.FINISHED in parts and MemberState.RUNNING in parts:
        waits.say(turn, "end", lambda: still_at_work(turn))
    if MemberState.LEFT in parts and MemberState.RUNNING not in parts and saves.may_still_come(turn):
        return False
    if parts == {MemberState.LEFT}:
        unplanned(turn)
        return True
    if parts == {MemberState.FINISHED}:
        return ending.settles(turn)
    if parts <= {MemberState.DRAINED, MemberState.FINISHED, MemberState.LEFT}:
        regroup(turn)
        return True
    return False


def finish(turn: Turn) -> None:
    """All ranks have finished: the run is over."""
    last = last_step(turn)
    if repeats_nothing(turn):
        failed = turn.job.run.budget.told
        turn.notice(f"what failed at the end of step {last} was not done again, as that step was saved: {failed}", True)
    end(turn, Phase.SUCCEEDED, f"the run finished at step {last}" if last > 0 else "the run finished")


def repeats_nothing(turn: Turn) -> bool:
    """Whether a worker failed in the run's last step, and who survived has saved it, so that no step was left to do."""
    world = world_of(turn)
    start = turn.job.checkpoint(world.resume)
    if start is None or turn.open.top_step > world.resumed_step:
        return False
    attempt = start.name.rpartition(".")[2]
    by_survivors = attempt.isdigit() and int(attempt) >= FIRST_OF_SURVIVORS
    return by_survivors and any(cause.startswith(failures.FAILED_ON) for cause in world.causes)


def still_at_work(turn: Turn) -> str:
    """The members that have finished, and those that have not."""
    members, part = world_of(turn).members, turn.job.part
    done = names(member.node for member in members if part(member) is MemberState.FINISHED)
    others = names(member.node for member in members if part(member) is MemberState.RUNNING)
    return f"{done} finished: waiting for {others} to finish, too"


def hopeless(turn: Turn) -> bool:
    """Whether every node's workers failed before the run ever made a step: trying again would not help.

    Of a script without a session nobody can tell that; it is started again as often as --max-restarts says.
    """
    job = turn.job
    return (
        not job.run.ever_stepped
        and not job.run.shapes.worked
        and (job.has_session or may_call_session(turn))
        and all(part is MemberState.FAILED for part in job.parts.values())
        and job.verification is None
    )


def unplanned(turn: Turn) -> None:
    """Makes survivors stop at once and go back to the last commit."""
    turn.open.trouble = True
    turn.job.drain = None  # its purpose is void
    regroup(turn)


def regroup(turn: Turn) -> None:
    """Ends the open epoch on every node, and gathers for the next."""
    job, world = turn.job, world_of(turn)
    stood = job.has_session and not job.told.first_step
    made = last_step(turn)
    turn.update_run(left_step=stands_at(job, max(made, world.left_step if stood else 0)))
    turn.update_next(grown=job.drain is not None and job.drain.grown)
    pause = pause_of(turn, stood=stood)
    saved_at = turn.open.drained_at
    turn.live.pause = pause.with_mark("noticed", turn.now) if saved_at is None else pause.with_mark("saved", saved_at)
    announcements.close_record(turn, world, max(made, job.run.left_step))
    failures.note_end(turn, world)
    turn.gather_anew()
    # A boundary is reported together with its save; but another master may have heard of it, and this one not.
    heard = turn.open.drained_at is not None or not turn.open.is_taken_over
    turn.live.gathering.counted = heard and bool({MemberState.DRAINED, MemberState.FINISHED} & set(job.parts.values()))
    left = [node.name for node in job.nodes.leavers if world.member(node.incarnation) is not None]
    if left:
        turn.cause(f"{names(left)} left")
    turn.enter(Phase.FORMING)


def pause_of(turn: Turn, *, stood: bool) -> Pause:
    """The pause that begins, or goes on where a world `stood`: it has made no step."""
    epoch, before = turn.open, turn.live.pause
    if stood and before is not None:
        return replace(before, more_lost=before.more_lost or not epoch.lost_exactly)
    since, more_lost = turn.now if epoch.stepped_at is None else epoch.stepped_at, stood and turn.job.run.ever_stepped
    return Pause(since, epoch.is_taken_over or epoch.heard_late, more_lost=more_lost)


def stalled(turn: Turn) -> bool:
    """Whether for too long no rank advances, no save grows and, after the training's end, nobody finishes."""
    job, epoch = turn.job, turn.open
    limit = job.settings.stall_timeout
    if limit <= 0:
        return False
    if not job.has_session:
        # Nobody hears of steps, so their absence proves nothing.
        if turn.overdue(max(epoch.moved, turn.live.phase_heard, turn.live.committed) + limit):
            announcements.perhaps_stalled(turn, world_of(turn))
        return False
    ended = bool(epoch.ended) or MemberState.FINISHED in job.parts.values()
    if epoch.first_step_at is not None and not ended and not any(epoch.written_bytes.values()):
        # What looked like a stall may have been the first evaluation: each time more patience, up to the setting.
        limit = min(
            limit, max(LEAST_STALL_SECONDS, STALL_FACTOR * epoch.longest_seconds) * 2.0 ** min(job.run.stalls, 60)
        )
    if not turn.overdue(epoch.moved + limit):
        return False
    what = "the training ended, but not all ranks finished" if ended else "no rank made a step"
    text = f"{what} for {limit:.0f} s (--stall-timeout){saves.problem(turn)}"
    turn.notice(text, True, Kind.FAILED, step=epoch.top_step)
    turn.cause("stalled")
    budget = job.run.budget
    if budget.pending is None:
        budget = replace(budget, pending=Failure(job.epoch, "the world", text, epoch.top_step))
    turn.update_run(stalls=job.run.stalls + 1, budget=budget)
    unplanned(turn)
    return True


# ---- draining -------------------------------------------------------------------------------------------------------


def start_drain(turn: Turn, reason: str, *, growth: bool = False, shrink: bool = False) -> None:
    """Orders everybody to save at one boundary and stop."""
    turn.enter(Phase.DRAINING)
    turn.job.drain = Drain(growth, reason, shrink, after=last_step(turn), grown=growth)
    turn.open.drain = DrainLife(turn.heard + turn.job.settings.drain_timeout if growth else notice_end(turn))
    turn.note(Kind.DRAINING, f"the ranks save and stop: {reason}", step=turn.job.drain.after)


def last_step(turn: Turn) -> int:
    """The last step that the open world is known to have made; of a script without a session, that it has saved."""
    world = world_of(turn)
    return max(world.resumed_step, turn.open.top_step, turn.job.checkpoints.last_step(world.epoch))


def notice_end(turn: Turn) -> float:
    """When the first of the leavers is gone, by the listening clock."""
    leavers = [node for node in turn.job.nodes.leavers if turn.is_working(node)]
    ends = [turn.presence(node).leaves for node in leavers]
    return min((end for end in ends if end is not None), default=turn.heard + turn.job.settings.drain_timeout)


def draining(turn: Turn) -> bool:
    """DRAINING: the ranks save to stop; this handles its end, its deadline and its withdrawal."""
    job, epoch = turn.job, turn.open
    drain = job.drain
    if drain is None:
        raise AssertionError("draining without a drain")
    if end_of_epoch(turn):
        return True
    if beside.is_over(turn):
        return False
    if not job.has_session and not drain.agreed and turn.overdue(turn.live.phase_heard + HELLO_WITHIN_SECONDS):
        go_on_unheard(turn)
        regroup(turn)
        return True
    leaving = any(turn.is_working(node) for node in job.nodes.leavers)
    drained = MemberState.DRAINED in job.parts.values()
    if leaving and drain.optional:
        job.drain = replace(drain, growth=False, shrink=False)
        turn.drain_life.deadline = notice_end(turn)
        return True
    if drain.growth and not drain.agreed and not drained and not newcomers(turn, presumed=True):
        withdraw(turn, "the newcomer is gone", again="")
        return True
    if drain.shrink and not drain.agreed and not drained and not is_too_large(turn):
        withdraw(turn, "it is not wanted any more", again="")
        return True
    if drain.agreed or drained:
        return saving(turn, drain, drained)
    # If nobody leaves, it may take as long as ranks advance; a leaver's notice runs out regardless.
    deadline = turn.drain_life.deadline
    # The ranks agree between two steps.
    patience_seconds = max(job.settings.drain_timeout, AGREE_FACTOR * epoch.longest_seconds)
    if drain.optional:
        deadline = max(deadline, epoch.moved + patience_seconds)
    if not turn.overdue(deadline):
        waits.say(turn, "boundary", lambda: boundary_of(turn, drain), deadline - turn.heard, "--drain-timeout")
        return False
    if drain.optional:
        withdraw(turn, f"the ranks did not agree on a boundary within {patience_seconds:.0f} s")
    else:
        give_up_drain(turn, drain)
    return True


def boundary_of(turn: Turn, drain: Drain) -> str:
    silent = waits.unheard(turn)
    awaited = saves.last_failing(turn) or "a step boundary of all ranks"
    return f"{drain.subject} waits for {awaited}{f' ({silent})' if silent else ''}"


def agree(turn: Turn, step: int) -> bool:
    """The ranks say that they save this step and stop. Returns whether that is news of the present drain."""
    drain = turn.job.drain
    if drain is None or drain.agreed or not is_of_this(turn, drain, step):
        return False
    turn.job.drain = replace(drain, agreed=True)
    return True


def is_of_this(turn: Turn, drain: Drain, step: int) -> bool:
    """Whether ranks that stop behind this step do so for this drain: a report that was delayed is about an earlier one.

    They may stand there since before it began, in an evaluation that they leave for it.
    """
    stood = step == drain.after == turn.open.top_step
    return (step > drain.after or stood) and step > turn.open.given_up_at


def saving(turn: Turn, drain: Drain, drained: bool) -> bool:
    """Handles the save after the ranks have agreed: it may take as long as they live, unless all stands still too long.

    Whether bytes move says little, because a sync, in which a slow disk spends its time, moves none. When a leaver's
    notice is over, the others go on without it. Ranks that stand still behind their save are stuck: going on without
    them loses nothing.
    """
    job, epoch, life = turn.job, turn.open, turn.drain_life
    saves.await_save(turn, drain.subject)
    leavers = [node for node in job.nodes.leavers if turn.is_working(node)]
    if leavers and turn.overdue(life.deadline) and saves.part_with(turn, leavers):
        life.deadline = notice_end(turn)
        # From now on the ranks write, or seal, what is left.
        epoch.moved = turn.heard
        return True
    limit = job.settings.stall_timeout
    if limit <= 0 or not turn.overdue(epoch.moved + limit):
        return False
    if drain.optional and not drained and not saves.is_committed(turn):
        withdraw(turn, f"its save stood still for {limit:.0f} s (--stall-timeout){saves.problem(turn)}")
        # Otherwise each of these saves would be followed by the next one.
        turn.live.grow_hold_until = max(turn.live.grow_hold_until, turn.now + limit)
    else:
        give_up_drain(turn, drain)
    return True


def give_up_drain(turn: Turn, drain: Drain) -> None:
    """Gives the drain up, because nothing more can be saved."""
    turn.notice(f"the drain ({drain.reason}) did not end in time: going back to the last commit", True)
    turn.cause("drain timed out")
    unplanned(turn)


def withdraw(turn: Turn, why: str, again: str = "; it is tried again with the next commit") -> None:
    """Withdraws a drain: nobody goes and nobody comes now, the ranks train on, and the next commit tries it `again`."""
    if turn.job.drain is not None:
        turn.notice(f"{turn.job.drain.subject} is put off: {why}{again}")
    turn.open.stopping = False
    turn.open.given_up_at = max(turn.open.given_up_at, last_step(turn))
    turn.open.put_off = True
    turn.open.moved = turn.heard
    turn.enter(Phase.RUNNING)


# ---- the end --------------------------------------------------------------------------------------------------------


def end_refused(turn: Turn) -> None:
    """Ends the job because all ranks refuse and nobody else could go on: another start would end in the same way."""
    refusal = refusals.pending(turn)
    why = refusal.message if refusal is not None else ""
    end(turn, Phase.FAILED, f"the training was refused: {why}", notice=False)


def end(turn: Turn, phase: Phase, message: str, *, notice: bool = True) -> None:
    """Ends the job, well or not. Every agent's last line says so; without `notice` nothing else does.

    A failed one ends when what it has in memory alone is on the disk (`ending`). One that is being stopped is stopped
    then, whatever failed.
    """
    job = turn.job
    if phase is Phase.FAILED and ending.put_off(turn, message, notice=notice):
        if job.phase.has_workers:
            unplanned(turn)
        return
    if phase is Phase.FAILED and job.stopping:
        # It stays as somebody wants it: of a failed one the agents that a supervisor starts again would go on.
        phase, message, notice = Phase.STOPPED, how_stopped(job, message), True
    job.ending, job.message = None, message
    # A stop may have come too late; then it is over as well, and must not keep out who comes next.
    job.stopping = False
    job.next = NextWorld(conversion=beside.still_owed(job), spoilt=job.next.spoilt)
    made = turn.open.top_step
    if job.world is not None:
        made = last_step(turn)
        announcements.close_record(turn, job.world, made)
    job.save_order, step = None, stands_at(job, max(made, job.run.left_step))
    turn.note(ENDS[phase], message, said=notice, warning=phase is Phase.FAILED, step=step)
    turn.enter(phase)
