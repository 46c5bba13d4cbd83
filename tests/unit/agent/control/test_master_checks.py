"""What a master cannot mean: passed over with one line. What ours says is never refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from dalsegno.agent.control.master_checks import problem_of, problem_of_reply
from dalsegno.agent.control.pace import ReportPace
from dalsegno.protos import control_pb2 as pb
from tests.fuzz.directives import INCARNATION, NPROC, run_order


def test_what_our_master_says_is_believed() -> None:
    """A world of one of three nodes with a resume point, and what goes with it."""
    assert problem_of(run_order(), INCARNATION, NPROC) == ""
    assert problem_of(pb.Directive(wait=pb.Wait(reason="1 of 2 nodes\nare here", round=3)), INCARNATION, NPROC) == ""
    take = pb.World(epoch=1, run_id="run-0001", world_size=2, nodes=2)
    assert problem_of(pb.Directive(gather=pb.Gather(round=2, take=take)), INCARNATION, NPROC) == ""
    reply = pb.RegisterReply(node="my node", run_id="run-0001", generation=1)
    reply.pace.heartbeat_seconds = math.nan
    assert problem_of_reply(reply) == ""
    assert problem_of_reply(pb.RegisterReply(run_id="run-0001", generation=1)) == "it gives this node no name"


def change(path: str, value: Any) -> Callable[[pb.Directive], None]:
    def act(directive: pb.Directive) -> None:
        *parts, last = path.split(".")
        message: Any = directive
        for part in parts:
            message = getattr(message, part)
        setattr(message, last, value)

    return act


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("run.place.incarnation", "another", "has no place for this node"),
        ("run.place.nproc", 0, "has 0 workers of this node, which has 2"),
        ("run.place.nproc", 3, "has 3 workers of this node, which has 2"),
        ("run.place.group_rank", 3, "group rank 3 of 3"),
        ("run.place.first_rank", 5, "ranks 5 to 6 of 6"),
        ("run.world_size", 1, "ranks 2 to 3 of 1"),
        ("run.epoch", 0, "a world without an epoch"),
        ("run.epoch", 2**64 - 1, "epoch is 18446744073709551615"),
        ("run.run_id", "../..", "run_id is '../..'"),
        ("run_id", "run-\n1", r"run_id is 'run-\n1'"),
        ("run.store_port", 70000, "port 70000"),
        ("run.store_host", "", "is at ''"),
        ("run.store_host", "h\x1b[2J", "store_host is 'h"),
        ("run.resume.form", pb.FORM_WEIGHTS, "in form 3"),
        ("run.resume.form", pb.FORM_UNIVERSAL, "without a name or a digest"),
        ("run.resume.source.ref.name", "../../etc", "name is '../../etc'"),
        ("run.resume.source.ref.digest", "", "without a name or a digest"),
        ("settings.drain_timeout", math.nan, "drain_timeout is nan"),
        ("settings.stall_timeout", math.inf, "stall_timeout is inf"),
        ("convert.source.ref.name", "/etc", "name is '/etc'"),
        ("sight.name", "step-1", "name is 'step-1'"),
        ("verify.ref.name", "", "verify names no checkpoint"),
        ("head.best", "../best", "best is '../best'"),
        ("converting", "../other", "converting is '../other'"),
        ("gather.take.world_size", 2, "a world without an epoch, a run or ranks"),
    ],
)
def test_what_nobody_can_mean_is_named(path: str, value: Any, problem: str) -> None:
    """An impossible place, a path, a number that no other follows."""
    directive = run_order()
    change(path, value)(directive)
    directive.convert.earlier.append("step-7.e3.1.universal.1")
    assert problem in problem_of(directive, INCARNATION, NPROC)


def test_a_pace_is_kept_within_bounds() -> None:
    """Neither a flood nor silence, whatever a master asks for."""
    for asked in (0.0, -1.0, -math.inf, math.nan, 1e-300, 1e-3):
        pace = ReportPace(0.0, 0.0)
        pace.told(pb.Pace(heartbeat_seconds=asked, progress_seconds=asked), 0.0)
        assert (pace.heartbeat, pace.progress) == (1.0, 0.1)
    for asked in (60.0, 1e9, 1e308, math.inf):
        pace = ReportPace(0.0, 0.0)
        pace.told(pb.Pace(heartbeat_seconds=asked, progress_seconds=asked), 0.0)
        assert (pace.heartbeat, pace.progress) == (60.0, 60.0)
