"""The agent's decisions, pure: `handle(state, event, now) -> (state, actions)`.

No I/O, no clock, no randomness: the shell (`elastic_agent.py`) and the simulator (`tests/simulation`) carry out the
same actions. A directive is a view of what the agent should be doing. So every handler compares it with what the agent
*is* doing and asks for the difference; the same directive again changes nothing.

What happens on which failure:

- a worker ends with an error: the rest of this node's workers are killed (those that may have something to save get a
  moment for it, see `keeping`), the master is told, the agent waits;
- the master is away: the workers go on; calls are kept and repeated; past the outage timeout the node drains if another
  node still reaches the master;
- the master has another token now: the workers go on for as long, save, and this node ends;
- with --self-fence the workers end after a save when nobody has heard the master for that long;
- the agent was declared dead ("fenced"): its workers are killed at once, and it registers anew as a new incarnation;
- the node has another address: its connections are dead, so its workers are killed and it registers anew, too;
- SIGTERM: the flag reaches the workers at once, with or without a master; at the end of the notice they are killed.
"""

from __future__ import annotations

from dataclasses import replace

from dalsegno.protos import control_pb2
from dalsegno.protos.addresses import is_only_here

from . import contact, directives, flash, keeping, leaving, memory, patience, quotes, ranks
from . import events as ev
from .decision import Decision
from .state import Admission, AgentSettings, AgentState, Door, Join, Outcome, Workers, fresh

# Seconds until a Join is tried again: if its store could not be opened, and if it did not see the directory.
JOIN_PAUSE_SECONDS = 1.0
LOOK_AGAIN_SECONDS = 5.0
# After so many tries to fetch the resume point from the memory of nodes the master hears that it does not come.
FETCHES = 2
# How long, and how often, a node that comes back asks for a name that another node holds.
NAME_PATIENCE_SECONDS = 60.0
NAME_PAUSE_SECONDS = 2.0
# The same for a node that has just started: a supervisor may have been quicker than the master, which must still notice
# that the previous agent was killed.
START_PATIENCE_SECONDS = 3.0
START_PAUSE_SECONDS = 0.5

__all__ = ("AgentSettings", "AgentState", "Outcome", "Workers", "fresh", "handle")


def handle(state: AgentState, event: ev.Event, now: float) -> tuple[AgentState, list[ev.Action]]:
    """One step of the agent. `now` is monotonic seconds. Returns the new state and what to do, in order."""
    decision = Decision(state.copy(), now)
    if not state.ended:
        take(decision, event)
        quotes.tell(decision)
    return decision.state, decision.actions


def take(decision: Decision, event: ev.Event) -> None:
    """Passes one event to its handler."""
    patience.leave_out_stops(decision)
    match event:
        case ev.Started():
            decision.register("")
        case ev.Registered():
            registered(decision, event)
        case ev.Postponed():
            postponed(decision, event.detail)
        case ev.Refused():
            refused(decision, event)
        case ev.Directed():
            directives.directed(decision, event.directive)
        case ev.CallFailed():
            contact.call_failed(decision, event)
        case ev.LinkChanged():
            contact.changed(decision, event)
        case ev.RecordingChanged():
            contact.recording(decision, event)
        case ev.Broken():
            decision.kill_workers()
            decision.exit(ev.EXIT_LEFT_UNSAVED, f"{event.detail}; its log has more; the same command joins again")
        case ev.WorkerSaid():
            ranks.worker_said(decision, event)
        case ev.WorkerExited():
            ranks.worker_exited(decision, event)
        case ev.StepsCounted() | ev.EndedWell():
            ranks.rank_ends(decision, event)
        case ev.WorkersStopped():
            ranks.workers_stopped(decision, event.epoch, answered=event.answered)
            flash.stopped(decision, event)
        case ev.FlashSaved():
            flash.saved(decision, event)
        case ev.SessionImported():
            ranks.session_imported(decision, event)
        case ev.StartFailed():
            ranks.start_failed(decision, event)
        case ev.Signalled():
            leaving.signalled(decision, event)
        case ev.StandbyWarm():
            standby_warm(decision, event.epoch)
        case ev.JoinPrepared():
            join_prepared(decision, event)
        case ev.JoinFailed():
            join_failed(decision, event)
        case ev.LooksAgain() | ev.Asked():
            patience.looked(decision, event)
        case ev.Remark():
            decision.do(ev.Say(event.text, event.warning))
        case ev.ManifestRead():
            ranks.manifest_read(decision, event)
        case ev.ConversionUpdate():
            conversion_update(decision, event)
        case ev.VerificationMoved():
            verification_moved(decision, event)
        case ev.VerificationDone():
            verification_done(decision, event)
        case ev.HeldChanged() | ev.Replication() | ev.Doubted() | ev.MadeDurable():
            memory.told(decision, event)
        case ev.Sighted() | ev.Pruned() | ev.RoomMissing():
            disk_told(decision, event)
        case ev.AddressChanged():
            address_changed(decision, event)
        case ev.Tick():
            patience.check_answer(decision)
    if not decision.state.ended:
        settle(decision)


