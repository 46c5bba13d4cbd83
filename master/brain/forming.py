"""WAITING and FORMING: gathering beside the conversion gate, and the opening of a world."""

from __future__ import annotations

from dataclasses import replace

from . import (
    announcements,
    beside,
    conversion,
    durable,
    ending,
    failures,
    growing,
    memory,
    places,
    refusals,
    sight,
    taking,
    unfetched,
    waits,
)
from .checkpoints import adopt_from_strangers, give_up_resharding, loads_now, resharded, resume_point, same_shape
from .chronicle import Kind
from .live import EpochLife, Missing, State
from .membership import (
    agree_on_directory,
    counts,
    eligible,
    expected,
    has_answered,
    is_candidate,
    members_of,
    of_size,
    sees_resume,
    select,
)
from .running import end, end_refused, hopeless
from .scaling import has_shrunk
from .state import Checkpoint, Ending, Job, Member, MemberState, NextWorld, Node, Opened, Phase, Recollection, World
from .turn import Turn, about, names, of_nodes

# The quiet time starts anew with each arrival, but all of it together takes at most so many quiet times and seconds.
QUIET_TIMES = 20.0
LEAST_QUIET_SECONDS = 20.0
# Least seconds between two reports of what WAITING lacks, because with many nodes that changes all the time.
MISSING_EVERY_SECONDS = 1.0
# The gate waits for this.
ON_THE_DISK = "durable"


def forming(turn: Turn) -> bool:
    """WAITING and FORMING: gathers, sees to the conversion, and opens a world."""
    job = turn.job
    if job.recollection.listening:
        return listening(turn)
    if job.ending is not None:
        return ends(turn, job.ending)
    if ends_hopeless(turn):
        return True
    announcements.unexplained(turn, now=False)
    agree_on_directory(turn)
    conversion.retry(turn)
    if memory.adopt(turn):
        return True
    gathering = expected(turn)
    ready = eligible(turn)
    waited_for = [node for node in gathering if not has_answered(turn, node)]
    # Behind `expected`, which tells who has not joined in time.
    if adopt_from_strangers(turn) or sight.look(turn) or sight.lost(turn, resume_point(job)):
        return True
    conversion.tend_verification(turn)
    if job.verification is not None and job.verification.verifier:
        waits.say(turn, "verification", f"waiting for {job.verification.verifier} to verify a checkpoint")
    prospects = {node.name: node for node in [*ready, *waited_for]}
    if places.plan(turn, gathering):
        return True
    possible = len(prospects) - len(prospects) % max(1, job.settings.node_unit)
    stuck = is_blocked(turn) and not old_shape(turn, resume_point(job), ready)
    stuck = stuck or conversion.cannot_verify(turn)
    moved = wait_or_form(turn, possible >= job.settings.min_nodes and not stuck)
    if ending.is_under_way(turn) or ends_in_vain(turn, stuck):
        return True
    if job.verification is not None:
        return moved
    gathered = is_gathered(turn, waited_for, ready)
    candidate = select(turn, ready if gathered else list(prospects.values()))
    resume = resume_point(job)
    if not candidate:
        return moved
    if gathered and places.could_not_start(turn, resume):
        return True
    if resume is not None and resume.reshards and gathered and failures.cannot_reshard(turn, resume):
        give_up_resharding(turn, resume)
        failures.acquit(turn)  # Counted as the script's only if it fails again.
        beside.tend(turn)
        resume = resume_point(job)
    if gathered and failures.leaves_shape(turn, ready):
        return True
    if gathered and memory.seeks(turn, resume):
        waits.say(turn, "disk", "waiting for a node that looks on the disk for what leavers had in memory")
        return moved
    if beside.holds(turn, gathered):
        return moved
    if shut := not gate_open(turn, resume, candidate):
        # A conversion that was blocked just now may lead to WAITING.
        moved = moved or (is_blocked(turn) and not stuck and not old_shape(turn, resume, ready))
        candidate = fallback(turn, resume, ready) if gathered else []
    if gathered and candidate:
        announcements.unexplained(turn, now=True)
    if gathered and candidate and not failures.count(turn) and not failures.pauses(turn):
        if places.fits(turn, resume, candidate := places.arranged(turn, resume, candidate)):
            if shut and resume is not None:
                growing.hold_growth(turn, resume)
            open_world(turn, candidate, resume)
        return True
    return moved or ending.is_under_way(turn)


