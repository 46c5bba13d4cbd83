"""The job's phases: what each waits for, its deadline and its way out. See docs/architecture.md for the diagram.

WAITING <-> FORMING (gathering beside the conversion gate -> open) -> RUNNING <-> DRAINING -> FORMING ... -> end
"""

from __future__ import annotations

from . import conversion
from .checkpoints import loads_as_is, resume_point
from .membership import agree_on_directory, eligible, expected, has_answered, newcomers, sees_resume, select
from .state import Checkpoint, Drain, EpochRecord, Failure, Member, Node, Part, Phase, World
from .turn import HISTORY, Turn

# Newcomers that are not warm by then are taken as they are (seconds after their Join).
WARM_LIMIT = 30.0
# Auto grow interval: this many times what the last growth cost, at most GROW_MAX seconds.
GROW_FACTOR = 20.0
GROW_MAX = 60.0
# After a conversion that failed on a growth, growing waits for a doubling time (seconds).
GROW_HOLD = 30.0
GROW_HOLD_MAX = 600.0
# A stall, once the epoch has made a step: this many times the longest step, save or evaluation, at least STALL_MIN.
STALL_FACTOR = 20.0
STALL_MIN = 60.0


def settle(turn: Turn) -> bool:
    """Whatever the state and the time call for, one transition. Returns whether anything moved."""
    phase = turn.job.phase
    if phase in (Phase.WAITING, Phase.FORMING):
        return forming(turn)
    if phase is Phase.RUNNING:
        return running(turn)
    if phase is Phase.DRAINING:
        return draining(turn)
    return False


# ---- forming --------------------------------------------------------------------------------------------------------


def forming(turn: Turn) -> bool:
    """WAITING and FORMING: gather, see to the conversion, open."""
    job = turn.job
    if job.listening:
        return listening(turn)
    if job.world is not None and job.pending_failure is not None and hopeless(turn):
        end(turn, Phase.FAILED, f"{job.pending_failure.node}: {job.pending_failure.message}")
        return True
    agree_on_directory(turn)
    conversion.retry(turn)
    gathering = expected(turn)
    ready = eligible(turn)
    prospects = {node.name: node for node in [*ready, *(n for n in gathering if not has_answered(turn, n))]}
    possible = len(prospects) - len(prospects) % max(1, job.settings.node_unit)
    stuck = is_blocked(turn) and not old_shape(turn, resume_point(job), ready)
    moved = wait_or_form(turn, possible >= job.settings.min_nodes and not stuck)
    conversion.tend_verification(turn)
    if job.verification is not None or job.phase.is_terminal:
        return moved
    gathered = is_gathered(turn, gathering, ready)
    candidate = select(turn, ready if gathered else list(prospects.values()))
    resume = resume_point(job)
    if not candidate:
        return moved
    if not gate_open(turn, resume, candidate):
        # A block that came just now may mean WAITING.
        moved = moved or (is_blocked(turn) and not stuck and not old_shape(turn, resume, ready))
        candidate = fallback(turn, resume, ready) if gathered else []
    if gathered and candidate and not count_failure(turn):
        open_world(turn, candidate, resume)
        return True
    return moved or job.phase.is_terminal


def listening(turn: Turn) -> bool:
    """The store was empty but agents remember a run: hear all of them out first."""
    live = turn.live
    if live.listen_until is None:
        live.listen_until = turn.now + turn.job.settings.node_timeout
    if not turn.due(live.listen_until):
        return False
    turn.job.listening = False
    turn.job.epoch = max(turn.job.epoch, turn.job.listening_epoch)
    turn.notice(
        f"the master's record was lost; the run was read back from its checkpoints ({len(turn.job.checkpoints)})"
    )
    return True


def wait_or_form(turn: Turn, enough: bool) -> bool:
    """WAITING while fewer than `min` nodes can take part, FORMING otherwise."""
    job = turn.job
    if enough and job.phase is Phase.WAITING:
        turn.enter(Phase.FORMING)
        return True
    if not enough and job.phase is Phase.FORMING:
        job.quiet = True
        turn.enter(Phase.WAITING)
        return True
    limit = job.settings.wait_for_nodes
    if job.phase is Phase.WAITING and limit >= 0 and turn.due(turn.live.phase_since + limit):
        end(turn, Phase.FAILED, f"{missing(turn)} for {limit:.0f} s (--wait-for-nodes)")
        return True
    return False


