"""A drain's save: what people hear of it, and which rank ends it if a leaver's notice runs out too early."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dalsegno.protos import control_pb2

from . import memory, waits
from .chronicle import Kind
from .live import AwaitedSave, State
from .state import Job, Member, MemberState, Node
from .turn import Turn, names, world_of

# Seconds after which people are told of a save that goes on; told again each time that has doubled.
TOLD_AFTER_SECONDS = 5.0
# The advice for --drain-timeout: so many times what a save took, in steps of 10 s.
ADVISED = 2.5


def await_save(turn: Turn, what: str) -> None:
    """Notes that the ranks save and `what` waits for it, and says so if it takes long."""
    life = turn.drain_life
    if life.awaited is None:
        life.awaited = AwaitedSave(turn.heard, turn.heard + TOLD_AFTER_SECONDS, 0)
        note_written(turn)
    save = life.awaited
    if not turn.overdue(save.told_at):
        return
    seconds = turn.heard - save.since
    save.told_at = save.since + 2 * seconds
    if is_committed(turn):
        saved = f"step {turn.open.top_step} is saved, {seconds:.0f} s have passed"
        others = names(one.node for one in world_of(turn).members if turn.job.part(one) is MemberState.RUNNING)
        turn.notice(f"{what} waits for the ranks of {others} to end: {saved}")
        return
    # Bytes are told by agents. Where one is silent, nobody knows what its ranks write.
    far = waits.unheard(turn) or f"nothing is written after {seconds:.0f} s"
    if save.written_bytes:
        far = f"{amount(save.written_bytes)} written in {seconds:.0f} s ({amount(save.written_bytes / seconds)}/s)"
    turn.notice(f"{what} waits for the save of step {turn.open.top_step}: {far}")


def note_failure(turn: Turn, message: control_pb2.SaveFailedRequest) -> None:
    """Keeps among the events why a save failed, once for each reason until something is committed.

    The agent of the first rank has told its console.
    """
    if turn.open.failure_told == message.reason:
        return
    turn.open.failure_told = message.reason
    order = turn.job.save_order
    ordered = "; the order to save still stands" if order is not None and message.step > order.after else ""
    what = message.name or f"step {message.step}"
    text = f"saving {what} failed ({message.reason}): the next save tries again, commits stand{ordered}"
    turn.note(Kind.REMARK, text, warning=True, step=message.step)


def note_attempt(turn: Turn, message: control_pb2.SaveFailedRequest) -> None:
    """Notes that a save failed that was no drain's. Only the last step is saved again and again: no step follows it."""
    epoch = turn.open
    epoch.tried_again = message.reason if 0 < message.step == epoch.failed_step else ""
    epoch.failed_step = message.step


def last_failing(turn: Turn) -> str:
    """The save of the last step, if that is tried again and again, for a line that waits for it; empty: it is not."""
    epoch = turn.open
    saved = turn.job.checkpoints.last_step(turn.job.epoch)
    if not epoch.tried_again or epoch.failed_step < epoch.top_step or epoch.failed_step <= saved:
        return ""
    return f"the save of step {epoch.failed_step}, the last one, which is tried again ({epoch.tried_again})"


def problem(turn: Turn) -> str:
    """Why a rank cannot write its part of the save under way, for the end of a line; empty if none says so."""
    found = [text for _, text in sorted(turn.open.save_problems.items()) if text]
    return f"; a rank's part of a save failed: {found[0]}" if found else ""


def note_written(turn: Turn) -> None:
    """Notes the bytes written. A checkpoint is one directory, so each node sees what all nodes have written.

    Between two parts of a save no node looks. A value of 1 only says that a rank is at work.
    """
    save = None if turn.open.drain is None else turn.open.drain.awaited
    seen = max(turn.open.written_bytes.values(), default=0)
    if save is not None and seen > max(1, save.written_bytes):
        save.written_bytes = seen


def amount(count: float) -> str:
    """A number of bytes, for a person."""
    size, units = count, ["kB", "MB", "GB", "TB"]
    if size < 1000:
        return "1 byte" if f"{size:.0f}" == "1" else f"{size:.0f} bytes"
    while size >= 1000 and units:
        size, unit = size / 1000, units.pop(0)
    return f"{size:.1f} {unit}" if size < 100 else f"{size:.0f} {unit}"


