"""What people are told about an opened world, and what the job's history keeps of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import waits
from .checkpoints import resume_point
from .chronicle import HISTORY, Kind, PausePart, parts_of
from .membership import may_call_session, members_of
from .state import EpochRecord, Job, MemberState, Node, World
from .turn import Turn, names, of_nodes

# Seconds after the start of its workers from which a script that has not called `session()` may have none.
SESSION_WITHIN_SECONDS = 30.0
# Seconds after ranks have lost a connection in which the node that ended should be seen to be gone.
NAMED_WITHIN_SECONDS = 3.0
NOT_YET = "the script has not called session() yet"


def first_step(turn: Turn, world: World) -> None:
    """Says what the change cost, once the open epoch has made its first step."""
    job, live = turn.job, turn.live
    turn.open.first_step_at, turn.open.first_step_heard = turn.now, turn.heard
    turn.update_run(ever_stepped=True)
    if job.told.first_step:
        return
    turn.update_told(first_step=True, start=False)
    given, world = world, as_heard(turn, world)
    exactly = turn.open.lost_exactly and job.has_session
    paused = turn.now - live.pause.since if live.pause is not None else 0.0
    lost = max(0, world.left_step - world.resumed_step)
    if world.grown:
        turn.update_run(growths=job.run.growths + 1, growth_cost_seconds=paused)
        live.run.growth_done_at = turn.now
    text = f"epoch {world.epoch}: steps are heard" if job.told.unheard else headline(world)
    if given.resume and world.resumed_step > given.resumed_step and not job.told.unheard:
        # The script has that checkpoint, or what it has in memory: the first step that is heard was not its first.
        text = f"{headline(given)} or later"
    parts: tuple[PausePart, ...] = ()
    if world.epoch > 1 and live.pause is not None:
        text += f", {cost(paused, lost, exactly=exactly, away=live.pause.costs_more)}"
        parts = parts_of(live.pause.since, (*live.pause.marks, *starts(turn)))
    about: dict[str, Any] = {
        "step": turn.open.top_step,
        "seconds": round(paused, 3),
        "parts": parts,
        "lost_steps": lost,
    }
    turn.notice(text, kind=Kind.STEPPED, **about)
    record(turn, world, paused, lost, parts=parts)


def starts(turn: Turn) -> list[tuple[str, float]]:
    """When the parts of a world's start ended, as far as its agents have said: the last of them is its first step."""
    pause, epoch = turn.live.pause, turn.open
    opened = dict(pause.marks).get("formed") if pause is not None else None
    if opened is None:  # by an earlier master
        return [("first step", turn.now)]
    told = (("started", epoch.started_seconds), ("loaded", epoch.loaded_seconds))
    return [*((name, min(turn.now, opened + took)) for name, took in told if took), ("first step", turn.now)]


def as_heard(turn: Turn, world: World) -> World:
    """The world with the step that it went on from, of which a script without a session says nothing.

    The run has no such checkpoint on its record, but the script has loaded something if its first step is a later one.
    """
    if turn.job.has_session or world.epoch == 1:
        return world
    return replace(world, resumed_step=max(world.resumed_step, turn.open.top_step - 1))


def cost(paused: float, lost: int, *, exactly: bool, away: bool) -> str:
    """A text that says what a change cost.

    `exactly`: the lost steps are counted. Otherwise at least so many were lost, because steps are reported only now and
    then. `away`: the master was away, and does not know when the steps ended.
    """
    known = f"{lost} step{'s' if lost != 1 else ''}"
    if not exactly:
        known = f"at least {known}" if lost else "an unknown number of steps"
    return f"paused {'at least ' if away else ''}{paused:.1f} s, lost {known}{' (the master was away)' if away else ''}"


def is_unexplained(job: Job) -> bool:
    """Whether ranks ended because others were gone, and no node is known to have failed or to be lost."""
    pending = job.run.budget.pending
    return pending is not None and pending.elsewhere and not job.next.causes


def unexplained(turn: Turn, *, now: bool) -> None:
    """Says that nobody knows which rank ended first, after a world ended because a connection between ranks broke.

    A lost node or a failure would be named instead. This waits some seconds for one, or not at all (`now`) if the next
    world opens.
    """
    if not is_unexplained(turn.job) or not (now or turn.overdue(turn.live.phase_heard + NAMED_WITHIN_SECONDS)):
        return
    pending = turn.job.run.budget.pending
    if pending is not None:
        turn.cause(f"the ranks of {pending.node} lost a peer")
        turn.notice(f"{pending.node}: {pending.message}; which rank ended first is not known", True)