def is_gathered(turn: Turn, gathering: list[Node], ready: list[Node]) -> bool:
    settings = turn.job.settings
    if len(ready) >= settings.max_nodes:
        return True
    if any(not has_answered(turn, node) for node in gathering):
        return False
    return not turn.job.quiet or turn.due(turn.live.last_arrival + settings.quiet_time)


def gate_open(turn: Turn, resume: Checkpoint | None, candidate: list[Node]) -> bool:
    """The conversion gate: not needed, or ready."""
    if resume is None or loads_as_is(resume, sum(node.nproc for node in candidate)):
        return True
    conversion.tend(turn, resume)
    return False


def old_shape(turn: Turn, resume: Checkpoint | None, ready: list[Node]) -> list[Node]:
    """The largest world that loads the resume point as it is; none where there is no such world."""
    settings = turn.job.settings
    if resume is None:
        return []
    for count in range(min(len(ready), settings.max_nodes), settings.min_nodes - 1, -1):
        fits = sum(node.nproc for node in ready[:count]) == resume.world_size
        if fits and count % max(1, settings.node_unit) == 0:
            return ready[:count]
    return []


def fallback(turn: Turn, resume: Checkpoint | None, ready: list[Node]) -> list[Node]:
    """Nobody can convert: go on in the old shape, and hold further growth for a doubling time."""
    job = turn.job
    if resume is None or not is_blocked(turn):
        return []
    nodes = old_shape(turn, resume, ready)
    if nodes:
        reason = job.conversion.reason if job.conversion is not None else ""
        turn.notice(f"nobody could convert {resume.name} ({reason}): going on in its old shape", True)
        job.conversion_failures += 1
        turn.live.grow_hold_until = turn.now + growth_hold(job.conversion_failures)
    return nodes


def growth_hold(failures: int) -> float:
    """Seconds without a growth after so many conversions in a row that failed for one."""
    return min(GROW_HOLD * 2.0 ** (failures - 1), GROW_HOLD_MAX) if failures else 0.0


def is_blocked(turn: Turn) -> bool:
    """Nobody can convert at present."""
    return turn.job.conversion is not None and turn.job.conversion.blocked


def missing(turn: Turn) -> str:
    """Why no world opens, for a person."""
    job = turn.job
    resume = resume_point(job)
    blind = [n.name for n in job.nodes.values() if has_answered(turn, n) and not sees_resume(turn, n)]
    strangers = [n.name for n in job.nodes.values() if not n.sees_directory]
    here = len(job.nodes) - len(blind) - len(strangers) - sum(n.leaving for n in job.nodes.values())
    if job.conversion is not None and job.conversion.blocked:
        return f"nobody can convert the checkpoint for this shape ({job.conversion.reason}): trying again"
    text = f"waiting for nodes: {here} here, at least {job.settings.min_nodes} needed"
    if blind and resume is not None:
        text += f"; {', '.join(blind)} cannot see {resume.name}"
    if strangers:
        text += f"; {', '.join(strangers)} cannot see the checkpoint directory"
    return text


def count_failure(turn: Turn) -> bool:
    """Everybody of the failed epoch is back: the failure is the script's own. Returns whether it ends the job."""
    job = turn.job
    failure = job.pending_failure
    job.pending_failure = None
    if failure is None or job.world is None:
        return False
    if not all(is_back(turn, member) for member in job.world.members):
        return False  # A node of it was lost or left: that is what broke it.
    job.last_failure_step = max(job.last_failure_step, failure.step)
    job.failures += 1
    if job.failures <= job.settings.max_restarts:
        return False
    end(
        turn,
        Phase.FAILED,
        f"{failure.node}: {failure.message}; {job.failures} failures without progress (--max-restarts "
        f"{job.settings.max_restarts})",
    )
    return True


def is_back(turn: Turn, member: Member) -> bool:
    """Here and well after the failure of its epoch. One that is silent may only not be declared dead yet."""
    node = turn.job.node_by(member.incarnation)
    if node is None or node.leaving or member.part is Part.LOST:
        return False
    return turn.is_fresh(node) and has_answered(turn, node)


