"""What this node's ranks report, and how they end."""

from __future__ import annotations

from dataclasses import replace

from dalsegno.protos import control_pb2, worker_pb2
from dalsegno.protos.signal_names import how_ended

from . import events as ev
from . import keeping, leaving, memory
from .decision import Decision, has_made_nothing
from .state import Outcome, SaveInFlight, Workers
from .worker_checks import MOST

# The most manifests read at the same time: one follows the other, unless the disk is very slow.
MOST_READING = 64
# Seconds that the master has to answer the report of a failure, before this node tells people of it.
TOLD_AFTER_SECONDS = 5.0


def worker_said(decision: Decision, event: ev.WorkerSaid) -> None:
    """Handles one message of a rank. Messages of an older epoch count only if they report a seal."""
    state, epoch = decision.state, decision.state.epoch
    message = event.message
    body = message.WhichOneof("body")
    if body == "sealed":
        if message.sealed.in_memory:
            memory.sealed(decision, event.epoch, message.sealed)
            if event.epoch == state.started:
                keeping.kept(decision, event.rank, message.sealed.digest)
            return
        if len(state.errands.reading) >= MOST_READING:
            return  # no script seals so fast; what is sealed lies on the disk, and is found there
        if event.epoch == state.started:
            epoch.sealed_step = max(epoch.sealed_step, message.sealed.step)
        # Worth recording whatever became of these workers since; the master refuses what comes too late.
        state.errands.reading = state.errands.reading | {message.sealed.name}
        state.took_seconds = {**state.took_seconds, message.sealed.name: message.sealed.seconds}
        decision.do(ev.ReadManifest(message.sealed.name, message.sealed.digest))
        return
    if event.epoch != state.started or state.workers is Workers.NONE:
        return
    match body:
        case "hello":
            session_begins(decision, event.rank)
        case "ready":
            epoch.start = replace(epoch.start, loaded_seconds=decision.now - epoch.start.began)
        case "keeping":
            keeping.writes(decision, event.rank, stays=message.keeping.stays)
        case "progress":
            keeping.may_keep(decision, event.rank, message.progress.may_keep)
            progress(decision, event.rank, message.progress)
        case "saving":
            saving(decision, event.rank, message.saving)
        case "draining":
            # Not if they have gone on since: then the drain was withdrawn.
            epoch.agreed = epoch.agreed or message.draining.step >= epoch.step
            epoch.step = max(epoch.step, message.draining.step)
            decision.report_progress()
        case "save_failed":
            save_failed(decision, event.rank, message.save_failed)
        case "drained":
            epoch.drained_ranks = epoch.drained_ranks | {event.rank}
            if message.drained.name:
                epoch.drained = control_pb2.CheckpointRef(name=message.drained.name, digest=message.drained.digest)
                epoch.drained_in_memory = message.drained.in_memory
            epoch.step = max(epoch.step, message.drained.step)
        case "finished":
            epoch.finished_ranks = epoch.finished_ranks | {event.rank}
            epoch.step = max(epoch.step, message.finished.step)
            decision.report_progress()
        case "bad_checkpoint":
            bad_checkpoint(decision, message.bad_checkpoint)
        case "peer_lost":
            epoch.peer_lost = epoch.peer_lost | {event.rank}
        case "refused":
            epoch.refusals = {**epoch.refusals, event.rank: message.refused.message or "it did not say why"}


def session_begins(decision: Decision, rank: int) -> None:
    """A rank has its session, in which it would wait for one that has ended before it had one."""
    state, epoch = decision.state, decision.state.epoch
    epoch.has_session = state.session_known = True
    epoch.start = replace(epoch.start, session_seconds=decision.now - epoch.start.began)
    decision.report_progress()
    if state.workers is not Workers.RUNNING or epoch.own_save.until is not None:
        return
    said = {rank, *epoch.finished_ranks, *epoch.drained_ranks}
    for local_rank, code in epoch.exits:
        if code == 0 and global_rank(decision, local_rank) not in said:
            epoch.outcome = Outcome.FAILED
            text = f"local rank {local_rank} exited with code 0 without session(), which rank {rank} calls"
            report_failure(decision, f"{text}: all ranks of a script have to call it, or none", 0)
            decision.kill_workers()
            return


