"""The commands `drain`, `stop`, `start`, `checkpoint` and `events`: orders to a job, and what happens to it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.contract import CONTROL_PROTOCOL
from dalsegno.protos.phases import ENDED_PHASES
from dalsegno.protos.plain_json import plain
from dalsegno.protos.text import one_line

from ..decisions.events import EXIT_FAILED, EXIT_FINISHED
from .asking import AskedMaster, NoAnswer, is_over, put, show

__all__ = ["checkpoint", "drain", "events", "start", "stop"]

# Seconds between two looks at what has become of an order, and for which a call waits for events.
LOOK_SECONDS = 0.3
EVENTS_SECONDS = 20.0
# Seconds in which agents start another master where theirs has died.
AWAY_SECONDS = 15.0
# What has become of an order, for a person, by the job's status and the answer to the order; empty: not yet.
Done = Callable[[pb.StatusReply, pb.OrderReply], str]


def drain(options: argparse.Namespace) -> int:
    """Tells a node to save and go, and waits until it has gone. Returns the exit code; raises as `AskedMaster`."""

    def gone(status: pb.StatusReply, order: pb.OrderReply) -> str:
        return _gone(status, order, options.node)

    return _order(options, "DrainNode", pb.DrainNodeRequest(protocol=CONTROL_PROTOCOL, node=options.node), gone)


def _gone(status: pb.StatusReply, order: pb.OrderReply, name: str) -> str:
    """What has become of an order to go, for a person; empty: the node is still there."""
    there = next((node for node in status.nodes if node.node == name), None)
    if there is None:
        return f"{name} has gone"
    if not order.incarnation or there.incarnation == order.incarnation:
        return ""
    return f"{name} has gone, and was started again: to keep it away, have its supervisor start it no more"


def stop(options: argparse.Namespace) -> int:
    """Tells all nodes to save and go, and waits for the job's end. Returns the exit code; raises as `AskedMaster`."""

    def stopped(status: pb.StatusReply, _: pb.OrderReply) -> str:
        return status.reason if status.phase == pb.PHASE_STOPPED else ""

    return _order(options, "Stop", pb.StopRequest(protocol=CONTROL_PROTOCOL), stopped, event_kind="stopped")


def start(options: argparse.Namespace) -> int:
    """Lets agents of a stopped job in again. Returns the exit code; raises as `AskedMaster`."""
    return show(options, "Start", pb.StartRequest(protocol=CONTROL_PROTOCOL), _text, order=True)


def checkpoint(options: argparse.Namespace) -> int:
    """Has the ranks save now, and waits for the commit. Returns the exit code; raises as `AskedMaster`."""

    def committed(status: pb.StatusReply, order: pb.OrderReply) -> str:
        return f"{saved.ref.name} is committed" if (saved := _saved(status, order)) is not None else ""

    request = pb.SaveNowRequest(protocol=CONTROL_PROTOCOL)
    return _order(options, "SaveNow", request, committed, master_stays=True)


def _saved(status: pb.StatusReply, order: pb.OrderReply) -> pb.Checkpoint | None:
    """The checkpoint that fulfils an order to save, once there is one."""
    if status.save_order and status.save_order == order.number:
        return None
    newest = next((one for one in reversed(status.checkpoints) if not one.in_memory), None)
    if newest is None or newest.ref.name == order.before:
        return None
    # A run that went back has fulfilled the order at a lower step. Of an order without a number, one in whose place
    # another one stands, and one of a job that has ended meanwhile, which drops it, only the step is known.
    known = order.number and not status.save_order and status.phase not in ENDED_PHASES
    return newest if known or newest.step > order.step else None


def _order(
    options: argparse.Namespace,
    method: str,
    request: Any,
    done: Done,
    *,
    master_stays: bool = False,
    event_kind: str = "",
) -> int:
    """Gives an order, and waits until it is carried out unless the person does not want that.

    `master_stays`: an order that ends neither master nor job: if they have ended, it was not carried out.

    `event_kind`: an event of this kind behind the order's says so, too, whatever the job does since.
    """
    asked = AskedMaster(options)
    try:
        reply = asked.call(method, request)
    except NoAnswer as said:
        print(f"dalsegno: {asked.why(said, order=True)}", file=sys.stderr)
        return EXIT_FAILED
    if not options.json:
        print(one_line(reply.text), flush=True)
    if options.no_wait:
        if options.json:
            print(json.dumps(plain(reply)))
        return EXIT_FINISHED
    return _wait(options, asked, reply, done, master_stays=master_stays, event_kind=event_kind)