def disk_told(decision: Decision, event: ev.Sighted | ev.Pruned | ev.RoomMissing) -> None:
    """The checkpoint directory was looked at, or checkpoints were deleted there."""
    caller = decision.caller()
    if isinstance(event, ev.Sighted):
        decision.call("ReportSighted", control_pb2.SightedRequest(caller=caller, ref=event.ref))
    elif isinstance(event, ev.Pruned):
        decision.state.errands.pruning = ()
        decision.call("ReportPruned", control_pb2.PrunedRequest(caller=caller, refs=event.refs))
    elif decision.is_rank_zero():
        missing = control_pb2.ShortageRequest(caller=caller, missing_bytes=event.missing_bytes)
        decision.call("ReportShortage", missing)


def registered(decision: Decision, event: ev.Registered) -> None:
    """The master has admitted this agent, under a name and an incarnation."""
    state = decision.state
    moved, state.door = state.door.moved, Door()
    state.fenced = False
    state.incarnation = event.incarnation
    state.node = event.reply.node
    state.run_id = event.reply.run_id
    state.generation = max(state.generation, event.reply.generation)
    state.place = Admission()
    memory.registered(decision, event)
    if event.reply.remark:
        decision.do(ev.Say(event.reply.remark, True, quoted=False))
    if state.warm:
        decision.call("ReportWarm", control_pb2.WarmRequest(caller=decision.caller()))
    if state.leaving:
        decision.call("Leave", control_pb2.LeaveRequest(caller=decision.caller(), notice=decision.notice_left()))
    elif moved is not None:
        move(decision, *moved)


def postponed(decision: Decision, detail: str) -> None:
    """Waits for a master that answered "not yet"; people are told each reason once."""
    decision.state.door.answer_deadline = None
    if detail != decision.state.door.postponed:
        decision.state.door.postponed = detail
        decision.do(ev.Say(detail))


def refused(decision: Decision, event: ev.Refused) -> None:
    """Handles a refusal: only for a name that another node holds is it tried again."""
    state = decision.state
    state.door.answer_deadline = None
    taken, again = event.code == "ALREADY_EXISTS", bool(state.incarnation)
    if taken and again and not state.settings.node_name and state.node:
        # The name was the master's choice, so the master chooses another.
        state.node = ""
        decision.register(state.incarnation)
        return
    if taken and state.settings.node_name:
        if state.door.name_deadline is None:
            state.door.name_deadline = decision.now + (NAME_PATIENCE_SECONDS if again else START_PATIENCE_SECONDS)
            if again:
                decision.do(ev.Say(f"{event.detail}; this node waits for it up to {NAME_PATIENCE_SECONDS:.0f} s", True))
        if decision.now < state.door.name_deadline:
            state.door.register_at = decision.now + (NAME_PAUSE_SECONDS if again else START_PAUSE_SECONDS)
            return
    if again and event.code == "PERMISSION_DENIED":
        # Somebody has taken its place from it on purpose, and with it what was not saved.
        decision.exit(ev.EXIT_LEFT_UNSAVED, event.detail)
        return
    where = state.settings.addresses
    if where and event.code == "UNIMPLEMENTED" and contact.is_stranger(event.detail):
        what = f"{state.settings.hint}{state.settings.advice}"
        decision.exit(ev.EXIT_USAGE, f"what answers at {where} is not Dal Segno's dlrover-master{what}")
        return
    decision.exit(ev.EXIT_USAGE, event.detail)