def manifest_read(decision: Decision, event: ev.ManifestRead) -> None:
    """A seal can be recorded now, or its manifest cannot be read.

    What is gone is said in the same words each time: after a Ctrl-Z it may be many, and a console says a line once.
    """
    state = decision.state
    state.errands.reading = state.errands.reading - {event.name}
    seconds = state.took_seconds.get(event.name, 0.0)
    state.took_seconds = {name: took for name, took in state.took_seconds.items() if name in state.errands.reading}
    if event.gone:
        gone = (
            "what was sealed here is gone from the disk: others recorded it and made room, or went on without it,"
            " while this node stood still; or somebody deleted it"
        )
        decision.do(ev.Say(gone, True))
        return
    if event.checkpoint is None:
        decision.do(ev.Say(f"checkpoint {event.name} cannot be recorded: {event.message}", True))
        return
    decision.call(
        "CommitCheckpoint",
        control_pb2.CommitRequest(
            caller=decision.caller(event.checkpoint.epoch), checkpoint=event.checkpoint, seconds=seconds
        ),
    )


def session_imported(decision: Decision, event: ev.SessionImported) -> None:
    """Tells the master that session() may come, so that it does not take a slow start for a script without one."""
    state, epoch = decision.state, decision.state.epoch
    if event.epoch == state.started and state.workers is Workers.RUNNING and not epoch.expects_session:
        epoch.expects_session = True
        decision.report_progress()


def progress(decision: Decision, rank: int, progress: worker_pb2.Progress) -> None:
    """A rank has made a step, or is busy between two steps."""
    epoch = decision.state.epoch
    if progress.step > epoch.step:
        # Before the first step nothing is saved, and a boundary that lies behind the ranks is not the end.
        epoch.agreed, epoch.saving = False, SaveInFlight(epoch.saving.name, epoch.saving.parts)
    if rank in epoch.refusals:
        # The script went on, so the refusal was not what it ends with.
        epoch.refusals = {other: why for other, why in epoch.refusals.items() if other != rank}
    epoch.peer_lost = epoch.peer_lost - {rank}
    if progress.step >= epoch.step:
        epoch.step = progress.step
        epoch.loss = progress.loss
    epoch.longest_seconds = max(epoch.longest_seconds, progress.longest, progress.seconds)
    epoch.anyone_sees_master, epoch.saves_nothing = progress.anyone_sees_master, progress.saves_nothing
    if progress.beats > epoch.beats.get(rank, 0):
        epoch.beats = {**epoch.beats, rank: progress.beats}
    decision.report_progress()


def rank_ends(decision: Decision, event: ev.StepsCounted | ev.EndedWell) -> None:
    """A process has ended, of which the exit is not reported yet."""
    if isinstance(event, ev.StepsCounted):
        steps_counted(decision, event)
    else:
        ended_well(decision, event)


def ended_well(decision: Decision, event: ev.EndedWell) -> None:
    """Tells the master that nothing is left to train here: a script without a session says so only by its end.

    Otherwise the commit of its last save would let newcomers in, and all would start again.
    """
    state, epoch = decision.state, decision.state.epoch
    if event.epoch != state.started or state.workers is not Workers.RUNNING or epoch.has_session:
        return
    epoch.ended_well = epoch.ended_well | {event.rank}
    if len(epoch.ended_well) == state.settings.nproc:
        epoch.finished_ranks = epoch.ended_well
        decision.report_progress()


def steps_counted(decision: Decision, event: ev.StepsCounted) -> None:
    """Takes the exact last step, because a rank reports its steps only now and then."""
    state, epoch = decision.state, decision.state.epoch
    if event.epoch != state.started or state.workers is Workers.NONE:
        return
    epoch.counted = True
    if event.step > epoch.step:
        # The ranks went on after the boundary, if there was one.
        epoch.agreed, epoch.step = False, event.step


def saving(decision: Decision, rank: int, saving: worker_pb2.Saving) -> None:
    """Adds the growth of this rank's part of the save: the master gets one count that only grows in an epoch."""
    epoch = decision.state.epoch
    parts = epoch.saving.parts if saving.name == epoch.saving.name else {}
    written_bytes = {**epoch.saving.written_bytes, rank: saving.written}
    known = parts.get(rank, 0)
    if saving.bytes > known:
        # A script can report any number; the report to the master has 64 bits.
        epoch.saved_bytes = min(epoch.saved_bytes + saving.bytes - known, MOST)
        parts = {**parts, rank: saving.bytes}
    problems = {**epoch.saving.problems, rank: saving.problem}
    epoch.saving = SaveInFlight(saving.name, parts, written_bytes, problems)
    decision.report_progress()


def save_ended(decision: Decision) -> None:
    """Resets the count: the next save starts from nothing, even under the same name."""
    decision.state.epoch.saving = SaveInFlight()


