"""`dalsegno status` and `dalsegno scale`: a job as its master sees it, and how many nodes it may have."""

from __future__ import annotations

import argparse
import math
import time

from dalsegno.protos import control_pb2
from dalsegno.protos.contract import CONTROL_PROTOCOL
from dalsegno.protos.limits import MOST_SETTING
from dalsegno.protos.text import one_line

from .asking import show

__all__ = ["scale", "status"]

# Phases in which steps are made.
_TRAINS = (control_pb2.PHASE_RUNNING, control_pb2.PHASE_DRAINING)


def status(options: argparse.Namespace) -> int:
    """Asks the master and prints its answer; returns the exit code.

    Raises:
        ValueError, OSError: see `asking.Asked`.
    """
    return show(options, "GetStatus", control_pb2.StatusRequest(protocol=CONTROL_PROTOCOL), status_lines)


def scale(options: argparse.Namespace) -> int:
    """Tells the master how many nodes the world may have; returns the exit code.

    Raises:
        ValueError, OSError: see `asking.Asked`.
    """
    if not 1 <= options.nodes <= MOST_SETTING:
        raise ValueError(f"a world has 1 to {MOST_SETTING} nodes, not {options.nodes}")
    request = control_pb2.ScaleRequest(protocol=CONTROL_PROTOCOL, nodes=options.nodes)
    return show(options, "Scale", request, scale_lines, order=True)


def counted(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def scale_lines(reply: control_pb2.ScaleReply) -> list[str]:
    """What holds now, for a person."""
    if reply.nodes > reply.limit:
        return [
            f"at most {counted(reply.limit, 'node')} from now on; {reply.nodes} save at the next step boundary, and"
            " some stand by; without a session all workers restart, from the last checkpoint"
        ]
    return [f"at most {counted(reply.limit, 'node')} from now on; the world has {reply.nodes}"]


def _progress(reply: control_pb2.StatusReply) -> str:
    """How far the run is, as far as nodes have reported."""
    if reply.unheard:
        return f"resumed at step {reply.step}, no steps heard since" if reply.step else "no steps heard"
    return f"step {_last_step(reply)}" + (f", loss {reply.loss:.4f}" if math.isfinite(reply.loss) else "")


def _last_step(reply: control_pb2.StatusReply) -> int:
    """The last step that was heard of, or that the newest epoch's record names, which it does once that is over.

    A master that took the record of a finished run over has heard of none.
    """
    over = [one.last_step for one in reply.history if one.epoch == reply.epoch and reply.phase not in _TRAINS]
    return max([reply.step, *over])


def _course(record: control_pb2.EpochRecord, reply: control_pb2.StatusReply) -> str:
    """The steps of an epoch, and what its beginning cost."""
    if record.unheard:
        return "no steps heard"
    newest = record.epoch == reply.epoch
    last_step = _last_step(reply) if newest else record.last_step
    until = "now" if newest and reply.phase in _TRAINS else str(last_step)
    lost = counted(record.lost_steps, "step")
    if record.lost_more:
        lost = f"at least {lost}" if record.lost_steps else "an unknown number of steps"
    return f"steps {record.first_step} to {until}, paused {record.paused:.1f} s, lost {lost}"


def status_lines(reply: control_pb2.StatusReply) -> list[str]:
    """A job as a person wants to see it."""
    phase = control_pb2.Phase.Name(reply.phase).removeprefix("PHASE_").lower()
    lines = [
        f"job {reply.job_id}, {reply.run_id or 'no run yet'}: {phase}, epoch {reply.epoch}, {_progress(reply)}"
        + (f" ({reply.reason})" if reply.reason else "")
    ]
    if reply.leader.address:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(reply.leader.since))
        lines.append(f"  master: {reply.leader.address} leads since {since}, generation {reply.generation}")
    if reply.store_trouble:
        lines.append(f"  the master cannot record anything now: {reply.store_trouble}; changes wait, training goes on")
    for node in reply.nodes:
        rank = f" {node.group_rank}" if node.role == "member" else ""
        # It begins with the node's name, which the line has already, and mostly goes on as its role does.
        reason = node.reason.removeprefix(f"{node.node} ").removeprefix("is a spare: ")
        why = f": {reason}" if reason else ""
        lines.append(f"  {node.role}{rank}  {node.node} on {node.host}, {counted(node.nproc, 'worker')}{why}")
    if reply.head.ref.name:
        where = ", in memory and not yet on the disk" if reply.head.in_memory else ""
        lines.append(f"  newest commit: {reply.head.ref.name}, {reply.head.bytes / 1e6:.1f} MB{where}")
    if reply.held.ref.name:
        parts = "some part on one node only" if reply.held_copies < 2 else f"each part on {reply.held_copies} nodes"
        lines.append(f"  held in memory: {reply.held.ref.name}, {reply.held.bytes / 1e6:.1f} MB, {parts}")
        if reply.replicated.ref.name:
            lines.append(f"  held on enough nodes for the loss of one: {reply.replicated.ref.name}")
    lines += [
        f"  epoch {record.epoch}: {record.cause}, {counted(record.nodes, 'node')}, {_course(record, reply)}"
        for record in reply.history
    ]
    # Escape sequences in names must not move the cursor; the leading spaces are ours.
    return [line[: len(line) - len(line.lstrip())] + one_line(line.lstrip()) for line in lines]
