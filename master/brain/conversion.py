"""The lease to make a checkpoint's universal form, and the verification of a checkpoint that a node could not load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dalsegno.protos import control_pb2
from dalsegno.protos.limits import MOST_EARLIER

from . import failures
from .checkpoints import cannot_convert, drop_form, resume_point, retire
from .live import ConversionLife, LeaseLife, VerificationLife
from .membership import has_answered, in_rank_order, sees_resume
from .state import Checkpoint, Conversion, Failure, Node, Verification
from .turn import Turn

# Seconds after which a lease whose owner moves no further byte is given to another node.
STALL_SECONDS = 120.0
# Not every byte is seen while it moves: a whole file is synced, or mapped and copied, in one call. So the limit is at
# least the time that the source's largest file takes on a slow network disk (bytes per second).
SLOW_DISK = 20e6
# Seconds after which a verifier that reads no further byte and does not answer is replaced.
VERIFY_STALL_SECONDS = 600.0
# After so many verifications without a verdict the job waits, and says why: that is no accident.
VERIFY_TRIES = 2
UNABLE_KEPT = 64
# Seconds until somebody is asked again after a failed conversion, or a verification without a verdict; they double.
FIRST_RETRY_SECONDS = 5.0
MAX_RETRY_SECONDS = 60.0


def tend(turn: Turn, source: Checkpoint) -> None:
    """Makes sure that a live node makes the universal form of `source`, which the gate wants."""
    conversion = turn.job.conversion
    if conversion is None or conversion.source != source.digest:
        conversion = Conversion(source=source.digest)
        turn.update_next(conversion=conversion)
        turn.live.conversion = ConversionLife()
    if source.unconvertible:
        if not conversion.blocked:
            change(turn, conversion, blocked=True, lease=0, owner="", reason=source.unconvertible)
        return
    if conversion.lease:
        conversion = check_owner(turn, conversion)
    if not conversion.lease and not conversion.blocked:
        assign(turn, conversion, source)


def change(turn: Turn, conversion: Conversion, **changes: Any) -> Conversion:
    """The conversion with some fields changed."""
    new = replace(conversion, **changes)
    turn.update_next(conversion=new)
    return new


def note_earlier(turn: Turn, conversion: Conversion, name: str) -> None:
    """Notes where a lease converts, for those behind it.

    Each takes over what those before it had finished, so the newest ones have all of it.
    """
    change(turn, conversion, earlier=(*conversion.earlier, name)[-MOST_EARLIER:])


def retry(turn: Turn) -> None:
    """Lets a node try again after a pause."""
    conversion = turn.job.conversion
    if conversion is not None and conversion.blocked and not is_vain(turn) and turn.due(turn.live.conversion.retry_at):
        unblock(turn)


def check_owner(turn: Turn, conversion: Conversion) -> Conversion:
    """Replaces an owner that is gone, leaving or stuck. Returns the new conversion."""
    owner = turn.job.nodes.get(conversion.owner)
    if owner is None or owner.leaving or not turn.is_fresh(owner):
        turn.notice(f"{conversion.owner} can no longer convert: another node takes over")
        return end_lease(turn, conversion)
    limit = stall_limit(turn.job.checkpoint(conversion.source))
    if turn.overdue(turn.live.conversion.lease.moved + limit):
        return failed(turn, conversion, f"no progress for {limit:.0f} s")
    return conversion


def stall_limit(source: Checkpoint | None) -> float:
    """Seconds that the conversion of `source` may go without a sign of progress."""
    # Records of an older version only have the size of the whole.
    largest = (source.largest_file or source.bytes) if source is not None else 0
    return max(STALL_SECONDS, largest / SLOW_DISK)


def end_lease(turn: Turn, conversion: Conversion) -> Conversion:
    """Ends the lease; nobody converts then."""
    return change(turn, conversion, lease=0, owner="")


def assign(turn: Turn, conversion: Conversion, source: Checkpoint) -> None:
    """Gives the lease to the first agent in the old rank order that is alive, not leaving, and sees the source."""
    job = turn.job
    able = [
        node
        for node in job.nodes.values()
        if not node.leaving
        and node.sees_directory
        and node.unreadable != source.digest
        and turn.is_fresh(node)
        and node.name not in conversion.failed
    ]
    for node in in_rank_order(turn.job, able):
        if not has_answered(turn, node):
            if nobody_waits_for(turn, node):
                continue  # nothing would ever end its turn
            return  # it is about to answer, and its turn comes first
        if sees_resume(turn, node):
            lend(turn, conversion, node)
            return
    if conversion.failed:
        block(turn, conversion)


def lend(turn: Turn, conversion: Conversion, node: Node) -> None:
    """A node gets the lease, under a number of its own."""
    turn.job.leases += 1
    change(turn, conversion, lease=turn.job.leases, owner=node.name)
    turn.live.conversion.lease = LeaseLife(turn.heard)


def nobody_waits_for(turn: Turn, node: Node) -> bool:
    """Whether the node has not answered, and gathering goes on without it."""
    gathering = turn.live.gathering
    loops = gathering.is_crash_looping(node.name, turn.now)
    resume = resume_point(turn.job)
    is_spare = bool(node.refused) or (resume is not None and node.unreadable == resume.digest)
    return node.name in gathering.overdue or loops or turn.is_held(node) or is_spare


def block(turn: Turn, conversion: Conversion) -> Conversion:
    """Notes that nobody can convert for now. The run goes on as it can; an agent tries again after doubling pauses."""
    life = turn.live.conversion
    if conversion.blocked:
        return conversion
    life.retry_pause_seconds = (
        min(MAX_RETRY_SECONDS, life.retry_pause_seconds * 2) if life.retry_pause_seconds else FIRST_RETRY_SECONDS
    )
    life.retry_at = turn.now + life.retry_pause_seconds
    return change(turn, conversion, blocked=True)


def failed(turn: Turn, conversion: Conversion, reason: str) -> Conversion:
    """ENVIRONMENT: one more agent tries. Returns the conversion as it is then."""
    if not conversion.beside or conversion.reason != reason:
        # Beside a training it may be tried again for hours: each reason is said once.
        turn.notice(f"converting on {conversion.owner} failed: {reason}", True)
    who = conversion.failed if conversion.owner in conversion.failed else (*conversion.failed, conversion.owner)
    conversion = change(turn, conversion, failed=who, reason=reason, lease=0, owner="")
    return block(turn, conversion) if len(who) >= 2 else conversion


def is_vain(turn: Turn) -> bool:
    """Whether the universal form that the gate wants can never be made."""
    conversion = turn.job.conversion
    source = turn.job.checkpoint(conversion.source) if conversion is not None else None
    return source is not None and bool(source.unconvertible)


def unblock(turn: Turn) -> None:
    """Lets a node try again at once, because a node joined."""
    conversion = turn.job.conversion
    if conversion is not None and conversion.blocked and not is_vain(turn):
        change(turn, conversion, blocked=False, failed=())


def report(turn: Turn, node: Node, request: control_pb2.ConversionReport) -> tuple[str, str]:
    """Handles a report of a lease's owner. Returns (status code, detail)."""
    conversion = turn.job.conversion
    if conversion is None and request.state == control_pb2.CONVERSION_STATE_READY:
        return "OK", ""  # its commit has opened the world already
    if conversion is None or not request.lease or conversion.lease != request.lease or conversion.owner != node.name:
        return "FAILED_PRECONDITION", f"lease {request.lease} is no longer held by {node.name}"
    source = turn.job.checkpoint(conversion.source)
    if request.state == control_pb2.CONVERSION_STATE_WORKING:
        known = turn.live.conversion.lease
        if request.files_done > known.files or request.bytes_done > known.bytes:
            files, moved = max(known.files, request.files_done), max(known.bytes, request.bytes_done)
            turn.live.conversion.lease = LeaseLife(turn.heard, files, moved)
    elif request.state == control_pb2.CONVERSION_STATE_READY:
        if source is None or not source.universal_digest:
            failed(turn, conversion, "ready without a committed form")
    elif request.state == control_pb2.CONVERSION_STATE_SOURCE_BAD and not conversion.beside:
        # Whoever loads what is owed finds the damage, too: the world that has loaded it trains.
        end_lease(turn, conversion)
        if source is not None:
            suspect(turn, source, False, node.name, request.message)
    elif request.state == control_pb2.CONVERSION_STATE_IMPOSSIBLE and source is not None:
        cannot_convert(turn, source, request.message)
        end_lease(turn, conversion)
    else:
        failed(turn, conversion, request.message or "no reason given")
    return "OK", ""