def save_failed(decision: Decision, rank: int, failed: worker_pb2.SaveFailed) -> None:
    """A save failed; all ranks know it and train on. Only the last step's is tried again: no step follows it."""
    epoch, first = decision.state.epoch, rank == global_rank(decision, 0)
    if first:
        epoch.tried_again = not failed.drain and 0 < failed.step == epoch.failed_step
        epoch.failed_step = 0 if failed.drain else failed.step
    epoch.agreed = False
    save_ended(decision)
    known, epoch.save_failure = epoch.save_failure, (failed.step, failed.reason)
    # The last step is tried again and again.
    if decision.is_rank_zero() and epoch.save_failure != known:
        what = failed.name or f"step {failed.step}"  # its directory could not be made
        decision.do(ev.Say(f"saving {what} failed ({failed.reason}): the next save tries again, commits stand", True))
    # Once for each try, so that the master knows another one.
    if failed.drain or (decision.is_rank_zero() and first):
        request = control_pb2.SaveFailedRequest(
            caller=decision.caller(),
            reason=failed.reason,
            step=failed.step,
            name=failed.name,
            regular=not failed.drain,
        )
        decision.call("ReportSaveFailed", request)


def bad_checkpoint(decision: Decision, bad: worker_pb2.BadCheckpoint) -> None:
    """The resume point could not be loaded; reported once for all ranks."""
    if decision.state.epoch.bad_reported:
        return
    decision.state.epoch.bad_reported = True
    decision.do(ev.Say(f"checkpoint {bad.name} cannot be loaded: {bad.file}: {bad.message}", True))
    decision.call(
        "ReportBadCheckpoint",
        control_pb2.BadCheckpointRequest(
            caller=decision.caller(),
            ref=control_pb2.CheckpointRef(name=bad.name, digest=bad.digest),
            form=control_pb2.FORM_UNIVERSAL if bad.form == control_pb2.FORM_UNIVERSAL else control_pb2.FORM_SHARDED,
            file=bad.file,
            message=bad.message,
        ),
    )
    memory.doubt(decision, control_pb2.CheckpointRef(name=bad.name, digest=bad.digest))


def worker_exited(decision: Decision, event: ev.WorkerExited) -> None:
    """One rank ended; the others of this node follow, or are made to."""
    state, epoch = decision.state, decision.state.epoch
    if event.epoch != state.started or state.workers is not Workers.RUNNING:
        return
    epoch.exits = (*epoch.exits, (event.local_rank, event.code))
    if epoch.own_save.until is not None:
        return  # Why the world has broken is known.
    drained = event.code in (0, ev.WORKER_DRAINED) and has_drained(decision, event.local_rank)
    # A script may end with any code: it is a drain only if somebody wanted one, or if a process that has stayed leaves
    # its place to a new one, because it cannot follow the others there.
    gives_way = event.had_stayed and has_made_nothing(state)
    drained = drained or (event.code == ev.WORKER_DRAINED and (is_draining(decision) or gives_way))
    refusal = epoch.refusals.get(global_rank(decision, event.local_rank))
    if refusal is not None and not drained:
        worker_refused(decision, refusal, event.code)
    elif event.code != 0 and not drained:
        worker_failed(decision, event)
    elif not drained and epoch.has_session and global_rank(decision, event.local_rank) not in epoch.finished_ranks:
        worker_gave_up(decision, event.local_rank)
    elif len(epoch.exits) == state.settings.nproc:
        workers_ended(decision)


def is_draining(decision: Decision) -> bool:
    """Whether the ranks were to save and end, or have said that they do."""
    state = decision.state
    told = state.drain is not None or state.leaving or state.contact.drain
    return told or state.epoch.agreed or state.epoch.drained is not None


def has_drained(decision: Decision, local_rank: int) -> bool:
    """Whether this rank reported that it drained, whatever exit status the script made of it."""
    return global_rank(decision, local_rank) in decision.state.epoch.drained_ranks


def global_rank(decision: Decision, local_rank: int) -> int:
    """A rank's number in the world that this node started last; -1 if it has no place in that."""
    world = decision.state.world
    if world is None or world.place.incarnation != decision.state.incarnation:
        return -1
    return int(world.place.first_rank) + local_rank


def worker_refused(decision: Decision, refusal: str, code: int) -> None:
    """A rank ended because all ranks agree that no rank may train what they were given."""
    decision.state.epoch.outcome = Outcome.FAILED
    report_failure(decision, refusal, code & 0xFF, control_pb2.FAILURE_KIND_REFUSED)
    decision.kill_workers()


def worker_gave_up(decision: Decision, local_rank: int) -> None:
    """A script with a session exited with 0 without reporting its training finished: a success would end the run."""
    decision.state.epoch.outcome = Outcome.FAILED
    text = (
        f"local rank {local_rank} exited with code 0 at step {decision.state.epoch.step}, but its training is not"
        " finished: a script that leaves its loop early calls session.finish() on all its ranks when it is done"
    )
    report_failure(decision, text, 0)
    decision.kill_workers()