def register_when_due(decision: Decision) -> None:
    """Asks again for the user's node name, which another node held a moment ago."""
    state = decision.state
    if state.door.register_at is None:
        return
    if decision.now < state.door.register_at:
        decision.wake_at(state.door.register_at)
    else:
        state.door.register_at = None
        decision.register(state.incarnation)


def address_changed(decision: Decision, event: ev.AddressChanged) -> None:
    """This node is reached elsewhere. The master hears it quite well; but its ranks would wait for dead connections.

    The new address is told with a registration, so this is a new incarnation. Workers that meet on loopback have lost
    nothing: they go on, and it registers before it joins another world.
    """
    state = decision.state
    old = state.door.moved[0] if state.door.moved else event.old
    if _meet_on_loopback(state):
        # What the others of this machine fetch from it they fetch there.
        state.door.moved = old, event.new
        return
    decision.do(ev.MoveTo(event.new))
    if state.door.registering:
        state.door.moved = old, event.new
    elif state.incarnation:
        move(decision, event.old, event.new)


def _meet_on_loopback(state: AgentState) -> bool:
    """Whether this node's workers train, all on this machine. Several that have made no step may wait for others."""
    world = state.world
    if world is None or state.workers is Workers.NONE or not is_only_here(world.store_host):
        return False
    # A script without a session tells no step. What it saves is committed.
    return world.nodes == 1 or max(state.epoch.step, state.epoch.committed_step) > world.resume.source.step


def move(decision: Decision, old: str, new: str) -> None:
    """Registers anew with another address."""
    decision.start_anew(f"this node's address is {new} now, not {old}: its workers stop and it joins again with it")


def standby_warm(decision: Decision, epoch: int) -> None:
    """The standby workers of this node are ready: the first, or those that follow the workers of an epoch."""
    if epoch == decision.state.started and decision.state.workers is Workers.RUNNING and not decision.state.epoch.warm:
        decision.state.epoch.warm = True
        decision.report_progress()
    if not decision.state.warm:
        decision.state.warm = True
        if decision.state.incarnation and not decision.state.door.registering:
            decision.call("ReportWarm", control_pb2.WarmRequest(caller=decision.caller()))


def prepare_join(decision: Decision) -> None:
    """Prepares the answer to the present Gather or Wait, once, when no worker of ours runs any more."""
    state = decision.state
    if state.workers is not Workers.NONE or state.leaving or state.fenced or state.door.registering:
        return
    if state.epoch.outcome is Outcome.DRAINED and (state.errands.reading or memory.awaits_its_part(decision)):
        return  # The commit goes first.
    if keeping.awaits_word(decision) or flash.is_pending(decision):
        return
    resume, wanted = wanted_join(state.place, is_in_memory_alone(decision))
    if wanted is None or (state.memory.doubting and wanted.resume == state.memory.doubting):
        return
    join = state.place.join
    if join is not None and answers(state.place, join, wanted):
        if join.lacks and not wanted.gathers:
            join = replace(join, again_at=decision.now)  # It is on the disk now.
        elif join.again_at is None and join.sent and state.contact.up and (join.lacks or is_blind(decision)):
            state.place.join = join = replace(join, again_at=decision.now + LOOK_AGAIN_SECONDS)
        if join.again_at is None:
            return
        if decision.now < join.again_at:
            decision.wake_at(join.again_at)
            return
    if state.door.moved is not None:
        move(decision, *state.door.moved)
        return
    failures = join.failures if join is not None and join.answers(wanted.round, wanted.resume) else 0
    state.place.join = replace(wanted, failures=failures)
    parts = tuple(state.place.order.parts) if state.place.order is not None else ()
    anyway = bool(parts) and failures >= FETCHES - 1
    take = state.place.order.take if wanted.takes and isinstance(state.place.order, control_pb2.Gather) else None
    decision.do(ev.PrepareJoin(wanted.round, resume, wanted.patient, parts, anyway, take, wanted.some))