def ends_hopeless(turn: Turn) -> bool:
    """Ends the job if what broke the last world would break the next one as well. Returns whether it did.

    Where only newcomers' ranks refuse, these are put aside.
    """
    if refusals.pending(turn) is not None:
        if refusals.ends_job(turn):
            end_refused(turn)
            return True
        refusals.put_aside(turn)
    pending = turn.job.run.budget.pending
    if turn.job.world is None or pending is None or not hopeless(turn):
        return False
    end(turn, Phase.FAILED, f"{pending.node}: {pending.message}", notice=False)
    return True


def ends(turn: Turn, under_way: Ending) -> bool:
    """Ends a job that is over, once nothing of it is in memory alone. Returns whether anything changed."""
    if ending.awaits(turn):
        return False
    end(turn, Phase.FAILED, under_way.message, notice=under_way.notice)
    return True


def listening(turn: Turn) -> bool:
    """Whether all agents are heard out first, because the store was empty but agents remember a run."""
    job, gathering = turn.job, turn.live.gathering
    if gathering.listen_until is None:
        gathering.listen_until = turn.heard + job.settings.node_timeout
    if not turn.overdue(gathering.listen_until):
        text = "the master's record was lost, and agents remember a run: listening to all of them"
        waits.say(turn, "listening", text, gathering.listen_until - turn.heard, "--node-timeout")
        return False
    job.recollection = known = replace(job.recollection, listening=False)
    job.epoch = max(job.epoch, known.epoch)
    settings = f", with --nnodes={job.settings.min_nodes}:{job.settings.max_nodes}" if known.settings_epoch >= 0 else ""
    turn.notice(
        f"the master's record was lost; the run was read back from its checkpoints ({len(job.checkpoints)}){settings}"
    )
    return True


def wait_or_form(turn: Turn, enough: bool) -> bool:
    """Enters WAITING while fewer than `min` nodes can take part, FORMING otherwise."""
    job = turn.job
    if enough and job.phase is Phase.WAITING:
        turn.enter(Phase.FORMING)
        return True
    if not enough and job.phase is Phase.FORMING:
        turn.update_next(quiet=True)
        turn.enter(Phase.WAITING)
        return True
    if job.phase is Phase.WAITING:
        durable.write_while_waiting(turn)
    limit = job.settings.wait_for_nodes
    if job.stopping:
        return False  # nobody comes any more
    if job.phase is Phase.WAITING and limit >= 0 and turn.due(turn.live.phase_since + limit):
        end(turn, Phase.FAILED, f"{missing(turn.state)} for {limit:.0f} s (--wait-for-nodes)")
        return True
    return False


def ends_in_vain(turn: Turn, stuck: bool) -> bool:
    """Ends the job if only a world of the old shape could go on, and nodes for one do not come."""
    gathering, settings = turn.live.gathering, turn.job.settings
    if not stuck or turn.job.stopping or not conversion.is_vain(turn):
        gathering.vain_until = None
        return False
    if gathering.vain_until is None:
        patience_seconds = settings.wait_for_nodes if settings.wait_for_nodes >= 0 else settings.node_timeout
        gathering.vain_until = turn.now + patience_seconds
    if not turn.due(gathering.vain_until):
        return False
    end(turn, Phase.FAILED, missing(turn.state), notice=False)
    return True