def worker_failed(decision: Decision, event: ev.WorkerExited) -> None:
    """A rank failed: the rest of this node stops, and the master hears the reason."""
    epoch = decision.state.epoch
    epoch.outcome = Outcome.FAILED
    if event.code == ev.WORKER_BAD_CHECKPOINT and epoch.bad_reported:
        decision.kill_workers()
        return
    if event.code == ev.WORKER_BAD_CHECKPOINT and epoch.has_session:
        # A rank of another node found the damage and told its own agent, so this is no failure of ours.
        text = f"local rank {event.local_rank} stopped: another node could not load the resume point"
        report_failure(decision, text, event.code, control_pb2.FAILURE_KIND_PEER)
        decision.kill_workers()
        return
    text = f"local rank {event.local_rank} {how_ended(event.code)}" + (f": {event.message}" if event.message else "")
    report_failure(decision, text, event.code & 0xFF, whose(decision, event))
    keeping.end_workers(decision)


def whose(decision: Decision, event: ev.WorkerExited) -> control_pb2.FailureKind.ValueType:
    """On which node the cause of a rank's end lies. It only decides which node people are told of first.

    A session knows it. For a script without one only its output can tell.
    """
    epoch = decision.state.epoch
    if epoch.has_session:
        elsewhere = global_rank(decision, event.local_rank) in epoch.peer_lost
    else:
        elsewhere = event.tells_of_a_peer
    return control_pb2.FAILURE_KIND_PEER if elsewhere else control_pb2.FAILURE_KIND_WORKER


def report_failure(
    decision: Decision, text: str, code: int, kind: control_pb2.FailureKind.ValueType = control_pb2.FAILURE_KIND_WORKER
) -> None:
    """Tells the master why the ranks of this node ended. It tells people; without an answer of it this node does."""
    decision.state.epoch.untold_failure = text, decision.now + TOLD_AFTER_SECONDS
    decision.call(
        "ReportFailure",
        control_pb2.FailureRequest(
            caller=decision.caller(),
            kind=kind,
            exit_code=code,
            message=text,
            step=decision.state.epoch.step,
        ),
    )


def tell_failure(decision: Decision) -> None:
    """Says why the ranks failed, if the master, which would say so on all consoles, does not answer."""
    epoch = decision.state.epoch
    if epoch.untold_failure is None:
        return
    text, due = epoch.untold_failure
    if decision.now < due:
        decision.wake_at(due)
        return
    epoch.untold_failure = None
    decision.do(ev.Say(f"{text}; the master, which decides how to go on, does not answer and is waited for", True))


def start_failed(decision: Decision, event: ev.StartFailed) -> None:
    """The ranks could not be started at all."""
    state = decision.state
    if event.epoch != state.started or state.workers is not Workers.RUNNING:
        return
    if event.unfit:
        leaving.unfit(decision, event.message)
        return
    state.epoch.outcome = Outcome.FAILED
    report_failure(decision, event.message, 1)
    decision.kill_workers()


def workers_ended(decision: Decision) -> None:
    """Every rank of this node ended without an error: drained if any of them drained, else finished."""
    state, epoch = decision.state, decision.state.epoch
    state.workers = Workers.NONE
    codes = [code for _, code in epoch.exits]
    drained = ev.WORKER_DRAINED in codes or any(has_drained(decision, rank) for rank, _ in epoch.exits)
    epoch.outcome = Outcome.DRAINED if drained else Outcome.FINISHED
    if not state.contact.up and not state.leaving:
        # A leaver does not wait, and its last line says how it ended.
        how = "drained" if drained else "finished"
        decision.do(
            ev.Say(f"the workers of this node have {how}; it waits for the master, which cannot be reached", True)
        )


def check_stopping(decision: Decision) -> None:
    """At their deadline, workers that were told to stop count as gone even if nothing is heard of their end."""
    state = decision.state
    if state.workers is not Workers.STOPPING:
        return
    if decision.now < state.stop_deadline:
        decision.wake_at(state.stop_deadline)
        return
    decision.do(ev.Say("the workers did not end in time and are given up; some may be left, stuck in the kernel", True))
    workers_stopped(decision, state.started)


def workers_stopped(decision: Decision, epoch: int, *, answered: bool = False) -> None:
    """The workers that were told to stop are gone."""
    state = decision.state
    if epoch != state.started or state.workers is not Workers.STOPPING:
        return
    state.workers = Workers.NONE
    state.epoch.answered = answered
    if state.epoch.self_fenced and state.epoch.outcome is Outcome.NONE and not state.fenced:
        # The master, when it is heard again, starts this node's ranks anew as after any drain.
        state.epoch.outcome = Outcome.DRAINED
        state.epoch.exits = tuple((rank, ev.WORKER_DRAINED) for rank in range(state.settings.nproc))
    if state.epoch.outcome is Outcome.NONE:
        state.epoch.outcome = Outcome.STOPPED
    if state.fenced:
        decision.register_again()
