"""Memory checkpoints as an agent sees them: what it holds, what it keeps, and what it writes to the disk. Pure.

What is held here changes by itself (`HeldChanged`); the master hears it, and so does each new one.
"""

from __future__ import annotations

from dataclasses import replace

from dalsegno.protos import control_pb2, worker_pb2

from . import events as ev
from . import replication
from .decision import Decision
from .last_copy import drained_into, is_own, is_safe, needed
from .state import AgentState, DurableOrder, Leave, Outcome, Spill, Workers

__all__ = [
    "awaits_its_part",
    "directed",
    "doubt",
    "doubted",
    "held_changed",
    "made_durable",
    "registered",
    "sealed",
    "spill",
    "spill_unheard",
    "tell_all",
    "tell_gathered",
    "to_memory",
]

# What the ranks drained into memory is told before their drain is. After so many seconds it is told without.
PART_PATIENCE_SECONDS = 10.0
# Seconds between two calls that tell of parts of one step as they are gathered.
PARTS_EVERY_SECONDS = 0.5
# And between two that tell that it goes on: a part may take minutes.
GATHERING_EVERY_SECONDS = 5.0
# What a leaver could not write to the disk it tries again so much later, where no master is heard.
SPILL_AGAIN_SECONDS = 1.0
# So many steps that the ranks want on the disk are remembered: the newest counts, and older ones are being written.
MOST_WANTED = 8


def sealed(decision: Decision, epoch: int, said: worker_pb2.Sealed) -> None:
    """The ranks of this node have written their part of a step into memory."""
    state = decision.state
    if said.make_durable and epoch == state.started:
        steps = {**state.epoch.to_disk, said.digest: said.step}
        remembered = {*list(steps)[-MOST_WANTED:], *candidates(state)}
        state.epoch.to_disk = {digest: step for digest, step in steps.items() if digest in remembered}
    urgent = state.drain is not None or state.leaving or state.epoch.agreed
    for digest in sorted(candidates(state)) if urgent else ():
        replication.send(decision, digest)  # It may not have been its turn yet.
    decision.do(ev.HoldPart(said.name, said.digest, urgent))


def told(decision: Decision, event: ev.HeldChanged | ev.Replication | ev.Doubted | ev.MadeDurable) -> None:
    """Passes news of this node's memory to its handler."""
    match event:
        case ev.HeldChanged():
            held_changed(decision, event)
        case ev.Replication():
            replication.answered(decision, event)
            keep(decision)
        case ev.Doubted():
            doubted(decision, event)
        case ev.MadeDurable():
            made_durable(decision, event)


def held_changed(decision: Decision, event: ev.HeldChanged) -> None:
    """Parts of a step have come in, or it is gone from here."""
    state = decision.state
    digest = event.checkpoint.ref.digest
    held = {known: entry for known, entry in state.memory.held.items() if known != digest}
    if event.parts:
        held[digest] = event
    known, state.memory.held = state.memory.held.get(digest), held
    before = known.parts if known is not None else ()
    if set(before) < set(event.parts) and is_on_its_way(state, event):
        untold = held.get(state.memory.parts_untold)
        if untold is not None and state.memory.parts_untold != digest:
            tell(decision, untold)  # Another step is gathered now, and leavers may wait for that one all the same.
        state.memory.parts_untold = digest
    elif before != event.parts or (event.unsent and known is not None and not known.unsent):
        tell(decision, event)
    if not before and event.parts:
        keep(decision, anew=True)  # one more is here: an older one may go
    if not state.contact.up and event.parts != before and is_own(state, digest):
        replication.unheard(decision)
    if event.damaged:
        loaded_damaged(decision, event)


def loaded_damaged(decision: Decision, event: ev.HeldChanged) -> None:
    """What the ranks have loaded proves to be damaged here: they may have read it so, behind its verification.

    Once a newer step counts, nobody goes back behind that.
    """
    state, ref = decision.state, event.checkpoint.ref
    if state.workers is not Workers.RUNNING or state.world is None or state.epoch.bad_reported:
        return
    head, resume = state.memory.head, state.world.resume.source
    if not resume.in_memory or resume.ref.digest != ref.digest or head is None or head.digest != ref.digest:
        return
    state.epoch.bad_reported = True
    what = f"{ref.name} has been loaded, and is damaged here ({event.damaged})"
    decision.do(ev.Say(f"{what}: the workers begin again, from another copy", True))
    said = control_pb2.BadCheckpointRequest(caller=decision.caller(), ref=ref, form=control_pb2.FORM_SHARDED)
    said.file, said.message = "a part in memory", event.damaged
    decision.call("ReportBadCheckpoint", said)
    doubt(decision, ref)