def note_seconds(turn: Turn, step: int, seconds: float) -> None:
    """Says once, after a commit, what the duration of its save means for nodes that have to leave."""
    notice = turn.job.settings.drain_timeout
    if seconds <= notice / 2 or turn.live.slow_save_told:
        return
    turn.live.slow_save_told = True
    advised = 10 * math.ceil(ADVISED * seconds / 10)
    turn.notice(
        f"saving step {step} took {seconds:.0f} s, but a node that leaves has {notice:.0f} s for it: if its notice is"
        f" longer, set --drain-timeout={advised}",
        True,
    )


def is_committed(turn: Turn) -> bool:
    """The boundary that the ranks have agreed on is recorded, or held in memory: what they still do loses nothing."""
    step = turn.open.top_step
    return turn.job.checkpoints.last_step(turn.job.epoch) >= step or memory.is_held(turn, step)


def somebody_stays(job: Job) -> bool:
    """Whether some member is still at work and has no notice."""
    world = job.world
    if world is None or not job.phase.has_workers:
        return True
    at_work = (job.node_by(member.incarnation) for member in world.members if job.part(member) is MemberState.RUNNING)
    return any(node is not None and not node.leaving for node in at_work)


def part_with(turn: Turn, leavers: list[Node]) -> bool:
    """Stops waiting for leavers whose notice has run out. Returns whether there were any."""
    job = turn.job
    gone = [node for node in leavers if (leaves := turn.presence(node).leaves) is None or turn.heard >= leaves]
    for node in gone:
        turn.set_part(job.world.by_incarnation[node.incarnation], MemberState.LEFT)  # type: ignore[union-attr]
    if gone:
        who = names(node.name for node in gone)
        turn.cause(f"{who} left")
        if not is_committed(turn):
            left = "what the others have of it is completed without"
            if MemberState.RUNNING not in job.parts.values():
                left = "no other node is left to complete it"
            turn.notice(f"the notice of {who} is over before the save is: {left}", True)
    return bool(gone)


def may_still_come(turn: Turn) -> bool:
    """Whether a last seal may be on its way, although leavers are no longer waited for and nobody else is at work.

    This holds until they are gone, but no longer than another notice.
    """
    job, epoch = turn.job, turn.open
    if is_committed(turn):
        return False
    here = any(
        part is MemberState.LEFT and job.node_by(incarnation) is not None for incarnation, part in job.parts.items()
    )
    return here and epoch.drain is not None and not turn.overdue(epoch.drain.deadline)


@dataclass(frozen=True)
class LastWriter:
    """The member (by incarnation) that completes a save which leavers had to leave; and whether all others are done."""

    incarnation: str
    alone: bool


def last_writer(job: Job) -> LastWriter | None:
    """The first member in rank order that is still at work; one without a notice comes first.

    None: no leaver had to go before the save was complete.
    """
    world = job.world
    if job.drain is None or world is None or MemberState.LEFT not in job.parts.values():
        return None
    working = [member.incarnation for member in world.members if job.part(member) is MemberState.RUNNING]
    nodes = {incarnation: job.node_by(incarnation) for incarnation in working}
    stays = [incarnation for incarnation, node in nodes.items() if node is not None and not node.leaving]
    return LastWriter((stays or working or [""])[0], len(working) == 1)


def is_left_to_others(state: State, member: Member | None, last: LastWriter | None) -> bool:
    """Whether this member's ranks have written their part of a drain's save and gone, and others still complete it."""
    job = state.job
    if member is None or last is None or not last.incarnation or job.part(member) is not MemberState.DRAINED:
        return False
    return job.checkpoints.last_step(job.epoch) < state.live.epoch.top_step


def ending_of(incarnation: str, last: LastWriter | None) -> control_pb2.Ending.ValueType:
    """How a member's ranks end the drain's save."""
    if last is None:
        return control_pb2.ENDING_TOGETHER
    if incarnation != last.incarnation:
        return control_pb2.ENDING_WRITE
    return control_pb2.ENDING_SEAL if last.alone else control_pb2.ENDING_WAIT