def suspect(turn: Turn, record: Checkpoint, universal: bool, reporter: str, message: str) -> None:
    """Has a checkpoint that a node could not read verified before anything is concluded."""
    job = turn.job
    if job.verification is not None:
        return
    job.verifications += 1
    verification = Verification(job.verifications, record.digest, universal, reporter, message=message)
    turn.update_next(verification=verification)
    turn.live.verification = VerificationLife(turn.heard)
    name = record.universal_name if universal else record.name
    turn.notice(f"{reporter} cannot read {name} ({message}): it is being verified", True)


def tend_verification(turn: Turn) -> None:
    """Makes sure that a live node verifies, if possible another than the reporter."""
    verification = turn.job.verification
    if verification is None:
        return
    record = turn.job.checkpoint(verification.digest)
    if record is None or (verification.universal and not record.universal_digest):
        turn.update_next(verification=None)
        return
    if gave_up_form(turn, verification, record):
        return
    verifier = turn.job.nodes.get(verification.verifier)
    usable = verifier is not None and not verifier.leaving and turn.is_fresh(verifier)
    if not verification.number:
        if not turn.due(turn.live.verification.retry_at):
            return
    elif usable:
        if not turn.overdue(turn.live.verification.moved + VERIFY_STALL_SECONDS):
            return
        verification = inconclusive(turn, verification, f"nothing read for {VERIFY_STALL_SECONDS:.0f} s")
    ask(turn, verification)


