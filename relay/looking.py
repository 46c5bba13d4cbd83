"""The commands `relay status`, `relay events`, `relay expire` and `relay release`: a run as its Commander sees it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from dalsegno.protos.commander_api import EXPIRE, RELEASE
from dalsegno.protos.contract import EXIT_FAILED, EXIT_FINISHED
from dalsegno.protos.text import one_line

from .asked_run import AskedRun, add_arguments
from .milestones.commander_client import Away, Denied
from .saying import say

__all__ = ("add_events", "add_order", "add_status", "events", "expire", "release", "status", "status_lines")

# Seconds for which an answer may wait for events.
EVENTS_SECONDS = 15
# Between two questions to a Commander that does not answer.
AGAIN_SECONDS = 2.0
# Milestones that are shown to a person.
SHOWN = 3


def add_status(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `status`."""
    add_arguments(parser)


def add_events(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `events`."""
    add_arguments(parser)
    parser.add_argument("--after", type=int, default=0, metavar="N", help="only those behind event N")
    parser.add_argument("--follow", "-f", action="store_true", help="go on as they come")


def add_order(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `expire` and `release`."""
    add_arguments(parser)


def status(options: argparse.Namespace) -> int:
    """Shows how a run stands. Returns the exit code; raises UsageError."""
    asked = AskedRun(options)
    try:
        run = asked.get()
    except Away as error:
        return _failed(error)
    _show([json.dumps(run)] if options.json else status_lines(run))
    return EXIT_FINISHED


def events(options: argparse.Namespace) -> int:
    """Shows what happened to a run, oldest first. Returns the exit code; raises UsageError.

    With --follow a Commander that does not answer is waited for: it comes back, as `dalsegno events` has it.
    """
    asked, after, is_away = AskedRun(options), max(0, options.after), False
    while True:
        try:
            said = asked.get("/events", after=after, wait=EVENTS_SECONDS if options.follow else 0)
        except Away as error:
            if not options.follow or isinstance(error, Denied):
                return _failed(error)
            if not is_away:
                say(f"{error}; waiting for it")
            is_away = True
            time.sleep(AGAIN_SECONDS)  # why: no event tells when a server far away answers again
            continue
        is_away = False
        if after > int(said.get("newest", after)):
            after = 0  # of a record that was lost
        for event in said.get("events", ()):
            if isinstance(event, dict) and int(event.get("sequence", after + 1)) > after:
                _show([json.dumps(event)] if options.json else [_event_line(event)])
                after = int(event.get("sequence", after))
        if not options.follow:
            return EXIT_FINISHED


def release(options: argparse.Namespace) -> int:
    """Fences whoever holds a run. Returns the exit code; raises UsageError."""
    return _order(options, RELEASE, "is fenced")


def expire(options: argparse.Namespace) -> int:
    """Ends the lease of a holder that is known dead. Returns the exit code; raises UsageError."""
    return _order(options, EXPIRE, "has lost its lease")


def _order(options: argparse.Namespace, path: str, done: str) -> int:
    asked = AskedRun(options, admin=True)
    try:
        said = asked.post(path)
    except Away as error:
        return _failed(error)
    text = f"{said.get('holder')} {done}: {asked.run_id} is free for the next one"
    _show([json.dumps(said)] if options.json else [text])
    return EXIT_FINISHED


def status_lines(run: dict[str, Any]) -> Iterator[str]:
    """How a run stands, for a person."""
    head = run.get("head")
    # Of a script without a session only the saves are heard of.
    step = max(run.get("step") or 0, head.get("step") or 0 if head else 0)
    yield f"{run.get('run_id')}: {run.get('state')}" + (f", step {step}" if step else "")
    if run.get("holder"):
        left = run.get("expires_in_sec")
        yield f"  held by {run['holder']} in epoch {run.get('epoch')}; its lease lasts {left:g} s if it falls silent"
    elif run.get("detail"):
        yield f"  {run['detail']}"
    if head:
        yield f"  newest commit: {head.get('name')} (step {head.get('step')})"
    made = run.get("milestones") or []
    for one in made[:SHOWN]:
        yield f"  milestone: step {one.get('step')} at {one.get('repo')}, revision {one.get('revision')}"
    if len(made) > SHOWN:
        yield f"  and {len(made) - SHOWN} earlier milestones"
    report = run.get("report")
    if report:
        checkpoint, text = report.get("latest_ckpt"), report.get("msg")
        said = f"step {report.get('step')}" + (f", {checkpoint}" if checkpoint else "") + (f": {text}" if text else "")
        yield f"  {report.get('worker_id')} says: {said}"


def _event_line(event: dict[str, Any]) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(event.get("at") or 0.0)))
    mark = "warning: " if event.get("warning") else ""
    return f"{at}  {event.get('kind')}: {mark}{event.get('text')}"


def _show(lines: Any) -> None:
    for line in lines:
        print(line if line.startswith("{") else one_line(line), flush=True)


def _failed(error: Away) -> int:
    say(str(error))
    return EXIT_FAILED
