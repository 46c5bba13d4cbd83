"""What a command that waits for an order takes for its end."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import grpc
import pytest

from dalsegno.agent.commands import asking, orders
from dalsegno.agent.commands.asking import AskedMaster, JobOnDisk, NoAnswer
from dalsegno.agent.commands.orders import _gone, _saved
from dalsegno.protos import control_pb2 as pb


def commit(step: int, epoch: int = 1, *, in_memory: bool = False) -> pb.Checkpoint:
    return pb.Checkpoint(ref=pb.CheckpointRef(name=f"step-{step}.e{epoch}"), step=step, in_memory=in_memory)


BEFORE = commit(10)
ORDER = pb.OrderReply(step=40, number=3, before=BEFORE.ref.name)


@pytest.mark.parametrize(
    ("commits", "standing", "saved"),
    [
        ([BEFORE], 3, ""),
        # A save that had begun before the order.
        ([BEFORE, commit(38)], 3, ""),
        ([BEFORE, commit(41)], 0, "step-41.e1"),
        # Every tenth step goes to memory: what is newest is not what was ordered.
        ([BEFORE, commit(41), commit(50, in_memory=True)], 0, "step-41.e1"),
        ([BEFORE, commit(41, in_memory=True)], 3, ""),
        # The run went back to step 10.
        ([BEFORE, commit(11, 2)], 0, "step-11.e2"),
        ([BEFORE, commit(11, 2)], 3, ""),
        # Somebody ordered another one, because this one's save may have failed.
        ([BEFORE, commit(38)], 4, ""),
        ([BEFORE, commit(45)], 4, "step-45.e1"),
        # The record was lost, and with it the order.
        ([BEFORE], 0, ""),
        ([], 0, ""),
    ],
)
def test_a_save_by_order_is_over_when_the_master_says_so(
    commits: list[pb.Checkpoint], standing: int, saved: str
) -> None:
    """Not by its step alone: the run may have gone back since."""
    found = _saved(pb.StatusReply(checkpoints=commits, save_order=standing), ORDER)
    assert (found.ref.name if found is not None else "") == saved


@pytest.mark.parametrize("phase", [pb.PHASE_SUCCEEDED, pb.PHASE_FAILED, pb.PHASE_STOPPED])
def test_a_job_that_ends_before_the_ordered_save_has_not_fulfilled_it(phase: pb.Phase.ValueType) -> None:
    """It stands no more then, whatever was committed: an earlier save that was on its way, or the last one of all."""
    for step, saved in ((38, ""), (41, "step-41.e1")):
        found = _saved(pb.StatusReply(phase=phase, checkpoints=[BEFORE, commit(step)]), ORDER)
        assert (found.ref.name if found is not None else "") == saved


@pytest.mark.parametrize(
    ("there", "became"),
    [
        ([], "b has gone"),
        ([("a", "1")], "b has gone"),
        ([("a", "1"), ("b", "2")], ""),
        ([("b", "3")], "b has gone, and was started again: to keep it away, have its supervisor start it no more"),
    ],
)
def test_a_node_that_its_supervisor_starts_again_has_gone_all_the_same(
    there: list[tuple[str, str]], became: str
) -> None:
    """It may be back before anybody looks: the order is carried out, and the person hears what happened."""
    nodes = [pb.NodeStatus(node=name, incarnation=incarnation) for name, incarnation in there]
    assert _gone(pb.StatusReply(nodes=nodes), pb.OrderReply(incarnation="2"), "b") == became


def test_a_master_that_does_not_say_who_goes() -> None:
    """An older one names no incarnation: whoever has the name is waited for."""
    assert _gone(pb.StatusReply(nodes=[pb.NodeStatus(node="b", incarnation="3")]), pb.OrderReply(), "b") == ""


def test_a_master_that_numbers_no_orders() -> None:
    """An older one tells the step only."""
    order = pb.OrderReply(step=40)
    assert _saved(pb.StatusReply(checkpoints=[commit(40)]), order) is None
    assert _saved(pb.StatusReply(checkpoints=[commit(40), commit(41)]), order) is not None


class Unreached(grpc.RpcError):
    """As of a process that is not there."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "failed to connect to all addresses"

    def trailing_metadata(self) -> tuple[()]:
        return ()


grpc.Call.register(Unreached)


def event(sequence: int, kind: str) -> pb.Event:
    return pb.Event(sequence=sequence, kind=kind, text=f"text of {kind}")


STOPPED = [event(1, "registered"), event(2, "formed"), event(3, "stopped"), event(4, "left")]
RUNNING = [*STOPPED, event(5, "resumed"), event(6, "ordered")]


class Asked:
    """Stands for an embedded master: answers in this order, and the last one again and again; None: it is away."""

    is_embedded = True
    why, stopped_on_record = AskedMaster.why, AskedMaster.stopped_on_record

    def __init__(self, answers: list[Any], events: list[pb.Event] = RUNNING, finished: str = "") -> None:
        self.answers = chain(answers, repeat(answers[-1]))
        self.recorded = pb.EventsReply(events=events, newest=len(events))
        self.left = JobOnDisk("how it stands on the disk", finished or "run-0002", finished=bool(finished))
        self._credentials, self.called = None, 0

    def call(self, method: str, request: Any, more_seconds: float = 0.0) -> Any:
        self.called += 1
        answer = next(self.answers)
        if answer is None:
            raise NoAnswer("127.0.0.1:1", Unreached())
        return answer

    def without_master(self) -> JobOnDisk:
        return self.left

    def events_without_master(self) -> pb.EventsReply:
        return self.recorded


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(orders, "AWAY_SECONDS", 0.3)
    monkeypatch.setattr(asking, "mismatch", lambda address, credentials: "")