def wanted_join(place: Admission, nowhere: bool) -> tuple[control_pb2.CheckpointRef | None, Join | None]:
    """The checkpoint that the present order names, and the Join that answers it; None: none is wanted.

    `nowhere`: it cannot come into sight.
    """
    order = place.order
    if isinstance(order, control_pb2.Gather):
        resume = order.resume if order.HasField("resume") else None
        takes = order.take.epoch if order.HasField("take") else 0
        digest = resume.digest if resume else ""
        return resume, Join(order.round, digest, gathers=bool(order.parts), some=some_of(order), takes=takes)
    if order is None or not (order.round or order.HasField("look_for")):
        return None, None
    resume = order.look_for if order.HasField("look_for") else None
    digest = resume.digest if resume else ""
    # The master first learns that it is not in sight; only then is it looked for without an end.
    patient = bool(digest) and digest == place.unseen and not nowhere
    return resume, Join(order.round, digest, patient, gathers=bool(order.parts), some=some_of(order))


def some_of(order: control_pb2.Gather | control_pb2.Wait) -> frozenset[int] | None:
    """Which parts of a step in memory this node needs, where it does not need all of them."""
    return frozenset(part.group_rank for part in order.parts) if order.partly else None


def answers(place: Admission, join: Join, wanted: Join) -> bool:
    """Whether this Join is the wanted one, or looks without an end for the same checkpoint.

    What is fetched from memory is not looked for any more; but what is on its way comes, also if it is on the disk now.
    """
    patient = join.patient == wanted.patient or (join.patient and isinstance(place.order, control_pb2.Wait))
    covers = join.some is None or (wanted.some is not None and wanted.some <= join.some)
    more = ((join.gathers and covers) or not wanted.gathers) and wanted.takes in (0, join.takes)
    return patient and more and join.answers(wanted.round, wanted.resume)


def is_blind(decision: Decision) -> bool:
    """Whether the master gives no place because this directory is not the job's, and nothing to look for instead.

    This happens before the first commit, and while the newest one is in memory alone; otherwise the order names a
    checkpoint to look for.
    """
    order = decision.state.place.order
    if not isinstance(order, control_pb2.Wait) or not order.reason:
        return False
    return is_in_memory_alone(decision) if order.HasField("look_for") else not decision.state.has_head


def is_in_memory_alone(decision: Decision) -> bool:
    """Whether the order is to look for what is in memory, and does not say where: it is in no directory."""
    order, head = decision.state.place.order, decision.state.memory.head
    if not isinstance(order, control_pb2.Wait) or order.parts or head is None:
        return False
    return order.HasField("look_for") and order.look_for.digest == head.digest


def join_failed(decision: Decision, event: ev.JoinFailed) -> None:
    """The present Join could not be prepared: it is tried again, and people are told each reason once."""
    state, join = decision.state, decision.state.place.join
    if join is None or not join.answers(event.round, event.resume_digest) or event.parts != join.some:
        return
    state.place.join = replace(join, again_at=decision.now + JOIN_PAUSE_SECONDS, failures=join.failures + 1)
    if event.message != state.join_problem:
        state.join_problem = event.message
        decision.do(ev.Say(event.message, True))


def join_prepared(decision: Decision, event: ev.JoinPrepared) -> None:
    """Store, inventory and probe are ready: joins, unless the order has changed meanwhile."""
    state, join = decision.state, decision.state.place.join
    if join is None or not join.answers(event.round, event.resume_digest) or event.took != join.takes:
        return
    if event.parts is not None and event.parts != join.some:
        return  # More of them are wanted now.
    if state.leaving or state.fenced or state.door.registering:
        return
    state.place.join = replace(join, sent=True, lacks=event.lacks)
    if not event.lacks:
        state.join_problem = ""
    seen = any(entry.ref.digest == event.resume_digest for entry in event.inventory)
    state.place.unseen = "" if seen else event.resume_digest
    decision.call(
        "Join",
        control_pb2.JoinRequest(
            caller=decision.caller(),
            round=event.round,
            resume=control_pb2.CheckpointRef(digest=event.resume_digest),
            store_host=event.store_host,
            store_port=event.store_port,
            probe=event.probe,
            inventory=event.inventory,
            unusable=event.unusable,
            last_step=state.epoch.step if state.epoch.counted else None,
            took=event.took,
            flash_saved=state.epoch.flash_step,
            parts=sorted(event.parts or ()),
        ),
    )