def no_step_yet(turn: Turn, world: World) -> None:
    """Says why a later world has begun, where its first step is long in coming: only then it is presented."""
    if world.epoch == 1 or turn.job.told.first_step or turn.job.told.unheard:
        return
    resumed = f" from step {world.resumed_step}" if world.resume else ""
    text = f"{', '.join(world.causes)}: {of_nodes(len(world.members))} began{resumed}, no step is heard yet"
    waits.say(turn, "first step of all", text)


def without_steps(turn: Turn, world: World) -> None:
    """Says once for each world that it was started, if no steps are reported for long, and why so little is known.

    The script may then be making steps that nobody reports, unless it is known to import a session. Its next worlds are
    presented when they open.
    """
    live, told = turn.live, turn.job.told
    if turn.job.has_session or told.unheard or told.first_step:
        return
    turn.update_told(unheard=True, start=told.start or not may_call_session(turn))
    turn.notice(f"{headline(world, heard=False)}; no steps are heard{why_unheard(turn, world)}")
    paused = live.phase_since - live.pause.since if live.pause is not None else 0.0
    record(turn, world, max(0.0, paused), 0, heard=False)


def why_unheard(turn: Turn, world: World) -> str:
    """Why no steps are heard, by all that has been heard of the script; or what is heard instead."""
    saved = resume_point(turn.job)
    if saved is not None:
        return ", but what the script saves is taken" + (f": step {saved.step}" if saved.digest != world.resume else "")
    if is_of_dlrover(turn):
        return " yet: DLRover's classes tell of them with a save to memory, or every 15 s"
    if saves_in_its_own_way(turn):
        return ", and it has saved nothing yet that could be taken"
    return f": {not_yet(turn)}"


def no_session(turn: Turn) -> str:
    """Says that the ranks cannot be asked for anything: the script has no session, or has not called it yet."""
    if not may_call_session(turn):
        if is_of_dlrover(turn):
            return "the script uses DLRover's classes"
        if turn.job.told.first_step or resume_point(turn.job) is not None or saves_in_its_own_way(turn):
            return "the script has no session"
    return not_yet(turn)


def is_of_dlrover(turn: Turn) -> bool:
    """Whether the open world's script uses DLRover's classes."""
    return any(node.dlrover for node in members_of(turn))


def saves_in_its_own_way(turn: Turn) -> bool:
    """Whether the open world's script was handed `${save_dir}`, and imports no session."""
    return not may_call_session(turn) and any(node.adopts for node in members_of(turn))


def not_yet(turn: Turn) -> str:
    """Says that session() was not called, and for how long."""
    seconds = turn.heard - turn.live.phase_heard
    return f"{NOT_YET}, {seconds:.0f} s after its start" if seconds >= 1 else NOT_YET


def perhaps_stalled(turn: Turn, world: World) -> None:
    """Says once for each world that a script without a session is silent for --stall-timeout, and is left alone."""
    job = turn.job
    if job.told.doubt:
        return
    turn.update_told(doubt=True)
    limit = f"{job.settings.stall_timeout:.0f} s (--stall-timeout)"
    finished = [member.node for member in world.members if job.part(member) is MemberState.FINISHED]
    if finished:
        others = [member.node for member in world.members if job.part(member) is not MemberState.FINISHED]
        what = f"{names(finished)} finished, {names(others)} did not for {limit}"
    else:
        heard = job.told.first_step or resume_point(job) is not None or is_of_dlrover(turn)
        what = f"no step and no save was heard of for {limit}" if heard else f"no rank called session() for {limit}"
    turn.notice(f"{what}: whether the script is at work or stuck cannot be told; it is left alone", True)


def waiting_to_grow(turn: Turn, new: list[Node], until: float | None, since: float) -> None:
    """Says when everybody will be restarted for the newcomers of a script that cannot be drained yet.

    `until`: by the listening clock; None: no time is set. Then it is said again each time the wait has doubled, with
    what a person can do about it; and not before the wait has lasted (`since`), because a session may be on its way.
    """
    who, epoch = frozenset(node.name for node in new), turn.open
    hopes = not turn.job.told.unheard and turn.open.first_step_at is None
    if until is None and hopes and not turn.overdue(since + waits.SAID_AFTER_SECONDS):
        return
    if who <= epoch.growth_told and (until is not None or not turn.overdue(epoch.growth_told_at)):
        return
    epoch.growth_told = who
    resume = resume_point(turn.job)
    if until is None:
        epoch.growth_told_at = turn.heard + max(SESSION_WITHIN_SECONDS, turn.heard - turn.live.phase_heard)
        turn.overdue(epoch.growth_told_at)
        if may_call_session(turn):
            what = (
                ". It imports dalsegno.elastic, so its first step is waited for, or a checkpoint that it saves below"
                " ${save_dir}; if neither will come, end all agents and start them together"
            )
        else:
            what = (
                ", and nothing of it could be resumed: all workers restart with the first checkpoint that it saves"
                " below ${save_dir}; --grow-wait=SECONDS restarts them without one, too, and"
                f" `dalsegno scale {turn.job.most_nodes}` now"
            )
    elif resume is not None:
        what = (
            ", so it cannot be drained: all workers restart with its next checkpoint, or from that of step"
            f" {resume.step} in {until - turn.heard:.0f} s (--grow-wait)"
        )
    else:
        what = (
            f", so it cannot be drained: all workers restart in {until - turn.heard:.0f} s (--grow-wait), and go on"
            " from what the script itself has saved"
        )
    turn.notice(f"{names(sorted(who))} joined: {no_session(turn)}{what}")