def ask(turn: Turn, verification: Verification) -> None:
    """Gives the order to verify. A node that was asked before, or the reporter, gets it only if there is no other.

    A node that keeps crashing comes last of all.
    """
    able = [
        node
        for node in in_rank_order(turn.job, list(turn.job.nodes.values()))
        if node.sees_directory and not node.leaving and turn.is_fresh(node)
    ]
    if not able:
        return
    unable, asked, reporter = verification.unable, verification.verifier, verification.reporter
    loops = turn.live.gathering.is_crash_looping

    def last_resort(node: Node) -> tuple[int, ...]:
        name = node.name
        return loops(name, turn.now), unable.count(name), name == asked, name == reporter

    chosen = min(able, key=last_resort)
    turn.job.verifications += 1
    turn.update_next(verification=replace(verification, number=turn.job.verifications, verifier=chosen.name))
    turn.live.verification = VerificationLife(turn.heard)


def verify_pause(verification: Verification) -> float:
    """Seconds to wait after a verification without a verdict."""
    return min(MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** max(0, len(verification.unable) - 1))


def verify_at_once(turn: Turn) -> None:
    """Has it verified at once, because a node joined that may be able to read what others could not."""
    verification = turn.job.verification
    if verification is not None and not verification.number:
        turn.live.verification.retry_at = turn.now


def cannot_verify(turn: Turn) -> bool:
    """Whether nobody has been able to say if a checkpoint is damaged."""
    verification = turn.job.verification
    return verification is not None and is_unable(verification)


def is_unable(verification: Verification) -> bool:
    return len(verification.unable) >= VERIFY_TRIES


def verified(turn: Turn, node: Node, request: control_pb2.VerificationReport) -> tuple[str, str]:
    """Handles a verification's progress or verdict. Returns (status code, detail)."""
    job = turn.job
    verification = job.verification
    wanted = verification.number if verification is not None else 0
    if verification is None or not wanted or wanted != request.number or verification.verifier != node.name:
        return "FAILED_PRECONDITION", f"verification {request.number} is no longer wanted"
    if request.working:
        life = turn.live.verification
        if request.bytes_done > life.bytes:
            life.bytes, life.moved = request.bytes_done, turn.heard
        return "OK", ""
    if request.inconclusive:
        inconclusive(turn, verification, request.message)
        return "OK", ""
    turn.update_next(verification=None)
    record = job.checkpoint(verification.digest)
    if record is None:
        return "OK", ""
    if request.intact:
        acquit(turn, verification, record)
    elif verification.universal:
        turn.notice(f"{record.universal_name} is damaged ({request.message}): it is made anew", True)
        drop_form(job, record)
    else:
        retire(job, record, damaged=True)
        before = resume_point(job)
        back = f"going back to {before.name}" if before is not None else "no checkpoint is left: starting from step 0"
        turn.notice(f"{record.name} is damaged ({request.message}): {back}", True)
    return "OK", ""


def inconclusive(turn: Turn, verification: Verification, reason: str) -> Verification:
    """Handles a file system failure, which is no verdict: another node is asked, or the same one again later."""
    if verification.message != reason:
        turn.notice(f"{verification.verifier} cannot verify the checkpoint ({reason}): it is tried again", True)
    # The order with this number is answered; `verifier` still names the node that was asked last.
    unable = (*verification.unable, verification.verifier)[-UNABLE_KEPT:]
    new = replace(verification, message=reason, number=0, unable=unable)
    turn.update_next(verification=new)
    turn.live.verification.retry_at = turn.now + verify_pause(new)
    return new


def gave_up_form(turn: Turn, verification: Verification, record: Checkpoint) -> bool:
    """Drops a later form if nobody could say whether it is damaged: it can be made again, so nothing is lost."""
    if not verification.universal or not is_unable(verification):
        return False
    turn.update_next(verification=None)
    turn.notice(f"{record.universal_name} can be neither loaded nor verified ({verification.message}): made anew", True)
    drop_form(turn.job, record)
    return True


def acquit(turn: Turn, verification: Verification, record: Checkpoint) -> None:
    """Handles a sound checkpoint: the reporter becomes a spare. If no other node is left, it counts as a failure."""
    job = turn.job
    reporter = job.nodes.get(verification.reporter)
    if reporter is not None and reporter.joined is not None:
        # This report is settled. What the node sees by now comes with its next Join.
        turn.update(reporter, joined=replace(reporter.joined, unusable=frozenset()))
    if verification.verifier != verification.reporter and reporter is not None:
        turn.update(reporter, unreadable=record.digest)
        turn.notice(f"{record.name} verifies on {verification.verifier}: {reporter.name} becomes a spare", True)
    elif job.world is not None:
        text = f"{record.name} verifies but does not load"
        failures.blame(turn, Failure(job.world.epoch, verification.reporter, text, record.step))