def conversion_update(decision: Decision, event: ev.ConversionUpdate) -> None:
    """The conversion job moved or ended."""
    state = decision.state
    if event.lease != state.lease:
        return
    if event.state == control_pb2.CONVERSION_STATE_READY and event.checkpoint is not None:
        decision.call(
            "CommitCheckpoint",
            control_pb2.CommitRequest(caller=decision.caller(), checkpoint=event.checkpoint, lease=event.lease),
        )
    decision.call(
        "ReportConversion",
        control_pb2.ConversionReport(
            caller=decision.caller(),
            lease=event.lease,
            state=event.state,
            files_done=event.files_done,
            files_total=event.files_total,
            message=event.message,
            bytes_done=event.bytes_done,
        ),
    )


def verification_moved(decision: Decision, event: ev.VerificationMoved) -> None:
    """A verification goes on; one that was asked for earlier does not count."""
    if event.number == decision.state.errands.verified:
        report = control_pb2.VerificationReport(
            caller=decision.caller(), number=event.number, bytes_done=event.bytes_done, working=True, inconclusive=True
        )
        decision.call("ReportVerification", report)


def verification_done(decision: Decision, event: ev.VerificationDone) -> None:
    """A verification has come to its verdict, or to none."""
    report = control_pb2.VerificationReport(
        caller=decision.caller(),
        number=event.number,
        intact=event.intact,
        message=event.message,
        inconclusive=event.inconclusive,
    )
    decision.call("ReportVerification", report)


def settle(decision: Decision) -> None:
    """Does what follows from the state, after every event."""
    decision.state.wake = None
    report_ended(decision)
    patience.await_answer(decision)
    register_when_due(decision)
    keeping.check(decision)
    ranks.check_stopping(decision)
    ranks.tell_failure(decision)
    if decision.state.ended:
        return  # a fenced leaver that waited only for its workers
    prepare_join(decision)
    memory.tell_gathered(decision)
    memory.spill_unheard(decision)
    contact.check(decision)
    leaving.check_leave(decision)
    if not decision.state.ended:
        tell_workers(decision)
        patience.look_often(decision)


def report_ended(decision: Decision) -> None:
    """Reports once that all ranks of this node drained or finished, after the commit of what they saved last."""
    state = decision.state
    if state.workers is not Workers.NONE or state.errands.reading or not state.epoch.exits:
        return
    if state.epoch.outcome in (Outcome.DRAINED, Outcome.FINISHED) and memory.awaits_its_part(decision):
        return
    if state.epoch.outcome is Outcome.FINISHED:
        decision.call("ReportFinished", control_pb2.FinishedRequest(caller=decision.caller(), step=state.epoch.step))
    elif state.epoch.outcome is Outcome.DRAINED:
        decision.call(
            "ReportDrained",
            control_pb2.DrainedRequest(caller=decision.caller(), checkpoint=state.epoch.drained, step=state.epoch.step),
        )
    state.epoch.exits = ()
    if state.epoch.outcome is Outcome.DRAINED and state.leave is not None:
        leaving.await_release(decision, state.leave)


def tell_workers(decision: Decision) -> None:
    """Keeps the flags that the ranks see up to date."""
    state = decision.state
    if state.workers is not Workers.RUNNING:
        return
    drain = state.leaving or state.drain is not None or state.contact.drain
    ending = state.drain.ending if state.drain is not None else control_pb2.ENDING_TOGETHER
    keep = state.epoch.own_save.until is not None
    flags = (drain, contact.gives_orders(state), ending, drain and memory.to_memory(state), keep, state.save_order)
    if flags != state.epoch.told:
        state.epoch.told = flags
        decision.do(ev.TellWorkers(*flags))