def is_gathered(turn: Turn, waited_for: list[Node], ready: list[Node]) -> bool:
    """Whether all have joined: `max` nodes, or every expected agent and, at a start, some quiet time since.

    The quiet time has an end of its own, so that agents that come, crash and come again hold nobody up for ever.
    """
    settings, gathering = turn.job.settings, turn.live.gathering
    if awaits_last_save(turn) or taking.awaits(turn, waited_for):
        return False
    chosen = len(select(turn, ready))
    full = len(ready) >= turn.job.most_nodes and chosen == max(counts(turn, ready), default=0)
    known = not awaits_witness(turn, waited_for, ready) and not failures.awaits_answers(turn, waited_for)
    if full and known and not places.awaits(turn, waited_for):
        return True
    enough = bool(chosen)
    if not enough or not turn.job.next.quiet:
        gathering.complete_at = None
    elif gathering.complete_at is None:
        gathering.complete_at = turn.now
    if waited_for:
        say_who_is_missing(turn, waited_for)
        return False
    if not turn.job.next.quiet:
        return True
    quiet = turn.live.last_arrival + settings.quiet_time
    if enough and gathering.complete_at is not None:
        longest = max(LEAST_QUIET_SECONDS, QUIET_TIMES * settings.quiet_time)
        quiet = min(quiet, gathering.complete_at + longest)
    if turn.due(quiet):
        return True
    text = f"{of_nodes(len(ready))} of at most {turn.job.most_nodes} here: starting unless others come"
    left = quiet - turn.now
    if enough:
        waits.say(turn, "quiet", text, left, "--quiet-time", now=left > waits.SAID_AFTER_SECONDS)
    return False


def awaits_last_save(turn: Turn) -> bool:
    """Whether the script of a leaver may still save, without a session, what becomes the run's.

    It may do so when it gets its notice. Its agent takes that, and is gone soon if the script does nothing. Of a node
    that had joined this round when it got its notice the script was gone.
    """
    if turn.job.world is None or turn.job.has_session:
        return False
    until = {
        node.name: leaves
        for node in members_of(turn)
        if node.leaving and node.adopts and node.joined is None and (leaves := turn.presence(node).leaves) is not None
    }
    # All of them are looked at, as each look also asks for a turn when its time is over.
    left = [(leaves, name) for name, leaves in until.items() if not turn.overdue(leaves)]
    if not left:
        return False
    goes = "leaves: what its script saves" if len(left) == 1 else "leave: what their script saves"
    text = f"waiting for {names(sorted(name for _, name in left))}, which {goes} now is the run's"
    waits.say(turn, "last save", text, max(left)[0] - turn.heard, "--drain-timeout")
    return True


def say_who_is_missing(turn: Turn, waited_for: list[Node]) -> None:
    """Says whose Join is waited for, if that takes long."""
    last = max(turn.live.gathering.asked.get(node.name, turn.heard) for node in waited_for)
    left = last + turn.job.settings.join_timeout - turn.heard

    def text() -> str:
        return f"waiting for {names(sorted(node.name for node in waited_for))} to stop workers and join"

    waits.say(turn, "joins", text, left, "--join-timeout")


def awaits_witness(turn: Turn, waited_for: list[Node], ready: list[Node]) -> bool:
    """Whether nodes of the last world will still join, and nobody else can tell what of it counts.

    One of them knows what it sealed without a master. Each of them may have a part of what it held in memory.
    """
    members = turn.job.world.by_incarnation if turn.job.world is not None else {}
    if not any(node.incarnation in members for node in waited_for):
        return False
    return memory.lacks_parts(turn) or not any(node.incarnation in members for node in ready)


def gate_open(turn: Turn, resume: Checkpoint | None, candidate: list[Node]) -> bool:
    """Whether the conversion gate is open: no conversion is needed, or it is ready."""
    if resume is None or loads_now(turn.job, resume, sum(node.nproc for node in candidate)):
        return True
    if resume.parts:
        durable.want_durable(turn, resume)
        waits.say(turn, ON_THE_DISK, f"waiting for {resume.name} to be written from memory to the disk")
    else:
        conversion.tend(turn, resume)
        say_conversion(turn, resume)
    return False


def say_conversion(turn: Turn, resume: Checkpoint) -> None:
    """Says who converts, and how far it is, if that takes long."""
    held, files = turn.job.conversion, turn.live.conversion.lease.files
    if held is not None and held.lease and not held.blocked:
        far = f" ({files} files so far)" if files > 0 else ""
        text = f"waiting for the universal files of {resume.name}, which {held.owner} makes{far}"
        waits.say(turn, "conversion", text)


def old_shape(turn: Turn, resume: Checkpoint | None, ready: list[Node]) -> list[Node]:
    """The largest world that loads the resume point as it is; empty if there is none."""
    job = turn.job
    return of_size(ready, resume.world_size, job.settings, job.most_nodes) if resume is not None else []