def is_on_its_way(state: AgentState, event: ev.HeldChanged) -> bool:
    """Whether this node gathers a step, and more parts of it are to come."""
    join, order, digest = state.place.join, state.place.order, event.checkpoint.ref.digest
    if join is None or join.sent or join.resume != digest or not join.gathers or order is None:
        return False
    return bool(event.parts) and not {part.group_rank for part in order.parts} <= set(event.parts)


def tell_gathered(decision: Decision) -> None:
    """Says which parts have come here that are still being gathered, now and then: there may be a thousand of them.

    Leavers wait until somebody else has their part, and a gathering that goes on is waited for.
    """
    tell_gathering(decision)
    memory = decision.state.memory
    held = memory.held.get(memory.parts_untold)
    if held is None:
        memory.parts_untold = ""
    elif memory.parts_untold not in decision.state.epoch.sent_steps.asked:
        at = memory.parts_told_at + PARTS_EVERY_SECONDS
        if decision.now < at:
            decision.wake_at(at)
        else:
            tell(decision, held)


def tell_gathering(decision: Decision) -> None:
    """Says now and then that this node still gathers the resume point, and not while it waits to try its Join again."""
    state, join = decision.state, decision.state.place.join
    at_it = join is not None and join.gathers and not join.sent and join.again_at is None
    if join is None or not at_it or not state.contact.up or not state.incarnation or state.fenced:
        state.memory.gathering_told_at = decision.now
        return
    at = state.memory.gathering_told_at + GATHERING_EVERY_SECONDS
    if decision.now >= at:
        state.memory.gathering_told_at, at = decision.now, decision.now + GATHERING_EVERY_SECONDS
        decision.call("ReportHeld", control_pb2.HeldRequest(caller=decision.caller(), gathering=join.resume))
    decision.wake_at(at)


def keep(decision: Decision, anew: bool = False) -> None:
    """Drops what nobody needs any more, if that has changed, or `anew`."""
    state, kept = decision.state, (newest_epoch(decision.state), still_wanted(decision.state))
    if anew or kept != state.memory.kept:
        state.memory.kept = kept
        decision.do(ev.KeepInMemory(*kept))


def newest_epoch(state: AgentState) -> int:
    """Of older epochs only what is still wanted stays.

    Who stands by fetches with each change what the next world begins with, and may have no part in any: so the worlds
    of others count, too. A leaver keeps what it has: it is there for nothing else.
    """
    stands_by = state.place.order is not None and state.workers is Workers.NONE and state.leave is None
    return max(state.started, state.open_epoch) if stands_by else state.started


def tell(decision: Decision, event: ev.HeldChanged) -> None:
    """Says which parts of a step are here."""
    if decision.state.incarnation and not decision.state.fenced:
        request = control_pb2.HeldRequest(caller=decision.caller(), checkpoint=event.checkpoint, parts=event.parts)
        request.make_durable = event.checkpoint.ref.digest in decision.state.epoch.to_disk
        request.unsent = event.unsent
        decision.call("ReportHeld", request)
        memory = decision.state.memory
        if memory.parts_untold == event.checkpoint.ref.digest:
            memory.parts_untold, memory.parts_told_at = "", decision.now
        replication.asked(decision, event.checkpoint.ref.digest)


def registered(decision: Decision, event: ev.Registered) -> None:
    """The master has admitted this agent: what an earlier incarnation was not answered is told anew."""
    state = decision.state
    state.memory.in_use = event.reply.settings.memory_replicas > 0
    replication.unanswered(decision)
    tell_all(decision)


def tell_all(decision: Decision) -> None:
    """A master that has not heard what is held here: first of the oldest, of which most may be known to be copied."""
    held = decision.state.memory.held.values()
    for event in sorted(held, key=lambda event: (event.checkpoint.epoch, event.checkpoint.step)):
        tell(decision, event)
    state = decision.state
    spill = state.leave.spill if state.leave is not None else None
    if spill is not None and spill.written and spill.digest in state.memory.held:
        ref = state.memory.held[spill.digest].checkpoint.ref
        decision.call("ReportDurable", said_of(decision, ref, spill.written))
    if state.memory.in_use and state.incarnation and not state.fenced:
        decision.call("ReportHeld", control_pb2.HeldRequest(caller=decision.caller(), all=True))


def doubt(decision: Decision, ref: control_pb2.CheckpointRef) -> None:
    """The ranks could not load the resume point. If it is in memory, this node looks at its copy first."""
    state = decision.state
    if state.world is not None and state.world.resume.source.in_memory:
        state.memory.doubting = ref.digest
        decision.do(ev.Doubt(ref))


def doubted(decision: Decision, event: ev.Doubted) -> None:
    """What is still held of it is told anew: until then the master counts nothing of it."""
    state = decision.state
    if event.ref.digest == state.memory.doubting:
        state.memory.doubting = ""
    held = state.memory.held.get(event.ref.digest)
    if held is not None:
        tell(decision, held)


