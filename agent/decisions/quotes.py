"""What this node says to its own people is told to the master, which makes it an event of the job."""

from __future__ import annotations

from dataclasses import replace

from dalsegno.protos import control_pb2

from . import events as ev
from .decision import Decision
from .state import Quotes

__all__ = ("QUOTES", "QUOTES_SECONDS", "tell")

# The most lines of this node that the master is told in so many seconds.
QUOTES, QUOTES_SECONDS = 20, 60.0


def tell(decision: Decision) -> None:
    """Tells the master what this node has just said to people, within measure: while it is away all calls are kept."""
    state, told = decision.state, decision.state.quotes
    said = [action for action in decision.actions if isinstance(action, ev.Say) and action.quoted]
    if not said or state.ended or state.fenced or state.door.registering or not state.incarnation:
        return
    if decision.now >= told.until and state.contact.up:
        told = Quotes(decision.now + QUOTES_SECONDS)
    fitting = said[: QUOTES - told.count]
    for line in fitting:
        request = control_pb2.RemarkRequest(caller=decision.caller(), text=line.text, warning=line.warning)
        decision.call("ReportRemark", request)
    state.quotes = replace(told, count=told.count + len(fitting))