def fallback(turn: Turn, resume: Checkpoint | None, ready: list[Node]) -> list[Node]:
    """The world of the old shape, if nobody can convert, or write to the disk what is to be converted."""
    if resume is None or not (is_blocked(turn) or growing.is_unwritten(turn, resume)):
        return []
    return old_shape(turn, resume, ready)


def is_blocked(turn: Turn) -> bool:
    """Nobody can make at present what the gate wants."""
    return gate_is_blocked(turn.job)


def gate_is_blocked(job: Job) -> bool:
    return job.conversion is not None and job.conversion.blocked and not job.conversion.beside


def missing(state: State) -> str:
    """Why no world opens, in a line for a person."""
    job = state.job
    resume = resume_point(job)
    answered = [node for node in job.nodes.values() if node.joined is not None and node.joined.round == job.round]
    blind = [n.name for n in answered if resume is not None and n.joined and resume.digest not in n.joined.seen]
    strangers = [n.name for n in job.nodes.values() if not n.sees_directory]
    here = len(job.nodes) - len(blind) - len(strangers) - len(job.nodes.leavers)
    if job.verification is not None and conversion.is_unable(job.verification):
        return f"nobody can verify a checkpoint that could not be loaded ({job.verification.message}): trying again"
    if gate_is_blocked(job) and resume is not None and resume.unconvertible:
        return (
            f"{resume.name} was saved by {resume.world_size} workers and loads with as many only "
            f"({resume.unconvertible}): start nodes until there are {resume.world_size} workers again"
        )
    if job.conversion is not None and gate_is_blocked(job):
        return f"nobody can convert the checkpoint for this shape ({job.conversion.reason}): trying again"
    unit = f" in a multiple of {job.settings.node_unit} (--node-unit)" if job.settings.node_unit > 1 else ""
    text = f"waiting for nodes: {max(0, here)} here, at least {job.settings.least_nodes}{unit} needed"
    if here >= job.settings.least_nodes and not blind and not strangers:
        text = f"{here} here, which is enough: waiting for {owed(state) or 'others that may be coming back'}"
    if blind and resume is not None:
        text += f"; {names(blind)} cannot see {resume.name}"
    if strangers:
        text += f"; {names(strangers)} cannot see the checkpoint directory"
    step = state.live.held.steps.get(resume.digest) if resume is not None and resume.parts else None
    told = not any(memory.is_unheard(state, node) for node in job.nodes.values())
    if resume is not None and step is not None and step.missing_since is not None and told:
        text += f"; a part of {resume.name}, which is in memory only, is with nobody who is here"
    if refused := [node for node in job.nodes.values() if node.refused]:
        text += f"; {names(node.name for node in refused)} cannot take part ({refused[0].refused})"
    return text


def why_over(job: Job) -> str:
    """Why none opens any more, in a line for a person; empty where one may."""
    if job.ending is not None:
        return f"the job ends when what it has in memory only is on the disk: {job.ending.message}"
    if job.stopping:
        return f"the job stops by order: waiting for {names(sorted(job.nodes))} to go"
    return ""


def owed(state: State) -> str:
    """What the next world waits for beside its nodes; empty where there is nothing."""
    job, held, resume = state.job, state.job.conversion, resume_point(state.job)
    if resume is not None and ON_THE_DISK in state.live.waits.known:
        return f"{resume.name} to be written from memory to the disk"
    source = job.checkpoint(held.source) if held is not None and held.beside else None
    return f"the universal files of {source.name}" if source is not None else ""


def missing_until(state: State) -> str:
    """What is waited for where no world is open, and for how long, in a line for a person."""
    if over := why_over(state.job):
        return over
    limit = state.job.settings.wait_for_nodes
    return missing(state) + (f"; the job ends after {limit:.0f} s of that (--wait-for-nodes)" if limit >= 0 else "")