def directed(decision: Decision, directive: control_pb2.Directive) -> None:
    """What a directive says of the memory of this node."""
    state = decision.state
    if directive.HasField("settings") and not state.memory.in_use and directive.settings.memory_replicas > 0:
        state.memory.in_use = True
        tell_all(decision)
    in_memory = directive.HasField("head") and directive.head.in_memory
    state.memory.head = directive.head.ref if in_memory else None
    state.memory.best, state.memory.candidate = directive.head.best, directive.head.candidate
    if directive.HasField("make_durable"):
        ordered(decision, directive.make_durable)
    else:
        state.memory.wrote = None
        if is_in_vain(state, directive):
            assert state.memory.writing is not None
            decision.do(ev.StopWriting(state.memory.writing.ref))
            state.memory.writing = None
    keep(decision)


def ordered(decision: Decision, told: control_pb2.MakeDurable) -> None:
    """Brings a step to the disk, or this node's share of it. What was done already is said again."""
    memory, order = decision.state.memory, DurableOrder(told.ref, tuple(told.write), told.seal, told.look)
    if memory.wrote is not None and memory.wrote.covers(order) and not order.look:
        decision.call("ReportDurable", said_of(decision, order.ref, order.write))
    elif memory.writing is None or not memory.writing.covers(order):
        memory.writing = order
        decision.do(ev.MakeDurable(order.ref, tuple(told.parts), order.write, order.seal, order.look))


def is_in_vain(state: AgentState, directive: control_pb2.Directive) -> bool:
    """Whether what is being written here counts no more: a newer step does, and this is not to be the best."""
    memory, head = state.memory, directive.head
    held = None if memory.writing is None else memory.held.get(memory.writing.digest)
    if held is None or not directive.HasField("head") or head.best == held.checkpoint.ref.name:
        return False
    if held.checkpoint.ref.digest in candidates(state):
        return False
    return (head.epoch, head.step) > (held.checkpoint.epoch, held.checkpoint.step)


def to_disk(state: AgentState) -> str:
    """Digest of the newest step that the ranks want on the disk, where nothing newer is; empty: there is none."""
    epoch = state.epoch
    wanted = [(step, digest) for digest, step in epoch.to_disk.items() if step > epoch.committed_step]
    return max(wanted, default=(0, ""))[1]


def candidates(state: AgentState) -> set[str]:
    """Digests of what is held here, was the best so far when it was saved, and may not be on the disk yet.

    Of this epoch the newest one, and what the newest commit calls the candidate.
    """
    memory = state.memory
    found = {digest for digest, one in memory.held.items() if memory.candidate == one.checkpoint.ref.name}
    own = [(step, digest) for digest, step in state.epoch.to_disk.items() if is_own_best(memory.held.get(digest))]
    newest = max(own, default=(0, ""))[1]
    named = bool(newest) and memory.held[newest].checkpoint.ref.name == memory.best
    return {*found, "" if named else newest} - {""}


def is_own_best(held: ev.HeldChanged | None) -> bool:
    """Whether a step calls itself the best."""
    return held is not None and held.checkpoint.best == held.checkpoint.ref.name


def still_wanted(state: AgentState) -> frozenset[str]:
    """Digests of the steps that somebody may still need, besides the newest ones of the open epoch."""
    found = {to_disk(state), *candidates(state), *replication.kept(state)}
    if state.memory.writing is not None:
        found.add(state.memory.writing.digest)
    if state.leave is not None and state.leave.spill is not None:
        found.add(state.leave.spill.digest)
    if state.memory.head is not None:
        found.add(state.memory.head.digest)
    if state.world is not None and state.world.resume.source.in_memory:
        found.add(state.world.resume.source.ref.digest)
    order, join = state.place.order, state.place.join
    if order is not None and order.parts:
        found.add(order.resume.digest if isinstance(order, control_pb2.Gather) else order.look_for.digest)
    if join is not None and not join.sent and join.resume in state.memory.kept[1]:
        found.add(join.resume)  # Its parts are on their way here, also if it has come to the disk meanwhile.
    return frozenset(found - {""})


def made_durable(decision: Decision, event: ev.MadeDurable) -> None:
    """A step, or some parts of it, are on the disk, or could not be written there."""
    leave, memory = decision.state.leave, decision.state.memory
    writing = None if memory.writing is None else (memory.writing.digest, memory.writing.write)
    own = writing == (event.ref.digest, event.write)
    if event.written:
        # Others seal it, perhaps when this node is gone.
        decision.call("ReportDurable", said_of(decision, event.ref, event.written))
    spilt = leave is not None and leave.spill is not None and leave.spill.digest == event.ref.digest
    if leave is not None and leave.spill is not None and spilt and not event.write:
        leave.spill = spill_over(decision.now, leave.spill, event)
        if event.failure and not own:
            say_what_fails(decision, leave, event)
            return  # Nobody has asked for it, and other parts of it are elsewhere, or it is tried again.
    if event.failure and not own and event.ref.digest == decision.state.epoch.spilled:
        return
    if own:
        memory.wrote = None if event.failure else memory.writing
        memory.writing = None
    said = said_of(decision, event.ref, event.write, event.failure)
    said.absent = event.absent
    decision.call("ReportDurable", said)


