"""Leaving: on a signal, by an order, or because the master lets this node in no more."""

from __future__ import annotations

import signal

from dalsegno.protos import control_pb2

from . import events as ev
from .decision import Decision, awaits_its_commit, had_something_to_save, is_saved, leaves_it_to_others
from .flash import is_pending
from .last_copy import goes_with_it, is_safe
from .memory import awaits_its_part, spill
from .state import Epoch, Leave, Outcome, Workers

# Seconds that a leaver whose notice has run out still waits for the processes that it has killed.
KILL_PATIENCE_SECONDS = 2.0
# Seconds without a write after which workers without a session, which have had their signal, are not waited for.
STILL_SECONDS = 5.0
# Seconds behind the first signal in which more of them are the same notice. `timeout` signals its child and then its
# whole group, a terminal signals a launcher and us, and the launcher passes it on, perhaps as another. Nobody who
# has waited for less than this knows that a save is too slow; and a later signal still hurries it.
SAME_NOTICE_SECONDS = 1.0


def signalled(decision: Decision, event: ev.Signalled) -> None:
    """Handles a signal: the first is a leave notice, with what comes at once behind it; a later one means now."""
    state, number = decision.state, event.number
    name = signal.Signals(number).name
    at = decision.now if event.at is None else event.at
    if state.leave is not None and not state.leave.signalled:
        # Whoever orders a node to go may well end its machine next.
        state.leave.signalled, state.leave.signalled_at = True, at
        decision.do(ev.Say(f"{name}: this node is leaving already, by order"))
        return
    if state.leaving and number == signal.SIGHUP:
        return  # a closed terminal sends it twice, from kernel and shell; nobody there is in a hurry
    if state.leave is not None and state.leave.hung_up and number == signal.SIGTERM:
        # Of two at once the kernel hands out the smaller number first. A later one may come twice at once as well.
        state.leave.hung_up, state.leave.signalled_at = False, at
        return
    if state.leave is not None and at - state.leave.signalled_at <= SAME_NOTICE_SECONDS:
        return
    if state.leaving:
        decision.do(ev.Say(f"{name} again: this node goes at once"))
        decision.kill_workers()
        if is_saved(state) or not had_something_to_save(state):
            decision.exit_left()
        else:
            # Not every step of workers that are killed now is heard, so silence does not prove that none was made.
            decision.exit(ev.EXIT_LEFT_UNSAVED, "left without waiting for a save")
        return
    begin(decision, name)
    if state.leave is not None:
        state.leave.hung_up, state.leave.signalled_at = number == signal.SIGHUP, at
    if state.incarnation and not state.door.registering and not state.fenced:
        decision.call("Leave", control_pb2.LeaveRequest(caller=decision.caller(), notice=state.settings.drain_timeout))
    elif not goes_with_it(state):
        decision.exit_left()


def ordered(decision: Decision, *, stop: bool) -> None:
    """Handles the master's order to go: a notice that the master knows of already. `stop`: the whole job stops."""
    state = decision.state
    if state.leave is None:
        begin(decision, "by order", signalled=False)
    if state.leave is not None:
        state.leave.stop = state.leave.stop or stop


def unfit(decision: Decision, why: str) -> None:
    """This node can start no workers any more: it goes, as on a notice, once what it has in memory is safe.

    Each further try would cost all nodes a restart, and the job would fail for what is wrong on this one.
    """
    state = decision.state
    state.workers, state.epoch.outcome = Workers.NONE, Outcome.STOPPED
    decision.do(ev.Say(why, True))
    if state.leave is None:
        notice = state.settings.drain_timeout
        state.leave = Leave(decision.now + notice, signalled=False, unfit=True)
        decision.call("Leave", control_pb2.LeaveRequest(caller=decision.caller(), notice=notice))
    check_leave(decision)


