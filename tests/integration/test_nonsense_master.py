"""A whole agent of something that answers as its master and makes no sense: one clear line, no traceback, no flood."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from dalsegno.protos import control_pb2 as pb
from tests.fuzz.directives import run_order
from tests.integration.test_agent_master_client import Master, Servicer
from tests.support.jobs.programs import Programs, wait_for

pytestmark = pytest.mark.timeout(180)


class Nonsense(Servicer):
    """Lets an agent in, as `reply` says; gives it the orders in `told`, to its incarnation; asks for `pace`."""

    def __init__(self, reply: pb.RegisterReply | None = None, pace: float = math.nan) -> None:
        super().__init__()
        self.reply = reply or pb.RegisterReply(generation=1, node="n", run_id="run-0001")
        self.reply.pace.heartbeat_seconds = self.reply.pace.progress_seconds = pace
        self.told: queue.SimpleQueue[pb.Directive] = queue.SimpleQueue()
        self.pace = pace

    def answer(self, method: str, request: Any, context: grpc.ServicerContext) -> pb.Ack:
        ack = super().answer(method, request, context)
        ack.pace.heartbeat_seconds = ack.pace.progress_seconds = self.pace
        return ack

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterReply:
        self.answer("Register", request, context)
        return self.reply

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.Directive]:
        while context.is_active():
            try:
                directive = self.told.get(timeout=0.2)
            except queue.Empty:
                continue
            if directive.run.place.incarnation:
                directive.run.place.incarnation = request.caller.incarnation
            yield directive


def impossible() -> list[pb.Directive]:
    """Places that no world has, names that lead elsewhere, numbers that no other follows."""
    orders = [run_order() for _ in range(7)]
    for order in orders:
        order.generation = 1
        order.run.place.nproc, order.run.place.group_rank = 1, 0
        order.ClearField("convert")
        order.ClearField("verify")
    orders[0].run.place.nproc = 0
    orders[1].run.place.group_rank = 7
    orders[2].run.world_size = 0
    orders[3].run.run_id = "../../elsewhere"
    orders[4].run.resume.source.ref.name = "../elsewhere"
    orders[5].settings.drain_timeout = math.nan
    orders[6].run.epoch = 2**64 - 1
    return orders


@pytest.mark.parametrize("pace", [math.nan, -1.0, 1e-9])
def test_impossible_orders_are_said_and_passed_over(programs: Programs, pace: float) -> None:
    """The agent lives on, starts nothing, and does the order after them that makes sense."""
    servicer = Nonsense(pace=pace)
    master = Master(servicer)
    try:
        agent = programs.agent("n", "--nnodes=1:1", "--nproc-per-node=1", "--master", master.address, "/bin/false")
        wait_for(lambda: bool(servicer.of("Register")), 60, programs.log("n"))
        began = time.monotonic()
        for order in impossible():
            servicer.told.put(order)
        wait_for(lambda: programs.log("n").count("makes no sense and is passed over") >= 7, 30, programs.log("n"))
        servicer.told.put(pb.Directive(generation=1, finish=pb.Finish(success=True, message="enough of that")))
        assert agent.wait(60) == 0
        took = time.monotonic() - began
    finally:
        master.stop()
    log = programs.log("n")
    assert "epoch 4 has 0 workers of this node, which has 1" in log
    assert "enough of that" in log
    assert "Traceback" not in log
    assert not (programs.directory / "elsewhere").exists()
    # One in a second, and what an answer, a registration and the leave-taking may add.
    assert len(servicer.of("Heartbeat")) + len(servicer.of("ReportProgress")) <= took * 2 + 5


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        (pb.RegisterReply(generation=1, run_id="run-0001"), "it gives this node no name"),
        (pb.RegisterReply(generation=1, node="n", run_id="../.."), "run_id is '../..'"),
        (pb.RegisterReply(generation=1, node="n\x1b[2J", run_id="run-0001"), "node is 'n"),
    ],
)
def test_a_registration_that_makes_no_sense_ends_the_agent(
    programs: Programs, reply: pb.RegisterReply, line: str
) -> None:
    """With 2 and one line, which says what to check."""
    master = Master(Nonsense(reply))
    try:
        agent = programs.agent("n", "--nnodes=1:1", "--nproc-per-node=1", "--master", master.address, "/bin/false")
        assert agent.wait(90) == 2
    finally:
        master.stop()
    (last,) = [text for text in programs.log("n").splitlines() if "makes no sense" in text]
    assert line in last
    assert "check that a dlrover-master" in last
    assert "Traceback" not in programs.log("n")


def test_a_generation_that_no_other_follows_is_not_believed(programs: Programs) -> None:
    """Nobody is registered by it, and it spins no faster than for a master that is away."""
    servicer = Nonsense(pb.RegisterReply(generation=2**64 - 1, node="n", run_id="run-0001"))
    master = Master(servicer)
    try:
        agent = programs.agent(
            "n", "--nnodes=1:1", "--nproc-per-node=1", "--connect-timeout=5", "--master", master.address, "/bin/false"
        )
        assert agent.wait(90) == 2
    finally:
        master.stop()
    assert "no master answered within 5 s" in programs.log("n")
    assert len(servicer.of("Register")) < 60