def say_missing(turn: Turn) -> None:
    """Tells agents what WAITING lacks: at once if it is new, then from time to time."""
    live, told = turn.live, turn.live.missing
    if turn.job.phase is not Phase.WAITING:
        if told.text:
            live.missing = Missing()
        return
    if told.text and turn.now < told.at + MISSING_EVERY_SECONDS:
        if len(turn.job.nodes) > 0 and missing_until(turn.state) != told.text:
            turn.due(told.at + MISSING_EVERY_SECONDS)
        return
    text = missing_until(turn.state)
    if text != told.text:
        live.missing = Missing(text, turn.now)


def say_who_could_not_fetch(turn: Turn, resume: Checkpoint | None) -> None:
    """A world opens from memory: nodes that are here and have not got it stay outside."""
    from_memory = resume is not None and resume.parts
    here = [node for node in turn.job.nodes.values() if is_candidate(turn, node) and has_answered(turn, node)]
    lacking = [node for node in here if not sees_resume(turn, node)] if from_memory else []
    without = unfetched.could_not_fetch(turn, lacking)
    if without and resume is not None:
        turn.notice(
            f"{names(without)} could not fetch {resume.name} from the memory of other nodes: changes in the next"
            f" {unfetched.DISK_FOR_SECONDS / 60:.0f} minutes are saved on the disk",
            True,
        )


def open_world(turn: Turn, nodes: list[Node], resume: Checkpoint | None) -> None:
    """Opens a world in one transition, and so closes the previous epoch for ever."""
    job, live = turn.job, turn.live
    first = nodes[0].joined
    if first is None:
        raise AssertionError("a member has not joined")
    memory.passed_over(turn, resume)
    say_who_could_not_fetch(turn, resume)
    old = set(job.world.by_incarnation) if job.world is not None else set()
    unheard = job.world is not None and job.told.start
    arrived = [node.name for node in nodes if node.incarnation not in old]
    if has_shrunk(turn, old, nodes):
        turn.cause(f"scaled to {of_nodes(job.limit)}")
    causes = job.next.causes + ((f"{names(arrived)} joined",) if arrived else ())
    size = sum(node.nproc for node in nodes)
    # What was trained behind the step that a person went back to is not lost, and nothing about it is unknown.
    went_back = next((one for one in job.run.gone_back[-1:] if one.epoch == job.epoch), None)
    job.epoch = max(job.epoch, job.recollection.epoch) + 1
    world = World(
        epoch=job.epoch,
        members=tuple(
            Member(node.name, node.incarnation, node.host, node.nproc, rank, job.nodes[node.name].trained)
            for rank, node in enumerate(nodes)
        ),
        store_host=first.store_host,
        store_port=first.store_port,
        resume=resume.digest if resume is not None else "",
        universal=resume is not None and not same_shape(resume, size) and not resharded(job, resume, size),
        resharded=resume is not None and resharded(job, resume, size),
        resumed_step=resume.step if resume is not None else 0,
        causes=causes or ("no newcomer joined after all" if job.grown else "restarted",),
        left_step=job.run.left_step if went_back is None else went_back.step,
        grown=job.grown and bool(arrived),
        arrived=len(arrived),
    )
    if world.universal or (resume is not None and job.conversion is not None and not job.conversion.blocked):
        job.conversion_failures = 0
    places.opened(turn)
    job.opened = Opened(world, {node.incarnation: MemberState.RUNNING for node in nodes})
    job.next = NextWorld()
    beside.owe(turn, world, resume)
    if job.save_order is not None:
        # A run that went back has fulfilled the order with its next save, whatever its step is.
        job.save_order = replace(job.save_order, after=min(job.save_order.after, world.resumed_step))
    job.recollection = Recollection()
    for node in nodes:
        turn.update(job.nodes[node.name], joined=None)
    exactly = live.gathering.counted or not (old or job.run.ever_stepped or live.gathering.unheard)
    exactly = went_back is not None or (exactly and not (live.pause is not None and live.pause.more_lost))
    live.epoch = EpochLife(epoch=job.epoch, opened=turn.heard, moved=turn.heard, lost_exactly=exactly)
    turn.gather_anew()
    turn.mark("formed")
    turn.note(Kind.FORMED, announcements.headline(world, heard=job.has_session), nodes=about(arrived))
    turn.enter(Phase.RUNNING)
    if unheard:
        announcements.without_steps(turn, world)