def begin(decision: Decision, why: str, *, signalled: bool = True) -> None:
    """Begins a notice: `why` is for people."""
    state = decision.state
    unsaved = state.fenced or state.workers is Workers.RUNNING
    state.leave = Leave(decision.now + state.settings.drain_timeout, signalled, unsaved=unsaved)
    decision.stop_conversion()
    if state.workers is Workers.RUNNING and not state.epoch.has_session:
        stop_unheard(decision, why)
    elif state.workers is Workers.RUNNING:
        decision.do(ev.Say(f"{why}: {what_comes_first(state.epoch)}", quoted=signalled))
    else:
        decision.do(ev.Say(f"{why}: leaving", quoted=signalled))


def what_comes_first(epoch: Epoch) -> str:
    """What ranks with a session are waited for to do, for a person."""
    if epoch.tried_again and epoch.failed_step >= max(epoch.step, epoch.sealed_step + 1):
        return f"leaving when step {epoch.failed_step}, the last one, is saved, which is tried again and again"
    return "saving at the next step boundary, then leaving"


def stop_unheard(decision: Decision, why: str) -> None:
    """Passes the notice on to a script without a session, as torchrun does: nothing of ours can save for it.

    It may catch the signal to save by itself, and it may do nothing about it while it waits for the other ranks. So it
    has the whole notice only while it writes. Where its saves are adopted and no other node waits for it, it may also
    end the step that it is in before it saves.
    """
    state, settings = decision.state, decision.state.settings
    notice = settings.drain_timeout
    work = settings.adopts and state.world is not None and state.world.nodes == 1
    if settings.save_signal:
        asked = f"the workers are asked to save ({settings.save_signal})"
        decision.do(
            ev.Say(f"{why}: {asked}, and end when that is taken, after {notice:.0f} s (--drain-timeout) in any case")
        )
        decision.stop_workers(notice, ask=settings.save_signal)
        return
    at_most = f"{notice:.0f} s (--drain-timeout)"
    if notice > STILL_SECONDS:
        at_most = f"{STILL_SECONDS:.0f} s, or {at_most} while they write{' or compute' if work else ''}"
    decision.do(
        ev.Say(f"{why}: passed on to the workers as SIGTERM (no session is open); leaving when they end: {at_most}")
    )
    decision.stop_workers(notice, STILL_SECONDS, work=work)


def check_leave(decision: Decision) -> None:
    """Lets a leaver go when its part is recorded or the master says so, and at the end of its notice in any case.

    This does not depend on its workers: the agent may not even hear that they are gone.
    """
    state, leave = decision.state, decision.state.leave
    if leave is None:
        return
    if state.workers is Workers.NONE:
        owed = bool(state.errands.reading) or is_pending(decision) or awaits_its_part(decision)
        if owed and decision.now < leave.deadline:
            decision.wake_at(leave.deadline)
            return
        spill(decision)
        if not is_safe(state) and decision.now < leave.deadline:
            decision.wake_at(leave.deadline)
            return
        release = await_release(decision, leave)
        stopped = state.epoch.outcome is Outcome.STOPPED and not awaits_its_commit(state)
        nothing_to_record = stopped or state.epoch.refused
        if nothing_to_record or decision.now >= release or not state.contact.up:
            decision.exit_left()
        else:
            decision.wake_at(release)
    else:
        last = leave.deadline + KILL_PATIENCE_SECONDS
        if decision.now < leave.deadline:
            decision.wake_at(leave.deadline)
            return
        decision.kill_workers()
        state.epoch.outcome = Outcome.STOPPED
        if decision.now >= last:
            decision.exit_left()
        else:
            decision.wake_at(last)


def await_release(decision: Decision, leave: Leave) -> float:
    """This node's part is safe: from the first such moment on it waits for the master. Returns until when.

    If others complete the save, that may take them until the notice ends.
    """
    if leave.release_deadline is None:
        leave.release_deadline = decision.now + decision.state.settings.release_timeout
        if leaves_it_to_others(decision.state):
            leave.release_deadline = max(leave.release_deadline, leave.deadline)
    return leave.release_deadline
