"""Whether the master is heard, what becomes of this node's workers while it is not, and calls that it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

from . import events as ev
from . import leaving, replication
from .decision import Decision
from .state import AgentState, MasterContact, Workers

# Seconds without an answer after which the master counts as away.
AWAY_AFTER_SECONDS = 3.0
# Calls that came after protocol 2: a master of ours that is older than this agent does not know them.
NEWER_CALLS = frozenset({"ReportRemark", "ReportHeld", "ReportDurable", "ReportShortage"})


def changed(decision: Decision, event: ev.LinkChanged) -> None:
    """The master is heard again, or no longer; or it answers, and refuses this node's token."""
    state, before = decision.state, decision.state.contact
    if (event.up, event.refused) == (before.up, before.refused):
        return
    lost_at = None if event.up else decision.now if before.lost_at is None else before.lost_at
    drain = before.drain and not event.up
    state.contact = MasterContact(event.up, lost_at, drain=drain, refused=event.refused, records=before.records)
    replication.unheard(decision)
    if event.up:
        back = "the master takes this token again" if before.refused else "the master is back"
        decision.do(ev.Say(back, quoted=False))
    elif event.refused:
        decision.do(ev.Say(refusal(decision), True, quoted=False))
    elif state.workers is Workers.RUNNING:
        away = "the master cannot be reached; training goes on, and what it must know is kept"
        decision.do(ev.Say(away, True, quoted=False))
    else:
        decision.do(ev.Say("the master cannot be reached; this node waits for it", True, quoted=False))


def is_stranger(detail: str) -> bool:
    """Whether a call that is not implemented was answered by another program's server: each library has its words.

    A master of ours knows the call, or it is one of `NEWER_CALLS`, and says which protocols do not fit.
    """
    return "speaks protocol" not in detail


def recording(decision: Decision, event: ev.RecordingChanged) -> None:
    """The master has lost its store, or has it again: the ranks save to the disk themselves meanwhile."""
    state = decision.state
    if event.records == state.contact.records:
        return
    state.contact = replace(state.contact, records=event.records)
    if event.records:
        decision.do(ev.Say("the master records again what it decides", quoted=False))
        return
    away = "the master is heard, but can record nothing, as its store is away; training goes on, and saves to the disk"
    decision.do(ev.Say(away, True, quoted=False))


def gives_orders(state: AgentState) -> bool:
    """Whether somebody tells the agents what to write of that which is in memory. Else the ranks save to the disk."""
    return state.contact.up and state.contact.records


def refusal(decision: Decision) -> str:
    """What a refused token means, and what to do about it, for a person."""
    state = decision.state
    seconds, own = max(0.0, end_of_patience(decision) - decision.now), state.settings.token_file
    does = "training goes on" if state.workers is Workers.RUNNING else "this node waits"
    if seconds < math.inf:
        ends = "saves and ends" if state.workers is Workers.RUNNING else "ends"
        does = f"{does} for {seconds:.0f} s, then it {ends} (exit code 2)"
    new = f"write the new one to {own}" if own else "start this again with the new one"
    return f"the master refuses this token: it was changed there; {does}; give the master the old one back, or {new}"


def end_of_patience(decision: Decision) -> float:
    """Until when a node whose token is refused trains on: with a self-fence, as long as its place is its own."""
    settings, lost_at = decision.state.settings, decision.state.contact.lost_at
    assert lost_at is not None, "the master is heard"
    if settings.self_fence:
        return lost_at - AWAY_AFTER_SECONDS + settings.self_fence
    return lost_at + settings.master_outage_timeout


def check(decision: Decision) -> None:
    """Drains a node that alone is cut off from the master. If nobody hears the master, training goes on."""
    state = decision.state
    if state.contact.lost_at is None or state.leaving:
        return
    if state.contact.refused:
        give_up(decision)
        return
    if state.workers is not Workers.RUNNING or state.contact.drain:
        return
    fence(decision, state.contact.lost_at)
    if state.contact.drain:
        return
    due = state.contact.lost_at + state.settings.master_outage_timeout
    if decision.now < due:
        decision.wake_at(due)
    elif state.epoch.anyone_sees_master:
        state.contact = replace(state.contact, drain=True)
        decision.do(ev.Say("only this node is cut off from the master: it drains and waits", True))


def give_up(decision: Decision) -> None:
    """Leaves as on a notice when the master has refused the token for too long: its workers save before they end."""
    state = decision.state
    due = end_of_patience(decision)
    if decision.now < due:
        decision.wake_at(due)
        return
    leaving.begin(decision, "the master still refuses this token", signalled=False)
    if state.leave is not None:
        state.leave.refused = True


def fence(decision: Decision, lost_at: float) -> None:
    """Stops workers when the master has not been heard for so long that it may have given their place away.

    They save first. What they save counts only if the master, when it is heard again, says so.
    """
    state = decision.state
    silence = state.settings.self_fence
    if not silence:
        return
    due = lost_at - AWAY_AFTER_SECONDS + silence
    if decision.now < due:
        decision.wake_at(due)
        return
    state.contact = replace(state.contact, drain=True)
    why = f"the master was not heard for {silence:g} s (--self-fence)"
    if state.epoch.has_session:
        decision.do(ev.Say(f"{why}: this node saves at the next step boundary, stops, and waits for it", True))
        return
    state.epoch.self_fenced = True
    decision.do(ev.Say(f"{why}: the workers stop, and start again when it is", True))
    decision.stop_workers(state.settings.drain_timeout, ask=state.settings.save_signal)


def call_failed(decision: Decision, event: ev.CallFailed) -> None:
    """One of our calls was answered with an error status."""
    if event.code == "NOT_FOUND":
        decision.become_fenced(event.detail)
    elif event.code == "FAILED_PRECONDITION" and event.method == "ReportDrained":
        decision.state.epoch.refused = True
    elif event.code == "PERMISSION_DENIED" or (event.code == "UNIMPLEMENTED" and event.method not in NEWER_CALLS):
        decision.kill_workers()
        decision.exit(ev.EXIT_USAGE, event.detail)
    elif event.method == "ReportHeld":
        replication.unanswered(decision)
    # Other errors are about a closed epoch or a lost lease: the next directive says what is wanted instead.