def open_world(turn: Turn, nodes: list[Node], resume: Checkpoint | None) -> None:
    """One transition; it closes the epoch before for ever."""
    job, live = turn.job, turn.live
    first = nodes[0].joined
    if first is None:
        raise AssertionError("a member has not joined")
    old = {member.incarnation for member in job.world.members} if job.world is not None else set()
    arrived = [node.name for node in nodes if node.incarnation not in old]
    causes = job.causes + ([f"{', '.join(arrived)} joined"] if arrived else [])
    size = sum(node.nproc for node in nodes)
    job.epoch += 1
    job.world = World(
        epoch=job.epoch,
        members=[Member(node.name, node.incarnation, node.host, node.nproc, rank) for rank, node in enumerate(nodes)],
        store_host=first.store_host,
        store_port=first.store_port,
        resume=resume.digest if resume is not None else "",
        universal=resume is not None and not resume.any_world_size and resume.world_size != size,
        resumed_step=resume.step if resume is not None else 0,
        causes=causes or ["restarted"],
        left_step=job.left_step,
        grown=job.grown and bool(arrived),
    )
    for node in nodes:
        node.joined = None
    if job.world.universal or (resume is not None and job.conversion is not None and not job.conversion.blocked):
        job.conversion_failures = 0
    job.conversion = None
    job.drain = None
    job.quiet = False
    job.causes = []
    job.grown = False
    live.steps, live.advanced, live.asked_at = {}, {}, {}
    live.unexpected = set()
    live.saved_bytes = 0
    live.trouble = False
    live.first_step_at, live.drain_deadline = None, None
    live.moved_at = turn.now
    turn.enter(Phase.RUNNING)


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
    if wants_to_grow(turn):
        if turn.job.has_session:
            job.grown = True
            start_drain(turn, growth=True, reason=f"{', '.join(n.name for n in newcomers(turn))} joins")
        else:
            regroup(turn)
        return True
    return False


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
        end(turn, Phase.SUCCEEDED, f"the run finished at step {max(turn.live.steps.values(), default=0)}")
        return True
    if all(part in (Part.DRAINED, Part.FINISHED) for part in parts):
        regroup(turn)
        return True
    return False


def hopeless(turn: Turn) -> bool:
    """Every node's workers failed before the run ever made a step: trying again would not help."""
    parts = [member.part for member in world_of(turn).members]
    return not turn.job.ever_stepped and all(part is Part.FAILED for part in parts) and turn.job.verification is None


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
    if world_of(turn).announced and job.history:
        job.history[-1].last_step = job.left_step
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
    """No rank advances and no save grows for too long."""
    job, live = turn.job, turn.live
    limit = job.settings.stall_timeout
    if limit <= 0 or live.deaf or any(m.part is not Part.RUNNING for m in world_of(turn).members):
        return False
    if live.first_step_at is not None:
        # What was taken for a stall may have been the first evaluation: each time more patience, up to the setting.
        limit = min(limit, max(STALL_MIN, STALL_FACTOR * live.longest) * 2.0**job.stalls)
    elif not job.has_session:
        return False  # Without a session nobody hears of steps: their absence says nothing.
    if not turn.due(live.moved_at + limit):
        return False
    text = f"no rank made a step for {limit:.0f} s (--stall-timeout)"
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
    if not new or any(m.part is not Part.RUNNING for m in world.members):
        return False
    if len(select(turn, members + new)) <= len(world.members):
        return False
    oldest = min(live.joined_at.get(node.name, turn.now) for node in new)
    if not job.has_session:
        # Nor has one said hello yet: what an earlier epoch committed does not count, or no world would ever start.
        since = max(oldest, live.phase_since, live.forgiven_at)
        # After an outage a hello may still be on its way.
        heard = turn.due(max(live.phase_since, live.forgiven_at) + job.settings.node_timeout)
        return (heard and live.committed_at > since) or turn.due(since + job.settings.grow_wait)
    if live.first_step_at is None or live.grow_after_commit:
        return False
    if not turn.due(max(live.grow_hold_until, (live.growth_done_at or float("-inf")) + grow_interval(turn))):
        return False
    return all(node.warm for node in new) or turn.due(oldest + WARM_LIMIT)