OPTIONS = argparse.Namespace(json=False, timeout=20.0, node="b", no_wait=False, after=0, follow=True)
GOING = pb.StatusReply(phase=pb.PHASE_DRAINING, run_id="run-0002", nodes=[pb.NodeStatus(node="b", incarnation="2")])
OVER = pb.StatusReply(phase=pb.PHASE_STOPPED, run_id="run-0002", reason="stopped by order")
Order = Callable[[argparse.Namespace], int]
BOTH = pytest.mark.parametrize("order", [orders.stop, orders.drain])


def give(monkeypatch: pytest.MonkeyPatch, order: Order, asked: Asked) -> int:
    monkeypatch.setattr(orders, "AskedMaster", lambda options: asked)
    asked.answers = chain([pb.OrderReply(text="told", incarnation="2")], asked.answers)
    return order(OPTIONS)


@BOTH
def test_an_order_is_not_carried_out_because_its_master_dies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], order: Order
) -> None:
    """Agents start another one at once, which knows the order. It counted as done while the job went on."""
    assert give(monkeypatch, order, Asked([GOING, None, None, GOING, OVER])) == 0
    assert {"stopped by order, after", "b has gone, after"} & {
        line.rpartition(" ")[0].rpartition(" ")[0] for line in capsys.readouterr().out.splitlines()
    }


@BOTH
@pytest.mark.parametrize(
    ("events", "finished", "became"),
    [
        (STOPPED, "", "text of stopped"),
        (RUNNING, "run-0002", "how it stands on the disk"),
        # The one before the last, whose successor has made nothing yet.
        (RUNNING, "run-0001", ""),
        (RUNNING, "", ""),
        ([], "", ""),
    ],
)
def test_where_no_master_comes_the_record_tells(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    order: Order,
    events: list[pb.Event],
    finished: str,
    became: str,
) -> None:
    """A job that is stopped or finished there has ended with its master. Of any other nobody knows that."""
    code = give(monkeypatch, order, Asked([GOING, None], events, finished))
    said = capsys.readouterr()
    assert (code, became in said.out) == (0 if became else 1, True)
    assert said.err == ("" if became else "dalsegno: how it stands on the disk\n")


def test_a_stop_was_carried_out_although_somebody_has_started_the_job_since(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dalsegno start` in a loop may come between two looks: the job is never seen as stopped."""
    asked = Asked([GOING, pb.EventsReply(events=RUNNING[:2]), GOING, pb.EventsReply(events=RUNNING)])
    monkeypatch.setattr(orders, "AskedMaster", lambda options: asked)
    asked.answers = chain([pb.OrderReply(text="told", event=2)], asked.answers)
    assert orders.stop(OPTIONS) == 0
    assert "text of stopped, after" in capsys.readouterr().out


def test_a_save_is_not_carried_out_by_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert give(monkeypatch, orders.checkpoint, Asked([GOING, None], STOPPED)) == 1


def follow(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> int:
    monkeypatch.setattr(orders, "AskedMaster", lambda options: asked)
    return orders.events(OPTIONS)


def test_events_go_on_with_the_next_master(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a line: nothing has happened to the job. It said that nobody runs the job, and ended."""
    first, then = pb.EventsReply(events=RUNNING[:2], newest=2), pb.EventsReply(events=STOPPED[2:3], newest=3)
    monkeypatch.setattr(orders, "AWAY_SECONDS", 60.0)
    asked = Asked([first, None, None, then, None], STOPPED, "run-0002")
    code = follow(monkeypatch, asked)
    said = capsys.readouterr()
    assert (code, asked.called) == (0, 5)
    assert [line.split()[0] for line in said.out.splitlines()] == ["1", "2", "3", "4"], "the last one is on the record"
    assert said.err == "dalsegno: how it stands on the disk\n"


def test_events_end_where_no_master_comes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert follow(monkeypatch, Asked([pb.EventsReply(events=RUNNING[:2], newest=2), None], RUNNING)) == 1
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == len(RUNNING)
    assert said.err == "dalsegno: how it stands on the disk\n"


def test_all_events_are_printed_however_many_one_answer_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest ones were left out, without a word."""
    answers = [pb.EventsReply(events=RUNNING[first : first + 2], newest=6) for first in (0, 2, 4)]
    monkeypatch.setattr(orders, "AskedMaster", lambda options: Asked(answers))
    assert orders.events(argparse.Namespace(json=False, after=0, follow=False)) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2", "3", "4", "5", "6"]
    monkeypatch.setattr(orders, "AskedMaster", lambda options: Asked([pb.EventsReply(newest=6)]))
    assert orders.events(argparse.Namespace(json=False, after=6, follow=False)) == 0