def unsaved_growth(turn: Turn, new: list[Node], until: float | None) -> None:
    """Says once when newcomers come in whose drain would lose steps, because the script's loop saves nothing.

    `until`: by the listening clock; None: no time is set.
    """
    who, epoch = frozenset(node.name for node in new), turn.open
    if who <= epoch.growth_told:
        return
    epoch.growth_told = who
    resume = resume_point(turn.job)
    back = f"that of step {resume.step}" if resume is not None else "step 0"
    when = f"the {'next' if resume is not None else 'first'} checkpoint"
    if until is None:
        when += (
            ", because before that all steps would be lost (--grow-wait=SECONDS: after that time in any case;"
            f" `dalsegno scale {turn.job.most_nodes}`: now)"
        )
    else:
        when += f", or in {until - turn.heard:.0f} s from {back} (--grow-wait)"
    turn.notice(
        f"{names(sorted(who))} joined: taken in with {when}. The script saves nothing when its world changes, as its"
        " steps() has neither a state nor save=; with one of them nobody waits, and no step is lost",
        True,
    )


def restart_to_grow(turn: Turn, new: list[Node], committed: bool, asked: bool) -> None:
    """Says that all workers are restarted to take the newcomers in, and why now.

    Args:
        committed: a commit has come since they wait.
        asked: somebody has asked for a number of nodes since.
    """
    who = names(sorted(node.name for node in new))
    if committed:
        why = "the commit that was waited for is there"
    elif resume_point(turn.job) is not None:
        why = "no other commit came (--grow-wait)"
    elif asked:
        why = "a number of nodes was asked for, and nothing could be resumed"
    else:
        why = "they go on from what the script itself has saved (--grow-wait)"
    turn.notice(f"all workers restart to take {who} in; {why}", not committed)


def headline(world: World, *, heard: bool = True) -> str:
    """A line about a world: why it opened, how large it is, where it starts, as far as that is `heard`."""
    text = f"epoch {world.epoch}: {', '.join(world.causes)}, {of_nodes(len(world.members))}"
    if world.resume:
        how = " (universal)" if world.universal else " (re-sharded)" if world.resharded else ""
        return f"{text}, resumed at step {world.resumed_step}{how}"
    if not heard:
        return text
    return f"{text}, from step {world.resumed_step}{' or before' if world.resumed_step else ''}"


def record(
    turn: Turn, world: World, paused: float, lost: int, *, heard: bool = True, parts: tuple[PausePart, ...] = ()
) -> None:
    """Adds a world to the history; replaces its entry if its first step is reported after all."""
    history = turn.job.history
    if history and history[-1].epoch == world.epoch:
        history = history[:-1]
    entry = EpochRecord(
        world.epoch,
        len(world.members),
        world.size,
        ", ".join(world.causes),
        world.resumed_step,
        world.universal,
        round(paused, 3),
        lost,
        world.resumed_step + 1,
        world.resumed_step + 1,
        heard,
        lost_more=not turn.open.lost_exactly,
        parts=parts,
        stepped_at=turn.unix if heard else 0.0,
    )
    turn.job.history = (*history, entry)[-HISTORY:]


def close_record(turn: Turn, world: World, last_step: int) -> None:
    """Closes a world's entry when the world is over. Once it is closed, later news can only add steps."""
    history = turn.job.history
    if not history or history[-1].epoch != world.epoch:
        return
    entry = history[-1]
    if entry.ended_at:
        entry = replace(entry, last_step=max(entry.last_step, last_step))
    else:
        last = turn.now if turn.open.stepped_at is None else turn.open.stepped_at
        entry = replace(entry, last_step=last_step, ended_at=round(last + turn.live.unix_offset, 3))
    turn.job.history = (*history[:-1], entry)