def grow_interval(turn: Turn) -> float:
    """Least seconds between two growths."""
    job = turn.job
    if job.settings.grow_interval >= 0:
        return job.settings.grow_interval
    return min(GROW_MAX, GROW_FACTOR * job.growth_cost) if job.growths else 0.0


# ---- draining -------------------------------------------------------------------------------------------------------


def start_drain(turn: Turn, growth: bool, reason: str) -> None:
    """Everybody saves at one boundary and stops."""
    turn.job.drain = Drain(growth=growth, reason=reason)
    turn.live.drain_deadline = turn.now + turn.job.settings.drain_timeout if growth else notice_end(turn)
    turn.enter(Phase.DRAINING)


def notice_end(turn: Turn) -> float:
    """When the first of the leavers is gone."""
    job, live = turn.job, turn.live
    ends = [live.leave_by[name] for name, node in job.nodes.items() if node.leaving and name in live.leave_by]
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
    if leaving and drain.growth:
        drain.growth = False
        live.drain_deadline = notice_end(turn)
        return True
    if drain.growth and not drain.agreed and not drained and not newcomers(turn, presumed=True):
        withdraw(turn, "the newcomer is gone")
        return True
    # A growth's drain may take as long as ranks advance or its save grows; a leaver's notice runs out regardless.
    deadline = live.drain_deadline or turn.now
    if drain.growth:
        deadline = max(deadline, live.moved_at + job.settings.drain_timeout)
    if not turn.due(deadline):
        return False
    if drain.growth and not drain.agreed and not drained:
        withdraw(turn, f"the ranks did not agree on a boundary within {job.settings.drain_timeout:.0f} s")
    else:
        turn.notice(f"the drain ({drain.reason}) did not end in time: going back to the last commit", True)
        job.causes.append("drain timed out")
        unplanned(turn)
    return True


def withdraw(turn: Turn, why: str) -> None:
    """The growth does not happen now; the ranks train on, and it is tried again at the next commit."""
    turn.notice(f"growing is put off: {why}")
    turn.job.drain = None
    turn.job.grown = False
    turn.live.drain_deadline = None
    turn.live.grow_after_commit = True
    turn.live.moved_at = turn.now
    turn.enter(Phase.RUNNING)


# ---- the first step, and the end ------------------------------------------------------------------------------------


def first_step(turn: Turn) -> None:
    """The open epoch has made its first step: say what the change cost."""
    job, live = turn.job, turn.live
    world = world_of(turn)
    live.first_step_at = turn.now
    job.ever_stepped = True
    if world.announced:
        return
    world.announced = True
    paused = turn.now - live.paused_since if live.paused_since is not None else 0.0
    lost = max(0, world.left_step - world.resumed_step)
    if world.grown:
        job.growths += 1
        job.growth_cost = paused
        live.growth_done_at = turn.now
    cause = ", ".join(world.causes)
    count = len(world.members)
    text = f"epoch {world.epoch}: {cause}, {count} node{'s' if count != 1 else ''}"
    if world.resume:
        text += f", resumed at step {world.resumed_step}" + (" (universal)" if world.universal else "")
    else:
        text += ", from step 0"
    if world.epoch > 1 and live.paused_since is not None:
        text += f", paused {paused:.1f} s, lost {lost} step{'s' if lost != 1 else ''}"
    turn.notice(text)
    job.history.append(
        EpochRecord(
            world.epoch,
            count,
            world.size,
            cause,
            world.resumed_step,
            world.universal,
            round(paused, 3),
            lost,
            world.resumed_step + 1,
            world.resumed_step + 1,
        )
    )
    del job.history[:-HISTORY]


def end(turn: Turn, phase: Phase, message: str) -> None:
    """The job is over, well or not."""
    job = turn.job
    job.message = message
    job.conversion = None
    job.verification = None
    job.drain = None
    if job.world is not None and job.history and job.world.announced:
        job.history[-1].last_step = max([*turn.live.steps.values(), job.world.resumed_step])
    turn.notice(message, phase is Phase.FAILED)
    turn.enter(phase)