def spill_over(now: float, spill: Spill, event: ev.MadeDurable) -> Spill:
    """A try of a leaver is over. What an earlier one has brought to the disk stays there."""
    again_at = now + SPILL_AGAIN_SECONDS if event.failure and not event.written else None
    written = tuple(sorted({*spill.written, *event.written}))
    return Spill(spill.digest, True, spill.sealed or not event.failure, written, again_at, spill.said)


def say_what_fails(decision: Decision, leave: Leave, event: ev.MadeDurable) -> None:
    """Says why a leaver stays which no master lets go: it cannot write what it holds. Each reason once."""
    spill = leave.spill
    if spill is None or spill.again_at is None or decision.state.contact.up or is_safe(decision.state):
        return
    if spill.said != event.failure:
        leave.spill = replace(spill, said=event.failure)
        what = f"{event.ref.name} cannot be written to the disk, and no master is heard"
        decision.do(ev.Say(f"this node stays, at most until its notice is over: {what} ({event.failure})", True))


def said_of(
    decision: Decision, ref: control_pb2.CheckpointRef, write: tuple[int, ...], failure: str = ""
) -> control_pb2.DurableRequest:
    return control_pb2.DurableRequest(caller=decision.caller(), ref=ref, failure=failure, parts=write)


def to_memory(state: AgentState) -> bool:
    """Whether a drain's save goes to memory, as far as this agent knows.

    A leaver's ranks save as soon as it has its notice, before the master says how.
    """
    if state.drain is not None:
        return state.drain.to_memory
    return state.leaving and state.contact.up and state.world is not None and bool(state.world.place.buddies)


def awaits_its_part(decision: Decision) -> bool:
    """What the ranks drained into memory, or wanted on the disk as they finished, is not known to be here yet."""
    state = decision.state
    digest = drained_into(state) if state.epoch.outcome is Outcome.DRAINED else to_disk(state)
    if not digest or state.world is None or has_own_part(state, digest):
        return False
    if digest == state.world.resume.source.ref.digest:
        return False  # They have made no step: whatever is here of it was told before this world opened.
    if state.epoch.part_deadline is None:
        state.epoch.part_deadline = decision.now + PART_PATIENCE_SECONDS
    if decision.now >= state.epoch.part_deadline:
        return False
    decision.wake_at(state.epoch.part_deadline)
    return True


def has_own_part(state: AgentState, digest: str) -> bool:
    """Whether the part of this node's own ranks is held here. Those of its buddies may come in earlier.

    Of what another world has left nobody here has a part of its own: it is all that there is.
    """
    held = state.memory.held.get(digest)
    if held is None or state.world is None:
        return False
    return held.checkpoint.epoch != state.world.epoch or state.world.place.group_rank in held.parts


def spill_unheard(decision: Decision) -> None:
    """A node that stays writes what it has drained to the disk, too, while no master is heard.

    Leavers may each count on the copy that another leaver has. Whoever finds all parts on the disk seals them.
    """
    state, digest = decision.state, drained_into(decision.state)
    if (
        state.contact.up
        or state.leave is not None
        or state.workers is not Workers.NONE
        or not has_own_part(state, digest)
    ):
        return
    ref = state.epoch.drained
    if ref is not None and digest != state.epoch.spilled and not writes_all(state, ref):
        state.epoch.spilled = digest
        decision.do(ev.MakeDurable(ref))


def spill(decision: Decision) -> None:
    """A leaver writes what it holds to the disk: all others may leave, too, and the master be away."""
    state, leave, ref = decision.state, decision.state.leave, needed(decision.state)
    if leave is None or ref is None or writes_all(state, ref):
        return
    spill = leave.spill
    if spill is None or spill.digest != ref.digest:
        leave.spill = Spill(ref.digest)
        decision.do(ev.MakeDurable(ref))
    elif spill.again_at is not None and not state.contact.up and not is_safe(state):
        # The disk may get room again, and nobody is heard who would order it.
        if decision.now < spill.again_at:
            decision.wake_at(spill.again_at)
        else:
            leave.spill = replace(spill, over=False, again_at=None)
            decision.do(ev.MakeDurable(ref))


def writes_all(state: AgentState, ref: control_pb2.CheckpointRef) -> bool:
    """Whether it is being written here as a whole, because the master asked."""
    writing = state.memory.writing
    return writing is not None and not writing.write and writing.digest == ref.digest