def _wait(
    options: argparse.Namespace,
    asked: AskedMaster,
    order: pb.OrderReply,
    done: Done,
    *,
    master_stays: bool,
    event_kind: str,
) -> int:
    """Waits until an order is carried out. Returns the exit code."""
    began, away, run = time.monotonic(), 0.0, ""
    while True:
        became, ended, why = "", False, ""
        try:
            status, away = asked.call("GetStatus", pb.StatusRequest(protocol=CONTROL_PROTOCOL)), 0.0
            became, ended, why, run = done(status, order), status.phase in ENDED_PHASES, status.reason, status.run_id
            became = became or _happened(asked, order, event_kind)
        except NoAnswer as said:
            away = away or time.monotonic()
            # An embedded master ends with its job; where it has died alone, agents start another one.
            if ended := asked.is_embedded and said.is_away and time.monotonic() - away > AWAY_SECONDS:
                why = asked.why(said)
                became = "" if master_stays else _on_record(asked, run)
        seconds = time.monotonic() - began
        if became:
            _tell(options, order, became, seconds, done=True)
            return EXIT_FINISHED
        if ended or seconds > options.timeout:
            late = f"it is not carried out after {seconds:.0f} s (--timeout), and still stands: see dalsegno events"
            _tell(options, order, why if ended else late, seconds, done=False)
            return EXIT_FAILED
        time.sleep(LOOK_SECONDS)  # why: the status has no event to wait for


def _happened(asked: AskedMaster, order: pb.OrderReply, kind: str) -> str:
    """The event of this kind behind the order's, for a person; empty: there is none, or it is not asked for."""
    if not kind or not order.event:
        return ""
    request = pb.EventsRequest(protocol=CONTROL_PROTOCOL, after=order.event)
    found = asked.call("GetEvents", request).events
    return next((event.text for event in found if event.kind == kind and event.sequence > order.event), "")


def _on_record(asked: AskedMaster, run: str) -> str:
    """How the job has ended by what is on the disk, for a person; empty: it goes on, or would. `run`: its last one."""
    left = asked.without_master()
    if left is not None and left.finished and run in ("", left.run):
        return left.text
    return asked.stopped_on_record()


def _tell(options: argparse.Namespace, order: pb.OrderReply, text: str, seconds: float, *, done: bool) -> None:
    if options.json:
        print(json.dumps({**plain(order), "became": text, "done": done, "seconds": round(seconds, 3)}))
    elif done:
        print(f"{one_line(text)}, after {seconds:.1f} s")
    else:
        print(f"dalsegno: {one_line(text)}", file=sys.stderr)


def _text(reply: pb.OrderReply) -> list[str]:
    return [one_line(reply.text)]


def events(options: argparse.Namespace) -> int:
    """Prints what happened; with --follow as long as there may be more. Returns the exit code; raises as `AskedMaster`.

    The master of a service comes back, or another one does; so does the one that agents host, while there are any.
    Where none comes, its job has ended, and what happened is read from its record.
    """
    asked, after, away, has_ended = AskedMaster(options), options.after, 0.0, False
    while True:
        wait = EVENTS_SECONDS if options.follow else 0.0
        request = pb.EventsRequest(protocol=CONTROL_PROTOCOL, after=after, wait_seconds=wait)
        try:
            reply, away = asked.call("GetEvents", request, wait), 0.0
        except NoAnswer as said:
            is_first, away = not away, away or time.monotonic()
            waits = options.follow and said.is_away
            if waits and asked.is_embedded:
                waits = not has_ended and time.monotonic() - away < AWAY_SECONDS
            left = asked.without_master() if said.is_away and not waits else None
            if left is not None:
                _print_events(options, asked.events_without_master(), after)
            if not waits or (is_first and not asked.is_embedded):
                print(f"dalsegno: {asked.why(said)}{'; waiting for it' if waits else ''}", file=sys.stderr)
            if waits:
                time.sleep(LOOK_SECONDS)  # why: nobody tells when another master is there
                continue
            return EXIT_FINISHED if left is not None and left.finished else EXIT_FAILED
        after, has_ended = _print_events(options, reply, after), is_over(reply.events, has_ended)
        if not options.follow and (not reply.events or after >= reply.newest):
            return EXIT_FINISHED


def _print_events(options: argparse.Namespace, reply: pb.EventsReply, after: int) -> int:
    """Prints the events behind this one. Returns the number of the last one that is known."""
    if after > reply.newest:
        after = 0  # of a record that was lost
    for event in reply.events:
        if event.sequence > after:
            put(options, event, event_lines)
            after = event.sequence
    return after


def event_lines(event: pb.Event) -> list[str]:
    """An event, for a person."""
    at = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(event.at))
    line = f"{event.sequence} {at} {event.kind}: {event.text}"
    if event.parts:
        line += " (" + ", ".join(f"{part.name} {part.seconds:.2f}" for part in event.parts) + ")"
    return [one_line(line)]
