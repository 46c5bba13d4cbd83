"""Deadlines of the agent, without the time in which its own process was stopped (Ctrl-Z, SIGSTOP)."""

from __future__ import annotations

from . import events as ev
from .decision import SILENCE_SECONDS, STOP_PATIENCE_SECONDS, Decision
from .state import AgentState, Workers

NOT_ANSWERING = "it does not register yet: the checkpoint directory does not answer (is the server of its mount away?)"
# While a deadline runs that a stop puts off, it wakes at least so often: else only what of a stop comes behind the
# deadline would show. So much later than it was to wake, this process itself stood still.
LOOK_SECONDS, STOOD_STILL_SECONDS = 1.0, 1.0


def leave_out_stops(decision: Decision) -> None:
    """Does not count time in which this process was stopped (Ctrl-Z): nobody was asked or heard in it.

    Each deadline is put off once: a machine that is slow all the time must come to an end, too.
    """
    state, now = decision.state, decision.now
    late = 0.0 if state.wake is None else now - state.wake
    door = state.door
    if door.answer_deadline is not None and late >= STOOD_STILL_SECONDS:
        door.answer_deadline += late
    if late < SILENCE_SECONDS:
        return
    # Enough for an answer, and for what lies unread, which comes behind the alarm.
    soon = now + SILENCE_SECONDS
    if door.answer_deadline is not None and not door.granted:
        door.granted = True
        door.answer_deadline = max(door.answer_deadline, soon)
    if state.workers is Workers.STOPPING and not state.stop_granted:
        # Whoever takes what they saved stood still as well, and may have all of its time before it.
        state.stop_granted = True
        state.stop_deadline = max(state.stop_deadline, now + state.settings.save_timeout + STOP_PATIENCE_SECONDS)
    leave = state.leave
    if leave is not None and not leave.granted:
        last = now + max(SILENCE_SECONDS, state.settings.save_timeout)
        # Only one that is over, or nearly: the machine goes at its own time, and what is left of a notice is not ours.
        if leave.deadline < soon:
            leave.granted, leave.deadline = True, last
        if leave.release_deadline is not None and leave.release_deadline < soon:
            leave.granted, leave.release_deadline = True, soon


def look_often(decision: Decision) -> None:
    """Wakes soon while this node leaves or its workers are stopped, so that a stop of this process shows."""
    state = decision.state
    if state.leave is not None or state.workers is Workers.STOPPING:
        decision.wake_at(decision.now + LOOK_SECONDS)


def await_answer(decision: Decision) -> None:
    """Wakes when the silence about the first registration is to be told, and when it is over."""
    door = decision.state.door
    if door.look_told_at is not None and not door.told_look:
        decision.wake_at(door.look_told_at)
    if door.answer_deadline is not None:
        told_at = _silence_is_told_at(decision.state, door.answer_deadline)
        decision.wake_at(door.answer_deadline if door.told else min(told_at, door.answer_deadline))
        decision.wake_at(decision.now + LOOK_SECONDS)


def looked(decision: Decision, event: ev.LooksAgain | ev.Asked) -> None:
    """The checkpoint directory fails, of which people are told once; or a master is asked now, and has its time.

    A node that was in the job once waits for its master; one that never was may have the wrong address.
    """
    door = decision.state.door
    if door.look_told_at is None:
        return
    if isinstance(event, ev.Asked):
        door.look_told_at = None
        door.answer_deadline = decision.now + decision.state.settings.connect_timeout
    elif not door.told_look:
        door.told_look = True
        decision.do(ev.Say(f"it does not register yet, and looks again for some seconds: {event.reason}", True))


def check_answer(decision: Decision) -> None:
    """Gives up if nobody has answered the first registration, once nothing else is in the queue, such as an answer."""
    state = decision.state
    look = state.door.look_told_at
    if look is not None and look <= decision.now and not state.door.told_look:
        state.door.told_look = True
        decision.do(ev.Say(NOT_ANSWERING, True))
    deadline, where = state.door.answer_deadline, state.settings.addresses
    if deadline is None:
        return
    if _silence_is_told_at(state, deadline) <= decision.now < deadline and not state.door.told:
        state.door.told = True
        left = f"{deadline - decision.now:.0f} s more (--connect-timeout)"
        who = f"no master has answered yet at {where}" if where else "the job's own master has not answered yet"
        decision.do(ev.Say(f"{who}: trying for {left}"))
    if decision.now >= deadline:
        seconds = state.settings.connect_timeout
        there = f"is it running at that address? ({where}){state.settings.hint}"
        what = there if where else "a line above, or its master.log, says why"
        decision.exit(ev.EXIT_USAGE, f"no master answered within {seconds:.0f} s: {what}")


def _silence_is_told_at(state: AgentState, deadline: float) -> float:
    """When people are told that nobody has answered the first registration."""
    return deadline - state.settings.connect_timeout + SILENCE_SECONDS
